"""The delta rule's kernels against their reference, and their time beside SGLang's kernels that store states."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from sglang_ddtree.gpu.equality import Mismatch
from sglang_ddtree.gpu.replay import captured
from sglang_ddtree.gpu.timing import Call, median_us
from sglang_ddtree.state_deltas import PooledDeltas, allocate
from sglang_ddtree.state_memory import QWEN36_27B, DeltaNet
from sglang_ddtree.tree.delta_rule import fold, prepare, verify_with_deltas
from sglang_ddtree.tree.kernels.delta_rule import fold_triton, verify_triton

BATCH_SIZES, WIDTHS = (1, 8, 16), (17, 33, 65)
#: One layer's heads, for a device that only tries this out.
SMALL = DeltaNet(layers=1, key_heads=1, value_heads=2, key_dim=16, value_dim=16, kernel=4)
#: Layers that are timed together: as many states of all nodes as a large GPU holds, and not the same in its cache.
TIMED_LAYERS = 4
#: Of sums in float32 beside the same in float64.
TOLERANCE = 1e-4


@dataclass(frozen=True)
class Step:
    """What a verify pass and a commit of ``layers`` layers work on, for ``bs`` trees of ``Q`` nodes.

    Attributes:
        q, k: bfloat16 ``[layers, bs, Q, H, K]``, views of one packed projection as in a server; ``v`` with values.
        a, b: bfloat16 ``[layers, bs, Q, HV]``.
        a_log, dt_bias: float32 ``[HV]``.
        states: float32 ``[layers, bs + 1, HV, V, K]``; tree ``n`` has slot ``n + 1``.
        parents: int32 ``[bs, Q]``.
        slots, rows: int32 ``[bs]``.
        last: int64 ``[bs]``, the accepted node.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    a: torch.Tensor
    b: torch.Tensor
    a_log: torch.Tensor
    dt_bias: torch.Tensor
    states: torch.Tensor
    parents: torch.Tensor
    slots: torch.Tensor
    rows: torch.Tensor
    last: torch.Tensor


def random_step(net: DeltaNet, layers: int, bs: int, width: int, device: torch.device, seed: int = 0) -> Step:
    """Trees whose nodes hang below one of the last eight, so that paths are about as long as drafted ones."""
    rng = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=rng)

    keys, values = net.key_heads * net.key_dim, net.value_heads * net.value_dim
    packed = normal(layers, bs, width, 2 * keys + values).bfloat16().to(device)
    q, k, v = packed.split([keys, keys, values], -1)
    a, b = (2 * normal(layers, bs, width, 2 * net.value_heads)).bfloat16().to(device).chunk(2, -1)
    node = torch.arange(width).expand(bs, width)
    parents = (node - 1 - (8 * torch.rand(bs, width, generator=rng)).long()).clamp(min=0)
    # As SGLang writes it: the root's is not read.
    parents[:, 0] = 0
    return Step(
        q=q.unflatten(-1, (net.key_heads, net.key_dim)),
        k=k.unflatten(-1, (net.key_heads, net.key_dim)),
        v=v.unflatten(-1, (net.value_heads, net.value_dim)),
        a=a,
        b=b,
        a_log=(3 * torch.rand(net.value_heads, generator=rng) - 3).to(device),
        dt_bias=normal(net.value_heads).to(device),
        states=normal(layers, bs + 1, net.value_heads, net.value_dim, net.key_dim).to(device),
        parents=parents.int().to(device),
        slots=torch.arange(1, bs + 1, dtype=torch.int32, device=device),
        rows=torch.arange(bs, dtype=torch.int32, device=device),
        last=torch.randint(width, (bs,), generator=rng).to(device),
    )


def deltas_of(net: DeltaNet, step: Step) -> PooledDeltas:
    layers, bs, width = step.q.shape[:3]
    return allocate(
        layers,
        bs,
        width,
        key_heads=net.key_heads,
        value_heads=net.value_heads,
        key_dim=net.key_dim,
        value_dim=net.value_dim,
        device=step.q.device,
    )


def verify_deltas(step: Step, deltas: PooledDeltas) -> list[torch.Tensor]:
    """The outputs of each layer, ``[bs, Q, HV, V]``."""
    return [
        verify_triton(
            *(step.q[layer], step.k[layer], step.v[layer], step.a[layer], step.b[layer], step.a_log, step.dt_bias),
            *(step.states[layer], step.slots, step.rows, step.parents, deltas[layer]),
        )
        for layer in range(len(step.q))
    ]


