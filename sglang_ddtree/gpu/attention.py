"""FlashInfer's tree variant on a GPU: right, safe to replay from a CUDA graph, and how long it takes.

On a CPU the same runs with FlashInfer's Python wrappers over ``flashinfer_stand_in.py``, to try this file out.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from sglang_ddtree.attention import tree_check
from sglang_ddtree.attention.flashinfer_tree import Variant, tree_wrapper_class
from sglang_ddtree.attention.tree_check import DEPTH, Batch, Heads, Layer
from sglang_ddtree.gpu.replay import captured
from sglang_ddtree.gpu.timing import median_us
from sglang_ddtree.tree.bits import ancestor_bits
from sglang_ddtree.tree.mask import full_mask

BF16, FP16, FP8 = torch.bfloat16, torch.float16, torch.float8_e4m3fn

#: Each is a module to compile: half a minute on 16 cores.
VARIANTS = (
    Variant(BF16, BF16, 128),
    Variant(FP16, FP16, 128),
    Variant(BF16, FP8, 128),
    Variant(BF16, BF16, 128, soft_cap=True, window=True),
    Variant(BF16, BF16, 64),
)
#: (query, kv): no groups, groups of 4 and of 7.
HEADS = ((8, 8), (32, 8), (28, 4))
#: More tokens than this in one batch are not timed.
MOST_TOKENS = 500_000


def workspace(device: torch.device) -> torch.Tensor:
    return torch.empty(384 << 20 if device.type == "cuda" else 1 << 10, dtype=torch.uint8, device=device)


def layers(variant: Variant) -> list[Layer]:
    """The layers that a variant is checked with; one that can do more also takes those that need less."""
    scales: dict[str, Any] = {"k_scale": 0.5, "v_scale": 2.0} if variant.kv.itemsize == 1 else {}
    found = [Layer(**scales)]
    if variant.soft_cap:
        found.append(Layer(soft_cap=3.0, **scales))
    if variant.window:
        found += [Layer(window=window, soft_cap=cap, **scales) for window in (0, 4, 50) for cap in (0.0, 3.0)]
    return found


def check_variant(
    variant: Variant, device: torch.device, widths: Sequence[int], prefixes: Sequence[Sequence[int]]
) -> dict[str, Any]:
    """Every kind of batch, layer, grouping and page size; how many, and the largest difference of the random ones.

    Raises:
        WrongAttention: the first that is wrong, with what it was.
    """
    cases, worst = 0, 0.0
    space = workspace(device)
    for width in widths:
        for seed, lens in enumerate(prefixes):
            bits = torch.full((len(lens) * width, -(-width // 32)), -1, dtype=torch.int32, device=device)
            wrapper = tree_wrapper_class()(space, bits, variant)
            for query, kv in HEADS:
                heads = Heads(query, kv, variant.head_dim)
                for page_size in (1, 16):
                    for kind in ("count", "random"):
                        batch = tree_check.make_batch(
                            variant, heads, width, lens, device, kind=kind, page_size=page_size, seed=seed
                        )
                        ancestor_bits(batch.tree, DEPTH, out=bits)
                        for layer in layers(variant):
                            out = tree_check.plan_and_run(wrapper, batch, variant, heads, layer)
                            try:
                                found = tree_check.compare(out, batch, heads, layer)
                            except tree_check.WrongAttention as error:
                                where = (
                                    f"{variant.name} width {width} heads {query}/{kv} page {page_size} {kind} {layer}"
                                )
                                raise tree_check.WrongAttention(f"{where}: {error}") from error
                            cases += 1
                            worst = max(worst, found if kind == "random" else 0.0)
    return {"variant": variant.name, "cases": cases, "worst": worst}


def check_replays(device: torch.device, width: int, most_prefix: int, steps: int) -> int:
    """One captured pass of four requests, replayed with other trees, lengths, slots and numbers of real requests; what
    a step does not fill keeps the bits of an earlier one. How many replays.

    Raises:
        WrongAttention: a real request's output is not its tree's.
    """
    variant, heads, layer, bs = VARIANTS[0], Heads(8, 2, 128), Layer(), 4
    most = bs * (most_prefix + width) + 3
    static: dict[str, Any] = {
        "query": torch.zeros(bs * width, heads.query, heads.dim, dtype=variant.query, device=device),
        "keys": torch.zeros(most, 1, heads.kv, heads.dim, dtype=variant.kv, device=device),
        "values": torch.zeros(most, 1, heads.kv, heads.dim, dtype=variant.kv, device=device),
    }
    bits = torch.full((bs * width, -(-width // 32)), -1, dtype=torch.int32, device=device)

    def integers(length: int) -> torch.Tensor:
        return torch.zeros(length, dtype=torch.int32, device=device)

    wrapper = tree_wrapper_class()(
        workspace(device),
        bits,
        variant,
        use_cuda_graph=True,
        qo_indptr_buf=integers(bs + 1),
        paged_kv_indptr_buf=integers(bs + 1),
        paged_kv_indices_buf=integers(most),
        paged_kv_last_page_len_buf=integers(bs),
    )

    def step(seed: int) -> tuple[Batch, int]:
        rng = torch.Generator().manual_seed(seed)
        real = int(torch.randint(1, bs + 1, (1,), generator=rng))
        lens = torch.randint(0, most_prefix + 1, (real,), generator=rng).tolist() + [1] * (bs - real)
        kind = "count" if seed % 2 else "random"
        made = tree_check.make_batch(variant, heads, width, lens, device, kind=kind, seed=seed)
        for name, buffer in static.items():
            buffer[: len(getattr(made, name))] = getattr(made, name)
        bits[: real * width] = ancestor_bits(made.tree, DEPTH)[: real * width]
        tree_check.plan(wrapper, made, variant, heads, layer)
        return made, real

    batch, _ = step(0)
    fixed = Batch(**{**vars(batch), **static})
    replay, out = captured(lambda: tree_check.run(wrapper, fixed, heads, layer), device)
    for seed in range(1, steps + 1):
        batch, real = step(seed)
        made = replay()
        tree_check.compare(out if made is None else made, batch, heads, layer, range(real))
    return steps


def measure(
    device: torch.device, batch_sizes: Sequence[int], budgets: Sequence[int], contexts: Sequence[int], repeats: int
) -> list[dict[str, Any]]:
    """Median microseconds of one layer's attention from a CUDA graph, and of ``plan`` on the host, on the same batch:
    the variant, FlashInfer without a mask (what no mask can beat) and with its own ``custom_mask``."""
    sizes = [(context, bs, budget) for context in contexts for bs in batch_sizes for budget in budgets]
    return [
        _measure_one(device, context, bs, budget, repeats)
        for context, bs, budget in sizes
        if bs * (context + budget + 1) <= MOST_TOKENS
    ]


def _measure_one(device: torch.device, context: int, bs: int, budget: int, repeats: int) -> dict[str, Any]:
    from flashinfer import BatchPrefillWithPagedKVCacheWrapper

    variant, heads = VARIANTS[0], Heads(32, 8, 128)
    batch = tree_check.make_batch(variant, heads, budget + 1, [context] * bs, device)
    space = workspace(device)
    mask = full_mask(batch.tree, torch.tensor(batch.prefix_lens, device=device))
    wrappers: dict[str, tuple[Any, dict[str, Any]]] = {
        "tree": (tree_wrapper_class()(space, ancestor_bits(batch.tree), variant), {}),
        "unmasked": (BatchPrefillWithPagedKVCacheWrapper(space, "NHD", backend="fa2"), {}),
        "stock": (BatchPrefillWithPagedKVCacheWrapper(space, "NHD", backend="fa2"), {"custom_mask": mask}),
    }

    def make_plan(wrapper: Any, options: dict[str, Any]) -> None:
        wrapper.begin_forward(
            *(batch.row_indptr, batch.page_indptr, batch.pages, batch.last_page_len),
            *(heads.query, heads.kv, heads.dim, 1),
            q_data_type=variant.query,
            kv_data_type=variant.kv,
            **options,
        )

    def attend(wrapper: Any) -> Any:
        return wrapper.forward(batch.query, (batch.keys, batch.values), causal=False, sm_scale=heads.dim**-0.5)

    row: dict[str, Any] = {"context": context, "bs": bs, "budget": budget}
    for name, (wrapper, options) in wrappers.items():
        row[f"{name}_plan"] = _host_us(partial(make_plan, wrapper, options), device, min(repeats, 10))
        replay, _ = captured(partial(attend, wrapper), device)
        row[name] = median_us(replay, device, repeats)
    row["over_unmasked"] = row["tree"] / row["unmasked"]
    row["stock_over_tree"] = row["stock"] / row["tree"]
    return row


def _host_us(call: Callable[[], Any], device: torch.device, repeats: int) -> float:
    call()
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize(device)
        begin = time.perf_counter()
        call()
        torch.cuda.synchronize(device)
        times.append((time.perf_counter() - begin) * 1e6)
    return sorted(times)[len(times) // 2]
