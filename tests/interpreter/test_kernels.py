"""The kernels against their references, on random trees and on the cases that are easy to get wrong."""

from __future__ import annotations

import math

import pytest
import torch

from sglang_ddtree.gpu import cases, equality
from sglang_ddtree.gpu.cases import Candidates, Size
from sglang_ddtree.tree.bits import ancestor_bits_torch
from sglang_ddtree.tree.build import build_tree_reference
from sglang_ddtree.tree.draft_tree import DraftTree, check_invariants
from sglang_ddtree.tree.kernels.build import build_tree_triton
from sglang_ddtree.tree.kernels.mask import ancestor_bits_triton, write_tree_columns
from sglang_ddtree.tree.kernels.walk import walk_targets_triton
from sglang_ddtree.tree.walk import walk_reference

CPU = torch.device("cpu")
SWEEP = cases.sizes(small=640, large=48)


def test_the_sweep_is_large_enough():
    assert sum(size.trees for size in SWEEP) >= 10_000
    assert {min(size.budget for size in SWEEP), max(size.budget for size in SWEEP)} == {1, 256}


@pytest.mark.parametrize("size", SWEEP, ids=lambda size: f"{size.budget}-{size.depth}-{size.top_k}")
def test_random_trees(size: Size):
    assert equality.check_sizes([size], CPU, seed=size.budget * 1000 + size.depth) == size.trees


def test_random_trees_are_varied():
    """Some trees are full and some are not, some walks get nowhere and some to the end."""
    random = cases.random_candidates(Size(400, 16, 7, 8), seed=1)
    tree = build_tree_reference(random.log_probs, random.token_ids, random.root_tokens, 16)
    check_invariants(tree)
    assert len(set(tree.num_nodes.tolist())) > 3 and int(tree.num_nodes.min()) == 1
    weights = tree.log_weights[:, 1:]
    assert int((weights.diff() == 0).sum()) > 100  # ties
    walk = walk_reference(tree, cases.random_targets(tree, 1), 7)
    assert set(walk.num_accepted.tolist()) >= {0, 1, 2, 3, 4}


def build_both(log_probs: torch.Tensor, token_ids: torch.Tensor, budget: int) -> DraftTree:
    roots = torch.arange(log_probs.shape[0])
    return equality.check(Candidates(log_probs, token_ids, roots, budget), CPU, seed=0)


def distinct_ids(*shape: int) -> torch.Tensor:
    return torch.arange(shape[-1]).expand(shape).contiguous()


def test_all_ties():
    """Everything weighs 0, also -0.0 and what rounding left above 0: depth, then parent, then rank decide."""
    for value in (0.0, -0.0, 1e-7):
        build_both(torch.full((2, 9, 6), value), distinct_ids(2, 9, 6), 50)


def test_sums_that_overflow_are_no_nodes():
    log_probs = torch.full((1, 3, 2), -3e38)
    tree = build_both(log_probs, distinct_ids(1, 3, 2), 10)
    assert tree.num_nodes.tolist() == [3]


def test_tiny_differences_are_kept():
    """Log-probabilities one rounding step apart, and below the smallest normal number, order as they should."""
    steps = torch.arange(8, dtype=torch.float32)
    near_one = (-1.0 - steps * 2**-23).expand(1, 3, 8).contiguous()
    denormal = (-steps * 2**-149).expand(1, 3, 8).contiguous()
    for log_probs in (near_one, denormal):
        build_both(log_probs, distinct_ids(1, 3, 8), 40)


@pytest.mark.parametrize("missing", [-math.inf, math.nan])
def test_missing_candidates(missing: float):
    log_probs = torch.tensor([[[-0.1, missing], [missing, missing]], [[missing, missing], [0.0, 0.0]]])
    assert build_both(log_probs, distinct_ids(2, 2, 2), 4).num_nodes.tolist() == [2, 1]


