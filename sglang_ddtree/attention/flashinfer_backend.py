"""SGLang's FlashInfer backend with the tree's bit rows in place of ``custom_mask``, for the target's verify pass.

Everything else is SGLang's: prefill, the page tables, the graphs. What differs for a verify pass:

- the wrappers, eager and captured, are ``flashinfer_tree.TreeWrapper``; all read one buffer of bit rows, at an address
  that graphs can keep;
- the worker writes the bits there once a step, before the pass (``verify.py``; ``verify_mask`` says where to);
- the plan under CUDA graphs is SGLang's own ``fast_prefill_plan``, and without graphs FlashInfer's with lengths from
  the host, so that neither reads anything back;
- the index buffer holds what a batch can have, ``max_bs * (context + Q)``, and there is no mask buffer.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from sglang.srt.layers.attention import flashinfer_backend as stock
from sglang.srt.layers.attention.verify_mask import VerifyMask
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.runtime_context import get_disagg, get_exec, get_parallel, get_spec
from sglang.srt.speculative.eagle_utils import TreeMaskMode
from sglang.srt.utils import get_cuda_graph_max_batch_size

from sglang_ddtree.attention import flashinfer_choice as choice
from sglang_ddtree.attention.flashinfer_tree import Variant, tree_wrapper_class
from sglang_ddtree.attention.tree_check import Heads, check_wrapper
from sglang_ddtree.errors import DDTreeError
from sglang_ddtree.verify import DDTreeVerifyInput

logger = logging.getLogger(__name__)


def build_verifier(original: Callable[[], Any], runner: Any, init_new_workspace: bool) -> Any:
    """The target's FlashInfer backend: with bit rows where that can be, else ``original()``. Logs which, and why.

    The variant is compiled and compared with torch on this GPU first; whatever goes wrong there leaves the stock mask.

    Raises:
        DDTreeError: ``SGLANG_DDTREE_FLASHINFER=tree`` and it cannot be; or the stock mask would be too large.
    """
    wanted = choice.wanted()
    backend = None
    against = f"{choice.ENV}=stock" if wanted == "stock" else why_not(runner)
    if against is None:
        try:
            backend = TreeFlashInferBackend(runner, init_new_workspace=init_new_workspace)
            check_wrapper(backend.make_check_wrapper, backend.variant, backend.heads, backend.width)
        except Exception as error:  # A compiler, a driver, a kernel: the stock mask needs none of this.
            backend, against = None, f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            logger.debug("the FlashInfer variant failed", exc_info=True)
    is_first = get_parallel().tp_rank == 0
    if backend is not None:
        if is_first:
            logger.info("DDTREE verifies with FlashInfer and bit rows (%s).", backend.variant.name)
        return backend
    if wanted == "tree":
        raise DDTreeError(f"{choice.ENV}=tree, but it cannot be used: {against}. Unset it for SGLang's custom_mask.")
    choice.require_stock_mask_fits(
        get_cuda_graph_max_batch_size(runner.req_to_token_pool.size),
        int(get_spec().speculative_num_draft_tokens),
        runner.model_config.context_len,
    )
    if is_first:
        logger.info("DDTREE verifies with FlashInfer and SGLang's custom_mask: %s.", against)
    return original()


def why_not(runner: Any) -> str | None:
    """Why this model runner's verify pass keeps the stock mask, or None."""
    layers = (module for module in runner.model.modules() if isinstance(module, RadixAttention))
    execution, parallel = get_exec(), get_parallel()
    head_dim = runner.model_config.head_dim
    return (
        choice.against_host()
        or choice.against_server(
            two_batches=execution.overlap.enable_two_batch_overlap,
            pdmux=get_disagg().enable_pdmux,
            multi_item=execution.features.enable_mis,
            context_parallel=parallel.attn_dcp_size,
            encoder=runner.model_config.is_encoder_decoder,
        )
        or choice.against_dtypes(runner.dtype, runner.kv_cache_dtype, head_dim)
        or choice.against_layers(layers, head_dim)
    )


