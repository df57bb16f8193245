"""Drafter hidden states -> the top candidates of every drafted position -> the tree."""

from __future__ import annotations

import torch
from sglang.srt.models.dflash import candidate_topk

from sglang_ddtree.config import DDTreeConfig
from sglang_ddtree.tree.build import build_tree
from sglang_ddtree.tree.draft_tree import DraftTree


def draft_tree(
    draft_hidden: torch.Tensor,
    root_tokens: torch.Tensor,
    lm_head: torch.nn.Module,
    config: DDTreeConfig,
    *,
    out: DraftTree | None = None,
) -> DraftTree:
    """The best-first tree of every request; called in a step, and in the capture of the draft graph.

    Args:
        draft_hidden: ``[bs, B, hidden]``, as for :func:`draft_candidates`.
        root_tokens: int64 ``[bs]``, the last committed tokens.
        out: trees to write instead of allocating, as for :func:`sglang_ddtree.tree.build.build_tree`.
    """
    log_probs, token_ids = draft_candidates(draft_hidden, lm_head, config.depth, config.top_k)
    return build_tree(log_probs, token_ids, root_tokens, config.budget, out=out)


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
