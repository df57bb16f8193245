"""``DDTREE`` as SGLang sees it: the predicates that its branches ask, and the start-up checks of the arguments."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.arg_groups.overrides import resolving_view
from sglang.srt.speculative.spec_registry import CustomSpecAlgo

from sglang_ddtree import config as settings
from sglang_ddtree import state_form
from sglang_ddtree.attention import flashinfer_choice
from sglang_ddtree.cpu.plugin import ATTENTION_BACKEND, is_selected
from sglang_ddtree.drafter.check import DrafterInfo, check_pair
from sglang_ddtree.drafter.files import read_config, resolve_model_dir
from sglang_ddtree.errors import DDTreeError
from sglang_ddtree.linear_attention import check_kernels
from sglang_ddtree.plugin import ACTIVE_ENV
from sglang_ddtree.target import check_target, is_hybrid, text_config

if TYPE_CHECKING:
    from sglang.srt.managers.overlap_utils import FutureMap

logger = logging.getLogger(__name__)

#: Attention backends whose target-verify pass reads a tree mask in SGLang 0.5.23; the others run the tree as a plain
#: causal chain, which gives wrong answers without any error.
TREE_BACKENDS = ("flashinfer", "triton", "fa3", "fa4")


class DDTreeAlgorithm(CustomSpecAlgo):
    """DFLASH's drafting with EAGLE's tree verification.

    ``is_dflash_family`` makes SGLang capture the target's hidden states for the drafter, size the draft KV pool and
    relay DFLASH's decode state; the verify pass itself is EAGLE's, which needs no predicate.
    """

    def is_dflash(self) -> bool:
        return True

    def is_dflash_family(self) -> bool:
        return True

    def supports_target_verify_for_draft(self) -> bool:
        return True

    def supports_prefill_shared_read_done(self) -> bool:
        return True

    def supports_grammar_overlap(self) -> bool:
        return True

    def has_draft_kv(self) -> bool:
        # The draft block is written into the verify window itself; EAGLE's page-aligned copies per branch do not exist.
        return False

    def get_num_tokens_per_req_for_target_verify(self, num_draft_tokens: int, is_draft_worker: bool) -> int:
        if not is_draft_worker:
            return num_draft_tokens
        from sglang.srt.runtime_context import get_spec

        return int(get_spec().speculative_dflash_block_size)

    # The enum has these and SGLang calls them, but its base class for registered algorithms lacks them in 0.5.23.

    def create_future_map(
        self,
        device: torch.device,
        req_to_token_pool: Any,
        needs_cpu_seq_lens: bool = True,
        needs_confidence_relay: bool = False,
    ) -> FutureMap:
        from sglang.srt.managers.overlap_utils import FutureMap

        return FutureMap(device, self, req_to_token_pool, needs_cpu_seq_lens, needs_confidence_relay)

    def need_topk(self) -> bool:
        return False

    def carries_draft_hidden_states(self) -> bool:
        return False

    def get_platform_worker_cls(self) -> type | None:
        return None

    def handle_server_args(self, server_args: Any) -> None:
        """Check and complete the server arguments; called before any model loads.

        ``server_args`` is SGLang's stand-in for a registered algorithm (``arg_groups/overrides.py``): reads see the
        resolved configuration and plain attribute writes are recorded.

        Raises:
            DDTreeError: one line naming what is wrong and what to do.
        """
        _refuse_unsupported(server_args)
        drafter = check_drafter(server_args)

        cpu = server_args.device == "cpu"
        target = read_config(resolve_model_dir(server_args.model_path, server_args.revision))
        check_target(target, cpu)
        if is_hybrid(text_config(target)) and is_selected():
            raise DDTreeError(
                "the CPU platform has no kernels for linear attention or state space layers: use a GPU, or a target "
                "without such layers."
            )
        check_kernels(server_args, text_config(target))
        default = settings.DEFAULT_BUDGET_CPU if cpu else settings.DEFAULT_BUDGET
        config = settings.DDTreeConfig(
            budget=settings.resolve_budget(server_args.speculative_num_draft_tokens, default),
            block_size=settings.resolve_block_size(server_args.speculative_dflash_block_size, drafter.block_size),
            top_k=settings.resolve_top_k(server_args.speculative_eagle_topk),
        )
        _require_track_interval(server_args, config.verify_width)
        _check_states(server_args, target, config.verify_width)
        for field, value in config.as_server_fields().items():
            setattr(server_args, field, value)
        if server_args.max_running_requests is None:
            # SGLang's own value for speculative decoding (_handle_dflash).
            server_args.max_running_requests = 48
            logger.warning("max_running_requests is 48 under speculative decoding; --max-running-requests changes it.")
        _resolve_attention_backends(server_args, cpu)
        flashinfer_choice.wanted()  # a wrong value is told now, not when the model is loaded
        os.environ[ACTIVE_ENV] = "1"
        logger.info(
            "DDTREE: budget %d (verify width %d), block size %d, top-k %d, depth %d",
            config.budget,
            config.verify_width,
            config.block_size,
            config.top_k,
            config.depth,
        )


def check_drafter(server_args: Any) -> DrafterInfo:
    """The drafter's settings, once it is known to fit the target.

    Raises:
        DDTreeError: no drafter given, none there, or one that does not fit.
    """
    if not server_args.speculative_draft_model_path:
        raise DDTreeError("DDTREE needs a DFlash drafter: give its directory with --speculative-draft-model-path DIR.")
    return _check_drafter_files(
        server_args.speculative_draft_model_path,
        # SGLang's own default, which it fills in only after check_drafter_first.
        server_args.speculative_draft_model_revision or "main",
        server_args.model_path,
        server_args.revision,
        server_args.json_model_override_args,
    )


@functools.cache
def _check_drafter_files(
    drafter: str, drafter_revision: str | None, target: str, target_revision: str | None, overrides: str
) -> DrafterInfo:
    # Cached, because it is asked before and after SGLang reads the drafter's config, and logs warnings.
    draft_dir = resolve_model_dir(drafter, drafter_revision, weights=True)
    return check_pair(draft_dir, resolve_model_dir(target, target_revision), overrides)


def check_drafter_first(server_args: Any, previous: Callable[[Any], None]) -> None:
    """Runs before SGLang's step of that name, which reads the drafter's config before it asks the algorithm.

    Without it a drafter that is not there ends in an error of transformers that names no flag. ``server_args`` holds
    what the user gave; the resolving view holds what SGLang has made of it so far.
    """
    args = resolving_view(server_args)
    if (args.speculative_algorithm or "").upper() == "DDTREE":
        _refuse_unsupported(server_args)
        check_drafter(args)
    previous(server_args)


def worker_class(server_args: Any) -> type:
    """SGLang's worker factory: imported late, because it pulls in the model runner."""
    from sglang_ddtree.worker import DDTreeWorker

    return DDTreeWorker