def check(net: DeltaNet, bs: int, width: int, device: torch.device, seed: int = 0) -> float:
    """One layer's outputs, deltas and committed states against the reference in float64; the largest difference.

    Raises:
        Mismatch: one is beyond :data:`TOLERANCE`; for the outputs, which are bfloat16, beyond
            a unit of their last place too.
    """
    step = random_step(net, 1, bs, width, device, seed)
    deltas = deltas_of(net, step)
    q, k, v, a, b = (x[0].cpu() for x in (step.q, step.k, step.v, step.a, step.b))
    tokens = prepare(q, k, v, a, b, step.a_log.cpu(), step.dt_bias.cpu(), torch.float64)
    initial, parents = step.states[0, 1:].cpu().double(), step.parents.cpu().long()
    outputs, updates = verify_with_deltas(tokens, parents, initial)
    got = verify_deltas(step, deltas)[0]
    folded = fold(initial, tokens.key, updates, tokens.log_decay, parents, step.last.cpu())
    untouched = step.states[0, 0].clone()
    fold_triton(step.states, step.slots, step.last, None, None, deltas)
    if not torch.equal(step.states[0, 0], untouched):
        raise Mismatch(f"bs {bs}, width {width}: a state that is not committed to was written")
    worst = 0.0
    for name, want, have, tolerance in (
        ("outputs", outputs, got, 2**-7),
        ("updates", updates, deltas.update[0], TOLERANCE),
        ("committed states", folded, step.states[0, 1:], TOLERANCE),
    ):
        difference = (have.cpu().double() - want).abs() - tolerance * want.abs()
        worst = max(worst, float(difference.max()))
        if not bool((difference <= TOLERANCE).all()):
            raise Mismatch(f"bs {bs}, width {width}: {name} differ by {float(difference.max()):.3g}")
    return worst


def measure(
    net: DeltaNet, device: torch.device, batch_sizes: Sequence[int], widths: Sequence[int], layers: int, repeats: int
) -> list[dict[str, Any]]:
    """Median microseconds of one layer's verify and commit, replayed from a CUDA graph of ``layers`` layers.

    One row per batch size and width: ``deltas_verify``, ``deltas_commit``, and ``stored_verify``, ``stored_commit``,
    which are None where SGLang is not installed.
    """
    rows = []
    for bs in batch_sizes:
        for width in widths:
            step = random_step(net, layers, bs, width, device)
            row: dict[str, Any] = {"bs": bs, "width": width}
            for name, call in calls(net, step).items():
                if call is None:
                    row[name] = None
                    continue
                replay, _ = captured(call, device)
                row[name] = median_us(replay, device, repeats) / layers
            rows.append(row)
    return rows


def calls(net: DeltaNet, step: Step) -> dict[str, Call | None]:
    """By name: what is timed."""
    deltas = deltas_of(net, step)
    verify_deltas(step, deltas)
    stored_verify = stored_commit = None
    if importlib.util.find_spec("sglang") is not None:
        layers, bs, width = step.q.shape[:3]
        nodes = step.states.new_zeros(layers, bs, width, *step.states.shape[2:])

        def stored_verify() -> None:
            verify_stored(step, nodes)

        def stored_commit() -> None:
            commit_stored(step, nodes)

    return {
        "deltas_verify": lambda: verify_deltas(step, deltas),
        "deltas_commit": lambda: fold_triton(step.states, step.slots, step.last, None, None, deltas),
        "stored_verify": stored_verify,
        "stored_commit": stored_commit,
    }


def verify_stored(step: Step, nodes: torch.Tensor) -> list[torch.Tensor]:
    """SGLang's tree verification, as :func:`verify_deltas`; writes ``nodes``, float32 ``[layers, bs, Q, HV, V, K]``."""
    from sglang.srt.layers.attention.linear.kernels.gdn_triton import TritonGDNKernel

    _, bs, width = step.q.shape[:3]
    starts = torch.arange(0, bs * width + 1, width, dtype=torch.int32, device=step.q.device)
    outputs = []
    for layer in range(len(step.q)):
        found = TritonGDNKernel().target_verify(
            A_log=step.a_log,
            dt_bias=step.dt_bias,
            q=step.q[layer].flatten(0, 1)[None],
            k=step.k[layer].flatten(0, 1)[None],
            v=step.v[layer].flatten(0, 1)[None],
            a=step.a[layer].flatten(0, 1),
            b=step.b[layer].flatten(0, 1),
            ssm_states=step.states[layer],
            cache_indices=step.slots,
            query_start_loc=starts,
            intermediate_states_buffer=nodes[layer],
            intermediate_state_indices=step.rows,
            cache_steps=width,
            retrieve_parent_token=step.parents,
        )
        outputs.append(found.view(bs, width, *found.shape[2:]))
    return outputs


def commit_stored(step: Step, nodes: torch.Tensor) -> None:
    """SGLang's copy of the accepted nodes' states; on a CPU, where its launcher takes no tensors, torch's."""
    from sglang.kernels.ops.mamba.mamba_state_scatter_triton import scatter_mamba_states_after_mtp_verify

    if step.states.device.type == "cuda":
        caches = SimpleNamespace(temporal=step.states, intermediate_ssm=nodes, conv=[], intermediate_conv_window=[])
        scatter_mamba_states_after_mtp_verify(caches, step.slots, step.last, None, None)
    else:
        step.states[:, step.slots.long()] = nodes[:, step.rows.long(), step.last]


def small_or_real(device: torch.device) -> tuple[DeltaNet, Sequence[int], Sequence[int], int]:
    """The model, batch sizes, widths and timed layers: Qwen3.6-27B's on a GPU, small ones elsewhere."""
    if device.type == "cuda":
        return QWEN36_27B, BATCH_SIZES, WIDTHS, TIMED_LAYERS
    return SMALL, (1, 2), (5,), 2
