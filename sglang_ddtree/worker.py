"""The DDTREE decode step: draft -> tree -> verify -> commit, and nothing else.

Prefill and idle batches are ``DFlashWorkerV2``'s own; drafting runs its draft model; verification and the commit of the
target's state are EAGLE's ``run_eagle_verify``.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
from sglang.kernels.ops.speculative.cache_locs import assign_extend_cache_locs_uniform_func
from sglang.srt.arg_groups.overrides import resolving_view
from sglang.srt.lora.layers import unwrap_lora_layer
from sglang.srt.managers.scheduler import GenerationBatchResult
from sglang.srt.model_executor.forward_batch_info import (
    CaptureHiddenMode,
    ForwardBatch,
    ForwardMode,
    enable_num_token_non_padded,
)
from sglang.srt.model_executor.model_runner import SamplingPrewarmResult
from sglang.srt.runtime_context import get_spec
from sglang.srt.speculative.dflash_info_v2 import DFlashDraftInputV2
from sglang.srt.speculative.dflash_worker_v2 import DFlashWorkerV2, _resolve_dflash_embedding_module
from sglang.srt.speculative.draft_worker_common import make_draft_input_v2
from sglang.srt.speculative.eagle_worker_common import run_eagle_verify
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.srt.speculative.spec_utils import draft_tp_context

from sglang_ddtree import compat, hooks
from sglang_ddtree.config import MAX_TOP_K, DDTreeConfig
from sglang_ddtree.drafter import mask_embedding
from sglang_ddtree.drafter.files import resolve_model_dir
from sglang_ddtree.drafting import draft_candidates
from sglang_ddtree.folding import TreeSampler, make_tree_sampler
from sglang_ddtree.grammar import keep_allowed, root_bitmask
from sglang_ddtree.graph_memory import captured_sizes
from sglang_ddtree.metrics import make_metrics
from sglang_ddtree.penalties import PenaltyTable, has_penalties
from sglang_ddtree.plugin import hook_groups
from sglang_ddtree.tree.build import build_tree
from sglang_ddtree.tree.draft_tree import DraftTree
from sglang_ddtree.verify import make_verify_input

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.managers.tp_worker import TpModelWorker
    from sglang.srt.server_args import ServerArgs

compat.require_contract()


class DDTreeDraftInput(DFlashDraftInputV2):
    """DFLASH's decode state, reserving slots for the wider of draft block and verify tree."""

    def prepare_for_decode(self, batch: ScheduleBatch) -> None:
        spec = get_spec()
        with spec.override(speculative_num_draft_tokens=DDTreeConfig.from_spec(spec).window):
            super().prepare_for_decode(batch)


