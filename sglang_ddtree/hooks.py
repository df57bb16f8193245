"""Every hook into SGLang, in one table, with the reason and what breaks without it.

Four groups, registered only where they are needed (see ``plugin.py``): the command-line flag in every process; the
engine's in the workers of a DDTREE server; those of deltas there too, where they were asked for; the CPU platform's
where that platform was selected. Each engine hook passes through to SGLang unless the server runs DDTREE.
"""

from __future__ import annotations

import argparse
import os
import pkgutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from sglang_ddtree.config import BUDGET_ENV, BUDGET_FLAG, DEFAULT_BUDGET, DEFAULT_BUDGET_CPU, MAX_BUDGET, DDTreeConfig
from sglang_ddtree.errors import DDTreeError
from sglang_ddtree.patching.installed import ROW_WIDTH, WITHOUT_TRITON, is_applied


@dataclass(frozen=True)
class Hook:
    """One entry for SGLang's HookRegistry.

    Attributes:
        target: dotted path of the SGLang function.
        function: called as ``function(original, *args, **kwargs)`` for AROUND, in place of it for REPLACE.
        kind: "around" or "replace".
        reason: why it is needed and what happens without it.
        patch: the patch of ours that makes it unneeded, if there is one; where that is in SGLang, the hook stays away.
    """

    target: str
    function: Callable[..., Any]
    kind: str
    reason: str
    patch: str = ""


