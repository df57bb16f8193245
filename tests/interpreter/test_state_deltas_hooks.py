"""The hooks of deltas on SGLang's own pool and kernel: what a server computes with them and without is the same."""

from __future__ import annotations

import pytest
import torch
from delta_rule_cases import random_layer
from no_sync import NoSync
from triton.runtime import interpreter

from sglang_ddtree import hooks, state_deltas

LAYERS, KEY_HEADS, VALUE_HEADS, DIM, WIDTH = 2, 2, 4, 16, 9
BS, ROWS, SLOTS = 3, 5, 8
CLOSE = {"rtol": 1e-5, "atol": 1e-5}


def make_pool(deltas: bool, state_dtype: torch.dtype = torch.float32):
    from sglang.srt.configs.mamba_utils import Mamba2CacheParams, Mamba2StateDType, Mamba2StateShape
    from sglang.srt.mem_cache.memory_pool import MambaPool

    shape = Mamba2StateShape.create(
        tp_world_size=1, intermediate_size=VALUE_HEADS * DIM, n_groups=KEY_HEADS, num_heads=VALUE_HEADS,
        head_dim=DIM, state_size=DIM, conv_kernel=4,
    )  # fmt: skip
    dtype = Mamba2StateDType(conv=torch.float32, temporal=state_dtype)
    params = Mamba2CacheParams(shape=shape, layers=[0, 1], dtype=dtype)
    arguments = {
        "size": SLOTS, "spec_state_size": ROWS, "cache_params": params, "mamba_layer_ids": [0, 1], "device": "cpu",
        "speculative_num_draft_tokens": WIDTH, "speculative_eagle_topk": 8,
    }  # fmt: skip
    pool = MambaPool.__new__(MambaPool)
    if deltas:
        state_deltas.make_pool(MambaPool.__init__, pool, **arguments)
    else:
        MambaPool.__init__(pool, **arguments)
    return pool


def layers(width: int = WIDTH):
    found = [random_layer(30 + each, BS, width, KEY_HEADS, VALUE_HEADS, DIM, DIM, "padded") for each in range(LAYERS)]
    for layer in found[1:]:
        layer.parents.copy_(found[0].parents)
    return found


def verify(pool, layer, number: int, slots: torch.Tensor):
    """As ``GDNAttnBackend.forward_extend`` calls it: queries, keys and values are parts of one tensor."""
    from sglang.srt.layers.attention.linear.kernels.gdn_triton import TritonGDNKernel

    cache = pool.mamba2_layer_cache(number)
    tokens = layer.q.shape[0] * layer.q.shape[1]
    packed = torch.cat([x.reshape(tokens, -1) for x in (layer.q, layer.k, layer.v)], -1)
    parts = packed.split([KEY_HEADS * DIM, KEY_HEADS * DIM, VALUE_HEADS * DIM], -1)
    q, k, v = (x.view(1, tokens, -1, DIM) for x in parts)
    a, b = torch.cat([layer.a, layer.b], -1).flatten(0, 1).split(VALUE_HEADS, -1)
    return hooks._verify_with_deltas(
        TritonGDNKernel.target_verify,
        TritonGDNKernel(),
        A_log=layer.a_log,
        dt_bias=layer.dt_bias,
        q=q,
        k=k,
        v=v,
        a=a,
        b=b,
        ssm_states=cache.temporal,
        cache_indices=slots,
        query_start_loc=torch.arange(0, tokens + 1, layer.q.shape[1], dtype=torch.int32),
        intermediate_states_buffer=cache.intermediate_ssm,
        # One for each row of the pool, as SGLang's.
        intermediate_state_indices=torch.arange(ROWS, dtype=torch.int32),
        cache_steps=layer.q.shape[1],
        retrieve_parent_token=layer.parents.clamp(min=0).to(torch.int32),
        stable_rows=False,
    )


def scatter_in_torch(caches, slots, last, track_slots, track_last, src_indices_raw=None):
    """SGLang's, whose launchers accept tensors of a GPU only."""
    assert src_indices_raw is None
    pairs = list(zip(caches.conv, caches.intermediate_conv_window, strict=True))
    if caches.temporal.numel():
        pairs.append((caches.temporal, caches.intermediate_ssm))
    for to, which in ((slots, last), (track_slots, track_last)):
        for row in range(0 if to is None else len(to)):
            if to[row] >= 0 and which[row] >= 0:
                for kept, of_nodes in pairs:
                    kept[:, to[row]] = of_nodes[:, row, which[row]]