class TreeFlashInferBackend(stock.FlashInferAttnBackend):
    """For a target of full-attention layers; ``why_not`` keeps the others away.

    Attributes:
        verify_mask: bits int32 ``[max_bs * Q, ceil(Q / 32)]``; a step's trees take the first rows. What is behind them
            is of earlier steps, and padding that a graph's batch is filled up with may read it: nobody reads what that
            attends to.
    """

    def __init__(self, model_runner: Any, *, init_new_workspace: bool) -> None:
        super().__init__(model_runner, init_new_workspace=init_new_workspace)
        # SGLang's constructor asks these of its own class only.
        if model_runner.prefill_attention_backend_str == "flashinfer":
            self._check_kv_attention_access("prefill", self.prefill_kv_access)
        if model_runner.decode_attention_backend_str == "flashinfer":
            self._check_kv_attention_access("decode", self.decode_kv_access)
        if self.num_wrappers != 1 or self.use_sliding_window_kv_pool or self.prefill_uses_dequant_workspace:
            raise DDTreeError("the target's KV cache has windows, cross-attention or a 4-bit format")
        updater = self.indices_updater_prefill
        self.width = int(get_spec().speculative_num_draft_tokens)
        self.heads = Heads(updater.num_qo_heads, updater.num_kv_heads, updater.head_dim)
        self.variant = Variant(updater.q_data_type, updater.data_type, updater.head_dim)
        requests, device = self.kv_last_page_len.numel(), self.kv_last_page_len.device
        # All ones: before the first step, every row sees something.
        bits = torch.full((requests * self.width, -(-self.width // 32)), -1, dtype=torch.int32, device=device)
        self._verify_mask = VerifyMask(buffer=bits, mode=TreeMaskMode.QLEN_ONLY_BITPACKING, max_bs=requests)
        self.prefill_wrappers_verify = [tree_wrapper_class()(self.workspace_buffer, bits, self.variant)]

    @property
    def verify_mask(self) -> VerifyMask:
        return self._verify_mask

    def make_check_wrapper(self, bits: torch.Tensor) -> Any:
        """An eager wrapper on this backend's workspace that reads other bits."""
        return tree_wrapper_class()(self.workspace_buffer, bits, self.variant)

    def init_cuda_graph_state(
        self, max_bs: int, max_num_tokens: int, kv_indices_buf: torch.Tensor | None = None
    ) -> None:
        # SGLang's own would take Q * context for every request, once for indices and once for a mask.
        if kv_indices_buf is None:
            most = max_bs * (self.max_context_len + self.width)
            kv_indices_buf = torch.zeros(most, dtype=torch.int32, device=self.kv_last_page_len.device)
        self.cuda_graph_kv_indices = [kv_indices_buf]
        self.cuda_graph_qo_indptr = [indptr.clone() for indptr in self.kv_indptr]
        self.cuda_graph_swa_out_cache_loc = None

    def _create_prefill_wrappers(self, bs: int, use_custom_mask: bool = False) -> list[Any]:
        if not use_custom_mask:
            return super()._create_prefill_wrappers(bs)
        return [
            tree_wrapper_class()(
                self.workspace_buffer,
                self.verify_mask.buffer,
                self.variant,
                use_cuda_graph=True,
                qo_indptr_buf=self.cuda_graph_qo_indptr[0][: bs + 1],
                paged_kv_indptr_buf=self.kv_indptr[0][: bs + 1],
                paged_kv_indices_buf=self.cuda_graph_kv_indices[0],
                paged_kv_last_page_len_buf=self.kv_last_page_len[:bs],
            )
        ]

    def init_forward_metadata(self, forward_batch: Any) -> None:
        self._require_bits(forward_batch)
        if forward_batch.forward_mode.is_target_verify() and forward_batch.seq_lens_cpu is not None:
            for wrapper in self.prefill_wrappers_verify:
                wrapper.know_lengths(forward_batch.seq_lens_cpu + self.width, self.width)
        super().init_forward_metadata(forward_batch)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        self._require_bits(forward_batch)
        super().init_forward_metadata_out_graph(forward_batch, in_capture)
        if in_capture and forward_batch.forward_mode.is_target_verify():
            # The plan of the capture had to be FlashInfer's; the replays' must not wait.
            for wrapper in self.forward_metadata.prefill_wrappers:
                wrapper.begin_forward = partial(stock.fast_prefill_plan, wrapper)

    def _require_bits(self, forward_batch: Any) -> None:
        """A verify pass's mask is this backend's bits. Warm-up and capture have no tree and come with SGLang's buffer.

        Raises:
            RuntimeError: its trees were written elsewhere, and the kernel would read those of another step.
        """
        if not forward_batch.forward_mode.is_target_verify():
            return
        spec_info, bits = forward_batch.spec_info, self.verify_mask.buffer
        if not isinstance(spec_info, DDTreeVerifyInput):
            raise RuntimeError(f"FlashInfer's bit rows hold no mask of a {type(spec_info).__name__}")
        if spec_info.tree is None:
            spec_info.custom_mask = bits
        elif spec_info.custom_mask.dtype != bits.dtype or spec_info.custom_mask.data_ptr() != bits.data_ptr():
            raise RuntimeError("the trees of this verify pass are not in the bit rows that FlashInfer reads")
