"""Acceptance: the path through a draft tree that the target itself would have produced."""

from __future__ import annotations

from typing import NamedTuple

import torch

from sglang_ddtree.tree.draft_tree import DraftTree
from sglang_ddtree.tree.kernels.dispatch import use_kernels


class Walk(NamedTuple):
    """The accepted path of every request.

    Attributes:
        accepted: int64 ``[bs, max_depth + 1]``, indices into the request's own tree, the root first, then -1. SGLang's
            ``accept_index`` has the same shape with ``b * Q`` added to the indices of request b.
        num_accepted: int64 ``[bs]``, accepted drafts, the root not counted; SGLang's ``accept_token_num``.
        bonus: int64 ``[bs]``, the target's token at the last accepted node. Committed tokens are the accepted drafts
            and this one.
    """

    accepted: torch.Tensor
    num_accepted: torch.Tensor
    bonus: torch.Tensor


def walk_targets(tree: DraftTree, target_tokens: torch.Tensor, max_depth: int) -> Walk:
    """Start at the root and follow the child that carries the target's token, while there is one.

    This is the rule of every lossless walk here: the tree is fixed before ``target_tokens`` are chosen, and the tokens
    committed are the target's own. Greedy and sampled walks differ only in how each node's token is chosen.

    No loop over requests, no host synchronisation. Padding is never entered, whatever its token.

    Args:
        tree: a tree of width ``Q``.
        target_tokens: int64 ``[bs, Q]``, the target's choice after each node; entries of padding are ignored.
        max_depth: accept at most so many drafts. The tree's depth bound accepts all there is; a lower one cuts the
            path short, and what is committed is still the target's.

    Raises:
        ValueError: a wrong shape or dtype, or a negative ``max_depth``.
    """
    bs, width = tree.tokens.shape
    if target_tokens.shape != tree.tokens.shape or target_tokens.dtype != torch.int64:
        raise ValueError(
            f"target_tokens must be int64 {(bs, width)}, got {target_tokens.dtype} {tuple(target_tokens.shape)}"
        )
    if max_depth < 0:
        raise ValueError(f"max_depth must not be negative, got {max_depth}")
    if use_kernels(tree.device, width):
        from sglang_ddtree.tree.kernels.walk import walk_targets_triton

        return Walk(*walk_targets_triton(tree, target_tokens, max_depth))
    return walk_targets_torch(tree, target_tokens, max_depth)


def walk_targets_torch(tree: DraftTree, target_tokens: torch.Tensor, max_depth: int) -> Walk:
    """:func:`walk_targets` in torch operations; the arguments are not checked."""
    bs, width = tree.tokens.shape
    # Siblings carry distinct tokens, so at most one child per node matches. Slot Q means "stopped" and leads to itself;
    # it also takes the writes of the nodes that do not match.
    parents = tree.parents.clamp(min=0)
    matches = (tree.parents >= 0) & (tree.tokens == target_tokens.gather(1, parents))
    node = torch.arange(width, device=parents.device).expand(bs, width)
    follow = parents.new_full((bs, width + 1), width)
    follow.scatter_(1, torch.where(matches, parents, width), torch.where(matches, node, width))

    current = parents.new_zeros(bs, 1)
    path = [current]
    for _ in range(max_depth):
        current = follow.gather(1, current)
        path.append(current)
    visited = torch.cat(path, 1)
    on_path = visited < width
    num_accepted = on_path.sum(1) - 1
    last = visited.gather(1, num_accepted.unsqueeze(1))
    return Walk(torch.where(on_path, visited, -1), num_accepted, target_tokens.gather(1, last).squeeze(1))


def walk_greedy(tree: DraftTree, target_tokens: torch.Tensor, max_depth: int) -> Walk:
    """:func:`walk_targets` with the target's argmax at each node (SGLang's ``verify_tree_greedy``)."""
    return walk_targets(tree, target_tokens, max_depth)


def walk_sampled(
    tree: DraftTree, probs: torch.Tensor, max_depth: int, generator: torch.Generator | None = None
) -> Walk:
    """:func:`walk_targets` with one draw from the target's distribution at each node.

    Lossless: the tree does not depend on the draws, so the token committed after a node is a draw from the target's
    distribution there, whether a child carries it or not. Draws of nodes off the path are thrown away unseen. Accepting
    a child with probability min(1, p/q) instead, as for sampled drafts, would be biased: a best-first tree is no sample
    of the drafter's distribution.

    Args:
        tree: a tree of width ``Q``.
        probs: float ``[bs, Q, vocab]``, the target's distribution after each node, with temperature, filters, penalties
            and grammar already applied; rows need not sum to 1. Rows of padding are ignored.
        max_depth: as in :func:`walk_targets`.
        generator: source of the draws, on the device of ``probs``.

    Raises:
        ValueError: a wrong shape or dtype, or a negative ``max_depth``.
    """
    bs, width = tree.tokens.shape
    if probs.dim() != 3 or probs.shape[:2] != (bs, width) or not probs.dtype.is_floating_point:
        raise ValueError(f"probs must be float [{bs}, {width}, vocab], got {probs.dtype} {tuple(probs.shape)}")
    # Padding may hold anything, zeros too, from which nothing can be drawn.
    real = torch.arange(width, device=probs.device) < tree.num_nodes.unsqueeze(1)
    rows = torch.where(real.unsqueeze(2), probs, 1.0).flatten(0, 1)
    # The draw that torch.multinomial makes; it also checks its rows on the host, which would wait for the device.
    drawn = (rows / torch.empty_like(rows).exponential_(generator=generator)).argmax(-1).view(bs, width)
    return walk_targets(tree, drawn, max_depth)


def walk_reference(tree: DraftTree, target_tokens: torch.Tensor, max_depth: int) -> Walk:
    """:func:`walk_targets` one request at a time over the child and sibling links, as SGLang's kernels walk."""
    paths: list[list[int]] = []
    for row in range(tree.batch_size):
        tokens, targets = tree.tokens[row].tolist(), target_tokens[row].tolist()
        next_child, next_sibling = tree.next_child[row].tolist(), tree.next_sibling[row].tolist()
        path = [0]
        while len(path) <= max_depth:
            child = next_child[path[-1]]
            while child != -1 and tokens[child] != targets[path[-1]]:
                child = next_sibling[child]
            if child == -1:
                break
            path.append(child)
        paths.append(path)
    device = tree.device
    padded = [path + [-1] * (max_depth + 1 - len(path)) for path in paths]
    accepted = torch.tensor(padded, dtype=torch.int64, device=device).reshape(-1, max_depth + 1)
    num_accepted = torch.tensor([len(path) - 1 for path in paths], dtype=torch.int64, device=device)
    bonus = [int(target_tokens[row, path[-1]]) for row, path in enumerate(paths)]
    return Walk(accepted, num_accepted, torch.tensor(bonus, dtype=torch.int64, device=device))
