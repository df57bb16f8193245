"""Acceptance where requests sample or have penalties: each node draws from the target's distribution, then the walk.

The tree is fixed before any draw, and a child is followed only when it carries the drawn token, so the tokens are the
target's whatever the drafter proposed. SGLang's own sampler makes the draws, which gives every sampling parameter its
usual meaning and keys seeded draws by (seed, position) as in plain decoding.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from sglang.kernels.ops.speculative.spec_tree import verify_tree_greedy_func
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.layers.sampler import apply_custom_logit_processor
from sglang.srt.runtime_context import get_parallel
from sglang.srt.sampling.custom_logit_processor import DisallowedTokensLogitsProcessor
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.srt.utils.async_probe import sanitize_nan_logits

from sglang_ddtree.penalties import PenaltyTable, apply_penalties, has_penalties
from sglang_ddtree.tree.paths import path_tokens
from sglang_ddtree.verify import DDTreeVerifyInput

#: Per-request tensors of SamplingBatchInfo that the sampler reads row by row.
_PER_REQUEST = ("temperatures", "top_ps", "top_ks", "min_ps", "sampling_seed")


def sample_tree(
    verify_input: DDTreeVerifyInput,
    batch: Any,
    logits_output: LogitsProcessorOutput,
    grammar_mask: Any,
    sampler: torch.nn.Module,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What ``eagle_sample`` returns, for a batch in which some request samples.

    Args:
        verify_input: the trees, ``bs`` of width ``Q``.
        batch: the running ``ScheduleBatch``.
        logits_output: ``next_token_logits`` float ``[bs * Q, vocab]``; adjusted in place, as SGLang does.
        grammar_mask: SGLang's mask over the tree's nodes, or None.
        sampler: the target's ``Sampler``.

    Returns:
        ``predict`` int32 ``[bs * Q]``, ``accept_lens`` int32 ``[bs]`` (accepted drafts + 1) and ``accept_index`` int32
        ``[bs, depth + 1]``.
    """
    width = verify_input.draft_token_num
    bs = len(batch.seq_lens)
    logits = logits_output.next_token_logits
    info: SamplingBatchInfo = batch.sampling_info
    table: PenaltyTable | None = verify_input.penalties if has_penalties(info) else None
    _adjust(logits, verify_input, batch, table, grammar_mask)

    # The sampler overwrites its logits with probabilities; log-probabilities are computed from ours afterwards.
    drawn = sampler(
        LogitsProcessorOutput(next_token_logits=logits.clone()),
        _per_node(info, width),
        return_logprob=False,
        top_logprobs_nums=[],
        token_ids_logprobs=[],
        positions=verify_input.positions,
    )
    tp_group = get_parallel().tp_group
    if tp_group.world_size > 1:
        tp_group.broadcast(drawn, src=0)

    device = logits.device
    predict, accept_index, accepted = verify_tree_greedy_func(
        predicts=torch.zeros(bs * width, dtype=torch.int32, device=device),
        accept_index=torch.full((bs, verify_input.max_tree_depth), -1, dtype=torch.int32, device=device),
        accept_token_num=torch.empty(bs, dtype=torch.int32, device=device),
        candidates=verify_input.draft_token.view(bs, width),
        retrieve_index=verify_input.retrieve_index,
        retrieve_next_token=_first_children(verify_input.retrieve_next_token, info),
        retrieve_next_sibling=verify_input.retrieve_next_sibling,
        target_predict=drawn.to(torch.int64).view(bs, width),
        topk=verify_input.tree_topk,
    )
    if table is not None:
        committed = predict[accept_index.clamp(min=0)].to(torch.int64)
        table.commit(batch.req_pool_indices, torch.where(accept_index >= 0, committed, -1))
    return predict, accepted + 1, accept_index


def _adjust(
    logits: torch.Tensor, verify_input: DDTreeVerifyInput, batch: Any, table: PenaltyTable | None, grammar_mask: Any
) -> None:
    """Penalties, grammar, bias and custom processors in place, in plain decoding's order: ``ModelRunner`` applies
    ``SamplingBatchInfo.apply_logits_bias``, then ``Sampler`` the processors."""
    info, width = batch.sampling_info, verify_input.draft_token_num
    sanitize_nan_logits(logits, "verify: target model logits")
    if table is not None:
        tree = verify_input.tree
        apply_penalties(
            logits.view(-1, width, logits.shape[1]),
            *table.of(batch.req_pool_indices, scaling=info.acc_scaling_penalties is not None),
            path_tokens(tree, verify_input.spec_steps),
            tree.depths,
        )
    if grammar_mask is not None:
        grammar_mask.apply(logits)
    if info.logit_bias is not None:
        logits.add_(info.logit_bias.repeat_interleave(width, dim=0))
    if info.has_custom_logit_processor:
        apply_custom_logit_processor(logits, info, num_tokens_in_batch=width)
        sanitize_nan_logits(logits, "verify: target model logits")


def _first_children(next_child: torch.Tensor, info: SamplingBatchInfo) -> torch.Tensor:
    """``next_child`` int64 ``[bs, Q]``, with all drafts cut off where a custom processor may look at the answer so far.

    Such a processor (a thinking budget, a ban of repeated n-grams) reads the request's tokens as they were before this
    step, which is right for the root alone. SGLang's list of disallowed tokens looks at nothing.
    """
    if not info.has_custom_logit_processor:
        return next_child
    cut = next_child.clone()
    for entry in info.custom_logit_processor.values():
        if type(entry.processor) is not DisallowedTokensLogitsProcessor:
            # SGLang keeps the rows on the device too; a list of them would be a copy that the host waits for.
            cut[:, 0].index_fill_(0, entry.indices, -1)
    return cut


def _per_node(info: SamplingBatchInfo, width: int) -> SamplingBatchInfo:
    """``info`` with each request's parameters repeated for its ``width`` nodes; adjustments are already applied."""
    nodes = copy.copy(info)
    for name in _PER_REQUEST:
        value = getattr(info, name)
        if value is not None:
            setattr(nodes, name, value.repeat_interleave(width, dim=0))
    nodes.has_custom_logit_processor = False
    nodes.sampling_mask_batch_indices = None
    nodes.grammars = None
    return nodes