def _refuse_unsupported(args: Any) -> None:
    refused = (
        (args.pp_size != 1, "pipeline parallelism (--pp-size > 1)", "use --tp-size instead"),
        (
            # SGLang turns the flag into attn_dp_size before this is called.
            args.attn_dp_size != 1 or args.enable_dp_attention,
            "DP attention (--attn-dp-size, --enable-dp-attention)",
            "run one server per replica instead",
        ),
        (args.speculative_adaptive, "--speculative-adaptive", "drop it; DDTREE has a fixed budget"),
        (args.speculative_token_map, "--speculative-token-map", "drop it; the drafter uses the full vocabulary"),
        (
            args.speculative_use_rejection_sampling,
            "--speculative-use-rejection-sampling",
            "drop it; DDTREE samples the target at every node and is lossless without it",
        ),
        (args.enable_unified_memory, "--enable-unified-memory", "drop it; SGLang has no tree verification there"),
        (
            args.enable_lora or args.lora_paths,
            "LoRA adapters (--enable-lora, --lora-paths)",
            "merge the adapter, or use DFLASH",
        ),
        (
            args.enable_return_hidden_states or args.enable_return_aux_hidden_states or args.return_hidden_states_mode,
            "hidden states in answers (--enable-return-hidden-states and its kin)",
            "drop it; a verify pass computes those of drafts too",
        ),
        (args.enable_watermark, "--enable-watermark", "drop it, or use DFLASH"),
        (
            args.enable_linear_replayssm or args.enable_linear_replayssm_spec,
            "ReplaySSM (--enable-linear-replayssm, --enable-linear-replayssm-spec)",
            f"drop it; it replays a chain, and a tree has branches (for memory, {state_form.ENV}={state_form.DELTAS})",
        ),
        (
            args.mamba_backend == "flashinfer",
            "--mamba-backend flashinfer",
            "use --mamba-backend triton, which follows a tree",
        ),
    )
    for found, what, instead in refused:
        if found:
            raise DDTreeError(f"DDTREE does not support {what}: {instead}.")