def test_strided_and_empty_inputs():
    random = cases.random_candidates(Size(5, 9, 4, 8), seed=3)
    expected = build_tree_reference(random.log_probs, random.token_ids, random.root_tokens, 9)
    wide = random.log_probs.repeat_interleave(2, -1)[..., ::2]
    got = build_tree_triton(wide, random.token_ids, random.root_tokens, 9)
    assert torch.equal(expected.tokens, got.tokens) and torch.equal(expected.parents, got.parents)

    empty = build_tree_triton(random.log_probs[:0], random.token_ids[:0], random.root_tokens[:0], 9)
    assert empty.tokens.shape == (0, 10)
    assert ancestor_bits_triton(empty, 4).shape == (0, 1)
    assert walk_targets_triton(empty, empty.tokens, 4)[0].shape == (0, 5)


def test_rejects_what_its_keys_cannot_hold():
    for budget, depth, top_k in ((257, 3, 4), (0, 3, 4), (8, 32, 4), (8, 3, 33)):
        log_probs = torch.zeros(1, depth, top_k)
        with pytest.raises(ValueError, match="the kernel builds trees of budget 1-256"):
            build_tree_triton(log_probs, distinct_ids(1, depth, top_k), torch.zeros(1, dtype=torch.int64), budget)
    random = cases.random_candidates(Size(2, 4, 3, 4), seed=4)
    args = (random.log_probs, random.token_ids, random.root_tokens)
    with pytest.raises(ValueError, match="out must be"):
        build_tree_triton(*args, 5, out=build_tree_triton(*args, 4))


def test_full_mask_of_long_and_missing_prefixes():
    """Requests far apart in the flat mask, prefix 0 among them, and a buffer that ends within the last request."""
    random = cases.random_candidates(Size(70, 8, 7, 8), seed=5)
    tree = build_tree_reference(random.log_probs, random.token_ids, random.root_tokens, 8)
    lens = torch.arange(70) * 37 % 400
    total = int(9 * (lens + 9).sum())
    whole = write_tree_columns(tree, lens, 7, torch.ones(total, dtype=torch.uint8))
    parts = whole.split([9 * (int(n) + 9) for n in lens])
    bits = ancestor_bits_torch(tree, 7).view(70, 9)
    for row, (part, prefix) in enumerate(zip(parts, lens.tolist(), strict=True)):
        table = part.view(9, prefix + 9)
        assert table[:, :prefix].all()
        packed = (table[:, prefix:].to(torch.int32) << torch.arange(9)).sum(1)
        assert torch.equal(packed, bits[row].to(torch.int64))

    unbounded = write_tree_columns(tree, lens, 7, torch.full((total,), 7, dtype=torch.uint8))
    short = torch.full((total,), 7, dtype=torch.uint8)
    write_tree_columns(tree, lens, 7, short[: total - 20])
    assert torch.equal(short[: total - 20], unbounded[: total - 20]) and short[total - 20 :].eq(7).all()
    assert not torch.equal(short, unbounded)


def test_sampled_walk_follows_what_was_drawn():
    """Draws from distributions over the vocabulary, one a node, as a sampled walk makes them."""
    random = cases.random_candidates(Size(300, 24, 7, 8), seed=6)
    tree = build_tree_reference(random.log_probs, random.token_ids, random.root_tokens, 24)
    rng = torch.Generator().manual_seed(6)
    logits = torch.randn(300 * 25, cases.VOCAB, generator=rng)
    logits.scatter_add_(1, cases.random_targets(tree, 6).view(-1, 1), torch.full((300 * 25, 1), 5.0))
    drawn = torch.multinomial(logits.softmax(-1), 1, generator=rng).view(300, 25)
    expected = walk_reference(tree, drawn, 7)
    assert int(expected.num_accepted.max()) >= 3
    for want, got in zip(expected, walk_targets_triton(tree, drawn, 7), strict=True):
        assert torch.equal(want, got)


@pytest.mark.parametrize("part", ["parents", "log_weights", "next_sibling"])
def test_the_comparison_can_fail(monkeypatch: pytest.MonkeyPatch, part: str):
    def wrong(*args, **options):
        tree = build_tree_triton(*args, **options)
        getattr(tree, part)[1, 2] += 1
        return tree

    monkeypatch.setattr(equality, "build_tree_triton", wrong)
    with pytest.raises(equality.Mismatch, match=part) as error:
        equality.check_sizes([Size(3, 6, 3, 4)], CPU)
    assert "\n" not in str(error.value)
