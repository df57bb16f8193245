"""Ancestor masks on the device: as bit rows, and as the bools that SGLang's backends read."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_ddtree.tree.draft_tree import DraftTree
from sglang_ddtree.tree.kernels.launch import block_size


def ancestor_bits_triton(tree: DraftTree, max_depth: int, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """One kernel launch. Result as :func:`sglang_ddtree.tree.bits.ancestor_bits`.

    Args:
        max_depth: no node is deeper than this.
        out: contiguous int32 ``[bs * Q, ceil(Q / 32)]`` to write instead of allocating.
    """
    bs, width = tree.tokens.shape
    words = -(-width // 32)
    out = torch.empty(bs * width, words, dtype=torch.int32, device=tree.device) if out is None else out
    if bs == 0:
        return out
    constants = bits_constants(bs, width)
    bits_kernel[(triton.cdiv(bs * width, constants["ROWS"]),)](
        tree.parents,
        out,
        bs * width,
        width,
        max_depth,
        words,
        **constants,
    )
    return out


def bits_constants(bs: int, width: int) -> dict[str, int]:
    """What the kernel is compiled for."""
    words = triton.next_power_of_2(-(-width // 32))
    return {"ROWS": block_size(32, bs * width, words), "WORDS": words, "num_warps": 1}


def write_ancestor_mask(tree: DraftTree, max_depth: int, out: torch.Tensor) -> torch.Tensor:
    """Write :func:`sglang_ddtree.tree.mask.ancestor_mask` into ``out``, bool or uint8, contiguous, ``bs * Q * Q``."""
    return _write_mask(tree, None, max_depth, out)


def write_tree_columns(tree: DraftTree, prefix_lens: torch.Tensor, max_depth: int, out: torch.Tensor) -> torch.Tensor:
    """Write the tree's columns of :func:`sglang_ddtree.tree.mask.full_mask` into ``out``; the prefix stays as it is.

    Args:
        prefix_lens: int32 or int64 ``[bs]``.
        out: bool or uint8, 1-D and contiguous. What would lie beyond its end is not written.
    """
    return _write_mask(tree, prefix_lens, max_depth, out)


def _write_mask(tree: DraftTree, prefix_lens: torch.Tensor | None, max_depth: int, out: torch.Tensor) -> torch.Tensor:
    bs, width = tree.tokens.shape
    if bs == 0:
        return out
    constants = mask_constants(bs, width, has_prefix=prefix_lens is not None)
    mask_kernel[(triton.cdiv(bs * width, constants["ROWS"]),)](
        tree.parents,
        tree.parents if prefix_lens is None else prefix_lens.contiguous(),
        out.view(torch.uint8),
        out.numel(),
        bs,
        width,
        max_depth,
        **constants,
    )
    return out


def mask_constants(bs: int, width: int, *, has_prefix: bool) -> dict[str, int]:
    """What the kernel is compiled for."""
    columns = triton.next_power_of_2(width)
    # At most 16 elements for each of 128 threads: the loop over ancestors is short, and so should its code be.
    rows = block_size(min(16, 2048 // columns), bs * width, columns)
    return {"HAS_PREFIX": has_prefix, "ROWS": rows, "COLUMNS": columns, "REQUESTS": 64, "num_warps": 4}


@triton.jit
def _ancestor(parents, row, seen, real):
    """The parent of node ``seen`` in the tree of ``row``'s request; the root for the root and for padding."""
    return tl.maximum(tl.load(parents + row + seen, mask=real, other=0), 0).to(tl.int32)


@triton.jit(do_not_specialize=["num_rows", "width", "max_depth", "words"])
def bits_kernel(parents, out, num_rows, width, max_depth, words, ROWS: tl.constexpr, WORDS: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    real = row < num_rows
    node = row % width
    first = (row - node).to(tl.int64)
    word = tl.arange(0, WORDS)[None, :]

    seen = node
    bits = tl.zeros([ROWS, WORDS], tl.int32)
    for _ in range(max_depth + 1):
        bit = tl.full([ROWS], 1, tl.int32) << (seen & 31)
        bits |= tl.where(word == (seen >> 5)[:, None], bit[:, None], 0)
        seen = _ancestor(parents, first, seen, real)
    tl.store(out + row.to(tl.int64)[:, None] * words + word, bits, mask=real[:, None] & (word < words))


@triton.jit(do_not_specialize=["size", "bs", "width", "max_depth"])
def mask_kernel(
    parents, prefix_lens, out, size, bs, width, max_depth,
    HAS_PREFIX: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, REQUESTS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    real = row < bs * width
    request = row // width
    node = row % width
    first = (row - node).to(tl.int64)
    column = tl.arange(0, COLUMNS)[None, :]

    seen = node
    mask = column == seen[:, None]
    for _ in range(max_depth):
        seen = _ancestor(parents, first, seen, real)
        mask |= column == seen[:, None]

    # Rows of request b are prefix + Q long and start after those of all requests before it.
    before = tl.zeros([ROWS], tl.int64)
    prefix = tl.zeros([ROWS], tl.int64)
    if HAS_PREFIX:
        for start in range(0, bs, REQUESTS):
            other = start + tl.arange(0, REQUESTS)
            lens = tl.load(prefix_lens + other, mask=other < bs, other=0).to(tl.int64)[None, :]
            before += tl.sum(tl.where(other[None, :] < request[:, None], lens, 0), axis=1)
            prefix += tl.sum(tl.where(other[None, :] == request[:, None], lens, 0), axis=1)
    place = width * (before + first) + node * (prefix + width) + prefix
    index = place[:, None] + column
    tl.store(out + index, mask.to(tl.uint8), mask=real[:, None] & (column < width) & (index < size))
