"""The tree sampler, called as SGLang's graph runner calls it: flat rows of padded batches, over one piece of memory."""

from __future__ import annotations

from dataclasses import fields
from types import SimpleNamespace

import pytest
import torch
from no_sync import NoSync
from sglang.srt.models import dflash

from sglang_ddtree import graph_memory
from sglang_ddtree.config import DDTreeConfig
from sglang_ddtree.drafting import draft_tree
from sglang_ddtree.folding import TreeSampler, make_tree_sampler
from sglang_ddtree.tree import build
from sglang_ddtree.tree.draft_tree import DraftTree

CONFIG = DDTreeConfig(budget=12, block_size=6, top_k=4)
HIDDEN, VOCAB, MAX_BS = 8, 40, 8


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "on_host", lambda device: False)
    for module in (dflash, graph_memory):
        monkeypatch.setattr(module, "get_parallel", lambda: SimpleNamespace(tp_size=1))


def head() -> SimpleNamespace:
    weight = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(7))
    return SimpleNamespace(weight=weight, org_vocab_size=VOCAB, shard_indices=None)


def draft_pass(bs: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    rows = bs * CONFIG.block_size
    return torch.randn(rows, HIDDEN, generator=generator), torch.randint(VOCAB, (rows,), generator=generator)


def unfolded(hidden: torch.Tensor, input_ids: torch.Tensor, lm_head: SimpleNamespace) -> DraftTree:
    blocks = hidden.view(-1, CONFIG.block_size, HIDDEN)
    return draft_tree(blocks, input_ids.view(-1, CONFIG.block_size)[:, 0].clone(), lm_head, CONFIG)


def assert_same(got: DraftTree, want: DraftTree) -> None:
    for field in fields(DraftTree):
        assert torch.equal(getattr(got, field.name), getattr(want, field.name)), field.name


def test_changing_batch_sizes_leave_nothing_stale() -> None:
    lm_head = head()
    sampler = TreeSampler(lm_head, CONFIG, MAX_BS, "cpu")
    for seed, bs in enumerate([8, 3, 1, 8, 5, 2]):
        hidden, input_ids = draft_pass(bs, seed)
        sampler(hidden, input_ids)
        assert_same(sampler.first(bs), unfolded(hidden, input_ids, lm_head))
        assert sampler.first(bs).tokens.data_ptr() == sampler.trees.tokens.data_ptr()


@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), -3e38])
def test_padding_does_not_disturb_real_rows(garbage: float) -> None:
    lm_head = head()
    sampler = TreeSampler(lm_head, CONFIG, MAX_BS, "cpu")
    hidden, input_ids = draft_pass(MAX_BS, 1)
    real = 3 * CONFIG.block_size
    hidden[real:] = garbage
    input_ids[real:] = 0
    sampler(hidden, input_ids)
    assert_same(sampler.first(3), unfolded(hidden[:real], input_ids[:real], lm_head))


def test_it_does_not_synchronise() -> None:
    sampler = TreeSampler(head(), CONFIG, MAX_BS, "cpu")
    sampler(*draft_pass(MAX_BS, 0))  # uploads the index tables, as the warm-up before a capture does
    hidden, input_ids = draft_pass(MAX_BS, 1)
    with NoSync() as watch:
        sampler(hidden, input_ids)
    assert watch.operators > 20


def test_the_switch_keeps_draft_graphs_bare(monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = make_tree_sampler(head(), CONFIG, [1, 2, 4], "cpu")
    assert sampler is not None and sampler.trees.tokens.shape == (4, CONFIG.verify_width)
    monkeypatch.setenv("SGLANG_DFLASH_EAGER_DRAFT_SAMPLER", "1")
    assert make_tree_sampler(head(), CONFIG, [1, 2, 4], "cpu") is None
