"""How FlashInfer's FA2 prefill kernels read a mask, in torch: the reference for both ways to verify a tree there.

Stock masks (``custom_mask``) are packed to one bit per query and key, in FlashInfer 0.7.2
(``include/flashinfer/attention/variants.cuh: DefaultAttention``, ``prefill.py: plan``):

- request after request; a request starts on a byte, its rows do not: row ``q`` starts at bit ``q * kv_len``;
- bit 0 of a byte is its first element;
- the kernel's ``mask_indptr`` counts bytes and is int32; ``plan`` computes one in elements first, int32 too;
- a page's unused tail has no columns: ``kv_len = (pages - 1) * page_size + last_page_len``.

Tree bits (``flashinfer_tree.cuh``, ours) have one row of ``ceil(Q / 32)`` words per node and none of the prefix.

Nothing here runs in a server. Host-side; no FlashInfer or SGLang is needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch

INT32_MAX = 2**31 - 1


def kv_len(pages: int, page_size: int, last_page_len: int) -> int:
    """Keys of one request, as ``get_seq_lens`` counts them; 0 pages hold none."""
    return (pages - 1) * page_size + last_page_len if pages else 0


def element_starts(q_lens: Sequence[int], kv_lens: Sequence[int]) -> list[int]:
    """``bs + 1`` offsets into the flat bool mask: ``plan``'s ``mask_indptr`` before packing.

    Raises:
        ValueError: the last one does not fit the int32 in which FlashInfer keeps it; it would wrap around silently.
    """
    starts = [0]
    for q_len, length in zip(q_lens, kv_lens, strict=True):
        starts.append(starts[-1] + q_len * length)
    if starts[-1] > INT32_MAX:
        raise ValueError(f"the mask has {starts[-1]} elements, FlashInfer counts up to {INT32_MAX}")
    return starts


def byte_starts(q_lens: Sequence[int], kv_lens: Sequence[int]) -> list[int]:
    """``bs + 1`` offsets into the packed mask: the ``mask_indptr`` that the kernel reads.

    Raises:
        ValueError: as :func:`element_starts`, which FlashInfer computes on the way.
    """
    element_starts(q_lens, kv_lens)
    starts = [0]
    for q_len, length in zip(q_lens, kv_lens, strict=True):
        starts.append(starts[-1] + -(-q_len * length // 8))
    return starts


def pack(mask: torch.Tensor, q_lens: Sequence[int], kv_lens: Sequence[int]) -> torch.Tensor:
    """``segment_packbits(mask, element_starts, "little")``.

    Args:
        mask: bool ``[>= sum(q_len * kv_len)]``; what is beyond that is not looked at.

    Returns:
        uint8 ``[byte_starts[-1]]``.

    Raises:
        ValueError: ``mask`` is shorter than the requests need (FlashInfer reads beyond its end), or too long for int32.
    """
    starts = element_starts(q_lens, kv_lens)
    if mask.numel() < starts[-1]:
        raise ValueError(f"the mask has {mask.numel()} elements, these requests need {starts[-1]}")
    weights = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.int32)
    parts = []
    for first, last in pairwise(starts):
        bits = mask[first:last].to(torch.int32)
        bits = torch.nn.functional.pad(bits, (0, -bits.numel() % 8))
        parts.append((bits.view(-1, 8) * weights).sum(1).to(torch.uint8))
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8)


def read_packed(packed: torch.Tensor, starts: Sequence[int], request: int, q_len: int, kv_len: int) -> torch.Tensor:
    """What the stock kernel sees: bool ``[q_len, kv_len]``.

    Args:
        packed: uint8, the packed mask.
        starts: the kernel's ``mask_indptr``, in bytes.
    """
    # base[(q * kv_len + kv) / 8] >> ((q * kv_len + kv) % 8) & 1, with base = packed + mask_indptr[request]
    offset = torch.arange(q_len).unsqueeze(1) * kv_len + torch.arange(kv_len)
    return (packed[starts[request] + offset // 8].to(torch.int32) >> (offset % 8)) & 1 != 0


def read_tree_bits(
    bits: torch.Tensor, q_indptr: Sequence[int], request: int, kv_len: int, window: int | None = None
) -> torch.Tensor:
    """What ``flashinfer_tree.cuh``'s ``LogitsMask`` answers: bool ``[Q, kv_len]``. Step by step the same arithmetic.

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
