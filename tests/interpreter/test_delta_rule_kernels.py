"""The delta rule's kernels against the reference, and against SGLang's kernel that stores a state per node."""

from __future__ import annotations

import pytest
import torch
from delta_rule_cases import Layer, random_layer

from sglang_ddtree.tree.delta_rule import fold, verify_with_states
from sglang_ddtree.tree.kernels.delta_rule import Deltas, fold_triton, verify_triton

CLOSE = {"rtol": 1e-5, "atol": 1e-5}
CASES = [
    {"width": 1},
    {"width": 2, "kind": "chain"},
    {"width": 17, "kind": "padded", "key_heads": 2, "value_heads": 4},
    {"width": 33, "kind": "deep", "bs": 2},
    {"width": 65, "kind": "tree", "bs": 1},
    {"width": 20, "kind": "star", "strength": 50.0},
    {"width": 20, "kind": "chain", "strength": 50.0},
    # Dimensions that fill no block.
    {"width": 9, "key_dim": 24, "value_dim": 40},
]


def empty_deltas(layer: Layer, rows: int, width: int, layers: int = 1) -> Deltas:
    heads, value_heads = layer.k.shape[2:], layer.v.shape[2:]

    def stale(*shape: int) -> torch.Tensor:
        return torch.full((layers, rows, width, *shape), torch.nan)

    return Deltas(stale(*heads), stale(*value_heads), stale(value_heads[0]), torch.full((rows, width), -7).int())


def of_layer(deltas: Deltas, layer: int) -> Deltas:
    return Deltas(deltas.key[layer], deltas.update[layer], deltas.log_decay[layer], deltas.parents)


def pool(layer: Layer, slots: torch.Tensor, size: int) -> torch.Tensor:
    states = torch.full((size, *layer.initial.shape[1:]), torch.nan)
    states[slots] = layer.initial
    return states


def inputs(layer: Layer) -> tuple[torch.Tensor, ...]:
    return layer.q, layer.k, layer.v, layer.a, layer.b, layer.a_log, layer.dt_bias


