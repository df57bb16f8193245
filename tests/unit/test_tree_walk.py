"""Acceptance: the longest path that the target's own tokens spell."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_ddtree.tree.build import build_tree_reference
from sglang_ddtree.tree.draft_tree import DraftTree
from sglang_ddtree.tree.walk import walk_greedy, walk_reference, walk_targets

#: No deadline: CI machines are shared.
quick = settings(deadline=None, derandomize=True, database=None, max_examples=100)


@st.composite
def cases(draw) -> tuple[DraftTree, torch.Tensor, int]:
    """A tree over a tiny vocabulary, target tokens that follow it often, and the tree's depth bound."""
    bs, depth, top_k = draw(st.integers(1, 4)), draw(st.integers(1, 6)), draw(st.integers(1, 4))
    budget = draw(st.integers(1, 20))
    rng = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    spread = torch.rand(bs, 1, 1, generator=rng) * 4
    log_probs, token_ids = (torch.randn(bs, depth, 5, generator=rng) * spread).log_softmax(-1).topk(top_k, -1)
    ends = torch.randint(1, top_k + 1, (bs, depth, 1), generator=rng)
    log_probs = log_probs.masked_fill(torch.arange(top_k) >= ends, -torch.inf)
    tree = build_tree_reference(log_probs, token_ids, torch.zeros(bs, dtype=torch.int64), budget)
    return tree, torch.randint(0, 5, (bs, tree.width), generator=rng), depth


def longest_matched_path(tree: DraftTree, targets: torch.Tensor, row: int) -> list[int]:
    """Over all nodes: the deepest one whose whole path from the root carries the target's tokens."""
    best = [0]
    for node in range(1, int(tree.num_nodes[row])):
        path = [node]
        while path[0] != 0:
            path.insert(0, int(tree.parents[row, path[0]]))
        spelled = all(int(tree.tokens[row, b]) == int(targets[row, a]) for a, b in itertools.pairwise(path))
        if spelled and len(path) > len(best):
            best = path
    return best


@quick
@given(cases())
def test_walk_is_the_longest_matched_path(case: tuple[DraftTree, torch.Tensor, int]) -> None:
    tree, targets, depth = case
    accepted, num_accepted, bonus = walk_greedy(tree, targets, depth)
    assert accepted.shape == (tree.batch_size, depth + 1)
    assert accepted.dtype == num_accepted.dtype == bonus.dtype == torch.int64
    for row in range(tree.batch_size):
        path = longest_matched_path(tree, targets, row)
        assert accepted[row].tolist() == path + [-1] * (depth + 1 - len(path))
        assert int(num_accepted[row]) == len(path) - 1
        assert int(bonus[row]) == int(targets[row, path[-1]])


@quick
@given(cases(), st.integers(-6, 6))
def test_walk_equals_reference_at_any_depth_limit(case: tuple[DraftTree, torch.Tensor, int], shift: int) -> None:
    tree, targets, depth = case
    limit = max(0, depth + shift)
    got, expected = walk_targets(tree, targets, limit), walk_reference(tree, targets, limit)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@quick
@given(cases())
def test_requests_are_independent(case: tuple[DraftTree, torch.Tensor, int]) -> None:
    tree, targets, depth = case
    together = walk_targets(tree, targets, depth)
    for row in range(tree.batch_size):
        alone = DraftTree(*(getattr(tree, f.name)[row : row + 1] for f in dataclasses.fields(DraftTree)))
        got = walk_targets(alone, targets[row : row + 1], depth)
        assert all(torch.equal(a[row : row + 1], b) for a, b in zip(together, got, strict=True))