class DDTreeWorker(DFlashWorkerV2):
    def __init__(self, server_args: ServerArgs, gpu_id: int, nccl_port: int, target_worker: TpModelWorker):
        hooks.require_applied(*hook_groups())
        self.tree_config = DDTreeConfig.from_spec(get_spec())
        with self._draft_scope():
            super().__init__(server_args, gpu_id, nccl_port, target_worker)
        self.speculative_num_draft_tokens = self.tree_config.verify_width
        self._block_ids_buf: torch.Tensor | None = None
        self._penalties: PenaltyTable | None = None
        self._metrics = make_metrics(self.tree_config, self.device)

    def _draft_scope(self) -> contextlib.AbstractContextManager[Any]:
        """The draft side is a chain of ``B`` tokens; SGLang's backends read their shape here when they are built."""
        return get_spec().override(
            speculative_num_draft_tokens=self.tree_config.block_size,
            speculative_eagle_topk=1,
            speculative_num_steps=1,
        )

    def _maybe_merge_trained_mask_embedding(self) -> None:
        # SGLang writes a drafter's own mask vector, which it unpickles, over a row of the target's embedding. Here the
        # drafter's blocks alone get it, and only the converted file is read.
        args = resolving_view(self.server_args)
        path, revision = args.speculative_draft_model_path, args.speculative_draft_model_revision
        vector = mask_embedding.read(resolve_model_dir(path, revision, weights=True))
        self._mask_embedding = None if vector is None else vector.to(self.device)

    def _defer_target_verify_gather(self) -> None:
        # run_eagle_verify reads whole logits; it cannot finish a gather that DFLASH would defer.
        return None

    def init_attention_backends(self) -> None:
        with self._draft_scope():
            super().init_attention_backends()

    def init_cuda_graphs(self) -> None:
        with self._draft_scope():
            super().init_cuda_graphs()

    def _maybe_build_draft_sampler(self) -> TreeSampler | None:
        # init_cuda_graphs keeps it as _draft_sampler and captures it behind the draft model.
        sizes = captured_sizes(self.draft_model_runner)
        return make_tree_sampler(self._lm_head(), self.tree_config, sizes, self.device)

    def _lm_head(self) -> torch.nn.Module:
        return unwrap_lora_layer(self.target_worker.model_runner.model.lm_head)

    def prewarm_sampling(self) -> SamplingPrewarmResult:
        # DFLASH rehearses its own chain sampler; DDTREE samples with the target's.
        return self.model_runner.prewarm_sampling()

    def _validate_phase1_sampling_support(self, batch: ScheduleBatch) -> None:
        # DFLASH warns here that it answers sampled requests greedily; DDTREE samples them.
        return None

    def _make_next_draft_input_prefill(self, *, bonus_tokens: torch.Tensor, seq_lens: torch.Tensor) -> DDTreeDraftInput:
        return _draft_input(bonus_tokens, seq_lens)

    def _make_next_draft_input_decode(
        self, *, bonus_tokens: torch.Tensor, new_seq_lens: torch.Tensor
    ) -> DDTreeDraftInput:
        return _draft_input(bonus_tokens, new_seq_lens)

    def forward_batch_generation(
        self,
        batch: ScheduleBatch,
        on_publish: Any = None,
        grammar_barrier: Any = None,
        pp_proxy_tensors: Any = None,
    ) -> GenerationBatchResult:
        if batch.forward_mode.is_extend() or batch.is_extend_in_batch or batch.forward_mode.is_idle():
            result = super().forward_batch_generation(batch, on_publish, grammar_barrier, pp_proxy_tensors)
            if batch.reqs and (self._penalties is not None or has_penalties(batch.sampling_info)):
                self._penalty_table().start(batch.req_pool_indices, batch.reqs, result.next_token_ids)
            return result

        config = self.tree_config
        draft_input: DFlashDraftInputV2 = batch.spec_info
        if batch.seq_lens.is_cuda:
            # Produced on another stream by the previous iteration.
            batch.seq_lens.record_stream(torch.get_device_module(self.device).current_stream())
        bs = len(batch.seq_lens)
        prefix_lens = batch.seq_lens
        self._metrics.begin()

        window, positions, block_ids = self._open_window(batch, draft_input)
        host_lens = batch.seq_lens_cpu if batch.seq_lens_cpu is not None else draft_input.nxt_kv_lens_cpu
        plan = self.target_worker.model_runner.kv_index_translator.plan(
            req_pool_indices=batch.req_pool_indices,
            seq_lens=prefix_lens,
            seq_lens_cpu=host_lens,
            write_virtual=window.reshape(-1),
            read_extent=config.window,
        )

        # 1. Draft. 2. Tree.
        hidden, is_replay = self._draft_block(batch, draft_input, plan, window, positions, block_ids)
        tree = self._draft_tree(batch, hidden, block_ids, is_replay, grammar_barrier)

        # 3. Verify. The tree takes the first Q slots of the window.
        wide = config.window > config.verify_width
        batch.spec_info = make_verify_input(
            tree,
            prefix_lens=prefix_lens,
            attn_backend=self.target_worker.model_runner.attn_backend,
            prefix_lens_sum=batch.seq_lens_sum,
            depth=config.depth,
            top_k=config.top_k,
            out_cache_loc=window[:, : config.verify_width].reshape(-1),
            kv_loc_plan=None if wide else plan,
            sampler=self.target_worker.model_runner.sampler,
            penalties=self._penalty_table() if has_penalties(batch.sampling_info) else None,
        )
        self._metrics.mark("build")
        result = run_eagle_verify(
            batch,
            target_worker=self.target_worker,
            req_to_token_pool=self.model_runner.req_to_token_pool,
            token_to_kv_pool_allocator=self.model_runner.token_to_kv_pool_allocator,
            plan_stream=None,
            plan_stream_ctx=contextlib.nullcontext(),
            topk=config.top_k,
            num_draft_tokens=config.verify_width,
            device=self.device,
            metadata_ready_pre_pad=False,
            finalize_tree_path=True,
            pp_proxy_tensors=pp_proxy_tensors,
            grammar_barrier=grammar_barrier,
        )
        self._metrics.mark("verify")
        if on_publish is not None:
            on_publish(result.new_seq_lens)

        # 4. Commit: the draft cache gets the accepted path, which run_eagle_verify moved to the front of each row.
        committed = config.depth + 1
        target_hidden = result.logits_output.hidden_states.view(bs, config.verify_width, -1)[:, :committed]
        draft_slots = self._draft_write_ids(plan).view(bs, -1)[:, :committed].contiguous()
        self._append_target_hidden_to_draft_kv_by_loc(
            target_hidden=target_hidden.reshape(bs * committed, -1),
            cache_loc=draft_slots.view(-1),
            cache_loc_2d=draft_slots,
            positions=positions[:, :committed].reshape(-1),
            commit_lens=result.accept_lens,
        )
        self._metrics.mark("commit")
        self._metrics.end(tree, result.accept_lens)
        # Large, and overlap scheduling would copy it to the host.
        result.logits_output.hidden_states = None
        result.next_draft_input = self._make_next_draft_input_decode(
            bonus_tokens=result.next_draft_input.bonus_tokens, new_seq_lens=result.new_seq_lens
        )
        return result

    def _penalty_table(self) -> PenaltyTable:
        if self._penalties is None:
            slots = self.model_runner.req_to_token_pool.req_to_token.shape[0]
            vocab_size = self.target_worker.model_runner.model_config.vocab_size
            self._penalties = PenaltyTable(slots, vocab_size, self.device)
        return self._penalties

    def _open_window(
        self, batch: ScheduleBatch, draft_input: DFlashDraftInputV2
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The step's KV slots and positions ``[bs, max(B, Q)]`` and the draft block's ids ``[bs, B]``, all int64.

        The block is the last committed token and ``B - 1`` mask tokens.
        """
        config = self.tree_config
        bs = len(batch.seq_lens)
        if self._block_ids_buf is None or self._block_ids_buf.shape[0] < bs:
            self._block_ids_buf = torch.full(
                (max(bs, 32), config.block_size), int(self._mask_token_id), dtype=torch.int64, device=self.device
            )
        block_ids = self._block_ids_buf[:bs]
        positions = torch.empty((bs, config.window), dtype=torch.int64, device=self.device)
        window = assign_extend_cache_locs_uniform_func(
            req_pool_indices=batch.req_pool_indices,
            req_to_token=self.model_runner.req_to_token_pool.req_to_token,
            start_offset=batch.seq_lens,
            batch_size=bs,
            draft_token_num=config.window,
            device=self.device,
            positions_out=positions,
            anchor_src=draft_input.bonus_tokens,
            anchor_out=block_ids,
        )
        return window.view(bs, config.window), positions, block_ids

    def _draft_block(
        self,
        batch: ScheduleBatch,
        draft_input: DFlashDraftInputV2,
        plan: Any,
        window: torch.Tensor,
        positions: torch.Tensor,
        block_ids: torch.Tensor,
    ) -> tuple[torch.Tensor, bool]:
        """Run the drafter over one block per request: hidden states ``[bs, B, hidden]``, and whether from its graph.

        As in ``DFlashWorkerV2.forward_batch_generation``, which has no method for it.
        """
        block_size = self.tree_config.block_size
        bs = block_ids.shape[0]
        embedding = unwrap_lora_layer(
            _resolve_dflash_embedding_module(self.draft_model, self.target_worker.model_runner.model)
        )
        if self._full_embed_gpu is not None:
            embeds = torch.nn.functional.embedding(block_ids, self._full_embed_gpu)
        else:
            embeds = embedding(block_ids)
        if self._mask_embedding is not None:
            embeds = embeds.clone()
            embeds[:, 1:] = self._mask_embedding
        if self._noise_embed_scale != 1.0:
            embeds = embeds * self._noise_embed_scale

        seq_lens, seq_lens_cpu, seq_lens_sum = self._draft_lens(batch, draft_input, window)
        forward_batch = ForwardBatch(
            forward_mode=ForwardMode.TARGET_VERIFY,
            batch_size=bs,
            input_ids=block_ids.flatten(),
            req_pool_indices=batch.req_pool_indices,
            seq_lens=seq_lens,
            out_cache_loc=window[:, :block_size].reshape(-1),
            seq_lens_sum=seq_lens_sum,
            seq_lens_cpu=seq_lens_cpu,
            positions=positions[:, :block_size].reshape(-1),
            input_embeds=embeds.view(bs * block_size, -1),
            spec_algorithm=SpeculativeAlgorithm.DFLASH,
            spec_info=self._draft_block_spec_info,
            capture_hidden_mode=CaptureHiddenMode.NULL,
            num_token_non_padded=(
                torch.full((), bs * block_size, dtype=torch.int32, device=self.device)
                if enable_num_token_non_padded()
                else None
            ),
            global_num_token_non_padded_cpu=bs * block_size,
            can_run_decode_cuda_graph=batch.can_run_decode_cuda_graph,
        )
        translator = self.draft_model_runner.kv_index_translator
        draft_plan = plan
        if self.use_compact_draft_cache:
            draft_plan = plan.reads_from(
                translator, seq_lens=seq_lens, seq_lens_cpu=seq_lens_cpu, read_extent=block_size
            )
        draft_plan.bind(forward_batch, translator, cols=slice(0, block_size))
        with torch.inference_mode(), draft_tp_context(self.draft_parallel_layout):
            out = self.draft_model_runner.forward(forward_batch)
        return out.logits_output.hidden_states.view(bs, block_size, -1), out.can_run_graph

    def _draft_tree(
        self,
        batch: ScheduleBatch,
        hidden: torch.Tensor,
        block_ids: torch.Tensor,
        is_replay: bool,
        grammar_barrier: Any,
    ) -> DraftTree:
        """The step's trees: those that the draft graph built, unless a grammar takes tokens from the root.

        Args:
            hidden: ``[bs, B, hidden]`` of the draft pass.
            block_ids: int64 ``[bs, B]``; column 0 holds the roots.
            is_replay: whether the draft pass was a replay of its graph.
        """
        config = self.tree_config
        bitmask = None
        if batch.has_grammar:
            vocab_size = batch.sampling_info.vocab_size
            bitmask = root_bitmask(batch.reqs, vocab_size, hidden.device, grammar_barrier)
        if bitmask is None and is_replay and self._draft_sampler is not None:
            self._metrics.mark("draft")
            return self._draft_sampler.first(len(block_ids))
        with draft_tp_context(self.draft_parallel_layout):
            candidates = config.top_k if bitmask is None else MAX_TOP_K
            log_probs, token_ids = draft_candidates(hidden, self._lm_head(), config.depth, candidates)
        if bitmask is not None:
            log_probs, token_ids = keep_allowed(log_probs, token_ids, bitmask, config.top_k)
        self._metrics.mark("draft")
        return build_tree(log_probs, token_ids, block_ids[:, 0], config.budget)

    def _draft_lens(
        self, batch: ScheduleBatch, draft_input: DFlashDraftInputV2, window: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, int]:
        """Cached lengths the drafter attends to: on the device ``[bs]``, and upper bounds on the host."""
        block_size = self.tree_config.block_size
        bs = len(batch.seq_lens)
        host = torch.empty((bs,), dtype=torch.int32)
        if self.use_compact_draft_cache:
            # A draft window keeps its own slot table, rebuilt from the committed state on every step. Without Triton
            # that takes a buffer which DFLASH makes at the beginning of its step.
            self._ensure_draft_block_buffers(bs)
            lens = self._compute_compact_draft_seq_lens(batch.seq_lens)
            self._fill_compact_seq_lens_cpu_bound(
                batch_seq_lens_cpu=batch.seq_lens_cpu, nxt_kv_lens_cpu=draft_input.nxt_kv_lens_cpu, out=host
            )
            self._rebuild_compact_draft_cache(
                req_pool_indices=batch.req_pool_indices,
                prefix_lens=batch.seq_lens,
                draft_prefix_lens=lens,
                verify_out_cache_loc_2d=window[:, :block_size].contiguous(),
                bs=bs,
                block_size=block_size,
            )
            return lens, host, int(host.sum())
        if batch.seq_lens_cpu is not None:
            host.copy_(batch.seq_lens_cpu)
            host.add_(block_size)
        elif draft_input.nxt_kv_lens_cpu is not None:
            host.copy_(draft_input.nxt_kv_lens_cpu)
        else:
            host.copy_(torch.tensor([req.kv.kv_allocated_len for req in batch.reqs], dtype=torch.int32))
        return batch.seq_lens, host, int(host.sum())


def _draft_input(bonus_tokens: torch.Tensor, new_seq_lens: torch.Tensor) -> DDTreeDraftInput:
    base = make_draft_input_v2(bonus_tokens=bonus_tokens, new_seq_lens=new_seq_lens)
    return DDTreeDraftInput(
        topk_p=base.topk_p,
        topk_index=base.topk_index,
        bonus_tokens=base.bonus_tokens,
        new_seq_lens=base.new_seq_lens,
        hidden_states=base.hidden_states,
    )