@pytest.mark.parametrize("case", CASES, ids=str)
def test_verify_and_fold(case):
    layer = random_layer(7, **case)
    bs, width = layer.parents.shape
    slots = torch.tensor([4, 1, 5])[:bs]
    states = pool(layer, slots, 9)
    deltas = empty_deltas(layer, bs + 1, width + 3)
    outputs, nodes = verify_with_states(layer.tokens(), layer.parents, layer.initial)
    got = verify_triton(*inputs(layer), states, slots, torch.arange(bs), layer.parents, of_layer(deltas, 0))
    torch.testing.assert_close(got, outputs, **CLOSE)

    rows = torch.arange(bs)
    for last in {0, width // 2, width - 1}:
        track = torch.tensor([max(0, last - 1), -1, 0])[:bs]
        folded = states.clone().unsqueeze(0)
        fold_triton(folded, slots, torch.full((bs,), last), torch.tensor([6, 7, 8])[:bs], track, deltas)
        torch.testing.assert_close(folded[0, slots], nodes[:, last], **CLOSE)
        for row in rows[track >= 0]:
            torch.testing.assert_close(folded[0, 6 + row], nodes[row, track[row]], **CLOSE)
        # Nothing else was written.
        written = [*slots.tolist(), *(6 + row for row in rows[track >= 0].tolist())]
        others = [slot for slot in range(9) if slot not in written]
        assert folded[0, others].isnan().all()


def sglang_verify(layer: Layer, states: torch.Tensor, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    from sglang.kernels.ops.attention.linear.fused_sigmoid_gating_recurrent import (
        fused_sigmoid_gating_delta_rule_update,
    )

    bs, width = layer.parents.shape
    q, k, v, a, b = (x.flatten(0, 1) for x in (layer.q, layer.k, layer.v, layer.a, layer.b))
    stored = torch.zeros(bs + 1, width, *layer.initial.shape[1:])
    out = fused_sigmoid_gating_delta_rule_update(
        A_log=layer.a_log, dt_bias=layer.dt_bias, q=q[None], k=k[None], v=v[None], a=a, b=b,
        initial_state_source=states, initial_state_indices=slots,
        cu_seqlens=torch.arange(0, bs * width + 1, width), use_qk_l2norm_in_kernel=True,
        softplus_beta=1.0, softplus_threshold=20.0, disable_state_update=True,
        intermediate_states_buffer=stored, intermediate_state_indices=torch.arange(bs), cache_steps=width,
        retrieve_parent_token=layer.parents.clamp(min=0),
    )  # fmt: skip
    return out.view(bs, width, *v.shape[1:]), stored[:bs]


@pytest.mark.parametrize("case", [CASES[2], {"width": 12, "kind": "deep", "strength": 20.0}], ids=str)
def test_it_gives_what_sglangs_stored_states_give(case):
    layer = random_layer(11, **case)
    bs, width = layer.parents.shape
    slots = torch.tensor([2, 0, 3])[:bs]
    states = pool(layer, slots, 5)
    outputs, stored = sglang_verify(layer, states, slots)
    deltas = empty_deltas(layer, bs, width)
    got = verify_triton(*inputs(layer), states, slots, torch.arange(bs), layer.parents, of_layer(deltas, 0))
    torch.testing.assert_close(got, outputs, **CLOSE)
    for last in range(width):
        folded = states.clone().unsqueeze(0)
        fold_triton(folded, slots, torch.full((bs,), last), None, None, deltas)
        torch.testing.assert_close(folded[0, slots], stored[:, last], **CLOSE)


def test_a_chain_needs_no_parents():
    layer = random_layer(3, width=6, kind="chain")
    deltas = [empty_deltas(layer, 3, 6) for _ in range(2)]
    slots = rows = torch.arange(3)
    first, second = (
        verify_triton(*inputs(layer), layer.initial, slots, rows, parents, of_layer(to, 0))
        for parents, to in zip((layer.parents, None), deltas, strict=True)
    )
    assert torch.equal(first, second)
    assert torch.equal(deltas[0].parents, deltas[1].parents) and deltas[0].parents.tolist() == [list(range(-1, 5))] * 3


def test_strides_rows_and_layers():
    """Views as SGLang makes them of packed projections and of its pool; rows that are not the trees' numbers."""
    layer = random_layer(9, width=5, bs=2)
    expected, nodes = verify_with_states(layer.tokens(), layer.parents, layer.initial)
    packed = torch.cat([x.flatten(2) for x in (layer.q, layer.k, layer.v)], -1)
    q, k, v = packed.split([16, 16, 32], -1)
    strided = q.view(2, 5, 1, 16), k.view(2, 5, 1, 16), v.view(2, 5, 2, 16)
    wide = torch.zeros(4, 3, *layer.initial.shape[1:])  # [slots, layers, ...]
    wide[[3, 1], 2] = layer.initial
    states = wide.transpose(0, 1)
    deltas = empty_deltas(layer, 4, 5, layers=3)
    slots, rows = torch.tensor([3, 1]), torch.tensor([1, 0])
    got = verify_triton(*strided, *inputs(layer)[3:], states[2], slots, rows, layer.parents, of_layer(deltas, 2))
    torch.testing.assert_close(got, expected, **CLOSE)
    for part in (deltas.key, deltas.update, deltas.log_decay):
        part[:2] = 0.0
    fold_triton(states, slots.flip(0), torch.tensor([4, 2]), None, None, deltas)
    torch.testing.assert_close(states[2, 1], nodes[1, 4], **CLOSE)
    torch.testing.assert_close(states[2, 3], nodes[0, 2], **CLOSE)
    assert not wide[:, :2].any()


def test_padded_requests_are_harmless():
    """A slot below 0 starts from zero; links that are nonsense lead nowhere outside."""
    layer = random_layer(13, width=7, bs=2)
    layer.initial[1] = 0
    parents = layer.parents.clone()
    parents[1] = torch.tensor([99, -5, 1 << 30, 3, 4, -1, 77])
    brought = parents.clone()
    brought[1] = torch.tensor([-1, 0, 1, 2, 3, 0, 5])
    expected, _ = verify_with_states(layer.tokens(), brought, layer.initial)
    deltas = empty_deltas(layer, 2, 7)
    slots = torch.tensor([0, -1])
    states = layer.initial[:1].clone()
    got = verify_triton(*inputs(layer), states, slots, torch.arange(2), parents, of_layer(deltas, 0))
    torch.testing.assert_close(got, expected, **CLOSE)
    before = states.clone()
    fold_triton(states[None], slots, torch.tensor([-1, 3]), None, None, deltas)
    assert torch.equal(states, before)


def test_half_precision_inputs_are_summed_in_float32():
    layer = random_layer(17, width=9, dtype=torch.bfloat16)
    expected, nodes = verify_with_states(layer.tokens(), layer.parents, layer.initial)
    deltas = empty_deltas(layer, 3, 9)
    slots = torch.arange(3)
    got = verify_triton(*inputs(layer), layer.initial, slots, slots, layer.parents, of_layer(deltas, 0))
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.float(), expected, rtol=1e-2, atol=1e-2)
    states = layer.initial.clone()
    fold_triton(states[None], slots, torch.full((3,), 8), None, None, deltas)
    torch.testing.assert_close(states, nodes[:, 8], **CLOSE)
    rounded = fold(
        layer.initial, layer.tokens().key, deltas.update[0], deltas.log_decay[0], layer.parents, torch.full((3,), 8)
    )
    torch.testing.assert_close(states, rounded, **CLOSE)
