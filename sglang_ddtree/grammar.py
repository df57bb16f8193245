"""Candidates for the first drafted token that a request's grammar allows.

The state of the grammar at the tree's root is known before the tree is built, so its forbidden tokens need not cost
nodes. Deeper states depend on the path; SGLang masks them in the verify pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from sglang.srt.speculative.spec_utils import generate_token_bitmask


def root_bitmask(
    reqs: Sequence[Any],
    vocab_size: int,
    device: torch.device | str,
    barrier: Callable[[], None] | None,
) -> torch.Tensor | None:
    """Tokens that each request's grammar allows next; None when no request has a grammar.

    Args:
        reqs: SGLang's ``Req`` objects.
        barrier: under overlap scheduling, brings the grammars to the last committed token (idempotent).

    Returns:
        int32 ``[bs, ceil(vocab / 32)]``, bit ``i`` of word ``w`` for token ``32 w + i``; all ones for a request without
        a grammar.
    """
    if barrier is not None:
        barrier()
    # SGLang's mask of a tree that is only a root.
    lone = torch.full((len(reqs), 1), -1, dtype=torch.int64)
    mask, _ = generate_token_bitmask(list(reqs), lone, lone, torch.zeros_like(lone), vocab_size)
    return None if mask is None else mask.to(device, non_blocking=True)


def keep_allowed(
    log_probs: torch.Tensor, token_ids: torch.Tensor, bitmask: torch.Tensor, top_k: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The best ``top_k`` candidates, at the first position only allowed ones.

    Args:
        log_probs: float32 ``[bs, depth, K]`` sorted descending, ``K >= top_k``.
        token_ids: int64 ``[bs, depth, K]``.
        bitmask: of :func:`root_bitmask`.

    Returns:
        The same, ``[bs, depth, top_k]``; forbidden candidates, where fewer are allowed, stand last with ``-inf``.
    """
    ids = token_ids[:, 0]
    words = bitmask.gather(1, ids // 32)
    allowed = (words >> (ids % 32).to(words.dtype)) & 1 == 1
    first = log_probs[:, 0].masked_fill(~allowed, float("-inf"))
    first, order = first.sort(dim=1, descending=True, stable=True)
    kept, kept_ids = log_probs[..., :top_k].clone(), token_ids[..., :top_k].clone()
    kept[:, 0] = first[:, :top_k]
    kept_ids[:, 0] = ids.gather(1, order)[:, :top_k]
    return kept, kept_ids
