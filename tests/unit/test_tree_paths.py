"""Tokens from the root to every node."""

from __future__ import annotations

import pytest
import torch

from sglang_ddtree.tree.build import build_tree_reference
from sglang_ddtree.tree.paths import path_tokens


@pytest.mark.parametrize("seed", range(20))
def test_paths_follow_the_parents(seed):
    rng = torch.Generator().manual_seed(seed)
    depth = seed % 5 + 1
    log_probs, ids = torch.randn(3, depth, 6, generator=rng).log_softmax(-1).topk(4, -1)
    # The last request's second level has no candidates: fewer nodes than the budget, and padding.
    log_probs[2, 1:] = -torch.inf
    tree = build_tree_reference(log_probs, ids, torch.tensor([5, 4, 3]), 13)
    paths = path_tokens(tree, depth)
    assert paths.shape == (3, tree.width, depth)
    assert paths.dtype == torch.int64
    for row in range(3):
        for node in range(tree.width):
            expected, at = [], node if node < int(tree.num_nodes[row]) else 0
            while at:
                expected.insert(0, int(tree.tokens[row, at]))
                at = int(tree.parents[row, at])
            assert paths[row, node].tolist() == expected + [-1] * (depth - len(expected))


def test_a_negative_depth_is_refused():
    tree = build_tree_reference(torch.zeros(1, 1, 1), torch.zeros(1, 1, 1, dtype=torch.int64), torch.tensor([0]), 1)
    with pytest.raises(ValueError, match="max_depth"):
        path_tokens(tree, -1)
