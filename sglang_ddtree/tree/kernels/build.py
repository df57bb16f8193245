"""Exact best-first construction on the device; the order of ``tree/build.py``, bit for bit.

One warp builds one tree. Every node has at most one open child, the best-ranked one not yet taken, so the whole
frontier is one key per node, held in registers:

    key = cost bits (31) | depth | parent, compared as one integer; cost = -log-weight, never negative

A step takes the least key, which is the next node under (log-weight, depth, parent, rank), and writes two keys: the
parent's next child and the new node's first. Child and sibling links grow along the way.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_ddtree.tree.draft_tree import DraftTree, empty_tree
from sglang_ddtree.tree.kernels.dispatch import MAX_BUDGET, MAX_DEPTH, MAX_TOP_K
from sglang_ddtree.tree.kernels.launch import block_size, node_block

_NONE = tl.constexpr(0x7FFFFFFFFFFFFFFF)  # the key of a node without an open child
_INF = tl.constexpr(float("inf"))


def build_tree_triton(
    log_probs: torch.Tensor,
    token_ids: torch.Tensor,
    root_tokens: torch.Tensor,
    budget: int,
    *,
    out: DraftTree | None = None,
) -> DraftTree:
    """One kernel launch. Arguments and result as :func:`sglang_ddtree.tree.build.build_tree`.

    Args:
        out: a tree of the same batch size and width, contiguous, on the same device; overwritten and returned.

    Raises:
        ValueError: a size beyond the kernel's limits (budget 256, depth 31, K 32), or an ``out`` of another size.
    """
    bs, max_depth, top_k = log_probs.shape
    if not (1 <= budget <= MAX_BUDGET and max_depth <= MAX_DEPTH and top_k <= MAX_TOP_K):
        raise ValueError(
            f"the kernel builds trees of budget 1-{MAX_BUDGET}, depth 1-{MAX_DEPTH}, K 1-{MAX_TOP_K}, "
            f"got {budget}, {max_depth}, {top_k}"
        )
    out = empty_tree(bs, budget + 1, log_probs.device) if out is None else out
    if out.tokens.shape != (bs, budget + 1):
        raise ValueError(f"out must be a tree of shape {(bs, budget + 1)}, got {tuple(out.tokens.shape)}")
    if bs == 0:
        return out
    constants = build_constants(bs, budget)
    build_kernel[(triton.cdiv(bs, constants["TREES"]),)](
        log_probs.detach().contiguous(),
        token_ids.contiguous(),
        root_tokens.contiguous(),
        out.tokens,
        out.parents,
        out.depths,
        out.log_weights,
        out.next_child,
        out.next_sibling,
        out.num_nodes,
        bs,
        max_depth,
        top_k,
        budget,
        **constants,
    )
    return out


def build_constants(bs: int, budget: int) -> dict[str, int]:
    """What the kernel is compiled for: depth and K are run-time arguments."""
    nodes = node_block(budget)
    return {"TREES": block_size(1, bs, nodes), "NODES": nodes, "num_warps": 1}


@triton.jit
def _child_key(log_prob, parent_cost, depth, parent):
    """Key of the child at ``depth`` under ``parent``; none if its log-probability or log-weight is -inf or NaN."""
    cost = parent_cost + tl.where(log_prob < 0, -log_prob, 0.0)
    key = (cost.to(tl.int32, bitcast=True).to(tl.int64) << 16) | (depth << 8).to(tl.int64) | parent.to(tl.int64)
    return tl.where((log_prob > -_INF) & (cost < _INF), key, _NONE)


@triton.jit(do_not_specialize=["bs", "max_depth", "top_k", "budget"])
def build_kernel(
    log_probs, token_ids, root_tokens,
    tokens, parents, depths, log_weights, next_child, next_sibling, num_nodes,
    bs, max_depth, top_k, budget,
    TREES: tl.constexpr, NODES: tl.constexpr,
):  # fmt: skip
    tree = (tl.program_id(0) * TREES + tl.arange(0, TREES)).to(tl.int64)
    real = tree < bs
    candidates = tree * (max_depth * top_k)
    row = tree * (budget + 1)
    nodes = tl.arange(0, NODES)[None, :]
    zero = tl.zeros([TREES], tl.int32)

    # Per node: its open child's key, its own cost, how many children it has, the last of them, and its links.
    log_prob = tl.load(log_probs + candidates, mask=real, other=-_INF)
    first_key = _child_key(log_prob, tl.zeros([TREES], tl.float32), zero + 1, zero)
    keys = tl.where(nodes == 0, first_key[:, None], _NONE)
    costs = tl.zeros([TREES, NODES], tl.float32)
    children = tl.zeros([TREES, NODES], tl.int32)  # count + 256 * last child
    child_links = tl.full([TREES, NODES], -1, tl.int32)
    sibling_links = tl.full([TREES, NODES], -1, tl.int32)

    tl.store(tokens + row, tl.load(root_tokens + tree, mask=real, other=0), mask=real)
    tl.store(parents + row, (zero - 1).to(tl.int64), mask=real)
    tl.store(depths + row, zero.to(tl.int64), mask=real)
    tl.store(log_weights + row, tl.zeros([TREES], tl.float32), mask=real)
    count = zero + 1

    for node in range(1, budget + 1):
        key = tl.min(keys, axis=1)
        found = key != _NONE
        parent = (key & 0xFF).to(tl.int32)
        depth = ((key >> 8) & 0xFF).to(tl.int32)
        cost = (key >> 16).to(tl.int32).to(tl.float32, bitcast=True)
        at_parent = (nodes == parent[:, None]) & found[:, None]
        parent_cost = tl.sum(tl.where(at_parent, costs, 0.0), axis=1)
        family = tl.sum(tl.where(at_parent, children, 0), axis=1)
        rank = family & 0xFF
        elder = family >> 8

        # The two keys this node opens: its next sibling's and its first child's.
        column = candidates + (depth - 1) * top_k + rank
        is_open = real & found & (rank + 1 < top_k)
        log_prob = tl.load(log_probs + column + 1, mask=is_open, other=-_INF)
        sibling_key = _child_key(log_prob, parent_cost, depth, parent)
        is_open = real & found & (depth < max_depth)
        log_prob = tl.load(log_probs + candidates + depth * top_k, mask=is_open, other=-_INF)
        child_key = _child_key(log_prob, cost, depth + 1, zero + node)
        at_node = (nodes == node) & found[:, None]
        keys = tl.where(at_parent, sibling_key[:, None], tl.where(at_node, child_key[:, None], keys))
        costs = tl.where(at_node, cost[:, None], costs)
        children = tl.where(at_parent, (rank + 1 + node * 256)[:, None], children)

        is_first = rank == 0
        child_links = tl.where(at_parent & is_first[:, None], node, child_links)
        is_younger = found & (rank > 0)
        sibling_links = tl.where((nodes == elder[:, None]) & is_younger[:, None], node, sibling_links)

        token = tl.load(token_ids + column, mask=real & found, other=0)
        tl.store(tokens + row + node, token, mask=real)
        tl.store(parents + row + node, tl.where(found, parent, -1).to(tl.int64), mask=real)
        tl.store(depths + row + node, tl.where(found, depth, 0).to(tl.int64), mask=real)
        tl.store(log_weights + row + node, tl.where(found, 0.0 - cost, -_INF), mask=real)
        count += found.to(tl.int32)

    # The last node opens nothing and is nobody's elder sibling; the vectors end before it.
    links = row[:, None] + nodes
    inner = real[:, None] & (nodes < budget)
    tl.store(next_child + links, child_links.to(tl.int64), mask=inner)
    tl.store(next_sibling + links, sibling_links.to(tl.int64), mask=inner)
    tl.store(next_child + row + budget, (zero - 1).to(tl.int64), mask=real)
    tl.store(next_sibling + row + budget, (zero - 1).to(tl.int64), mask=real)
    tl.store(num_nodes + tree, count.to(tl.int64), mask=real)
