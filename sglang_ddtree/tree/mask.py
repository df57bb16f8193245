"""Positions and attention masks of a draft tree."""

from __future__ import annotations

import torch

from sglang_ddtree.tree.draft_tree import DraftTree
from sglang_ddtree.tree.kernels.dispatch import on_host, use_kernels


def positions(tree: DraftTree, prefix_lens: torch.Tensor) -> torch.Tensor:
    """Position of every node: prefix length + depth, so that siblings share one.

    Args:
        tree: a tree of width ``Q``.
        prefix_lens: integer ``[bs]``, tokens in the cache; the root is not one of them and stands at ``prefix_len``.

    Returns:
        int64 ``[bs, Q]``; padding gets the root's position. Flattened it is SGLang's ``EagleVerifyInput.positions``.

    Raises:
        ValueError: ``prefix_lens`` is not an integer tensor ``[bs]``.
    """
    _check_prefix_lens(tree, prefix_lens)
    return prefix_lens.to(torch.int64).unsqueeze(1) + tree.depths


def ancestor_mask(tree: DraftTree, max_depth: int | None = None) -> torch.Tensor:
    """Which nodes may attend to which: a node sees its ancestors and itself.

    Padding sees the root and itself, so that no row is fully masked (softmax over nothing is NaN), and no real node
    sees padding. SGLang calls this layout ``QLEN_ONLY``.

    Args:
        tree: a tree of width ``Q``.
        max_depth: no node is deeper than this; ``Q - 1`` when not given. Fewer steps the lower it is.

    Returns:
        bool ``[bs, Q, Q]``, ``[b, i, j]`` True where node i may attend to node j.
    """
    limit = _depth_limit(tree, max_depth)
    if use_kernels(tree.device, tree.width):
        from sglang_ddtree.tree.kernels.mask import write_ancestor_mask

        bs, width = tree.parents.shape
        return write_ancestor_mask(tree, limit, torch.empty(bs, width, width, dtype=torch.bool, device=tree.device))
    return ancestor_mask_torch(tree, limit)


def ancestor_mask_torch(tree: DraftTree, limit: int) -> torch.Tensor:
    """:func:`ancestor_mask` in torch operations, for trees no deeper than ``limit``."""
    bs, width = tree.parents.shape
    # Lists of ancestors that double in length: those up to distance 2^k - 1 of a node, then the same ones of the
    # ancestor at distance 2^k. The root's parent is the root, and padding hangs on it.
    jump = tree.parents.clamp(min=0)
    seen = torch.arange(width, device=jump.device).expand(bs, width).unsqueeze(2)
    distance = 1
    while distance <= limit:
        further = seen.gather(1, jump.unsqueeze(2).expand(bs, width, distance))
        seen = torch.cat((seen, further), 2)
        jump = jump.gather(1, jump)
        distance *= 2
    return torch.zeros(bs, width, width, dtype=torch.bool, device=jump.device).scatter_(2, seen, True)


def full_mask(
    tree: DraftTree,
    prefix_lens: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    total: int | None = None,
    max_depth: int | None = None,
) -> torch.Tensor:
    """The mask SGLang's attention backends read as ``custom_mask`` (``TreeMaskMode.FULL_MASK``).

    Per request, row-major ``[Q, prefix_len + Q]``: the whole prefix, then :func:`ancestor_mask`. Requests one after the
    other, flat.

    Args:
        tree: a tree of width ``Q``.
        prefix_lens: integer ``[bs]``, as in :func:`positions`; 0 is allowed.
        out: bool or uint8, 1-D, at least ``total`` long; written from its start instead of allocating.
        total: length of the result, at least ``Q * sum(prefix_lens + Q)``. What is beyond that is True, as where
            SGLang pads. When not given it is computed from ``prefix_lens``, which waits for the device. Too small a
            ``total`` is an error on the CPU and undefined behaviour elsewhere.
        max_depth: as in :func:`ancestor_mask`.

    Returns:
        1-D, ``total`` long: ``out[:total]`` if ``out`` is given, else a new bool tensor.

    Raises:
        ValueError: a wrong shape or dtype, an ``out`` or a ``total`` that is too small.
    """
    _check_prefix_lens(tree, prefix_lens)
    width = tree.width
    row_lens = prefix_lens.to(torch.int64) + width
    if total is None or on_host(row_lens.device):
        needed = width * int(row_lens.sum())
        total = needed if total is None else total
        if total < needed:
            raise ValueError(f"total is {total}, this batch needs {needed}")
    if out is None:
        out = torch.empty(total, dtype=torch.bool, device=tree.device)
    if out.dim() != 1 or out.dtype not in (torch.bool, torch.uint8) or out.numel() < total:
        raise ValueError(f"out must be bool or uint8 [>= {total}], got {out.dtype} {tuple(out.shape)}")

    # Only the tree's columns depend on the tree: fill once, then write Q * Q elements per request.
    flat = out[:total].fill_(True)
    if use_kernels(tree.device, width):
        from sglang_ddtree.tree.kernels.mask import write_tree_columns

        return write_tree_columns(tree, prefix_lens, _depth_limit(tree, max_depth), flat)
    first = width * (row_lens.cumsum(0) - row_lens) + row_lens - width
    node = torch.arange(width, device=row_lens.device)
    index = (first.unsqueeze(1) + row_lens.unsqueeze(1) * node).unsqueeze(2) + node
    flat.scatter_(0, index.flatten(), ancestor_mask(tree, max_depth).to(out.dtype).flatten())
    return flat


def unpack_full_mask(flat: torch.Tensor, prefix_lens: torch.Tensor, width: int) -> list[torch.Tensor]:
    """The inverse of :func:`full_mask`'s layout, on the host, for tests: per request bool ``[Q, prefix_len + Q]``.

    Raises:
        ValueError: ``flat`` is too short for ``prefix_lens`` and ``width``.
    """
    sizes = [width * (prefix + width) for prefix in prefix_lens.tolist()]
    if flat.numel() < sum(sizes):
        raise ValueError(f"flat has {flat.numel()} elements, these prefixes need {sum(sizes)}")
    parts = flat[: sum(sizes)].to(torch.bool).split(sizes)
    return [part.view(width, -1) for part in parts]


def _depth_limit(tree: DraftTree, max_depth: int | None) -> int:
    return tree.width - 1 if max_depth is None else min(max_depth, tree.width - 1)


def _check_prefix_lens(tree: DraftTree, prefix_lens: torch.Tensor) -> None:
    if prefix_lens.shape != (tree.batch_size,) or prefix_lens.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"prefix_lens must be int32 or int64 [{tree.batch_size}], "
            f"got {prefix_lens.dtype} {tuple(prefix_lens.shape)}"
        )
