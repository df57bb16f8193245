"""Tree links in the static buffers of a captured verify pass, and the parents that SGLang's convolution makes of them.

A graph is captured for one top-k and one width and replayed with many trees: what an earlier tree left in the buffers
must not show in a later one. Without a GPU nothing is captured; the metadata is SGLang's own, and so is the kernel.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from sglang.kernels.ops.mamba.causal_conv1d_triton import causal_conv1d_update
from sglang.srt.layers.attention.hybrid_linear_attn_backend import MambaAttnBackendBase
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from sglang_ddtree import graphs
from sglang_ddtree.config import MAX_TOP_K, DDTreeConfig
from sglang_ddtree.tree.build import build_tree
from sglang_ddtree.verify import make_verify_input

BS, BUDGET, DEPTH, CHANNELS, TAPS = 3, 12, 5, 4, 4
WIDTH = BUDGET + 1


def linear_backend(top_k):
    """SGLang's metadata code for linear attention, with static buffers for graphs; a request's slot is its row."""
    backend = object.__new__(MambaAttnBackendBase)
    vars(backend).update(
        topk=top_k,
        device="cpu",
        pad_slot_id=-1,
        state_indices_list=[],
        query_start_loc_list=[],
        retrieve_next_token_list=[],
        retrieve_next_sibling_list=[],
        retrieve_parent_token_list=[],
        _fused_state_indices_ok=False,
        _graph_seq_len_fill_value=1,
        req_to_token_pool=SimpleNamespace(
            mamba_pool=None, get_mamba_indices=lambda rows: rows.clone(), translate_mamba_indices=lambda slots: slots
        ),
    )
    backend.init_cuda_graph_state(BS, BS * WIDTH)
    return backend


def verify_input(seed, bs, top_k):
    rng = torch.Generator().manual_seed(seed)
    # How sure the drafter is decides the shape: a chain, a bush, or in between.
    logits = torch.randn(bs, DEPTH, 40, generator=rng) * (1 + 8 * (seed % 3))
    values, ids = logits.log_softmax(-1).topk(top_k, -1)
    tree = build_tree(values, ids, torch.zeros(bs, dtype=torch.int64), BUDGET)
    made = make_verify_input(
        tree,
        prefix_lens=torch.full((bs,), 9),
        attn_backend=SimpleNamespace(verify_mask=None, max_context_len=64),
        prefix_lens_sum=9 * bs,
        depth=DEPTH,
        top_k=top_k,
        out_cache_loc=torch.arange(bs * WIDTH),
        kv_loc_plan=None,
        sampler=None,
        penalties=None,
    )
    made.ragged_verify_layout = None
    return made


def convolve(metadata, x, states):
    """SGLang's kernel over ``x [BS, channels, Q]``: outputs of a sum over the last taps, itself included."""
    weight = torch.ones(CHANNELS, TAPS)
    windows = torch.zeros(BS + 1, WIDTH, CHANNELS, TAPS - 1)
    return causal_conv1d_update(
        x.clone(),
        states.clone(),
        weight,
        None,
        None,
        conv_state_indices=metadata.mamba_cache_indices,
        intermediate_conv_window=windows,
        intermediate_state_indices=torch.arange(BS, dtype=torch.int32),
        retrieve_next_token=metadata.retrieve_next_token,
        retrieve_next_sibling=metadata.retrieve_next_sibling,
        retrieve_parent_token=metadata.retrieve_parent_token,
    )


def reference(x, states, parents, row):
    """The same sum, each node over its ancestors and, before the root, over the window."""
    out = torch.empty(CHANNELS, WIDTH)
    for node in range(WIDTH):
        path, at = [], node
        while at >= 0:
            path.append(x[row, :, at])
            at = int(parents[row, at])
        path += [states[row, :, -back] for back in range(1, TAPS)]
        out[:, node] = torch.stack(path[:TAPS]).sum(0)
    return out


