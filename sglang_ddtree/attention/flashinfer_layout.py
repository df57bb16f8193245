"""FlashInfer's packed custom mask in torch: how it is laid out, and how its kernels find a bit.

A reference for tests; FlashInfer is not imported. What it follows, in flashinfer-python 0.7.2:
``quantization/packbits.py`` (``segment_packbits`` with ``"little"``), ``prefill.py`` (``plan``) and
``data/include/flashinfer/attention/variants.cuh`` (``LogitsMask`` of the default variant).

- Unpacked, a mask is flat: per request row-major ``[qo_len, kv_len]``, requests one after the other.
- Packed, eight elements make a byte, the first in the lowest bit. Every request starts on a byte; rows do not, so that
  element ``(q, kv)`` of a request is bit ``q * kv_len + kv`` counted from the request's first byte.
- The index pointer that the kernels read counts bytes and is int32. ``plan`` makes one that counts elements first, and
  leaves it so when it is given a packed mask only: then the kernels read the wrong bits of all requests but the first
  (FlashInfer PR #2201).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

#: The index pointer of elements is int32 in ``plan``, even where bytes are what counts in the end.
MAX_ELEMENTS = 2**31 - 1


class MaskTooLarge(ValueError):
    """The mask has more elements than FlashInfer's int32 index pointer can count; in ``plan`` it wraps unnoticed."""


def element_indptr(qo_lens: Sequence[int], kv_lens: Sequence[int]) -> torch.Tensor:
    """Where every request's mask starts in the flat one.

    Args:
        qo_lens: rows per request (in a tree its width ``Q``), not negative.
        kv_lens: columns per request (prefix and tree), not negative.

    Returns:
        int32 ``[bs + 1]``, in elements.

    Raises:
        MaskTooLarge: ``sum(qo_len * kv_len)`` is 2^31 or more.
        ValueError: the lists differ in length, or a length is negative.
    """
    return _int32_indptr(_elements(qo_lens, kv_lens))


def byte_indptr(qo_lens: Sequence[int], kv_lens: Sequence[int]) -> torch.Tensor:
    """Where every request's mask starts in the packed one. Arguments and errors as :func:`element_indptr`.

    Returns:
        int32 ``[bs + 1]``, in bytes: what the kernels read as ``maybe_mask_indptr``.
    """
    return _int32_indptr([-(-count // 8) for count in _elements(qo_lens, kv_lens)])


def pack_mask(mask: torch.Tensor, qo_lens: Sequence[int], kv_lens: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """What ``segment_packbits(mask, element_indptr, "little")`` returns.

    Args:
        mask: bool or uint8, 1-D, at least ``sum(qo_len * kv_len)`` long; nonzero is visible. What is beyond is not
            looked at: SGLang hands over a buffer whose length is an upper bound.

    Returns:
        uint8 ``[byte_indptr[-1]]`` with zeros in every request's unused bits, and :func:`byte_indptr`.

    Raises:
        MaskTooLarge: as :func:`element_indptr`.
        ValueError: a wrong shape or dtype, or a mask that is too short (FlashInfer reads beyond its end).
    """
    counts = _elements(qo_lens, kv_lens)
    if mask.dim() != 1 or mask.dtype not in (torch.bool, torch.uint8):
        raise ValueError(f"mask must be bool or uint8 and flat, got {mask.dtype} {tuple(mask.shape)}")
    if mask.numel() < sum(counts):
        raise ValueError(f"mask has {mask.numel()} elements, these lengths need {sum(counts)}")
    weights = 2 ** torch.arange(8, device=mask.device)
    parts = []
    for segment in mask[: sum(counts)].ne(0).split(counts):
        padded = torch.nn.functional.pad(segment, (0, -segment.numel() % 8))
        parts.append((padded.view(-1, 8) * weights).sum(1).to(torch.uint8))
    packed = torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8, device=mask.device)
    return packed, byte_indptr(qo_lens, kv_lens).to(mask.device)


def read_mask(
    packed: torch.Tensor,
    indptr: torch.Tensor,
    request: int,
    q: torch.Tensor,
    kv: torch.Tensor,
    qo_len: int,
    kv_len: int,
) -> torch.Tensor:
    """Whether the kernels let row ``q`` of a request attend to column ``kv``, as ``LogitsMask`` computes it.

    Args:
        packed: uint8, 1-D.
        indptr: int32 ``[bs + 1]``, in bytes.
        request: index of the request.
        q: int64 of any shape; rows at or beyond ``qo_len`` see nothing, as the last tile of a launch has.
        kv: int64 of a shape that broadcasts with ``q``; columns at or beyond ``kv_len`` are not seen.

    Returns:
        bool of the broadcast shape.

    Raises:
        IndexError: a bit outside ``packed`` is read, which a kernel does not notice.
    """
    q, kv = torch.broadcast_tensors(q, kv)
    inside = (q < qo_len) & (kv < kv_len)
    offset = torch.where(inside, q * kv_len + kv, 0)
    byte = int(indptr[request]) + (offset >> 3)
    if bool((inside & (byte >= packed.numel())).any()):
        raise IndexError(f"request {request} reads byte {int(byte[inside].max())} of {packed.numel()}")
    bits = torch.zeros_like(inside)
    bits[inside] = (packed[byte[inside]].to(torch.int64) >> (offset[inside] & 7) & 1).bool()
    return bits


def read_request(packed: torch.Tensor, indptr: torch.Tensor, request: int, qo_len: int, kv_len: int) -> torch.Tensor:
    """The whole mask of one request, bool ``[qo_len, kv_len]``, by :func:`read_mask`."""
    q = torch.arange(qo_len, device=packed.device).unsqueeze(1)
    return read_mask(packed, indptr, request, q, torch.arange(kv_len, device=packed.device), qo_len, kv_len)


def _elements(qo_lens: Sequence[int], kv_lens: Sequence[int]) -> list[int]:
    if len(qo_lens) != len(kv_lens) or min((*qo_lens, *kv_lens), default=0) < 0:
        raise ValueError(f"qo_lens and kv_lens must be as many lengths, got {list(qo_lens)} and {list(kv_lens)}")
    counts = [rows * columns for rows, columns in zip(qo_lens, kv_lens)]
    if sum(counts) > MAX_ELEMENTS:
        raise MaskTooLarge(
            f"the mask of this batch has {sum(counts)} elements; FlashInfer's int32 indptr ends at {MAX_ELEMENTS}"
        )
    return counts


def _int32_indptr(counts: Sequence[int]) -> torch.Tensor:
    return torch.tensor([0, *counts], dtype=torch.int64).cumsum(0).to(torch.int32)
