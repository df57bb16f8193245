"""The folded sampler with the Triton kernels in it: against the reference, and captured and replayed."""

from __future__ import annotations

from dataclasses import fields
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from captured_piece import Captured
from fold_pieces import (
    CONFIG,
    HIDDEN,
    MAX_BS,
    SIZES,
    VOCAB,
    Memory,
    attention_backend,
    draft_graph,
    fresh_trees,
    head,
    replay_changing_batches,
    whole_step,
)
from peak_memory import Peak
from sglang.kernels.ops.speculative.lilicorr import _topk_lse_torch
from sglang.srt.models import dflash
from sglang.srt.speculative.eagle_utils import TreeMaskMode

from sglang_ddtree import graph_memory
from sglang_ddtree.config import DDTreeConfig
from sglang_ddtree.drafting import draft_candidates
from sglang_ddtree.folding import TreeSampler
from sglang_ddtree.tree import bits, build, mask, walk
from sglang_ddtree.tree.draft_tree import DraftTree

STEPS = 6
FULL, BITS = TreeMaskMode.FULL_MASK, TreeMaskMode.QLEN_ONLY_BITPACKING


@pytest.fixture
def choice(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The functions choose as on a GPU, while ``kernels`` is set."""
    chosen = SimpleNamespace(kernels=True)
    for module in (bits, build, mask, walk):
        monkeypatch.setattr(module, "use_kernels", lambda *args, **limits: chosen.kernels)
    for module in (build, mask):
        monkeypatch.setattr(module, "on_host", lambda device: False)
    monkeypatch.setattr(dflash, "get_parallel", lambda: SimpleNamespace(tp_size=1))
    return chosen


def sampler(lm_head: Any) -> TreeSampler:
    return TreeSampler(lm_head, CONFIG, MAX_BS, "cpu")


@pytest.mark.parametrize(
    ("budget", "block_size", "top_k"), [(1, 2, 2), (3, 8, 4), (16, 8, 8), (33, 16, 5), (64, 16, 8), (128, 32, 32)]
)
def test_the_sampler_writes_the_references_trees(
    choice: SimpleNamespace, budget: int, block_size: int, top_k: int
) -> None:
    """Into its own memory, batch after batch, rows of padding among them."""
    config, lm_head = DDTreeConfig(budget=budget, block_size=block_size, top_k=top_k), head()
    made = TreeSampler(lm_head, config, 5, "cpu")
    memory = made.trees.tokens.data_ptr()
    spread = torch.tensor([0.1, 1.0, 3.0, 9.0, 0.0]).view(5, 1, 1)
    for seed, (bs, real) in enumerate([(5, 5), (4, 3)]):
        rng = torch.Generator().manual_seed(seed)
        hidden = torch.randn(bs, block_size, HIDDEN, generator=rng) * spread[:bs]
        ids = torch.randint(VOCAB, (bs, block_size), generator=rng)
        hidden[real:] = torch.nan
        made(hidden.view(-1, HIDDEN), ids.view(-1))
        candidates = draft_candidates(hidden, lm_head, config.depth, top_k)
        want = build.build_tree_reference(*(each[:real] for each in candidates), ids[:real, 0], budget)
        for each in fields(DraftTree):
            assert torch.equal(getattr(made.first(real), each.name), getattr(want, each.name)), each.name
    assert made.trees.tokens.data_ptr() == memory and made.trees.tokens.shape == (5, budget + 1)


def test_draft_graphs_of_all_sizes_replayed_on_other_batches(choice: SimpleNamespace) -> None:
    graphs = replay_changing_batches(Memory(), sampler, STEPS)
    assert [graph.kernels for graph in graphs] == [["build_kernel"]] * len(SIZES)


@pytest.fixture
def top_k_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's top-K takes its way for CUDA tensors."""
    original = dflash.lilicorr_topk_lse

    def as_cuda(*args: Any) -> Any:
        with mock.patch.object(torch.Tensor, "is_cuda", True):
            return original(*args)

    monkeypatch.setattr(dflash, "lilicorr_topk_lse", as_cuda)


def test_with_sglangs_top_k_kernels(
    choice: SimpleNamespace, top_k_kernels: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that a GPU launches behind the head's product."""
    memory, lm_head = Memory(), head()
    made = sampler(lm_head)
    graph = Captured(draft_graph(memory, made, 2))
    assert graph.kernels == ["_tiled_scan", "_tiled_select", "build_kernel"]
    for seed in range(1, 4):
        memory.write(2, seed)
        graph.replay()
        want = fresh_trees(memory, 2, lm_head)
        for each in fields(DraftTree):
            assert torch.equal(getattr(made.first(2), each.name), getattr(want, each.name)), f"{seed}: {each.name}"
    # And they are the trees that torch's top-K gives, but for the rounding of the log-sum-exp.
    monkeypatch.setattr(dflash, "lilicorr_topk_lse", _topk_lse_torch)
    want = fresh_trees(memory, 2, lm_head)
    assert torch.equal(made.first(2).tokens, want.tokens) and torch.equal(made.first(2).parents, want.parents)
    torch.testing.assert_close(made.first(2).log_weights, want.log_weights)


@pytest.mark.parametrize(("top_k", "copies"), [(4, 1), (3, 3)])
def test_the_memory_of_the_logits(
    choice: SimpleNamespace, top_k_kernels: None, monkeypatch: pytest.MonkeyPatch, top_k: int, copies: int
) -> None:
    """Most of what the fold holds at a time is the head's logits, as often as they are counted."""
    monkeypatch.setattr(graph_memory, "get_parallel", lambda: SimpleNamespace(tp_size=1))
    config, vocab = DDTreeConfig(budget=4, block_size=3, top_k=top_k), 9000
    lm_head: Any = SimpleNamespace(weight=torch.randn(vocab + 64, HIDDEN), org_vocab_size=vocab)
    counted = graph_memory.check_draft_graph(lm_head, config, [2], "cpu")
    assert counted == copies * 2 * 2 * vocab * 4
    made = TreeSampler(lm_head, config, 2, "cpu")
    with Peak() as peak:
        made(torch.randn(6, HIDDEN), torch.zeros(6, dtype=torch.int64))
    assert counted <= peak.most <= 1.05 * counted


@pytest.mark.parametrize("mode", [FULL, TreeMaskMode.QLEN_ONLY, BITS])
def test_the_whole_step_as_one_graph(choice: SimpleNamespace, mode: TreeMaskMode) -> None:
    memory, lm_head = Memory(), head()
    graph = Captured(whole_step(memory, sampler(lm_head), attention_backend(mode), 4))
    assert graph.kernels == ["build_kernel", "bits_kernel" if mode == BITS else "mask_kernel", "walk_kernel"]
    for seed in range(1, STEPS + 1):
        memory.write(4, seed)
        choice.kernels = True
        got = graph.replay()
        choice.kernels = False
        want = whole_step(memory.copy(), sampler(lm_head), attention_backend(mode), 4)()
        for name, tensor in want.items():
            assert torch.equal(got[name], tensor), f"step {seed}: {name}"