@pytest.mark.parametrize("top_k", [2, 8])
def test_replays_of_different_trees(top_k, monkeypatch):
    spec = SimpleNamespace(
        speculative_num_draft_tokens=WIDTH, speculative_dflash_block_size=DEPTH + 1, speculative_eagle_topk=top_k
    )
    monkeypatch.setattr(graphs, "get_spec", lambda: spec)
    captured_input = graphs.capture_input(torch.zeros(1, dtype=torch.bool))
    captured_input.ragged_verify_layout = None
    backend = linear_backend(spec.speculative_eagle_topk)
    rows = torch.arange(BS)
    captured = backend._capture_metadata(BS, rows, ForwardMode.TARGET_VERIFY, captured_input)
    rng = torch.Generator().manual_seed(1)
    seen = set()
    for seed in range(7):
        # The last batch is smaller: its third row is padding of the graph.
        bs = BS if seed < 6 else BS - 1
        made = verify_input(seed, bs, top_k)
        assert (made.topk, made.draft_token_num, made.spec_steps) == (
            captured_input.topk,
            captured_input.draft_token_num,
            captured_input.spec_steps,
        )
        replayed = backend._replay_metadata(
            BS, rows.clone(), ForwardMode.TARGET_VERIFY, made, None, num_padding=BS - bs
        )
        # What the graph was captured with is what is filled now.
        for name in ("retrieve_next_token", "retrieve_next_sibling", "retrieve_parent_token", "mamba_cache_indices"):
            assert getattr(replayed, name).data_ptr() == getattr(captured, name).data_ptr(), name
        x = torch.randn(BS, CHANNELS, WIDTH, generator=rng)
        states = torch.randn(BS, CHANNELS, TAPS - 1, generator=rng)
        out = convolve(captured, x, states)
        parents = made.tree.parents
        for row in range(bs):
            nodes = int(made.tree.num_nodes[row])
            assert captured.retrieve_parent_token[row, 1:nodes].tolist() == parents[row, 1:nodes].tolist()
            want = reference(x, states, parents, row)[:, :nodes]
            torch.testing.assert_close(out[row, :, :nodes], want)
            seen.add(tuple(parents[row].tolist()))
    assert len(seen) > 10


def test_links_of_another_tree_are_seen():
    """A chain's parents under a bush give other sums, so stale ones would not go unnoticed."""
    backend = linear_backend(8)
    rows = torch.arange(BS)
    made = verify_input(1, BS, 8)
    metadata = backend._replay_metadata(BS, rows.clone(), ForwardMode.TARGET_VERIFY, made, None, num_padding=0)
    x, states = torch.randn(BS, CHANNELS, WIDTH), torch.randn(BS, CHANNELS, TAPS - 1)
    metadata.retrieve_next_token.copy_(torch.arange(1, WIDTH + 1) % WIDTH)
    metadata.retrieve_next_sibling.fill_(-1)
    out = convolve(metadata, x, states)
    assert not torch.allclose(out[0], reference(x, states, made.tree.parents, 0))


@pytest.mark.parametrize("top_k", [2, MAX_TOP_K])
def test_every_top_k_makes_sglang_follow_a_tree(top_k):
    """SGLang's backends follow links where their top-k is above 1; 1 is refused (``config.resolve_top_k``)."""
    config = DDTreeConfig(budget=BUDGET, block_size=DEPTH + 1, top_k=top_k)
    backend = linear_backend(config.as_server_fields()["speculative_eagle_topk"])
    metadata = backend._capture_metadata(BS, torch.arange(BS), ForwardMode.TARGET_VERIFY, verify_input(0, BS, top_k))
    assert metadata.retrieve_parent_token is not None
    chain = linear_backend(1)._capture_metadata(
        BS, torch.arange(BS), ForwardMode.TARGET_VERIFY, verify_input(0, BS, top_k)
    )
    assert chain.retrieve_parent_token is None