@pytest.mark.parametrize("walk", [walk_greedy, walk_reference])
@pytest.mark.parametrize("token", [0, 3])
def test_padding_is_never_accepted(walk, token: int) -> None:
    """Target and padding carry the same token, token 0 and another one, with and without drafts before the padding."""
    log_probs = torch.full((2, 3, 2), -torch.inf)
    log_probs[1, 0, 0] = -0.1
    token_ids = torch.full((2, 3, 2), 1)
    tree = build_tree_reference(log_probs, token_ids, torch.tensor([token, token]), 6)
    assert tree.num_nodes.tolist() == [1, 2]
    tokens = tree.tokens.clone()
    tokens[0, 1:] = token
    tokens[1, 2:] = token
    tree = dataclasses.replace(tree, tokens=tokens)
    targets = torch.full((2, 7), token)
    accepted, num_accepted, bonus = walk(tree, targets, 6)
    assert num_accepted.tolist() == [0, 0] and bonus.tolist() == [token, token]
    assert accepted.tolist() == [[0] + [-1] * 6] * 2
    targets[1, 0] = 1  # now the one real draft matches, and nothing after it
    accepted, num_accepted, bonus = walk(tree, targets, 6)
    assert num_accepted.tolist() == [0, 1] and accepted[1].tolist() == [0, 1] + [-1] * 5


def test_one_worked_example() -> None:
    # root 9 -> 5 (node 1) -> 7 (node 3); root -> 6 (node 2) -> 7 (node 4); deeper siblings are nodes 5 and 6.
    log_probs, token_ids = torch.tensor([[[-0.5, -0.5], [0.0, -0.5]]]), torch.tensor([[[5, 6], [7, 8]]])
    tree = build_tree_reference(log_probs, token_ids, torch.tensor([9]), 6)
    targets = torch.tensor([[6, 7, 8, 0, 0, 0, 42]])
    accepted, num_accepted, bonus = walk_greedy(tree, targets, 2)
    assert (accepted.tolist(), num_accepted.tolist(), bonus.tolist()) == ([[0, 2, 6]], [2], [42])
    accepted, num_accepted, bonus = walk_greedy(tree, targets, 1)
    assert (accepted.tolist(), num_accepted.tolist(), bonus.tolist()) == ([[0, 2]], [1], [8])


def test_targets_of_unvisited_nodes_do_not_matter() -> None:
    log_probs, token_ids = torch.tensor([[[-0.5, -0.5], [0.0, -0.5]]]), torch.tensor([[[5, 6], [7, 8]]])
    tree = build_tree_reference(log_probs, token_ids, torch.tensor([9]), 9)
    targets = torch.tensor([[5, 1, -1, 2**40, 7, 7, 7, -1, 0, 0]])
    assert walk_greedy(tree, targets, 2).accepted.tolist() == [[0, 1, -1]]


def test_other_devices_never_wait_for_the_host() -> None:
    tree = DraftTree(
        *(torch.empty(s, dtype=t, device="meta") for s, t in [((2, 5), torch.int64)] * 6 + [((2,), torch.int64)])
    )
    walk = walk_targets(tree, torch.empty(2, 5, dtype=torch.int64, device="meta"), 3)
    assert [t.shape for t in walk] == [(2, 4), (2,), (2,)] and walk.bonus.device.type == "meta"


def test_empty_batch() -> None:
    none = torch.zeros(0, dtype=torch.int64)
    tree = build_tree_reference(torch.zeros(0, 3, 2), torch.zeros(0, 3, 2, dtype=torch.int64), none, 4)
    for walk in (walk_targets, walk_reference):
        assert [t.shape for t in walk(tree, torch.zeros(0, 5, dtype=torch.int64), 3)] == [(0, 4), (0,), (0,)]


def test_bad_inputs() -> None:
    tree = build_tree_reference(torch.zeros(2, 3, 1), torch.zeros(2, 3, 1, dtype=torch.int64), torch.tensor([1, 2]), 3)
    for bad in (torch.zeros(2, 3, dtype=torch.int64), torch.zeros(8, dtype=torch.int64), torch.zeros(2, 4)):
        with pytest.raises(ValueError, match="target_tokens must be"):
            walk_targets(tree, bad, 3)
    with pytest.raises(ValueError, match="max_depth"):
        walk_targets(tree, torch.zeros(2, 4, dtype=torch.int64), -1)
