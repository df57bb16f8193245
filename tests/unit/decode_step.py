"""The project's own parts of a DDTREE decode step, in ``worker.py``'s order, on random hidden states."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.layers.attention.verify_mask import VerifyMask, tree_mask_numel
from sglang.srt.speculative.eagle_utils import TreeMaskMode

from sglang_ddtree.drafting import draft_candidates
from sglang_ddtree.tree.bits import ancestor_bits, ancestor_bits_torch
from sglang_ddtree.tree.build import build_tree, build_tree_reference
from sglang_ddtree.tree.draft_tree import DraftTree
from sglang_ddtree.tree.mask import ancestor_mask_torch, positions
from sglang_ddtree.tree.walk import Walk, walk_greedy, walk_reference
from sglang_ddtree.verify import DDTreeVerifyInput, make_verify_input

MAX_CONTEXT, MAX_BS, HIDDEN, VOCAB = 90, 6, 16, 80
BLOCK, TOP_K, BUDGET = 8, 8, 24
DEPTH, WIDTH = BLOCK - 1, BUDGET + 1


def backend(mode: TreeMaskMode | None) -> Any:
    """What ``verify.py`` asks of an attention backend: with a mask buffer in ``mode``, or without one."""
    verify_mask = None
    if mode is not None:
        cells = tree_mask_numel(mode, MAX_BS, WIDTH, MAX_CONTEXT)
        verify_mask = VerifyMask(buffer=torch.zeros(cells, dtype=torch.bool), mode=mode, max_bs=MAX_BS)
    return SimpleNamespace(verify_mask=verify_mask, max_context_len=MAX_CONTEXT)


@dataclass(frozen=True)
class Inputs:
    """What a step starts from; ``wanted`` stands for the target model: which nodes it agrees at, and its logits."""

    hidden: torch.Tensor
    lm_head: Any
    root_tokens: torch.Tensor
    prefix_lens: torch.Tensor
    out_cache_loc: torch.Tensor
    agrees: torch.Tensor
    logits: torch.Tensor


@dataclass(frozen=True)
class Outputs:
    log_probs: torch.Tensor
    token_ids: torch.Tensor
    tree: DraftTree
    verify_input: DDTreeVerifyInput
    bits: torch.Tensor
    target_tokens: torch.Tensor
    walk: Walk


def random_inputs(seed: int) -> Inputs:
    """A batch of 1 to ``MAX_BS`` requests, some with an empty prefix; how sure the drafter is differs by request."""
    rng = torch.Generator().manual_seed(seed)
    bs = seed % MAX_BS + 1
    spread = torch.rand(bs, 1, 1, generator=rng) * 2
    head = SimpleNamespace(weight=torch.randn(VOCAB + 16, HIDDEN, generator=rng), org_vocab_size=VOCAB)
    return Inputs(
        hidden=torch.randn(bs, BLOCK, HIDDEN, generator=rng) * spread,
        lm_head=head,
        root_tokens=torch.randint(0, VOCAB, (bs,), generator=rng),
        prefix_lens=torch.randint(0, MAX_CONTEXT + 1, (bs,), generator=rng) * (torch.arange(bs) % 3 != 1),
        out_cache_loc=torch.arange(bs * WIDTH),
        agrees=torch.rand(bs, WIDTH, 1, generator=rng) < 0.7,
        logits=torch.randn(bs, WIDTH, VOCAB, generator=rng),
    )


def run_step(inputs: Inputs, attn_backend: Any, prefix_lens_sum: int | None) -> Outputs:
    log_probs, token_ids = draft_candidates(inputs.hidden, inputs.lm_head, DEPTH, TOP_K)
    tree = build_tree(log_probs, token_ids, inputs.root_tokens, BUDGET)
    verify_input = make_verify_input(
        tree,
        prefix_lens=inputs.prefix_lens,
        attn_backend=attn_backend,
        prefix_lens_sum=prefix_lens_sum,
        depth=DEPTH,
        top_k=TOP_K,
        out_cache_loc=inputs.out_cache_loc,
        kv_loc_plan=None,
        sampler=None,
        penalties=None,
    )
    bits = ancestor_bits(tree, DEPTH)
    target_tokens = _logits(inputs, verify_input).argmax(-1)
    walk = walk_greedy(tree, target_tokens, DEPTH)
    return Outputs(log_probs, token_ids, tree, verify_input, bits, target_tokens, walk)


def _logits(inputs: Inputs, verify_input: DDTreeVerifyInput) -> torch.Tensor:
    """The target's logits ``[bs, Q, vocab]``: where it agrees, its best token is the node's first child's."""
    child = verify_input.retrieve_next_token
    tokens = verify_input.draft_token.view(child.shape).gather(1, child.clamp(min=0)).unsqueeze(2)
    return inputs.logits.scatter_add(2, tokens, 100.0 * (inputs.agrees & (child >= 0).unsqueeze(2)))


def check_outputs(inputs: Inputs, outputs: Outputs, mode: TreeMaskMode | None) -> int:
    """Compare a step with the references, on the host; how many drafts were accepted.

    Raises:
        AssertionError: an output is not the reference's.
    """
    bs = len(inputs.root_tokens)
    logits = inputs.hidden[:, 1:] @ inputs.lm_head.weight[:VOCAB].T
    best = logits.log_softmax(-1).topk(TOP_K, -1)
    torch.testing.assert_close(outputs.log_probs, best.values)
    assert torch.equal(outputs.token_ids, best.indices)

    tree, found = outputs.tree, outputs.verify_input
    expected = build_tree_reference(outputs.log_probs, outputs.token_ids, inputs.root_tokens, BUDGET)
    for name in tree.__dataclass_fields__:
        assert torch.equal(getattr(tree, name), getattr(expected, name)), name
    assert torch.equal(found.draft_token.view(bs, WIDTH), expected.tokens)
    assert torch.equal(found.retrieve_next_token, expected.next_child)
    assert torch.equal(found.retrieve_next_sibling, expected.next_sibling)
    assert found.retrieve_index.tolist() == [[b * WIDTH + node for node in range(WIDTH)] for b in range(bs)]
    assert torch.equal(found.positions.view(bs, WIDTH), positions(expected, inputs.prefix_lens))
    assert torch.equal(outputs.bits, ancestor_bits_torch(expected, DEPTH))

    start, visible = 0, ancestor_mask_torch(expected, DEPTH)
    for row, prefix in enumerate(inputs.prefix_lens.tolist()):
        prefix = 0 if mode == TreeMaskMode.QLEN_ONLY else prefix
        part = found.custom_mask[start : start + WIDTH * (prefix + WIDTH)].view(WIDTH, prefix + WIDTH)
        assert part[:, :prefix].all() and torch.equal(part[:, prefix:], visible[row])
        start += part.numel()

    for want, got in zip(walk_reference(expected, outputs.target_tokens, DEPTH), outputs.walk, strict=True):
        assert torch.equal(want, got)
    return int(outputs.walk.num_accepted.sum())
