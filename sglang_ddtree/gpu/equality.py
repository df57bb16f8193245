"""Every Triton kernel against its reference on the CPU, bit for bit."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields

import torch

from sglang_ddtree.gpu.cases import Candidates, Size, random_candidates, random_targets
from sglang_ddtree.tree.bits import ancestor_bits_torch
from sglang_ddtree.tree.build import build_tree_reference
from sglang_ddtree.tree.draft_tree import DraftTree
from sglang_ddtree.tree.kernels.build import build_tree_triton
from sglang_ddtree.tree.kernels.mask import ancestor_bits_triton, write_ancestor_mask, write_tree_columns
from sglang_ddtree.tree.kernels.walk import walk_targets_triton
from sglang_ddtree.tree.mask import ancestor_mask_torch
from sglang_ddtree.tree.walk import walk_reference

#: What output buffers hold before a kernel runs; a value that no kernel writes.
_STALE = -77


class Mismatch(RuntimeError):
    """A kernel and its reference disagree; one line that says which and where."""


def check_sizes(sizes: Iterable[Size], device: torch.device, seed: int = 0) -> int:
    """Check all kernels on random trees of every size; the number of trees.

    Raises:
        Mismatch: at the first difference.
    """
    trees = 0
    for number, size in enumerate(sizes):
        try:
            check(random_candidates(size, seed + number), device, seed + number)
        except Mismatch as error:
            raise Mismatch(f"{size}: {error}") from error
        trees += size.trees
    return trees


def check(candidates: Candidates, device: torch.device, seed: int) -> DraftTree:
    """Build, bit rows, both masks and the walk of one batch. The masks and walks start from the kernel's own tree.

    Returns:
        The kernel's tree.
    """
    expected = build_tree_reference(*candidates.on(torch.device("cpu")))
    tree = build_tree_triton(*candidates.on(device), out=_stale_tree(expected, device))
    for field in fields(DraftTree):
        same(field.name, getattr(expected, field.name), getattr(tree, field.name))
    check_masks(expected, tree, candidates.depth, seed)
    check_walk(expected, tree, candidates.depth, seed)
    return tree


def check_masks(expected: DraftTree, tree: DraftTree, depth: int, seed: int) -> None:
    """Bit rows, the tree-only mask, and the tree's columns of the full mask."""
    bs, width = expected.tokens.shape
    limit = min(depth, width - 1)
    bits = ancestor_bits_torch(expected, limit)
    out = torch.full(bits.shape, _STALE, dtype=torch.int32, device=tree.device)
    same("bit rows", bits, ancestor_bits_triton(tree, limit, out=out))

    mask = ancestor_mask_torch(expected, limit)
    small = torch.full((bs * width * width,), _STALE % 256, dtype=torch.uint8, device=tree.device)
    same("mask", mask.to(torch.uint8).flatten(), write_ancestor_mask(tree, limit, small))

    # The prefix and what is beyond the last request must stay as they were.
    rng = torch.Generator().manual_seed(seed)
    prefix_lens = torch.randint(0, 9, (bs,), generator=rng).to(torch.int32 if seed % 2 else torch.int64)
    rows = [
        torch.cat((torch.full((width, prefix), 9, dtype=torch.uint8), mask[row].to(torch.uint8)), 1).flatten()
        for row, prefix in enumerate(prefix_lens.tolist())
    ]
    full = torch.cat([*rows, torch.full((5,), 9, dtype=torch.uint8)])
    got = write_tree_columns(tree, prefix_lens.to(tree.device), limit, torch.full_like(full, 9, device=tree.device))
    same("full mask", full, got)


def check_walk(expected: DraftTree, tree: DraftTree, depth: int, seed: int) -> None:
    """The walk over the tree's whole depth, and cut short."""
    targets = random_targets(expected, seed)
    for max_depth in {depth, depth // 2}:
        want = walk_reference(expected, targets, max_depth)
        out = tuple(torch.full_like(part, _STALE, device=tree.device) for part in want)
        got = walk_targets_triton(tree, targets.to(tree.device), max_depth, out=out)  # type: ignore[arg-type]
        for name, a, b in zip(want._fields, want, got, strict=True):
            same(f"walk to depth {max_depth}: {name}", a, b)


def _stale_tree(like: DraftTree, device: torch.device) -> DraftTree:
    stale = {field.name: torch.full_like(getattr(like, field.name), _STALE, device=device) for field in fields(like)}
    return DraftTree(**stale)


def same(name: str, expected: torch.Tensor, got: torch.Tensor) -> None:
    """Compare bit for bit, shape and type included.

    Raises:
        Mismatch: with the first place that differs.
    """
    got = got.cpu()
    if expected.dtype != got.dtype or expected.shape != got.shape:
        raise Mismatch(f"{name} is {got.dtype} {tuple(got.shape)} instead of {expected.dtype} {tuple(expected.shape)}")
    if expected.dtype == torch.float32:
        expected, got = expected.view(torch.int32), got.view(torch.int32)
    wrong = expected != got
    if bool(wrong.any()):
        where = wrong.nonzero()[0].tolist()
        raise Mismatch(
            f"{name} differs in {int(wrong.sum())} places, first at {where}: "
            f"{got[tuple(where)].item()} instead of {expected[tuple(where)].item()}"
        )