def register(*groups: Sequence[Hook]) -> None:
    """Hand the hooks of some groups to SGLang; it applies them when all plugins have run."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for hook in needed(*groups):
        HookRegistry.register(hook.target, hook.function, HookType(hook.kind))


def needed(*groups: Sequence[Hook]) -> list[Hook]:
    """The hooks of some groups without those that a patch in this SGLang makes unneeded. One that stands in two groups
    comes once, since SGLang warns of a function that is wrapped twice."""
    hooks = {(hook.target, hook.function): hook for group in groups for hook in group}
    return [hook for hook in hooks.values() if not (hook.patch and is_applied(hook.patch))]


def missing(*groups: Sequence[Hook]) -> list[str]:
    """Targets of the needed hooks of some groups that are not in place in this process."""
    return [hook.target for hook in needed(*groups) if hook.function not in _functions_around(hook.target)]


def require_applied(*groups: Sequence[Hook]) -> None:
    """Raises DDTreeError when a hook is not in place: SGLang logs that and goes on, and the answers could be wrong."""
    if targets := missing(*groups):
        raise DDTreeError(
            f"DDTREE cannot run: SGLang has not applied the hooks on {', '.join(targets)} (its log says why, above): "
            "see sglang-ddtree doctor"
        )


def _functions_around(target: str) -> list[Any]:
    """The functions that SGLang's registry has put around a target: what its wrappers close over."""
    try:
        function = pkgutil.resolve_name(target)
    except (ImportError, AttributeError):
        return []
    found: list[Any] = []
    while function is not None:
        function = getattr(function, "__func__", function)
        found += [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
        function = getattr(function, "__wrapped__", None)
    return found


def _ddtree_is_running() -> bool:
    from sglang.srt.runtime_context import get_spec

    # SGLang keeps the name as it was typed.
    return (get_spec().speculative_algorithm or "").upper() == "DDTREE"


# --- command line ---


class _StoreBudget(argparse.Action):
    """Keep the flag's text where SGLang's worker processes find it; ``handle_server_args`` checks it."""

    def __call__(self, parser, namespace, values, option_string=None):  # type: ignore[no-untyped-def]
        os.environ[BUDGET_ENV] = str(values)


def _add_budget_flag(original: Callable[..., Any], parser: argparse.ArgumentParser, *args: Any, **kwargs: Any) -> Any:
    result = original(parser, *args, **kwargs)
    if BUDGET_FLAG not in parser._option_string_actions:
        parser.add_argument(
            BUDGET_FLAG,
            action=_StoreBudget,
            default=argparse.SUPPRESS,
            metavar="N",
            help=f"DDTREE: tree nodes below the root that the target verifies in one step (1 to {MAX_BUDGET}; default "
            f"{DEFAULT_BUDGET}, on a CPU {DEFAULT_BUDGET_CPU}). Also {BUDGET_ENV}.",
        )
    return result


COMMAND_LINE = (
    Hook(
        "sglang.srt.server_args.ServerArgs.add_cli_args",
        _add_budget_flag,
        "around",
        f"adds {BUDGET_FLAG}; registered algorithms have no channel for flags of their own",
    ),
)


# --- engine ---


def _row_headroom(original: Callable[..., int], *args: Any, **kwargs: Any) -> int:
    from sglang.srt.mem_cache.allocation_sizing import get_alloc_page_size
    from sglang.srt.runtime_context import get_spec

    extra = original(*args, **kwargs)
    spec = get_spec()
    if spec.speculative_algorithm == "DDTREE":
        window = DDTreeConfig.from_spec(spec).window
    elif spec.speculative_algorithm == "DFLASH":
        window = int(spec.speculative_num_draft_tokens)
    else:
        return extra
    # prepare_for_decode reserves up to two windows past the committed length, rounded up to a page.
    return max(extra, 2 * window + get_alloc_page_size() - 1)


def _slots_per_step(original: Callable[..., int], *args: Any, **kwargs: Any) -> int:
    if not _ddtree_is_running():
        return original(*args, **kwargs)
    from sglang.srt.runtime_context import get_spec

    return DDTreeConfig.from_spec(get_spec()).window


def finish_token_by_token(original: Callable[..., None], req: Any, new_accepted_len: int = 1) -> None:
    """End a request at the first of a step's tokens that ends it, as plain decoding would.

    All tokens stay in ``output_ids``, because their keys and values are committed; ``finished_len`` cuts the answer.
    """
    # A grammar's state is already that of the whole run, and SGLang has cut the run where the grammar ended.
    if new_accepted_len <= 1 or req.grammar is not None:
        return original(req, new_accepted_len)
    output = req.output_ids
    later = output[len(output) - new_accepted_len + 1 :]
    del output[len(output) - new_accepted_len + 1 :]
    original(req, 1)
    while later and not req.finished():
        output.append(later.pop(0))
        original(req, 1)
    output.extend(later)


def _unsupported_request(original: Callable[..., str | None], req: Any, *args: Any, **kwargs: Any) -> str | None:
    if not _ddtree_is_running():
        return original(req, *args, **kwargs)
    from sglang.srt.runtime_context import get_exec

    if req.return_hidden_states:
        return "return_hidden_states is not supported with DDTREE: a verify pass computes the states of drafts too."
    if req.sampling_params.min_p > 0 and get_exec().deterministic.enable_deterministic_inference:
        # SGLang runs a refused request's prefill all the same, and would end there.
        req.sampling_params.min_p = 0.0
        return "min_p cannot be used with --enable-deterministic-inference: SGLang has no seeded draw for it."
    return None


def _refuse_media(original: Callable[..., None], req: Any, *args: Any, **kwargs: Any) -> None:
    # First SGLang's own, so that the request owns what its abort releases.
    original(req, *args, **kwargs)
    if _ddtree_is_running():
        req.set_finish_with_abort("images, audio and video are not supported with DDTREE: leave them out.")


def _sampling_mask_support(original: Callable[..., str | None], *args: Any, **kwargs: Any) -> str | None:
    if not _ddtree_is_running():
        return original(*args, **kwargs)
    return "return_sampling_mask is not supported with DDTREE; leave it out, or use DFLASH."


def _seeded_draws_alone(
    original: Callable[..., Any],
    sampler: Any,
    probs: Any,
    sampling_info: Any,
    positions: Any,
    simple_sampling_case: bool,
    *args: Any,
    **kwargs: Any,
) -> Any:
    seed = sampling_info.sampling_seed
    if simple_sampling_case or seed is None or not _ddtree_is_running():
        return original(sampler, probs, sampling_info, positions, simple_sampling_case, *args, **kwargs)
    import torch
    from sglang.srt.layers.sampler import sampling_from_probs_torch
    from sglang.srt.sampling.sampling_params import TOP_K_ALL

    free = (sampling_info.top_ks >= TOP_K_ALL) & (sampling_info.top_ps >= 1.0)
    alone = sampling_from_probs_torch(probs, sampling_seed=seed, positions=positions)
    drawn, *rest = original(sampler, probs, sampling_info, positions, simple_sampling_case, *args, **kwargs)
    return (torch.where(free, alone.to(drawn.dtype), drawn), *rest)


def _dummy_verify_input(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if not _ddtree_is_running():
        return original(*args, **kwargs)
    from sglang_ddtree.graphs import dummy_verify_input

    return dummy_verify_input(original, *args, **kwargs)


def _graph_runner_class(original: Callable[..., type], model_runner: Any, *args: Any, **kwargs: Any) -> type:
    runner_class = original(model_runner, *args, **kwargs)
    if not _ddtree_is_running() or model_runner.is_draft_worker:
        return runner_class
    from sglang_ddtree.graphs import tree_graph_runner_class

    return tree_graph_runner_class(runner_class)


def _verify_attention(original: Callable[..., Any], *, model_runner: Any, backend_str: str, **kwargs: Any) -> Any:
    def stock() -> Any:
        return original(model_runner=model_runner, backend_str=backend_str, **kwargs)

    if backend_str != "flashinfer" or model_runner.is_draft_worker or not _ddtree_is_running():
        return stock()
    from sglang.srt.runtime_context import get_spec

    # Of a split pair the prefill backend verifies, unless the user says decode.
    half = "decode" if get_spec().speculative_attention_mode == "decode" else "prefill"
    if getattr(model_runner, f"{half}_attention_backend_str") != backend_str:
        return stock()
    from sglang_ddtree.attention.flashinfer_backend import build_verifier

    return build_verifier(stock, model_runner, **kwargs)


def _state_memory(original: Callable[..., float], configurator: Any, *args: Any, **kwargs: Any) -> float:
    if not _ddtree_is_running():
        return original(configurator, *args, **kwargs)
    from sglang_ddtree.state_check import size_states

    return size_states(original, configurator, *args, **kwargs)


def _sample(original: Callable[..., Any], verify_input: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
    from sglang_ddtree.verify import DDTreeVerifyInput

    if not isinstance(verify_input, DDTreeVerifyInput) or batch.forward_mode.is_idle():
        return original(verify_input, batch, *args, **kwargs)
    from sglang_ddtree.penalties import has_penalties

    info = batch.sampling_info
    # SGLang's own runs no custom logit processors and relaxes penalties, for greedy requests too.
    if info.is_all_greedy and not info.has_custom_logit_processor and not has_penalties(info):
        return original(verify_input, batch, *args, **kwargs)
    return verify_input.sample(batch, *args, **kwargs)


ENGINE = (
    Hook(
        "sglang.srt.mem_cache.allocation_sizing.get_req_to_token_extra_context_len",
        _row_headroom,
        "around",
        "a request's row of the slot table is shorter than what a step reserves near the context limit; without it "
        "SGLang writes into the next request's row",
        patch=ROW_WIDTH,
    ),
    Hook(
        "sglang.srt.mem_cache.allocation_sizing.get_alloc_len_per_decode",
        _slots_per_step,
        "around",
        "SGLang foresees max(depth * top-k, Q) slots for a step; where the draft block is wider, a full pool ends in "
        "an allocation error instead of a retracted request, and where it is narrower, requests are retracted early",
    ),
    Hook(
        "sglang.srt.managers.schedule_batch.Req.update_finish_state",
        finish_token_by_token,
        "around",
        "SGLang looks for stop strings in all of a step's tokens first, so one behind the end of sequence, a stop "
        "token or another stop string would win, and the answer would differ from plain decoding",
    ),
    Hook(
        "sglang.srt.speculative.dflash_utils.validate_dflash_request",
        _unsupported_request,
        "around",
        "a request with min_p ends a server with deterministic inference, as it does in plain SGLang; it gets an error "
        "instead",
    ),
    Hook(
        "sglang.srt.managers.schedule_batch.Req.extend_image_inputs",
        _refuse_media,
        "around",
        "media have positions of their own, and trees over them have not been shown to be right; such a request gets "
        "an error instead of an unchecked answer",
    ),
    Hook(
        "sglang.srt.layers.sampler.Sampler._sample_from_probs",
        _seeded_draws_alone,
        "around",
        "the seeded draw of a request without filters depends on whether another request of the batch has some (a "
        "greedy one has): SGLang then numbers the tokens by rank; with it every request draws as it does alone",
    ),
    Hook(
        "sglang.srt.speculative.spec_sampling_mask.validate_spec_sampling_mask_request",
        _sampling_mask_support,
        "around",
        "SGLang takes DDTREE for DFLASH here and accepts the request, whose answer would then lack the mask",
    ),
    Hook(
        "sglang.srt.speculative.spec_info.create_dummy_verify_input",
        _dummy_verify_input,
        "around",
        "warm-up and autotune runs would verify a chain, and hybrid models read tree links that it does not have",
    ),
    Hook(
        "sglang.srt.model_executor.model_runner.ModelRunner._decode_cuda_graph_runner_cls",
        _graph_runner_class,
        "around",
        "the verify graph would be captured without a mask, and replay would raise or ignore the tree",
    ),
    Hook(
        "sglang.srt.model_executor.model_runner_components.attention_backend_setup."
        "_build_full_attention_backend_from_str",
        _verify_attention,
        "around",
        "FlashInfer verifies trees by a mask that is as long as the context, packs it anew each step, and counts it in "
        "int32 without a check; with it the kernel reads the tree's bits where that can be, and a server whose mask "
        "could be too large does not start",
    ),
    Hook(
        "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator._handle_max_mamba_cache",
        _state_memory,
        "around",
        "a hybrid target keeps a recurrent state for every node of the tree: says at start what that takes, and which "
        "budget would fit; without it SGLang quietly runs fewer requests, or ends in an error that names no budget",
    ),
    Hook(
        "sglang.srt.speculative.eagle_utils.eagle_sample",
        _sample,
        "around",
        "sampled requests draw at every node with SGLang's own sampler (all parameters, exact seeds); without it they "
        "are sampled by EAGLE's kernel, which ignores min_p and exists on CUDA only, and penalties are relaxed: one "
        "state for all nodes, and only a step's last token is counted",
    ),
)


# --- deltas instead of states, SGLANG_DDTREE_STATES=deltas ---


def _pool_of_deltas(original: Callable[..., None], pool: Any, **kwargs: Any) -> None:
    if not _ddtree_is_running():
        return original(pool, **kwargs)
    from sglang_ddtree.state_deltas import make_pool

    return make_pool(original, pool, **kwargs)


def _verify_with_deltas(original: Callable[..., Any], kernel: Any, **kwargs: Any) -> Any:
    from sglang_ddtree.state_deltas import verify

    return verify(original, kernel, **kwargs)


def _commit_deltas(original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    from sglang_ddtree.state_deltas import commit

    commit(original, *args, **kwargs)


STATES = (
    Hook(
        "sglang.srt.mem_cache.memory_pool.MambaPool.__init__",
        _pool_of_deltas,
        "around",
        "the pool has a recurrent state for every node of the tree; with it there are the node's key, update and decay "
        "in their place",
    ),
    Hook(
        "sglang.srt.layers.attention.linear.kernels.gdn_triton.TritonGDNKernel.target_verify",
        _verify_with_deltas,
        "around",
        "SGLang's kernel writes a state for each node, which there is no room for; this one computes the same outputs "
        "from the state before the root",
    ),
    Hook(
        "sglang.kernels.ops.mamba.mamba_state_scatter_triton.scatter_mamba_states_after_mtp_verify",
        _commit_deltas,
        "around",
        "SGLang copies the accepted node's state, and there is none; with it that state is folded from the accepted "
        "path, and SGLang copies the convolution windows",
    ),
)


# --- CPU platform ---


def _keep_embedding_dtype(
    original: Callable[..., dict[str, Any]], model_runner: Any, forward_batch: Any, *args: Any, **kwargs: Any
) -> dict[str, Any]:
    result = original(model_runner, forward_batch, *args, **kwargs)
    if forward_batch.input_embeds is not None:
        result["input_embeds"] = forward_batch.input_embeds.to(model_runner.dtype)
    return result


def _no_batch_invariant_kernels(original: Callable[..., None], model_runner: Any, *args: Any, **kwargs: Any) -> None:
    if model_runner.device != "cpu":
        original(model_runner, *args, **kwargs)


def _draft_attention_init(original: Callable[..., None], module: Any, *args: Any, **kwargs: Any) -> None:
    original(module, *args, **kwargs)
    module.use_table_qk_norm_rope = False


def _greedy_draft_head(
    original: Callable[..., Any], worker: Any, *, hidden_states: Any, lm_head: Any, **kwargs: Any
) -> Any:
    from sglang_ddtree.cpu.linear import PackedHeadMethod

    if isinstance(getattr(lm_head, "quant_method", None), PackedHeadMethod):
        return worker._greedy_sample_from_quantized_head(
            hidden_states=hidden_states, lm_head=lm_head, chunk_size=kwargs.get("chunk_size", 256)
        )
    return original(worker, hidden_states=hidden_states, lm_head=lm_head, **kwargs)


def _cpu_op(name: str) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        from sglang_ddtree.cpu import ops

        return getattr(ops, name)(*args, **kwargs)

    call.__name__ = name
    return call


_TRITON_ONLY = "a Triton or CUDA kernel in SGLang; this is the same operation in torch"

CPU = (
    Hook(
        "sglang.srt.mem_cache.allocation_sizing.get_req_to_token_extra_context_len",
        _row_headroom,
        "around",
        "stock DFLASH has the same short rows, and this platform's slot writer raises where SGLang's kernel writes "
        "into the next row: a request that reaches the context limit would end the server",
        patch=ROW_WIDTH,
    ),
    Hook(
        "sglang.srt.mem_cache.allocation.assign_req_to_token_pool_func",
        _cpu_op("assign_req_to_token_pool_func"),
        "replace",
        _TRITON_ONLY,
        patch=WITHOUT_TRITON,
    ),
    Hook(
        "sglang.kernels.ops.speculative.cache_locs.fill_front_out_cache_loc_func",
        _cpu_op("fill_front_out_cache_loc_func"),
        "replace",
        _TRITON_ONLY,
    ),
    Hook(
        "sglang.kernels.ops.speculative.eagle.fill_accept_out_cache_loc_func",
        _cpu_op("fill_accept_out_cache_loc_func"),
        "replace",
        _TRITON_ONLY,
    ),
    Hook(
        "sglang.kernels.ops.speculative.eagle.fill_bonus_tokens_func",
        _cpu_op("fill_bonus_tokens_func"),
        "replace",
        _TRITON_ONLY,
    ),
    Hook(
        "sglang.kernels.ops.speculative.spec_tree.verify_tree_greedy_func",
        _cpu_op("verify_tree_greedy_func"),
        "replace",
        _TRITON_ONLY,
    ),
    Hook(
        "sglang.kernels.ops.sampling.murmur_hash.murmur_hash32",
        _cpu_op("murmur_hash32"),
        "replace",
        "draws with a seed; on a CPU SGLang calls an operator of its own CPU build, which PyPI does not carry",
    ),
    Hook(
        "sglang.srt.model_executor.model_runner.ModelRunner._extend_forward_kwargs",
        _keep_embedding_dtype,
        "around",
        "SGLang casts the draft block's embeddings to bf16, which fails in an fp32 model",
        patch=WITHOUT_TRITON,
    ),
    Hook(
        "sglang.srt.model_executor.model_runner.ModelRunner.maybe_enable_batch_invariant_mode",
        _no_batch_invariant_kernels,
        "around",
        "--enable-deterministic-inference, which seeded draws need, would end in an error: its kernels are for GPUs",
    ),
    Hook(
        "sglang.srt.models.dflash.DFlashAttention.__init__",
        _draft_attention_init,
        "around",
        "the fused norm and rotation of a bf16 drafter is a Triton kernel; off, SGLang runs its torch version",
        patch=WITHOUT_TRITON,
    ),
    Hook(
        "sglang.srt.speculative.dflash_worker_v2.DFlashWorkerV2._greedy_sample_from_vocab_parallel_head",
        _greedy_draft_head,
        "around",
        "lets stock DFLASH use the packed LM head too, so that both are compared on the same product",
    ),
)
