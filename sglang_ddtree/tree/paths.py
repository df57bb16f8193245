"""The tokens on the way from the root to every node."""

from __future__ import annotations

import torch

from sglang_ddtree.tree.draft_tree import DraftTree


def path_tokens(tree: DraftTree, max_depth: int) -> torch.Tensor:
    """Draft tokens from the root's child down to each node, the node itself included and the root not.

    Args:
        tree: a tree of width ``Q``.
        max_depth: no node is deeper than this.

    Returns:
        int64 ``[bs, Q, max_depth]``: entry d - 1 is the token of the ancestor at depth d, -1 below the node. The root
        and padding have only -1.

    Raises:
        ValueError: a negative ``max_depth``.
    """
    if max_depth < 0:
        raise ValueError(f"max_depth must not be negative, got {max_depth}")
    bs, width = tree.tokens.shape
    # One slot more than needed takes what the root and padding write, whose depth is 0.
    found = tree.tokens.new_full((bs, width, max_depth + 1), -1)
    node = torch.arange(width, device=tree.device).expand(bs, width)
    parents = tree.parents.clamp(min=0)
    for _ in range(max_depth):
        depth = tree.depths.gather(1, node)
        slot = torch.where(depth > 0, depth - 1, max_depth)
        found.scatter_(2, slot.unsqueeze(2), tree.tokens.gather(1, node).unsqueeze(2))
        node = parents.gather(1, node)
    return found[..., :max_depth]
