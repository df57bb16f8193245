"""Exact best-first tree construction (DDTree, arXiv 2604.12989).

The drafter gives, for every draft depth, a list of candidate tokens with log-probabilities that do not depend on the
path. The log-weight of a node is the sum along its path. A tree of budget N is the N nodes that come first under

    (higher log-weight, lower depth, lower parent index, lower rank)

and that is also the order in which they are stored. A parent and a better-ranked sibling always come before a node, so
the N first nodes are a tree, parents precede children, and the tree of budget n is the first n + 1 nodes of the tree of
any larger budget. The order is total and its log-weights are float32 sums taken from the root downwards, so every
device and every tensor-parallel rank that has the same candidates builds the same tree, bit for bit.

Log-probabilities above 0 (rounding of a log-softmax) count as 0. A candidate of log-probability -inf or NaN, and every
worse-ranked one at its depth, does not exist: the tree is then smaller than the budget and the rest is padding.
"""

from __future__ import annotations

import heapq
import math
from array import array
from functools import lru_cache
from typing import NamedTuple

import torch

from sglang_ddtree.tree.draft_tree import DraftTree
from sglang_ddtree.tree.kernels.dispatch import on_host, use_kernels

#: On a CPU, ``bs * budget`` up to which the heap is faster than the batched version (measured: depth 7 and 15, K 8).
_HEAP_MAX_NODES = 256


def build_tree(
    log_probs: torch.Tensor,
    token_ids: torch.Tensor,
    root_tokens: torch.Tensor,
    budget: int,
    *,
    out: DraftTree | None = None,
) -> DraftTree:
    """Build the tree of the ``budget`` most probable continuations for every request.

    On a CUDA device this is a Triton kernel within its limits (``kernels/dispatch.py``), elsewhere
    :func:`build_tree_batched`. On a CPU the heap takes small batches, where the cost of launching tensor operations
    dominates. All give the same tree, bit for bit.

    Args:
        log_probs: float32 ``[bs, depth, K]``, descending in K; index d holds the candidates of tree depth d + 1.
        token_ids: int64 ``[bs, depth, K]``, distinct along K.
        root_tokens: int64 ``[bs]``, the last committed tokens.
        budget: nodes below the root, at least 1.
        out: a tree of this batch size and width on the same device; overwritten and returned.

    Returns:
        A tree of width ``budget + 1`` on the same device; see the module docstring for the order of its nodes.

    Raises:
        ValueError: a wrong shape, dtype, device or budget.
    """
    _check_inputs(log_probs, token_ids, root_tokens, budget)
    if out is not None and out.tokens.shape != (log_probs.shape[0], budget + 1):
        raise ValueError(f"out must be {(log_probs.shape[0], budget + 1)}, got {tuple(out.tokens.shape)}")
    if on_host(log_probs.device) and log_probs.shape[0] * budget <= _HEAP_MAX_NODES:
        tree = build_tree_reference(log_probs, token_ids, root_tokens, budget)
        return tree if out is None else out.copy_(tree)
    _, max_depth, top_k = log_probs.shape
    if use_kernels(log_probs.device, budget + 1, max_depth=max_depth, top_k=top_k):
        from sglang_ddtree.tree.kernels.build import build_tree_triton

        return build_tree_triton(log_probs, token_ids, root_tokens, budget, out=out)
    tree = build_tree_batched(log_probs, token_ids, root_tokens, budget)
    return tree if out is None else out.copy_(tree)


def build_tree_reference(
    log_probs: torch.Tensor, token_ids: torch.Tensor, root_tokens: torch.Tensor, budget: int
) -> DraftTree:
    """The plain heap, one request at a time, on the host. Arguments, result and errors as :func:`build_tree`."""
    _check_inputs(log_probs, token_ids, root_tokens, budget)
    rows = [
        _heap(*row, budget) for row in zip(log_probs.tolist(), token_ids.tolist(), root_tokens.tolist(), strict=True)
    ]
    device, width = log_probs.device, budget + 1
    links = torch.tensor([row.links for row in rows], dtype=torch.int64).reshape(-1, 5, width)
    tokens, parents, depths, next_child, next_sibling = links.transpose(0, 1).contiguous().to(device).unbind(0)
    weights = torch.tensor([row.log_weights for row in rows], dtype=torch.float32, device=device)
    num_nodes = torch.tensor([row.num_nodes for row in rows], dtype=torch.int64, device=device)
    return DraftTree(tokens, parents, depths, weights.reshape(-1, width), next_child, next_sibling, num_nodes)


class _HeapRow(NamedTuple):
    links: tuple[list[int], ...]  # tokens, parents, depths, next_child, next_sibling
    log_weights: list[float]
    num_nodes: int


