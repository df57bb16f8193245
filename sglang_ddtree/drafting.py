"""Drafter hidden states -> the top candidates of every drafted position."""

from __future__ import annotations

import torch
from sglang.srt.models.dflash import candidate_topk


def draft_candidates(
    draft_hidden: torch.Tensor, lm_head: torch.nn.Module, depth: int, top_k: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Top-K tokens of each drafted position with their true log-probabilities.

    The projection, the top-K and, under tensor parallelism, the gather of K values per vocabulary shard are SGLang's
    own (``models/dflash.py: candidate_topk``), so all ranks hold the same candidates.

    Args:
        draft_hidden: ``[bs, B, hidden]``; row ``j`` predicts the token at depth ``j`` (row 0 is the root itself).
        lm_head: the target's head, which the drafter borrows.
        depth: positions to keep, at most ``B - 1``.
        top_k: ``K``.

    Returns:
        ``log_probs`` float32 ``[bs, depth, K]`` sorted descending, ``token_ids`` int64 ``[bs, depth, K]``.
    """
    bs, _, hidden = draft_hidden.shape
    rows = draft_hidden[:, 1 : depth + 1].reshape(-1, hidden)
    ids, values, partition = candidate_topk(rows, lm_head, top_k, with_partition=True)
    assert partition is not None
    log_probs = values.float() - partition.float().unsqueeze(-1)
    return log_probs.view(bs, depth, top_k), ids.view(bs, depth, top_k)
