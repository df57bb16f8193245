"""The walk on the device, over the target's tokens: its argmax for a greedy walk, its draws for a sampled one."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_ddtree.tree.draft_tree import DraftTree
from sglang_ddtree.tree.kernels.launch import block_size, node_block

_STOP = tl.constexpr(0x7FFFFFFF)  # sorts after every node


def walk_targets_triton(
    tree: DraftTree,
    target_tokens: torch.Tensor,
    max_depth: int,
    *,
    out: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One kernel launch. The fields of :class:`sglang_ddtree.tree.walk.Walk` for these arguments of ``walk_targets``.

    Args:
        out: contiguous int64 ``[bs, max_depth + 1]``, ``[bs]`` and ``[bs]`` to write instead of allocating.
    """
    bs, width = tree.tokens.shape
    if out is None:
        accepted = tree.tokens.new_empty(bs, max_depth + 1)
        out = accepted, tree.tokens.new_empty(bs), tree.tokens.new_empty(bs)
    if bs == 0:
        return out
    constants = walk_constants(bs, width)
    walk_kernel[(triton.cdiv(bs, constants["TREES"]),)](
        tree.tokens,
        tree.parents,
        target_tokens.contiguous(),
        *out,
        bs,
        width,
        max_depth,
        **constants,
    )
    return out


def walk_constants(bs: int, width: int) -> dict[str, int]:
    """What the kernel is compiled for."""
    nodes = node_block(width)
    return {"TREES": block_size(1, bs, nodes), "NODES": nodes, "num_warps": 1}


@triton.jit(do_not_specialize=["bs", "width", "max_depth"])
def walk_kernel(
    tokens, parents, target_tokens, accepted, num_accepted, bonus,
    bs, width, max_depth,
    TREES: tl.constexpr, NODES: tl.constexpr,
):  # fmt: skip
    tree = (tl.program_id(0) * TREES + tl.arange(0, TREES)).to(tl.int64)
    real = tree < bs
    row = tree * width
    path = tree * (max_depth + 1)
    nodes = tl.arange(0, NODES)[None, :]
    inside = real[:, None] & (nodes < width)

    # A node is open where it carries the target's token after its parent. The root and padding have no parent.
    parent = tl.load(parents + row[:, None] + nodes, mask=inside, other=-1).to(tl.int32)
    has_parent = inside & (parent >= 0)
    token = tl.load(tokens + row[:, None] + nodes, mask=has_parent, other=0)
    wanted = tl.load(target_tokens + row[:, None] + parent, mask=has_parent, other=0)
    open_parent = tl.where(has_parent & (token == wanted), parent, -1)

    current = tl.zeros([TREES], tl.int32)
    steps = tl.zeros([TREES], tl.int32)
    walking = real
    tl.store(accepted + path, current.to(tl.int64), mask=real)
    for step in range(1, max_depth + 1):
        child = tl.min(tl.where(open_parent == current[:, None], nodes, _STOP), axis=1)
        walking = walking & (child != _STOP)
        current = tl.where(walking, child, current)
        steps += walking.to(tl.int32)
        tl.store(accepted + path + step, tl.where(walking, current, -1).to(tl.int64), mask=real)
    tl.store(num_accepted + tree, steps.to(tl.int64), mask=real)
    tl.store(bonus + tree, tl.load(target_tokens + row + current, mask=real, other=0), mask=real)
