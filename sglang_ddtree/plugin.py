"""Entry point ``sglang.srt.plugins: ddtree``; the only file that registers anything with SGLang.

SGLang loads it in every process it starts, before it reads its arguments, and logs and swallows whatever it raises.
So nothing here raises: when SGLang is not the version this package was written for, DDTREE is registered all the same,
as an algorithm whose start fails with the reason.
"""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglang_ddtree.hooks import Hook

logger = logging.getLogger(__name__)

#: Set by ``DDTreeAlgorithm.handle_server_args`` in the launching process and inherited by SGLang's workers, so that
#: a server that does not use DDTREE runs without a single engine hook of ours.
ACTIVE_ENV = "SGLANG_DDTREE_ACTIVE"


def register() -> None:
    """Register DDTREE, its command-line flag and, where they are needed, the engine hooks."""
    from sglang_ddtree import compat

    problems = compat.problems()
    if problems:
        reason = "; ".join(problems)
        logger.error("DDTREE is disabled: %s", reason)
        _register_refusal(reason)
        return

    from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    from sglang_ddtree import hooks
    from sglang_ddtree.algorithm import DDTreeAlgorithm, check_drafter_first, worker_class

    SpeculativeAlgorithm.register("DDTREE", supports_overlap=True, spec_class=DDTreeAlgorithm)(worker_class)
    register_resolution_hook("handle_speculative_decoding")(check_drafter_first)
    hooks.register(*hook_groups())


def hook_groups() -> list[tuple[Hook, ...]]:
    """The groups of hooks that this process needs."""
    from sglang_ddtree import hooks, state_form
    from sglang_ddtree.cpu.plugin import is_selected

    groups: list[tuple[Hook, ...]] = [hooks.COMMAND_LINE]
    if os.environ.get(ACTIVE_ENV) == "1":
        groups.append(hooks.ENGINE)
        if state_form.is_deltas():
            groups.append(hooks.STATES)
    if is_selected():
        groups.append(hooks.CPU)
    return groups


def _register_refusal(reason: str) -> None:
    """Answer ``--speculative-algorithm DDTREE`` with ``reason`` instead of "unknown algorithm"."""
    from sglang_ddtree.errors import DDTreeError

    try:
        from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
        from sglang.srt.speculative.spec_registry import CustomSpecAlgo

        class RefusedAlgorithm(CustomSpecAlgo):
            def handle_server_args(self, server_args) -> None:
                raise DDTreeError(f"DDTREE cannot run here: {reason}")

        def no_worker(server_args):
            raise DDTreeError(f"DDTREE cannot run here: {reason}")

        SpeculativeAlgorithm.register("DDTREE", supports_overlap=True, spec_class=RefusedAlgorithm)(no_worker)
    except Exception:
        # An SGLang without this registry cannot be told; the error above and `sglang-ddtree doctor` remain.
        logger.exception("DDTREE could not register its refusal with this SGLang")