@pytest.mark.parametrize("width", [WIDTH, 5])
def test_outputs_and_committed_states_are_those_of_stored_states(width):
    slots = torch.tensor([6, 2, 4], dtype=torch.int32)
    last, track_last = torch.tensor([width - 1, 0, 3]), torch.tensor([2, -1, 3])
    track_slots = torch.tensor([1, 3, 5])
    found = []
    for deltas in (False, True):
        pool = make_pool(deltas)
        cache = pool.mamba_cache
        generator = torch.Generator().manual_seed(5)
        cache.temporal.copy_(torch.randn(cache.temporal.shape, generator=generator))
        for window in cache.intermediate_conv_window:
            window.copy_(torch.randn(window.shape, generator=generator))
        outputs = [verify(pool, layer, number, slots) for number, layer in enumerate(layers(width))]
        hooks._commit_deltas(scatter_in_torch, cache, slots, last, track_slots, track_last, src_indices_raw=None)
        found.append((torch.stack(outputs), cache.temporal, *cache.conv))
    for stored, from_deltas in zip(*found, strict=True):
        assert stored.shape == from_deltas.shape
        torch.testing.assert_close(from_deltas, stored, **CLOSE)
    # It was committed: two slots more than requests have another state than before, the rest have the old one.
    before = torch.randn(found[0][1].shape, generator=torch.Generator().manual_seed(5))
    changed = (found[1][1] != before).flatten(2).any(-1)
    assert [slot for slot in range(SLOTS + 1) if changed[:, slot].all()] == [1, 2, 4, 5, 6]
    assert [slot for slot in range(SLOTS + 1) if changed[:, slot].any()] == [1, 2, 4, 5, 6]


def test_padded_requests_of_a_graph_write_to_their_own_rows():
    """A graph for three requests that holds one: slot -1 and stale links."""
    pool = make_pool(True)
    slots = torch.tensor([6, -1, -1], dtype=torch.int32)
    layer = layers()[0]
    pool.mamba_cache.temporal.copy_(torch.randn(pool.mamba_cache.temporal.shape))
    whole = verify(pool, layer, 0, slots).view(BS, WIDTH, VALUE_HEADS, DIM)
    layer.parents[1:] = 77
    assert torch.equal(verify(pool, layer, 0, slots).view(BS, WIDTH, VALUE_HEADS, DIM)[0], whole[0])
    assert pool.mamba_cache.intermediate_ssm.update[0, 3:].count_nonzero() == 0


def test_neither_waits_for_the_device(monkeypatch):
    """So that a graph can hold the verify pass, and the commit does not hold up the next step."""
    launched = []
    launch = interpreter.GridExecutor.__call__

    def counted(executor, *args, **options):
        launched.append(executor.fn.__name__)
        with NoSync.paused():
            return launch(executor, *args, **options)

    monkeypatch.setattr(interpreter.GridExecutor, "__call__", counted)
    pool, layer = make_pool(True), layers()[0]
    slots, last = torch.tensor([6, 2, 4], dtype=torch.int32), torch.tensor([8, 0, 3])
    track = torch.tensor([1, 3, 5]), torch.tensor([2, -1, 3])
    with NoSync():
        verify(pool, layer, 0, slots)
        hooks._commit_deltas(lambda *args: None, pool.mamba_cache, slots, last, *track)
    assert launched == ["verify_kernel", "fold_kernel"]


def test_half_precision_states_are_rounded_once_a_step():
    """Stored states are rounded at each node, the folded one at the end: it is the nearer to float32."""
    slots, last = torch.tensor([6, 2, 4], dtype=torch.int32), torch.full((BS,), WIDTH - 1)
    layer = random_layer(3, BS, WIDTH, KEY_HEADS, VALUE_HEADS, DIM, DIM, "chain")
    found = {}
    for name, deltas, dtype in (
        ("exact", True, torch.float32),
        ("stored", False, torch.bfloat16),
        ("deltas", True, torch.bfloat16),
    ):
        pool = make_pool(deltas, dtype)
        start = torch.randn(pool.mamba_cache.temporal.shape, generator=torch.Generator().manual_seed(5))
        pool.mamba_cache.temporal.copy_(start.bfloat16())
        verify(pool, layer, 0, slots)
        hooks._commit_deltas(scatter_in_torch, pool.mamba_cache, slots, last, None, None)
        found[name] = pool.mamba_cache.temporal[0, slots.long()]
    # The interpreter cuts where a GPU rounds, so one unit of the last place.
    torch.testing.assert_close(found["deltas"].float(), found["exact"], rtol=2**-7, atol=1e-7)
    error = {name: (found[name].float() - found["exact"]).abs().mean() for name in ("stored", "deltas")}
    assert error["deltas"] < error["stored"]
