"""Says at start what the states of a hybrid target take, and refuses what does not fit, with what would."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from sglang.srt.runtime_context import get_memory, get_schedule, get_spec

from sglang_ddtree.config import BUDGET_FLAG
from sglang_ddtree.errors import DDTreeError
from sglang_ddtree.state_memory import (
    GIB,
    requests_that_fit,
    share_for_states,
    total_bytes,
    verify_bytes,
    widest_that_fits,
)

logger = logging.getLogger(__name__)


def size_states(original: Callable[[Any, float], float], configurator: Any, free_gib: float) -> float:
    """``KVCacheConfigurator._handle_max_mamba_cache``: chooses the slots and returns what is left for keys and values.

    Raises:
        DDTreeError: not even one request fits, or not all that a fixed size asks for.
    """
    schedule = get_schedule()
    width = int(get_spec().speculative_num_draft_tokens)
    state = int(configurator.mambaish_config.mamba2_cache_params.mamba_cache_per_req)
    slots = configurator._calculate_mamba_ratio()
    wanted = max(1, schedule.max_running_requests // configurator.attn_dp_size)
    if schedule.max_mamba_cache_size is not None:
        # A size that was asked for is taken whatever is left for keys and values, and requests are cut to it.
        wanted = min(wanted, max(1, schedule.max_mamba_cache_size // configurator.attn_dp_size // slots))
    is_fixed = schedule.max_mamba_cache_size is not None or get_memory().disable_radix_cache
    free = int(free_gib * GIB)
    if not is_fixed:
        free = share_for_states(free, schedule.mamba_full_memory_ratio)
    report(state, width, wanted, slots, free, is_fixed)
    return original(configurator, free_gib)


def report(state: int, width: int, wanted: int, slots: int, free: int, is_fixed: bool) -> None:
    """Log the sizes, in bytes, of ``wanted`` requests' states at a verify width, or refuse them.

    Args:
        state: one set of states.
        slots: sets per request outside of the verify pass.
        free: what may be used.
        is_fixed: SGLang takes ``wanted`` as it is; else it runs as many requests as fit.
    """
    fit = min(wanted, requests_that_fit(free, state, width, slots))
    if fit < (wanted if is_fixed else 1):
        asked = wanted if is_fixed else 1
        raise DDTreeError(
            f"the recurrent states of {asked} request{'s'[: asked > 1]} at verify width {width} take "
            f"{_gib(total_bytes(state, width, asked, slots))}, and {_gib(free)} are free: "
            f"{_instead(state, width, asked, slots, free)}."
        )
    logger.info(
        "DDTREE: states of the verify pass: width %d x %.1f MiB x (%d + 1) requests = %s; with %d slots a request %s "
        "of %s",
        width,
        state / (1 << 20),
        fit,
        _gib(verify_bytes(state, width, fit)),
        slots,
        _gib(total_bytes(state, width, fit, slots)),
        _gib(free),
    )
    if fit < wanted:
        widest = widest_that_fits(free, state, wanted, slots)
        logger.warning(
            "DDTREE: the states leave room for %d of %d running requests; %s",
            fit,
            wanted,
            f"all fit with {BUDGET_FLAG} {widest - 1}" if widest >= 2 else "no budget makes room for all of them",
        )


def _instead(state: int, width: int, asked: int, slots: int, free: int) -> str:
    ways = []
    if (widest := widest_that_fits(free, state, asked, slots)) >= 2:
        ways.append(f"{BUDGET_FLAG} {widest - 1}")
    if asked > 1 and (fit := requests_that_fit(free, state, width, slots)) >= 1:
        ways.append(f"--max-running-requests {fit}")
    ways.append("a higher --mem-fraction-static or --mamba-ssm-dtype bfloat16")
    return "use " + ", or ".join(ways)


def _gib(size: int) -> str:
    return f"{size / GIB:.2f} GiB"
