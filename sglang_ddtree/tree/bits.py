"""The ancestor mask as bit rows."""

from __future__ import annotations

import torch

from sglang_ddtree.tree.draft_tree import DraftTree
from sglang_ddtree.tree.kernels.dispatch import use_kernels
from sglang_ddtree.tree.mask import ancestor_mask_torch


def ancestor_bits(tree: DraftTree, max_depth: int | None = None, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """:func:`sglang_ddtree.tree.mask.ancestor_mask`, 32 columns to a word.

    Args:
        tree: a tree of width ``Q``.
        max_depth: no node is deeper than this; ``Q - 1`` when not given.
        out: contiguous int32 of the result's shape, written instead of allocating.

    Returns:
        int32 ``[bs * Q, ceil(Q / 32)]``, ``out`` if it is given: bit ``j % 32`` of word ``j // 32`` in row
        ``b * Q + i`` is set where node i of request b may attend to its node j. Bits beyond Q are 0.

    Raises:
        ValueError: an ``out`` of another shape, dtype or layout.
    """
    shape = (tree.batch_size * tree.width, -(-tree.width // 32))
    if out is not None and (out.shape != shape or out.dtype != torch.int32 or not out.is_contiguous()):
        raise ValueError(f"out must be contiguous int32 {shape}, got {out.dtype} {tuple(out.shape)}")
    limit = tree.width - 1 if max_depth is None else min(max_depth, tree.width - 1)
    if use_kernels(tree.device, tree.width):
        from sglang_ddtree.tree.kernels.mask import ancestor_bits_triton

        return ancestor_bits_triton(tree, limit, out=out)
    bits = ancestor_bits_torch(tree, limit)
    return bits if out is None else out.copy_(bits)


def ancestor_bits_torch(tree: DraftTree, limit: int) -> torch.Tensor:
    """:func:`ancestor_bits` in torch operations, for trees no deeper than ``limit``."""
    bs, width = tree.tokens.shape
    words = -(-width // 32)
    mask = torch.nn.functional.pad(ancestor_mask_torch(tree, limit), (0, words * 32 - width))
    weights = torch.ones(32, dtype=torch.int64, device=tree.device) << torch.arange(32, device=tree.device)
    # The sum is below 2^32; int32 keeps its low 32 bits, the sign among them.
    unsigned = (mask.view(bs * width, words, 32).to(torch.int64) * weights).sum(-1)
    return (unsigned - ((unsigned >> 31) << 32)).to(torch.int32)
