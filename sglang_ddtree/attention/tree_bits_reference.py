"""What ``flashinfer_tree.cuh`` answers for every query and key, in torch; a reference for tests."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def read_tree_bits(
    bits: torch.Tensor, q_indptr: Sequence[int], request: int, kv_len: int, window: int | None = None
) -> torch.Tensor:
    """``LogitsMask`` of one request by the same arithmetic: bool ``[Q, kv_len]``.

    Args:
        bits: int32 ``[rows, ceil(Q / 32)]``, as :func:`sglang_ddtree.tree.bits.ancestor_bits` gives them.
        q_indptr: ``bs + 1`` first rows.
        kv_len: prefix and tree.
        window: a node sees keys up to this many positions back; None for all.
    """
    first, last = q_indptr[request], q_indptr[request + 1]
    q_len = last - first
    prefix_len = kv_len - q_len
    words = (q_len + 31) // 32
    rows = bits.flatten()[first * words : last * words].view(q_len, words).to(torch.int64) & 0xFFFFFFFF

    kv = torch.arange(kv_len)
    column = (kv - prefix_len).clamp(min=0)
    seen = (rows[:, column // 32] >> (column % 32)) & 1 != 0
    if window is None:
        return (kv < prefix_len) | seen
    depth = ((rows.unsqueeze(2) >> torch.arange(32)) & 1).sum((1, 2)) - 1
    prefix_seen = prefix_len + depth.unsqueeze(1) - kv <= window
    tree_seen = seen & (depth.unsqueeze(1) - depth[column] <= window)
    return torch.where(kv < prefix_len, prefix_seen, tree_seen)