def _require_track_interval(args: Any, verify_width: int) -> None:
    """A hybrid target's prefix cache keeps one state per interval, so no step may pass two of its ends.

    SGLang asks the same before it knows DDTREE's width.
    """
    if args.mamba_radix_cache_strategy.startswith("extra_buffer") and verify_width > args.mamba_track_interval:
        raise DDTreeError(
            f"a verify width of {verify_width} needs a --mamba-track-interval of at least that, got "
            f"{args.mamba_track_interval}: use {settings.BUDGET_FLAG} {args.mamba_track_interval - 1} or less."
        )


def _check_states(args: Any, target: dict[str, Any], verify_width: int) -> None:
    from sglang.srt.layers.attention.linear.utils import pp_spec_stable_rows_enabled

    state_form.check(
        target,
        device=args.device,
        width=verify_width,
        verify_backend=args.linear_attn_verify_backend,
        by_rows=pp_spec_stable_rows_enabled(),
    )
    if state_form.is_deltas() and is_hybrid(text_config(target)) and args.linear_attn_verify_backend is None:
        # A tree goes to the Triton kernel anyway. A dummy pass has no links, and where FlashInfer decodes SGLang would
        # hand it to FlashInfer's kernel, which knows no deltas.
        args.linear_attn_verify_backend = "triton"


def _resolve_attention_backends(args: Any, cpu: bool) -> None:
    """Refuse a verify backend that would ignore the tree mask; choose one where nothing was chosen.

    Which of a split pair verifies follows SGLang's ``HybridAttnBackend``: the prefill backend, unless
    ``--speculative-attention-mode decode``. On a CPU there is one backend for everything.
    """
    half = "decode" if args.speculative_attention_mode == "decode" else "prefill"
    verifier = f"{half}_attention_backend" if getattr(args, f"{half}_attention_backend") else "attention_backend"
    if args.attention_backend is None and verifier == "attention_backend":
        args.attention_backend = ATTENTION_BACKEND if cpu else TREE_BACKENDS[0]
    if cpu:
        for flag in ("attention_backend", "prefill_attention_backend", "decode_attention_backend"):
            _require_backend(flag, getattr(args, flag), (ATTENTION_BACKEND,))
    else:
        _require_backend(verifier, getattr(args, verifier), TREE_BACKENDS)
    if args.speculative_draft_attention_backend is None:
        args.speculative_draft_attention_backend = getattr(args, verifier)


def _require_backend(flag: str, name: str | None, allowed: tuple[str, ...]) -> None:
    if name is None or name in allowed:
        return
    others = f" (or {', '.join(allowed[1:])})" if len(allowed) > 1 else ""
    raise DDTreeError(
        f"--{flag.replace('_', '-')} {name} ignores tree masks, so DDTREE's answers would be wrong: "
        f"use {allowed[0]}{others}."
    )
