"""The tree as SGLang's verify pass takes it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
from sglang.srt.speculative.eagle_info import EagleVerifyInput
from sglang.srt.speculative.eagle_utils import TreeMaskMode

from sglang_ddtree.penalties import PenaltyTable
from sglang_ddtree.tree.bits import ancestor_bits
from sglang_ddtree.tree.draft_tree import DraftTree
from sglang_ddtree.tree.mask import ancestor_mask, full_mask, positions


@dataclass
class DDTreeVerifyInput(EagleVerifyInput):
    """EAGLE's verify input for an irregular tree.

    A subclass, because SGLang's hybrid-linear backend asks ``isinstance(..., EagleVerifyInput)`` before it follows a
    tree, and because ``eagle_sample`` is told apart by it (see ``hooks.py``).

    Attributes:
        sampler: the target's ``Sampler``, for batches that sample.
        tree: the trees as they were built.
        penalties: the requests' penalties and generated tokens; None when no request of the batch has one.
    """

    sampler: Any = None
    tree: Any = None
    penalties: Any = None

    def generate_attn_arg_prefill(self, **arguments: Any) -> tuple[torch.Tensor, ...]:
        """FlashInfer's indices and mask: EAGLE's own, or no mask where the kernel reads the tree's bits."""
        if self.custom_mask.dtype != torch.int32:
            made: tuple[torch.Tensor, ...] = super().generate_attn_arg_prefill(**arguments)
            return made
        return (*verify_indices(self.draft_token_num, **arguments), None)

    @property
    def tree_topk(self) -> int:
        """-1 is SGLang's word for a tree without fixed branching."""
        return -1

    def sample(self, batch: Any, logits_output: Any, grammar_mask: Any = None, **_: Any) -> Any:
        """``eagle_sample`` for a batch that needs ``sampling.sample_tree``; ``hooks._sample`` says which do."""
        from sglang_ddtree.sampling import sample_tree

        assert self.sampler is not None
        return sample_tree(self, batch, logits_output, grammar_mask, self.sampler)


def verify_indices(
    width: int,
    *,
    req_pool_indices: torch.Tensor,
    paged_kernel_lens: torch.Tensor,
    paged_kernel_lens_sum: int,
    translator: Any,
    plan: Any,
    kind: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Where FlashInfer finds a verify pass's keys: EAGLE's ``generate_attn_arg_prefill`` without the mask.

    Args:
        width: verify width ``Q``.
        req_pool_indices: integer ``[bs]``.
        paged_kernel_lens: integer ``[bs]``, prefix lengths.
        paged_kernel_lens_sum: their sum, or more.

    Returns:
        int32 slots ``[sum + bs * Q]``, int32 ``[bs + 1]`` where each request's begin, int32 ``[bs + 1]`` its rows.
    """
    bs, device = req_pool_indices.numel(), req_pool_indices.device
    rows = torch.arange(0, (bs + 1) * width, width, dtype=torch.int32, device=device)
    lens = paged_kernel_lens + width
    starts = torch.zeros(bs + 1, dtype=torch.int32, device=device)
    starts[1:] = torch.cumsum(lens, 0)
    total = paged_kernel_lens_sum + bs * width
    slots = torch.empty(total, dtype=torch.int32, device=device)
    translator.pack_read_stream(
        plan,
        req_pool_indices=req_pool_indices,
        seq_lens=lens,
        indptr=starts,
        out=slots,
        kind=kind,
        num_token_blocks=None,
        kv_lens_sum=total,
    )
    return slots, starts, rows


def make_verify_input(
    tree: DraftTree,
    *,
    prefix_lens: torch.Tensor,
    attn_backend: Any,
    prefix_lens_sum: int | None,
    depth: int,
    top_k: int,
    out_cache_loc: torch.Tensor,
    kv_loc_plan: Any,
    sampler: Any,
    penalties: PenaltyTable | None,
) -> DDTreeVerifyInput:
    """Lay out ``tree`` for ``run_eagle_verify``.

    Args:
        tree: ``bs`` trees of verify width ``Q``.
        prefix_lens: int64 ``[bs]``, tokens already in the cache; the root sits at position ``prefix_lens``.
        attn_backend: the target's backend; its ``verify_mask`` says which mask it reads, and where from.
        prefix_lens_sum: sum of ``prefix_lens`` (or an upper bound) if the host knows it.
        depth: deepest node the tree can have.
        out_cache_loc: int64 ``[bs * Q]``, the KV slots of the nodes.
        kv_loc_plan: the iteration's plan when it covers exactly these slots, else None.
    """
    bs, width = tree.tokens.shape
    device = tree.tokens.device
    return DDTreeVerifyInput(
        draft_token=tree.tokens.reshape(-1),
        custom_mask=_mask(tree, prefix_lens, attn_backend, prefix_lens_sum, depth),
        positions=positions(tree, prefix_lens).reshape(-1),
        retrieve_index=torch.arange(bs * width, dtype=torch.int64, device=device).view(bs, width),
        retrieve_next_token=tree.next_child,
        retrieve_next_sibling=tree.next_sibling,
        retrieve_cum_len=None,
        spec_steps=depth,
        topk=top_k,
        draft_token_num=width,
        capture_hidden_mode=CaptureHiddenMode.FULL,
        seq_lens_sum=None,
        seq_lens_cpu=None,
        prepared_out_cache_loc=out_cache_loc,
        kv_loc_plan=kv_loc_plan,
        sampler=sampler,
        tree=tree,
        penalties=penalties,
    )


def _mask(
    tree: DraftTree, prefix_lens: torch.Tensor, attn_backend: Any, prefix_lens_sum: int | None, depth: int
) -> torch.Tensor:
    """The mask in the layout the backend reads, in its own buffer when it has one that fits."""
    bs, width = tree.tokens.shape
    verify_mask = attn_backend.verify_mask
    if verify_mask is not None and verify_mask.mode == TreeMaskMode.QLEN_ONLY_BITPACKING:
        # Ours alone (attention/flashinfer_backend.py), with room for every batch.
        return ancestor_bits(tree, depth, out=verify_mask.buffer[: bs * width])
    owned = verify_mask is not None and verify_mask.fits(bs)
    if verify_mask is not None and verify_mask.mode == TreeMaskMode.QLEN_ONLY:
        mask = ancestor_mask(tree, depth)
        if not owned:
            return mask.reshape(-1)
        out = verify_mask.buffer[: bs * width * width]
        out.copy_(mask.reshape(-1))
        return out
    if prefix_lens_sum is None:
        prefix_lens_sum = bs * attn_backend.max_context_len
    total = prefix_lens_sum * width + bs * width * width
    return full_mask(tree, prefix_lens, total=total, out=verify_mask.buffer if owned else None, max_depth=depth)
