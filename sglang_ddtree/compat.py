"""The SGLang names this package relies on, in one table, and the check that they are what it expects.

``DFlashWorkerV2`` and its neighbours are internals that change in every SGLang release, so exactly one release is
supported, and DDTREE refuses to run on anything else with the reason. A unit test compares ``CONTRACT`` with the
imports and hook targets in this package: a name that is used and not listed fails it.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import re
from dataclasses import dataclass
from typing import Any

from sglang_ddtree.errors import DDTreeError

SUPPORTED = "0.5.23"
ADVICE = f"install it with: pip install sglang=={SUPPORTED}"
NOT_INSTALLED = f"SGLang is not installed: {ADVICE}"


@dataclass(frozen=True)
class Name:
    """One SGLang name; lists are words separated by spaces.

    Attributes:
        path: ``module:attribute`` or ``module:Class.attribute``.
        used_by: our files that use it.
        passes: parameters it must accept, those we pass by name.
        signature: its whole parameter list, for what we override, wrap, replace or call by position. None: not pinned.
        attributes: what its class must have, as class attributes or set on ``self`` in its source.
    """

    path: str
    used_by: str
    passes: str = ""
    signature: str | None = None
    attributes: str = ""


_ALGORITHM = "sglang.srt.speculative.spec_registry:CustomSpecAlgo"
_BATCH_INFO = "sglang.srt.model_executor.forward_batch_info"
_CPU_PLATFORM = "sglang.srt.platforms.cpu:CpuSRTPlatform"
_DFLASH = "sglang.srt.speculative.dflash_worker_v2"
_FLASHINFER = "sglang.srt.layers.attention.flashinfer_backend:FlashInferAttnBackend"
_KERNELS = "sglang.kernels.ops.speculative"
_TORCH_ATTENTION = "sglang.srt.layers.attention.torch_native_backend:TorchNativeAttnBackend"
_UNQUANT = "sglang.srt.layers.quantization.unquant"

CONTRACT: tuple[Name, ...] = (
    # Registration and arguments
    Name(
        "sglang.srt.speculative.spec_info:SpeculativeAlgorithm.register",
        "plugin.py",
        passes="name supports_overlap spec_class",
    ),
    Name("sglang.srt.speculative.spec_info:SpeculativeAlgorithm.from_string", "doctor.py", signature="name"),
    Name("sglang.srt.speculative.spec_info:SpeculativeAlgorithm.DFLASH", "worker.py"),
    Name(_ALGORITHM, "algorithm.py plugin.py", signature="name factory supports_overlap validate_server_args"),
    Name(_ALGORITHM + ".handle_server_args", "algorithm.py plugin.py", signature="self server_args"),
    Name(
        _ALGORITHM + ".get_num_tokens_per_req_for_target_verify",
        "algorithm.py",
        signature="self num_draft_tokens is_draft_worker",
    ),
    Name(
        "sglang.srt.speculative.spec_info:SpeculativeAlgorithm.create_future_map",
        "algorithm.py",
        signature="self device req_to_token_pool needs_cpu_seq_lens needs_confidence_relay",
    ),
    Name(
        "sglang.srt.managers.overlap_utils:FutureMap",
        "algorithm.py",
        signature="device spec_algo req_to_token_pool needs_cpu_seq_lens needs_confidence_relay",
    ),
    Name(
        "sglang.srt.runtime_context:get_spec",
        "algorithm.py attention/flashinfer_backend.py graph_memory.py hooks.py state_check.py worker.py",
        signature="",
    ),
    Name("sglang.srt.arg_groups.overrides:resolving_view", "algorithm.py doctor.py worker.py", signature="server_args"),
    Name("sglang.srt.arg_groups.resolution_hooks:register_resolution_hook", "plugin.py", signature="name"),
    Name("sglang.srt.server_args:ServerArgs.add_cli_args", "hooks.py", passes="parser"),
    Name(
        "sglang.srt.plugins.hook_registry:HookRegistry.register", "hooks.py", signature="target hook hook_type source"
    ),
    Name("sglang.srt.plugins.hook_registry:HookType", "hooks.py"),
    Name(
        "sglang.srt.managers.scheduler:run_scheduler_process",
        "hook_probe.py",
        signature="server_args port_args gpu_id tp_rank pp_rank dp_rank pipe_writer display_tp_rank display_dp_rank "
        "display_moe_ep_rank",
    ),
    Name("sglang.srt.managers.scheduler:resolve_spawn_dp_rank", "hook_probe.py"),
    # Command line
    Name("sglang.launch_server:run_server", "cli.py", signature="server_args"),
    Name("sglang.srt.plugins:load_plugins", "cli.py doctor.py", signature=""),
    Name("sglang.srt.server_args:prepare_server_args", "cli.py doctor.py", signature="argv"),
    Name("sglang.srt.server_args:ServerArgs.resolve_once", "doctor.py", signature="self"),
    Name("sglang.srt.server_args:ServerArgs", "worker.py cli.py", attributes="_resolution_failed"),
    Name("sglang.srt.utils:kill_process_tree", "cli.py", passes="parent_pid include_parent"),
    # Drafting
    Name(_DFLASH + ":DFlashWorkerV2", "worker.py", signature="server_args gpu_id nccl_port target_worker"),
    Name(
        _DFLASH + ":DFlashWorkerV2.forward_batch_generation",
        "worker.py",
        signature="self batch on_publish grammar_barrier pp_proxy_tensors",
        attributes="device draft_model draft_model_runner draft_parallel_layout model_runner target_worker "
        "use_compact_draft_cache speculative_num_draft_tokens _draft_block_spec_info _full_embed_gpu _mask_token_id "
        "_noise_embed_scale _draft_sampler server_args",
    ),
    Name(_DFLASH + ":DFlashWorkerV2.init_attention_backends", "worker.py", signature="self"),
    Name(_DFLASH + ":DFlashWorkerV2.init_cuda_graphs", "worker.py", signature="self"),
    Name(_DFLASH + ":DFlashWorkerV2.prewarm_sampling", "worker.py", signature="self"),
    Name("sglang.srt.model_executor.model_runner:ModelRunner.prewarm_sampling", "worker.py", signature="self"),
    Name("sglang.srt.model_executor.model_runner:SamplingPrewarmResult", "worker.py"),
    Name(_DFLASH + ":DFlashWorkerV2._defer_target_verify_gather", "worker.py", signature="self"),
    Name(_DFLASH + ":DFlashWorkerV2._maybe_merge_trained_mask_embedding", "worker.py", signature="self"),
    Name(_DFLASH + ":DFlashWorkerV2._maybe_build_draft_sampler", "worker.py", signature="self"),
    Name(_DFLASH + ":DFlashWorkerV2._validate_phase1_sampling_support", "worker.py", signature="self batch"),
    Name(
        _DFLASH + ":DFlashWorkerV2._make_next_draft_input_prefill", "worker.py", signature="self bonus_tokens seq_lens"
    ),
    Name(
        _DFLASH + ":DFlashWorkerV2._make_next_draft_input_decode",
        "worker.py",
        signature="self bonus_tokens new_seq_lens",
    ),
    Name(_DFLASH + ":DFlashWorkerV2._compute_compact_draft_seq_lens", "worker.py", signature="self seq_lens"),
    Name(_DFLASH + ":DFlashWorkerV2._ensure_draft_block_buffers", "worker.py", signature="self bs"),
    Name(
        _DFLASH + ":DFlashWorkerV2._fill_compact_seq_lens_cpu_bound",
        "worker.py",
        passes="batch_seq_lens_cpu nxt_kv_lens_cpu out",
    ),
    Name(
        _DFLASH + ":DFlashWorkerV2._rebuild_compact_draft_cache",
        "worker.py",
        passes="req_pool_indices prefix_lens draft_prefix_lens verify_out_cache_loc_2d bs block_size",
    ),
    Name(_DFLASH + ":DFlashWorkerV2._draft_write_ids", "worker.py", signature="self plan"),
    Name(
        _DFLASH + ":DFlashWorkerV2._append_target_hidden_to_draft_kv_by_loc",
        "worker.py",
        passes="target_hidden cache_loc cache_loc_2d positions commit_lens",
    ),
    Name(_DFLASH + ":_resolve_dflash_embedding_module", "worker.py", signature="draft_model target_model"),
    Name(
        "sglang.srt.speculative.dflash_info_v2:DFlashDraftInputV2",
        "worker.py",
        passes="topk_p topk_index bonus_tokens new_seq_lens hidden_states nxt_kv_lens_cpu",
    ),
    Name(
        "sglang.srt.speculative.dflash_info_v2:DFlashDraftInputV2.prepare_for_decode",
        "worker.py",
        signature="self batch",
    ),
    Name(
        "sglang.srt.speculative.draft_worker_common:make_draft_input_v2",
        "worker.py",
        passes="bonus_tokens new_seq_lens",
    ),
    Name("sglang.srt.speculative.spec_utils:draft_tp_context", "worker.py", signature="layout"),
    Name(
        "sglang.srt.speculative.spec_utils:generate_token_bitmask",
        "grammar.py",
        signature="reqs retrieve_next_token_cpu retrieve_next_sibling_cpu draft_tokens_cpu vocab_size",
    ),
    Name("sglang.srt.lora.layers:unwrap_lora_layer", "worker.py", signature="module"),
    Name("sglang.srt.models.dflash:candidate_topk", "drafting.py", signature="hidden lm_head k with_partition"),
    Name(
        _BATCH_INFO + ":ForwardBatch",
        "worker.py",
        passes="forward_mode batch_size input_ids req_pool_indices seq_lens out_cache_loc seq_lens_sum seq_lens_cpu "
        "positions input_embeds spec_algorithm spec_info capture_hidden_mode num_token_non_padded "
        "global_num_token_non_padded_cpu can_run_decode_cuda_graph",
    ),
    Name(_BATCH_INFO + ":ForwardMode.TARGET_VERIFY", "worker.py"),
    Name(_BATCH_INFO + ":CaptureHiddenMode.FULL", "graphs.py verify.py"),
    Name(_BATCH_INFO + ":CaptureHiddenMode.NULL", "worker.py"),
    Name(_BATCH_INFO + ":enable_num_token_non_padded", "worker.py", signature=""),
    Name(
        "sglang.srt.mem_cache.kv_index_translator:KVIndexTranslator.plan",
        "worker.py",
        passes="req_pool_indices seq_lens seq_lens_cpu write_virtual read_extent",
    ),
    Name("sglang.srt.mem_cache.kv_loc_plan:KVLocPlan.bind", "worker.py", signature="self batch reader cols"),
    Name(
        "sglang.srt.mem_cache.kv_loc_plan:KVLocPlan.reads_from",
        "worker.py",
        signature="self source seq_lens seq_lens_cpu read_extent",
    ),
    Name("sglang.srt.managers.scheduler:GenerationBatchResult", "worker.py"),
    Name("sglang.srt.managers.schedule_batch:ScheduleBatch", "worker.py"),
    Name("sglang.srt.managers.tp_worker:TpModelWorker", "worker.py"),
    # Verification
    Name(
        "sglang.srt.speculative.eagle_worker_common:run_eagle_verify",
        "worker.py",
        passes="batch target_worker req_to_token_pool token_to_kv_pool_allocator plan_stream plan_stream_ctx topk "
        "num_draft_tokens device metadata_ready_pre_pad finalize_tree_path pp_proxy_tensors grammar_barrier",
    ),
    Name(
        "sglang.srt.speculative.eagle_info:EagleVerifyInput",
        "verify.py sampling.py",
        passes="draft_token custom_mask positions retrieve_index retrieve_next_token retrieve_next_sibling "
        "retrieve_cum_len spec_steps topk draft_token_num capture_hidden_mode seq_lens_sum seq_lens_cpu "
        "prepared_out_cache_loc kv_loc_plan",
        attributes="tree_topk max_tree_depth",
    ),
    Name("sglang.srt.speculative.eagle_utils:TreeMaskMode.QLEN_ONLY", "verify.py attention/torch_tree.py"),
    Name(
        "sglang.srt.speculative.eagle_utils:TreeMaskMode.QLEN_ONLY_BITPACKING",
        "graph_memory.py verify.py attention/flashinfer_backend.py",
    ),
    Name(
        "sglang.srt.speculative.eagle_info:EagleVerifyInput.generate_attn_arg_prefill",
        "verify.py",
        signature="self req_pool_indices paged_kernel_lens paged_kernel_lens_sum translator plan kind",
    ),
    Name(
        "sglang.srt.mem_cache.kv_index_translator:KVIndexTranslator.pack_read_stream",
        "verify.py",
        passes="plan req_pool_indices seq_lens indptr out kind num_token_blocks kv_lens_sum",
    ),
    # FlashInfer's verify pass
    Name(
        "sglang.srt.model_executor.model_runner_components.attention_backend_setup:"
        "_build_full_attention_backend_from_str",
        "hooks.py",
        signature="model_runner backend_str init_new_workspace",
    ),
    Name(
        _FLASHINFER,
        "attention/flashinfer_backend.py",
        passes="model_runner init_new_workspace",
        attributes="cuda_graph_kv_indices cuda_graph_qo_indptr cuda_graph_swa_out_cache_loc decode_kv_access "
        "forward_metadata indices_updater_prefill kv_indptr kv_last_page_len max_context_len num_wrappers "
        "prefill_kv_access prefill_uses_dequant_workspace prefill_wrappers_verify use_sliding_window_kv_pool "
        "workspace_buffer",
    ),
    Name(_FLASHINFER + ".verify_mask", "attention/flashinfer_backend.py"),
    Name(_FLASHINFER + "._check_kv_attention_access", "attention/flashinfer_backend.py", signature="self phase access"),
    Name(
        _FLASHINFER + ".init_cuda_graph_state",
        "attention/flashinfer_backend.py",
        signature="self max_bs max_num_tokens kv_indices_buf",
    ),
    Name(
        _FLASHINFER + "._create_prefill_wrappers",
        "attention/flashinfer_backend.py",
        signature="self bs use_custom_mask",
    ),
    Name(_FLASHINFER + ".init_forward_metadata", "attention/flashinfer_backend.py", signature="self forward_batch"),
    Name(
        _FLASHINFER + ".init_forward_metadata_out_graph",
        "attention/flashinfer_backend.py",
        signature="self forward_batch in_capture",
    ),
    Name(
        "sglang.srt.layers.attention.flashinfer_backend:fast_prefill_plan",
        "attention/flashinfer_backend.py",
        passes="qo_indptr_host kv_indptr_host kv_lens_host",
    ),
    Name(
        "sglang.srt.utils:get_cuda_graph_max_batch_size",
        "attention/flashinfer_backend.py",
        signature="max_batch_size",
    ),
    Name("sglang.srt.runtime_context:get_disagg", "attention/flashinfer_backend.py", signature=""),
    Name(
        "sglang.srt.speculative.eagle_utils:eagle_sample",
        "hooks.py",
        signature="verify_input batch logits_output grammar_mask uno_target_max_top_k watermark_state "
        "watermark_full_mask",
    ),
    Name(
        "sglang.srt.speculative.spec_info:create_dummy_verify_input",
        "hooks.py graphs.py",
        signature="spec_algorithm custom_mask num_tokens_per_req is_draft_worker",
    ),
    Name(
        "sglang.srt.model_executor.model_runner:ModelRunner._decode_cuda_graph_runner_cls",
        "hooks.py",
        signature="self",
        attributes="is_draft_worker",
    ),
    Name(
        "sglang.srt.model_executor.runner.decode_cuda_graph_runner:DecodeCudaGraphRunner.get_spec_info",
        "graphs.py",
        signature="self num_tokens",
        attributes="buffers",
    ),
    Name(
        "sglang.srt.model_executor.model_runner:ModelRunner.decode_num_tokens_per_req",
        "graph_memory.py",
        signature="self num_draft_tokens",
        attributes="attn_backend decode_attention_backend_str decode_graph_gather_requirements device "
        "graph_shared_output model_config page_size prefill_attention_backend_str",
    ),
    Name(
        "sglang.srt.model_executor.runner.base_cuda_graph_runner:get_batch_sizes_to_capture",
        "graph_memory.py",
        signature="model_runner captured_req_width gathered_buffer_required",
    ),
    Name(
        "sglang.srt.model_executor.graph_shared_output:GraphSharedOutput",
        "graph_memory.py",
        signature="device max_rows",
        attributes="_logits_buffers",
    ),
    Name(
        "sglang.srt.model_executor.runner.decode_cuda_graph_runner:DecodeCudaGraphRunner",
        "graphs.py",
        signature="model_runner attn_backend speculative_num_steps speculative_num_draft_tokens record_nolora_graph",
    ),
    Name("sglang.srt.utils:get_available_gpu_memory", "graph_memory.py", passes="device gpu_id empty_cache"),
    # Slots
    Name("sglang.srt.mem_cache.allocation_sizing:get_req_to_token_extra_context_len", "hooks.py", signature=""),
    Name("sglang.srt.mem_cache.allocation_sizing:get_alloc_page_size", "hooks.py", signature=""),
    Name("sglang.srt.mem_cache.allocation_sizing:get_alloc_len_per_decode", "hooks.py", signature=""),
    # States of hybrid targets
    Name(
        "sglang.srt.mem_cache.kv_cache_configurator:KVCacheConfigurator._handle_max_mamba_cache",
        "hooks.py state_check.py",
        signature="self total_rest_memory",
        attributes="mambaish_config hybrid_gdn_config attn_dp_size _calculate_mamba_ratio",
    ),
    Name(
        "sglang.srt.mem_cache.kv_cache_configurator:_pd_prefill_skips_mamba_spec_state",
        "state_check.py",
        signature="",
    ),
    Name(
        "sglang.srt.configs.mamba_utils:Mamba2StateShape",
        "state_check.py state_deltas.py",
        attributes="temporal num_k_heads_per_tp",
    ),
    Name(
        "sglang.srt.mem_cache.memory_pool:MambaPool.__init__",
        "hooks.py state_deltas.py",
        signature="self size spec_state_size cache_params mamba_layer_ids device enable_memory_saver "
        "speculative_num_draft_tokens speculative_eagle_topk enable_linear_replayssm linear_replayssm_cache_len "
        "envelope_layout enable_linear_replayssm_spec",
        attributes="mamba_cache mem_usage memory_saver_adapter _intermediate_conv_window_phys",
    ),
    Name(
        "sglang.srt.mem_cache.memory_pool:MambaPool.SpeculativeState",
        "state_deltas.py",
        passes="intermediate_ssm intermediate_conv_window",
    ),
    Name("sglang.srt.mem_cache.memory_pool:MambaPool.State", "state_deltas.py", passes="conv temporal"),
    Name("sglang.srt.constants:GPU_MEMORY_TYPE_KV_CACHE", "state_deltas.py"),
    Name("sglang.srt.layers.attention.linear.utils:pp_spec_stable_rows_enabled", "algorithm.py", signature=""),
    Name(
        "sglang.srt.layers.attention.linear.kernels.gdn_triton:TritonGDNKernel.target_verify",
        "hooks.py state_deltas.py gpu/states.py",
        signature="self A_log dt_bias q k v a b ssm_states cache_indices query_start_loc intermediate_states_buffer "
        "intermediate_state_indices cache_steps retrieve_parent_token kwargs",
    ),
    Name(
        "sglang.kernels.ops.mamba.mamba_state_scatter_triton:scatter_mamba_states_after_mtp_verify",
        "hooks.py state_deltas.py gpu/states.py",
        signature="mamba_caches state_indices_tensor last_correct_step_indices mamba_track_indices "
        "mamba_steps_to_track src_indices_raw",
    ),
    Name("sglang.srt.runtime_context:get_memory", "state_check.py", signature=""),
    Name("sglang.srt.runtime_context:get_schedule", "state_check.py", signature=""),
    # Requests
    Name(
        "sglang.srt.managers.schedule_batch:Req.update_finish_state",
        "hooks.py",
        signature="self new_accepted_len",
        attributes="output_ids grammar finished",
    ),
    Name("sglang.srt.managers.schedule_batch:Req.extend_image_inputs", "hooks.py", signature="self image_inputs"),
    Name("sglang.srt.managers.schedule_batch:Req.set_finish_with_abort", "hooks.py", passes="error_msg"),
    Name(
        _KERNELS + ".cache_locs:assign_extend_cache_locs_uniform_func",
        "worker.py",
        passes="req_pool_indices req_to_token start_offset batch_size draft_token_num device positions_out anchor_src "
        "anchor_out",
    ),
    # Sampling
    Name("sglang.srt.speculative.dflash_utils:validate_dflash_request", "hooks.py", signature="req enable_overlap"),
    Name(
        "sglang.srt.runtime_context:get_exec",
        "attention/flashinfer_backend.py graph_memory.py hooks.py",
        signature="",
    ),
    Name("sglang.srt.environ:Envs.SGLANG_DFLASH_EAGER_DRAFT_SAMPLER", "folding.py"),
    Name(
        "sglang.srt.model_executor.model_runner:ModelRunnerOutput",
        "worker.py",
        attributes="logits_output can_run_graph",
    ),
    Name("sglang.srt.sampling.sampling_batch_info:ProcessorEntry", "sampling.py", attributes="processor indices"),
    Name(
        "sglang.srt.layers.sampler:Sampler._sample_from_probs",
        "hooks.py",
        signature="self probs sampling_info positions simple_sampling_case",
    ),
    Name("sglang.srt.layers.sampler:sampling_from_probs_torch", "hooks.py", signature="probs sampling_seed positions"),
    Name("sglang.srt.sampling.sampling_params:TOP_K_ALL", "hooks.py"),
    Name(
        "sglang.srt.speculative.spec_sampling_mask:validate_spec_sampling_mask_request",
        "hooks.py",
        signature="req spec_algorithm",
    ),
    Name(
        "sglang.srt.layers.sampler:Sampler.forward",
        "sampling.py",
        passes="logits_output sampling_info return_logprob top_logprobs_nums token_ids_logprobs positions",
    ),
    Name(
        "sglang.srt.layers.sampler:apply_custom_logit_processor",
        "sampling.py",
        signature="logits sampling_batch_info num_tokens_in_batch",
    ),
    Name("sglang.srt.layers.logits_processor:LogitsProcessorOutput", "sampling.py", passes="next_token_logits"),
    Name(
        "sglang.srt.runtime_context:get_parallel",
        "attention/flashinfer_backend.py graph_memory.py metrics.py sampling.py",
        signature="",
    ),
    Name("sglang.srt.runtime_context:get_observability", "metrics.py", signature=""),
    Name("sglang.srt.runtime_context:get_serving", "metrics.py", signature=""),
    Name("sglang.srt.sampling.custom_logit_processor:DisallowedTokensLogitsProcessor", "sampling.py"),
    Name(
        "sglang.srt.sampling.sampling_batch_info:SamplingBatchInfo",
        "sampling.py penalties.py",
        passes="temperatures top_ps top_ks min_ps sampling_seed has_custom_logit_processor grammars "
        "sampling_mask_batch_indices acc_additive_penalties acc_scaling_penalties logit_bias custom_logit_processor",
    ),
    Name("sglang.srt.utils.async_probe:sanitize_nan_logits", "sampling.py", signature="logits msg"),
    Name(
        _KERNELS + ".spec_tree:verify_tree_greedy_func",
        "hooks.py sampling.py cpu/ops.py",
        signature="predicts accept_index accept_token_num candidates retrieve_index retrieve_next_token "
        "retrieve_next_sibling target_predict topk",
    ),
    # CPU platform: what it overrides and replaces
    Name(_CPU_PLATFORM + ".apply_server_args_defaults", "cpu/platform.py", signature="self server_args"),
    Name(_CPU_PLATFORM + ".get_default_attention_backend", "cpu/platform.py", signature="self"),
    Name(
        _CPU_PLATFORM + ".get_default_speculative_draft_attention_backend",
        "cpu/platform.py",
        signature="self algorithm",
    ),
    Name(_CPU_PLATFORM + ".supports_speculative_algorithm", "cpu/platform.py", signature="self algorithm"),
    Name(
        _CPU_PLATFORM + ".supports_speculative_draft_attention_backend",
        "cpu/platform.py",
        signature="self algorithm backend",
    ),
    Name(_CPU_PLATFORM + ".get_speculative_cache_locs_fn", "cpu/platform.py", signature="self"),
    Name(_CPU_PLATFORM + ".get_kv_pool_cls", "cpu/platform.py", signature="self kind"),
    Name(_CPU_PLATFORM + ".get_dispatch_key_name", "cpu/platform.py", signature="self"),
    Name(_CPU_PLATFORM + ".init_backend", "cpu/platform.py", signature="self"),
    Name(_CPU_PLATFORM + ".post_load_model", "cpu/platform.py", signature="self model"),
    Name("sglang.srt.platforms.device_mixin:PlatformEnum.OOT", "cpu/platform.py"),
    Name(
        "sglang.srt.platforms.interface:PlatformCapabilities",
        "cpu/platform.py",
        passes="supports_triton graph_capture",
    ),
    Name("sglang.srt.arg_groups.choices:DRAFT_ATTENTION_BACKEND_CHOICES", "cpu/setup.py"),
    Name("sglang.srt.arg_groups.choices:add_draft_attention_backend_choices", "cpu/setup.py", signature="iterable"),
    Name("sglang.srt.arg_groups.choices:DETERMINISTIC_ATTENTION_BACKEND_CHOICES", "cpu/setup.py"),
    Name(
        "sglang.srt.arg_groups.choices:add_deterministic_attention_backend_choices",
        "cpu/setup.py",
        signature="iterable",
    ),
    Name("sglang.srt.layers.attention.attention_registry:register_attention_backend", "cpu/setup.py", signature="name"),
    Name("sglang.srt.mem_cache.memory_pool:MHATokenToKVPool._init_kv_copy_and_warmup", "cpu/kv_pool.py"),
    Name(
        "sglang.srt.mem_cache.memory_pool:MHATokenToKVPool._move_kv_cache_impl",
        "cpu/kv_pool.py",
        signature="self tgt_loc src_loc",
        attributes="k_buffer v_buffer _kv_copy_config",
    ),
    Name(
        _KERNELS + ".cache_locs:fill_front_out_cache_loc_func",
        "hooks.py cpu/ops.py",
        signature="num_front out_cache_loc front_out_cache_loc",
    ),
    Name(
        _KERNELS + ".eagle:fill_accept_out_cache_loc_func",
        "hooks.py cpu/ops.py",
        signature="accept_index out_cache_loc accept_out_cache_loc size",
    ),
    Name(
        _KERNELS + ".eagle:fill_bonus_tokens_func",
        "hooks.py cpu/ops.py",
        signature="accept_tokens accept_lens bonus_tokens accept_stride batch_size",
    ),
    Name(
        "sglang.kernels.ops.sampling.murmur_hash:murmur_hash32",
        "hooks.py cpu/ops.py",
        signature="seed positions col_indices",
    ),
    Name(
        "sglang.srt.mem_cache.allocation:assign_req_to_token_pool_func",
        "hooks.py cpu/ops.py",
        signature="req_pool_indices req_to_token start_offset end_offset out_cache_loc batch_size",
    ),
    Name(
        "sglang.srt.model_executor.model_runner:ModelRunner._extend_forward_kwargs",
        "hooks.py",
        signature="self forward_batch pp_proxy_tensors",
        attributes="dtype",
    ),
    Name(
        "sglang.srt.model_executor.model_runner:ModelRunner.maybe_enable_batch_invariant_mode",
        "hooks.py",
        signature="self",
        attributes="device",
    ),
    Name(
        "sglang.srt.models.dflash:DFlashAttention.__init__",
        "hooks.py",
        signature="self config layer_id quant_config prefix",
        attributes="use_table_qk_norm_rope",
    ),
    Name(
        _DFLASH + ":DFlashWorkerV2._greedy_sample_from_vocab_parallel_head",
        "hooks.py",
        signature="self hidden_states lm_head chunk_size",
    ),
    Name(
        _DFLASH + ":DFlashWorkerV2._greedy_sample_from_quantized_head",
        "hooks.py",
        passes="hidden_states lm_head chunk_size",
    ),
    # CPU platform: layers and attention
    Name(
        "sglang.kernels.fused_op:BaseFusedOp.register_oot_forward",
        "cpu/layers.py",
        signature="op_cls fn platform_key",
    ),
    Name(
        "sglang.srt.layers.layernorm:RMSNorm.forward_native",
        "cpu/layers.py",
        signature="self x residual post_residual_addition quant_linear",
        attributes="cast_x_before_out_mul fp32_residual hidden_size override_orig_dtype variance_epsilon "
        "variance_size_override weight",
    ),
    Name(
        "sglang.srt.layers.rotary_embedding.base:RotaryEmbedding.forward_native",
        "cpu/layers.py",
        signature="self positions query key offsets fused_set_kv_buffer_arg",
        attributes="head_size is_neox_style rotary_dim cos_sin_cache",
    ),
    Name("sglang.srt.layers.linear:LinearBase", "cpu/linear.py"),
    Name("sglang.srt.layers.vocab_parallel_embedding:VocabParallelEmbedding", "cpu/linear.py"),
    Name(_UNQUANT + ":UnquantizedLinearMethod.apply", "cpu/linear.py", signature="self layer x bias"),
    Name(_UNQUANT + ":UnquantizedEmbeddingMethod.apply", "cpu/linear.py", signature="self layer x bias"),
    Name(
        _TORCH_ATTENTION,
        "attention/torch_tree.py",
        signature="model_runner",
        attributes="device req_to_token_pool token_to_kv_pool swa_out_cache_loc",
    ),
    Name(_TORCH_ATTENTION + ".init_forward_metadata", "attention/torch_tree.py", signature="self forward_batch"),
    Name(
        _TORCH_ATTENTION + ".forward_extend",
        "attention/torch_tree.py",
        signature="self q k v layer forward_batch save_kv_cache",
    ),
    Name(
        _TORCH_ATTENTION + ".forward_decode",
        "attention/torch_tree.py",
        signature="self q k v layer forward_batch save_kv_cache",
    ),
    Name(_TORCH_ATTENTION + ".verify_mask", "attention/torch_tree.py"),
    Name(
        "sglang.srt.layers.attention.verify_mask:VerifyMask",
        "attention/torch_tree.py attention/flashinfer_backend.py",
        passes="buffer mode max_bs",
    ),
    Name(
        "sglang.srt.layers.radix_attention:RadixAttention",
        "attention/torch_tree.py attention/flashinfer_choice.py attention/flashinfer_backend.py",
        attributes="attn_type is_cross_attention layer_id logit_cap qk_head_dim scaling sliding_window_size "
        "tp_k_head_num tp_q_head_num v_head_dim",
    ),
    Name("sglang.srt.layers.radix_attention:AttentionType.ENCODER_ONLY", "attention/torch_tree.py"),
    Name(
        "sglang.srt.mem_cache.memory_pool:KVWriteLoc",
        "attention/torch_tree.py",
        signature="loc swa_loc full_loc physical",
    ),
)


#: Names that scripts for measuring use, and no server: a server starts without them.
TOOLS: tuple[Name, ...] = (
    Name(
        _KERNELS + ".uno_tree:_build_tree_kernel",
        "gpu/uno.py",
    ),
)


def problems() -> list[str]:
    """Why DDTREE cannot run with the installed SGLang, from its version alone; cheap enough for every process."""
    try:
        version = importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        return [NOT_INSTALLED]
    # 0.5.23+cu130 is 0.5.23 built for another CUDA; 0.5.23.post1 and 0.5.23.dev5 are other code.
    if version.split("+")[0] != SUPPORTED:
        return [f"SGLang {version} is installed, and this version of sglang-ddtree needs {SUPPORTED}: {ADVICE}"]
    return []


def contract_problems() -> list[str]:
    """``problems()`` and every name of ``CONTRACT`` that is missing or different; imports SGLang's model runner."""
    found = problems()
    if found:
        return found
    for name in CONTRACT:
        problem = check_name(name)
        if problem is not None:
            found.append(f"{name.path} {problem} (needed by {name.used_by})")
    return found