def _heap(log_probs: list[list[float]], token_ids: list[list[int]], root: int, budget: int) -> _HeapRow:
    width, max_depth, top_k = budget + 1, len(log_probs), len(log_probs[0])
    tokens, parents, depths = [0] * width, [-1] * width, [0] * width
    next_child, next_sibling, last_child = [-1] * width, [-1] * width, [-1] * width
    weights = [-math.inf] * width
    tokens[0], weights[0] = root, 0.0

    heap: list[tuple[float, int, int, int]] = []  # (-log-weight, depth, parent, rank): a min-heap gives the order
    float32 = array("f", [0.0])  # storing a Python float here rounds it to float32

    def push(parent: int, depth: int, rank: int) -> None:
        log_prob = log_probs[depth - 1][rank]
        if log_prob > -math.inf:  # false for NaN
            float32[0] = weights[parent] + min(log_prob, 0.0)
            if float32[0] > -math.inf:
                heapq.heappush(heap, (-float32[0], depth, parent, rank))

    push(0, 1, 0)
    node = 1
    while heap and node < width:
        cost, depth, parent, rank = heapq.heappop(heap)
        tokens[node], parents[node], depths[node], weights[node] = token_ids[depth - 1][rank], parent, depth, -cost
        if rank == 0:
            next_child[parent] = node
        else:
            next_sibling[last_child[parent]] = node
        last_child[parent] = node
        if rank + 1 < top_k:
            push(parent, depth, rank + 1)
        if depth < max_depth:
            push(node, depth + 1, 0)
        node += 1
    return _HeapRow((tokens, parents, depths, next_child, next_sibling), weights, node)


def build_tree_batched(
    log_probs: torch.Tensor, token_ids: torch.Tensor, root_tokens: torch.Tensor, budget: int
) -> DraftTree:
    """All requests at once, level by level. Arguments, result and errors as :func:`build_tree`.

    Every level keeps the nodes that could still be among the first ``budget`` overall, expanded from the kept nodes of
    the level above; one last selection over all levels gives the tree. That is exact because no node precedes its
    parent or its better-ranked siblings. Shapes depend on the arguments' shapes only and nothing is read back to the
    host, so the whole function can be captured in a CUDA graph; call it once before the capture with the same shapes,
    because the first call uploads its index tables.
    """
    _check_inputs(log_probs, token_ids, root_tokens, budget)
    bs, max_depth, top_k = log_probs.shape
    width = budget + 1
    plan = _plan(budget, max_depth, top_k, log_probs.device)

    # Costs (negated log-weights) are never negative, so that their bits order as integers. cummax ends a depth's list
    # at its first missing candidate.
    costs = torch.nan_to_num(-log_probs.detach(), nan=math.inf, posinf=math.inf).clamp_(min=0.0)
    step_costs = costs.cummax(-1).values.reshape(bs, max_depth * top_k).index_select(1, plan.step)

    level = costs.new_zeros(bs, 1)
    kept_costs, kept = [level], [plan.step.new_zeros(1).expand(bs, 1)]
    for first, last, keep, parent in plan.levels:
        candidates = level.index_select(1, parent) + step_costs[:, first:last]
        level, index = _smallest(candidates, keep)
        kept_costs.append(level)
        kept.append(index + (first + 1))  # candidate 0 is the root

    all_costs = torch.cat(kept_costs, 1)
    slots = all_costs.shape[1]
    if slots < width:
        all_costs = torch.nn.functional.pad(all_costs, (0, width - slots), value=math.inf)
        kept.append(kept[0].expand(bs, width - slots))
    cost, slot = _smallest(all_costs, width)
    candidate = torch.cat(kept, 1).gather(1, slot)

    drafted = cost < math.inf
    drafted[:, 0] = False
    order = torch.arange(width, device=cost.device).expand(bs, width)
    node_of_slot = torch.zeros_like(all_costs, dtype=torch.int64).scatter_(1, slot, order)
    parents = torch.where(drafted, node_of_slot.gather(1, plan.parent_slot[candidate]), -1)
    depths = torch.where(drafted, plan.depth[candidate], 0)
    tokens = token_ids.reshape(bs, max_depth * top_k).gather(1, plan.token[candidate])
    tokens = torch.where(drafted, tokens, 0)
    tokens[:, 0] = root_tokens

    # child_at[parent, rank]. Column K stays -1: the sibling after the last rank. Row Q takes the writes of padding.
    stride = top_k + 1
    place = torch.where(drafted, parents * stride + plan.rank[candidate], width * stride)
    child_at = place.new_full((bs, (width + 1) * stride), -1).scatter_(1, place, order)
    next_child = child_at.view(bs, width + 1, stride)[:, :width, 0].contiguous()
    next_sibling = torch.where(drafted, child_at.gather(1, place + 1), -1)
    return DraftTree(tokens, parents, depths, 0.0 - cost, next_child, next_sibling, drafted.sum(1) + 1)


