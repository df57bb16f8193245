"""Ask a scheduler process which of our hooks are in place there.

The process is spawned as SGLang spawns its schedulers and runs SGLang's own entry point, which loads the plugins first
of all; it ends where it would go on to the server's arguments.
"""

from __future__ import annotations

import multiprocessing
import os
from dataclasses import dataclass
from multiprocessing.connection import Connection

from sglang_ddtree.errors import DDTreeError

#: Importing SGLang takes half a minute, on a very busy machine many times that.
TIMEOUT_SECONDS = 900


@dataclass(frozen=True)
class Answer:
    """Hooks in place, hooks that should be and are not (their targets), hooks that a patch makes unneeded."""

    applied: int
    missing: list[str]
    unneeded: int


class _Asked(Exception):
    pass


def ask_scheduler() -> Answer:
    """Start a scheduler process of a DDTREE server up to its plugins.

    Raises:
        DDTreeError: it ended before it could answer.
    """
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(sender,), daemon=True)
    process.start()
    sender.close()
    try:
        if not receiver.poll(TIMEOUT_SECONDS):
            raise DDTreeError(f"the scheduler process has not answered in {TIMEOUT_SECONDS} seconds")
        answer = receiver.recv()
    except EOFError:
        raise DDTreeError("the scheduler process ended before it could answer") from None
    finally:
        process.kill()
        process.join()
    if isinstance(answer, str):
        raise DDTreeError(answer)
    return answer


def _answer(sender: Connection) -> None:
    from sglang_ddtree.plugin import ACTIVE_ENV

    os.environ[ACTIVE_ENV] = "1"
    try:
        from sglang.srt.managers import scheduler

        def stop_here(*args: object) -> None:
            raise _Asked

        scheduler.resolve_spawn_dp_rank = stop_here
        try:
            scheduler.run_scheduler_process(None, None, 0, 0, 0, None, None)
        except _Asked:
            sender.send(_look())
    except Exception as error:
        sender.send(f"{type(error).__name__}: {' '.join(str(error).split())}")


def _look() -> Answer:
    from sglang_ddtree import hooks
    from sglang_ddtree.plugin import hook_groups

    groups = hook_groups()
    wanted = hooks.needed(*groups)
    missing = hooks.missing(*groups)
    every = {(hook.target, hook.function) for group in groups for hook in group}
    return Answer(len(wanted) - len(missing), missing, len(every) - len(wanted))
