"""Says at start what the states of a hybrid target take, and refuses what does not fit, with what would."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from sglang.srt.mem_cache import kv_cache_configurator
from sglang.srt.runtime_context import get_memory, get_schedule, get_spec

from sglang_ddtree import state_form
from sglang_ddtree.config import BUDGET_FLAG, MAX_BUDGET
from sglang_ddtree.errors import DDTreeError
from sglang_ddtree.state_memory import (
    GIB,
    StateSizes,
    delta_bytes,
    requests_that_fit,
    share_for_states,
    total_bytes,
    verify_bytes,
    widest_that_fits,
)

logger = logging.getLogger(__name__)


def size_states(original: Callable[[Any, float], float], configurator: Any, free_gib: float) -> float:
    """``KVCacheConfigurator._handle_max_mamba_cache``: chooses the slots and returns what is left for keys and values.

    With deltas SGLang is asked with the width at which its states would take what the deltas do (its sums are linear in
    the width), so that what they free goes where SGLang's own division puts it: to requests, and to keys and values.

    Raises:
        DDTreeError: not even one request fits, or not all that a fixed size asks for; or the target has no deltas.
    """
    if kv_cache_configurator._pd_prefill_skips_mamba_spec_state():
        # A server that only prefills verifies nothing, and its pool has no nodes.
        return original(configurator, free_gib)
    schedule, spec = get_schedule(), get_spec()
    width = int(spec.speculative_num_draft_tokens)
    stored, deltas = sizes_of(configurator)
    sizes = stored
    if state_form.is_deltas():
        if deltas is None:
            raise DDTreeError(
                f"{state_form.ENV}={state_form.DELTAS}: SGLang does not run this target as a Gated DeltaNet: "
                f"{state_form.INSTEAD}."
            )
        sizes = deltas
    slots = configurator._calculate_mamba_ratio()
    wanted = max(1, schedule.max_running_requests // configurator.attn_dp_size)
    if schedule.max_mamba_cache_size is not None:
        # A size that was asked for is taken whatever is left for keys and values, and requests are cut to it.
        wanted = min(wanted, max(1, schedule.max_mamba_cache_size // configurator.attn_dp_size // slots))
    is_fixed = schedule.max_mamba_cache_size is not None or get_memory().disable_radix_cache
    free = int(free_gib * GIB)
    if not is_fixed:
        free = share_for_states(free, schedule.mamba_full_memory_ratio)
    report(sizes, width, wanted, slots, free, is_fixed, other=deltas if sizes is stored else stored)
    if sizes is stored:
        return original(configurator, free_gib)
    with spec.override(speculative_num_draft_tokens=width * sizes.node / sizes.state):
        return original(configurator, free_gib)


def sizes_of(configurator: Any) -> tuple[StateSizes, StateSizes | None]:
    """What the target's states take on this GPU as stored states and as deltas; None where it has no deltas."""
    params = configurator.mambaish_config.mamba2_cache_params
    stored = StateSizes.stored(int(params.mamba_cache_per_req))
    # SGLang counts Jet Nemotron, whose layers are others, among Gated DeltaNets; its config has none of their sizes.
    if not hasattr(configurator.hybrid_gdn_config, "linear_num_value_heads") or params.is_kda:
        return stored, None
    value_heads, value_dim, key_dim = params.shape.temporal
    layers = len(params.layers)
    recurrent = layers * value_heads * value_dim * key_dim * params.dtype.temporal.itemsize
    delta = delta_bytes(layers, params.shape.num_k_heads_per_tp, value_heads, key_dim, value_dim)
    return stored, StateSizes(stored.state, stored.state - recurrent + delta)


def report(
    sizes: StateSizes,
    width: int,
    wanted: int,
    slots: int,
    free: int,
    is_fixed: bool,
    other: StateSizes | None = None,
) -> None:
    """Log the sizes, in bytes, of ``wanted`` requests' states at a verify width, or refuse them.

    Args:
        sizes: of the form in use.
        slots: sets of states per request outside of the verify pass.
        free: what may be used.
        is_fixed: SGLang takes ``wanted`` as it is; else it runs as many requests as fit.
        other: of the form that is not in use; None where there is none.
    """
    smaller = other if other is not None and other.node < sizes.node else None
    fit = min(wanted, requests_that_fit(free, sizes, width, slots))
    if fit < (wanted if is_fixed else 1):
        asked = wanted if is_fixed else 1
        raise DDTreeError(
            f"the recurrent states of {asked} request{'s'[: asked > 1]} at verify width {width} take "
            f"{_gib(total_bytes(sizes, width, asked, slots))}, and {_gib(free)} are free: "
            f"{_instead(sizes, width, asked, slots, free, smaller)}."
        )
    logger.info(
        "DDTREE: %s of the verify pass: width %d x %.1f MiB x (%d + 1) requests = %s; with %d slots a request %s of "
        "%s%s",
        "states" if sizes.node == sizes.state else "deltas instead of states",
        width,
        sizes.node / (1 << 20),
        fit,
        _gib(verify_bytes(sizes, width, fit)),
        slots,
        _gib(total_bytes(sizes, width, fit, slots)),
        _gib(free),
        f" (with {state_form.ENV}={state_form.DELTAS if smaller else state_form.STORED} it would be "
        f"{_gib(total_bytes(other, width, fit, slots))})"
        if other
        else "",
    )
    if fit < wanted:
        widest = min(MAX_BUDGET + 1, widest_that_fits(free, sizes, wanted, slots))
        logger.warning(
            "DDTREE: the states leave room for %d of %d running requests; %s%s",
            fit,
            wanted,
            f"all fit with {BUDGET_FLAG} {widest - 1}" if widest >= 2 else "no budget makes room for all of them",
            _room_for_more(smaller, width, fit, slots, free),
        )


def _instead(sizes: StateSizes, width: int, asked: int, slots: int, free: int, smaller: StateSizes | None) -> str:
    ways = []
    if (widest := min(MAX_BUDGET + 1, widest_that_fits(free, sizes, asked, slots))) >= 2:
        ways.append(f"{BUDGET_FLAG} {widest - 1}")
    if asked > 1 and (fit := requests_that_fit(free, sizes, width, slots)) >= 1:
        ways.append(f"--max-running-requests {fit}")
    if smaller is not None and requests_that_fit(free, smaller, width, slots) >= asked:
        ways.append(f"{state_form.ENV}={state_form.DELTAS}")
    ways.append("a higher --mem-fraction-static or --mamba-ssm-dtype bfloat16")
    return "use " + ", or ".join(ways)


def _room_for_more(smaller: StateSizes | None, width: int, fit: int, slots: int, free: int) -> str:
    """What deltas would do, as the end of a sentence."""
    if smaller is None or (more := requests_that_fit(free, smaller, width, slots)) <= fit:
        return ""
    return f"; {state_form.ENV}={state_form.DELTAS} has room for {more}"


def _gib(size: int) -> str:
    return f"{size / GIB:.2f} GiB"