def _smallest(costs: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The ``count`` smallest of each row in order, and their columns; the lower column wins a tie.

    ``topk`` promises nothing about ties, and a stable sort costs more; with the column in the low half of the key there
    are no ties.
    """
    columns = torch.arange(costs.shape[1], device=costs.device)
    keys = costs.view(torch.int32).to(torch.int64).mul_(1 << 32).add_(columns)
    index = torch.topk(keys, count, dim=1, largest=False, sorted=True).indices
    return costs.gather(1, index), index


class _Plan(NamedTuple):
    """Which candidates the levels look at, as index tables; candidate 0 is the root."""

    step: torch.Tensor  # [C] column in log_probs [depth * K], without the root
    levels: list[tuple[int, int, int, torch.Tensor]]  # first and last candidate, how many to keep, parent in its level
    parent_slot: torch.Tensor  # [1 + C] parent among the kept nodes of all levels
    depth: torch.Tensor  # [1 + C]
    rank: torch.Tensor  # [1 + C]
    token: torch.Tensor  # [1 + C] column in token_ids [depth * K]


@lru_cache(maxsize=64)
def _plan(budget: int, max_depth: int, top_k: int, device: torch.device) -> _Plan:
    """List, per level, the (parent, rank) pairs that can be among the first ``budget`` nodes.

    Parents are counted in order within their level. Before the child of rank r of parent p (both from 0) at depth d > 1
    come all (p + 1)(r + 1) - 1 other children that are no worse in either, p + 1 nodes of the level above and d - 2
    ancestors further up. At depth 1 it is the better ranks alone.
    """
    step: list[int] = []
    levels: list[tuple[int, int, int, torch.Tensor]] = []
    parent_slot, depths, ranks, tokens = [0], [0], [0], [0]
    level_size, level_start = 1, 0
    for depth in range(1, min(max_depth, budget) + 1):
        above = 0 if depth == 1 else depth - 2
        weight = 1 if depth == 1 else 2
        pairs = [
            (parent, rank)
            for parent in range(level_size)
            for rank in range(top_k)
            if (parent + 1) * (rank + weight) + above <= budget
        ]
        first = len(step)
        columns = [(depth - 1) * top_k + rank for _, rank in pairs]
        step += columns
        tokens += columns
        parent_slot += [level_start + parent for parent, _ in pairs]
        depths += [depth] * len(pairs)
        ranks += [rank for _, rank in pairs]
        keep = min(budget - depth + 1, len(pairs))
        parents = torch.tensor([parent for parent, _ in pairs], device=device)
        levels.append((first, len(step), keep, parents))
        level_start += level_size
        level_size = keep
    step_, parent_slot_, depth_, rank_, token_ = (
        torch.tensor(table, dtype=torch.int64, device=device) for table in (step, parent_slot, depths, ranks, tokens)
    )
    return _Plan(step_, levels, parent_slot_, depth_, rank_, token_)


def _check_inputs(log_probs: torch.Tensor, token_ids: torch.Tensor, root_tokens: torch.Tensor, budget: int) -> None:
    if budget < 1:
        raise ValueError(f"budget must be at least 1, got {budget}")
    if log_probs.dim() != 3 or log_probs.shape[1] < 1 or log_probs.shape[2] < 1:
        raise ValueError(f"log_probs must be [bs, depth, K] with depth and K at least 1, got {tuple(log_probs.shape)}")
    if token_ids.shape != log_probs.shape:
        raise ValueError(f"token_ids must be {tuple(log_probs.shape)} like log_probs, got {tuple(token_ids.shape)}")
    if root_tokens.shape != log_probs.shape[:1]:
        raise ValueError(f"root_tokens must be [{log_probs.shape[0]}], got {tuple(root_tokens.shape)}")
    if log_probs.dtype != torch.float32 or token_ids.dtype != torch.int64 or root_tokens.dtype != torch.int64:
        raise ValueError(
            "log_probs, token_ids and root_tokens must be float32, int64 and int64, "
            f"got {log_probs.dtype}, {token_ids.dtype} and {root_tokens.dtype}"
        )
    if not log_probs.device == token_ids.device == root_tokens.device:
        raise ValueError(
            "log_probs, token_ids and root_tokens must be on one device, "
            f"got {log_probs.device}, {token_ids.device} and {root_tokens.device}"
        )