def require_contract() -> None:
    """Raises DDTreeError with the first problem, and how many more there are."""
    found = contract_problems()
    if found:
        more = f" (and {len(found) - 1} more: see sglang-ddtree doctor)" if len(found) > 1 else ""
        raise DDTreeError(f"DDTREE cannot run with this SGLang: {found[0]}{more}.")


def check_name(name: Name) -> str | None:
    """What is wrong with one name, or None."""
    module_name, _, attribute = name.path.partition(":")
    try:
        value: Any = importlib.import_module(module_name)
    except Exception as error:
        return f"cannot be imported: {type(error).__name__}: {error}"
    owner = value
    for part in attribute.split("."):
        try:
            owner, value = value, getattr(value, part)
        except AttributeError:
            return f"is missing: SGLang has no {part} there"
    problem = _check_parameters(value, name.passes.split(), name.signature)
    if problem is not None:
        return problem
    return _check_attributes(value if inspect.isclass(value) else owner, name.attributes.split())


def _check_parameters(value: Any, passes: list[str], signature: str | None) -> str | None:
    if not passes and signature is None:
        return None
    try:
        parameters = inspect.signature(value).parameters
    except (TypeError, ValueError):
        return "is not callable"
    names = " ".join(parameters)
    if signature is not None and names != signature:
        return f"has parameters ({names}), expected ({signature})"
    missing = [parameter for parameter in passes if parameter not in parameters]
    return f"does not accept {', '.join(missing)}" if missing else None


def _check_attributes(cls: type, attributes: list[str]) -> str | None:
    wanted = [name for name in attributes if not hasattr(cls, name) and name not in _annotations(cls)]
    if not wanted:
        return None
    sources = (inspect.getsource(base) for base in cls.__mro__ if base.__module__.split(".")[0] == "sglang")
    source = "\n".join(sources)
    missing = [name for name in wanted if not re.search(rf"(?m)^\s*self\.{name}\s*(:[^=\n]+)?=(?!=)", source)]
    return f"does not set {', '.join(missing)}" if missing else None


def _annotations(cls: type) -> set[str]:
    return {name for base in cls.__mro__ for name in inspect.get_annotations(base)}
