"""AR, DFLASH and DDTREE on the same prompts, in turns.

Servers that fit into memory are up at the same time and get every prompt one after the other (A B C, then the next
prompt: B C A, ...), so that whatever else the machine does meets all arms alike. A waiting server sleeps.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from sglang_ddtree.bench import client, machine, server
from sglang_ddtree.bench.arms import Arm, Stint, common_flags
from sglang_ddtree.bench.prompts import Prompt
from sglang_ddtree.signals import stop_on_signals as stop_on_signals  # part of this module's interface

Say = Callable[[str], None]

WARM_UP_TOKENS = 16


@dataclass(frozen=True)
class Setting:
    """What all arms share."""

    target: Path
    drafter: Path
    dtype: str
    threads: int
    max_tokens: int
    concurrency: int = 1


@dataclass(frozen=True)
class Turn:
    """One arm's answers to ``concurrency`` prompts sent at once.

    Attributes:
        group, round: turns of one group and round may be compared with each other.
        seconds: from sending until the last answer.
        decode_seconds: the part after the prefill; with several prompts, from the first prefill's end to the last
            answer.
    """

    arm: Arm
    group: int
    round: int
    prompts: tuple[Prompt, ...]
    answers: tuple[client.Answer, ...]
    seconds: float
    decode_seconds: float


@dataclass(frozen=True)
class Load:
    """What the machine did during one stint, in busy cores: all of it, and what none of the servers and not this
    program did."""

    busy_cores: float
    other_cores: float


def interleaved(columns: Sequence[Sequence[Prompt]]) -> list[Prompt]:
    """The prompt sets in turn: code, maths, chat, code, ..."""
    return [prompt for row in itertools.zip_longest(*columns) for prompt in row if prompt is not None]


def start_arm(arm: Arm, setting: Setting, log_dir: Path, say: Say, port: int | None = None) -> server.Server:
    """Start one arm's server; its log is ``log_dir/ARM.log``."""
    say(f"{arm.label}: starting the server")
    flags = [*common_flags(setting.target, setting.dtype), *arm.flags(setting.drafter)]
    started = server.start(
        flags,
        log=log_dir / f"{arm.label.replace(' ', '-')}.log",
        env={"SGLANG_DDTREE_CPU_THREADS": str(setting.threads)},
        port=port,
        progress=lambda stage: say(f"{arm.label}: {stage}"),
    )
    say(f"{arm.label}: answers on {started.url} after {started.start_seconds:.0f} s")
    return started


def run_stint(
    stint: Stint, setting: Setting, prompts: Sequence[Prompt], log_dir: Path, say: Say
) -> tuple[list[Turn], Load]:
    """Start the stint's servers, take all its turns, stop them."""
    with contextlib.ExitStack() as stack:
        up: dict[Arm, server.Server] = {}
        for arm in stint.arms:
            up[arm] = start_arm(arm, setting, log_dir, say)
            stack.callback(up[arm].stop)
        return take_turns(up, setting, prompts, say, rounds=stint.rounds, group=stint.group)


def take_turns(
    up: dict[Arm, server.Server],
    setting: Setting,
    prompts: Sequence[Prompt],
    say: Say,
    *,
    rounds: Sequence[int] = (0,),
    group: int = 0,
) -> tuple[list[Turn], Load]:
    """Every prompt to every running server, ``concurrency`` at once; a warm-up request first, not measured."""
    batches = [tuple(prompts[i : i + setting.concurrency]) for i in range(0, len(prompts), setting.concurrency)]
    for one in up.values():
        client.ask_together(one.url, [p.messages for p in batches[0]], WARM_UP_TOKENS)
    arms = list(up)
    turns: list[Turn] = []
    begin, busy, ours = time.monotonic(), machine.busy_seconds(), _our_seconds(up)
    for number in rounds:
        for one in up.values():
            # Every round prefills the same prompts; the warm-up or the last round must not have done it already.
            one.post("/flush_cache", {})
        for index, batch in enumerate(batches):
            shift = (index + number) % len(arms)
            row = [take_turn(arm, up[arm], group, number, batch, setting) for arm in arms[shift:] + arms[:shift]]
            turns.extend(row)
            times = ", ".join(f"{turn.arm.label} {turn.seconds:.1f} s" for turn in row)
            done = min((index + 1) * setting.concurrency, len(prompts))
            say(f"round {number + 1}, prompts {done} of {len(prompts)}: {times}")
    elapsed = time.monotonic() - begin
    busy = machine.busy_seconds() - busy
    return turns, Load(busy / elapsed, max(0.0, busy - (_our_seconds(up) - ours)) / elapsed)


def take_turn(
    arm: Arm, one: server.Server, group: int, number: int, batch: tuple[Prompt, ...], setting: Setting
) -> Turn:
    answers = client.ask_together(one.url, [p.messages for p in batch], setting.max_tokens)
    spans = [answer.decode_span for answer in answers if answer.decode_span is not None]
    return Turn(
        arm=arm,
        group=group,
        round=number,
        prompts=batch,
        answers=tuple(answers),
        seconds=max(answer.seconds for answer in answers),
        decode_seconds=max(end for _, end in spans) - min(begin for begin, _ in spans),
    )


def _our_seconds(up: dict[Arm, server.Server]) -> float:
    return sum(machine.group_seconds(one.process.pid) for one in up.values()) + time.process_time()
