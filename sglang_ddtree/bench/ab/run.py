"""Measure: every repeat, arm, prompt set and load, in turns, written down after every cell."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sglang_ddtree.bench.ab import store
from sglang_ddtree.bench.ab.config import Arm, Load, Settings
from sglang_ddtree.bench.ab.endpoint import Endpoint, delta
from sglang_ddtree.bench.ab.fleet import Fleet
from sglang_ddtree.bench.ab.load import send
from sglang_ddtree.bench.ab.neartie import differences, measure_gaps
from sglang_ddtree.bench.ab.telemetry import GpuWatch, step_means
from sglang_ddtree.bench.compare import Say
from sglang_ddtree.bench.prompts import Prompt


@dataclass(frozen=True)
class Task:
    """One cell to measure."""

    arm: Arm
    set: str
    load: Load
    repeat: int


def schedule(settings: Settings, sets: list[str]) -> Iterator[Task]:
    """All cells in turns: A B C, then B C A, ...

    With all servers up the arm changes after every cell, so that whatever else the machine does meets all arms alike.
    Else an arm takes its whole repeat before the next server starts.
    """
    turn = 0
    for repeat in range(settings.repeats):
        if settings.together:
            for name in sets:
                for load in settings.loads:
                    for arm in rotated(settings.arms, turn):
                        yield Task(arm, name, load, repeat)
                    turn += 1
        else:
            for arm in rotated(settings.arms, repeat):
                for name in sets:
                    for load in settings.loads:
                        yield Task(arm, name, load, repeat)


def rotated(arms: tuple[Arm, ...], by: int) -> tuple[Arm, ...]:
    shift = by % len(arms)
    return arms[shift:] + arms[:shift]


def head(settings: Settings, command: str, machine: dict[str, Any]) -> dict[str, Any]:
    """What the result says of the run as a whole; arms are told apart from it."""
    told = {key: value for key, value in asdict(settings).items() if key != "arms"}
    return {
        "command": command,
        "machine": machine,
        "reference": settings.reference_arm,
        "greedy": settings.greedy,
        "settings": told,
    }


def measure(
    settings: Settings,
    prompts: dict[str, list[Prompt]],
    result: store.Result,
    out: Path,
    log_dir: Path,
    say: Say,
    progress: Callable[[str], None],
) -> None:
    """Fill ``result`` and write it to ``out`` after every cell.

    Args:
        prompts: by set.
        progress: called with a short text before every cell, and once with "" at the end.

    Raises:
        ServerError: a server did not start or stopped; what was measured until then is in the file.
    """
    longest = max(prompts.values(), key=len)
    if not settings.together and len([arm for arm in settings.arms if not arm.url]) > 1:
        result.note("One server at a time: ratios are between measurements taken minutes apart.")
    store.write(out, result)
    with Fleet(settings, longest, log_dir, say) as fleet:
        if settings.together:
            # No server starts beside a measurement.
            for arm in settings.arms:
                remember(result, fleet.get(arm))
        for task in schedule(settings, list(prompts)):
            progress(f"{task.arm.name} {task.set} {task.load.label} {task.repeat + 1}/{settings.repeats}")
            endpoint = fleet.get(task.arm)
            remember(result, endpoint)
            left_out = beyond(task, endpoint, len(prompts[task.set]))
            if left_out:
                result.note(left_out)
                continue
            result.cells.append(take(task, endpoint, prompts[task.set], settings))
            store.write(out, result)
            fleet.check(task.arm)
        result.complete = True
        if settings.greedy and (found := differences(result)):
            progress("log-probabilities where answers differ")
            reference = next(arm for arm in settings.arms if arm.name == settings.reference_arm)
            measure_gaps(found, fleet.get(reference), prompts, settings.request_body)
            result.differences = found
        store.write(out, result)
    progress("")


def remember(result: store.Result, endpoint: Endpoint) -> None:
    arm = endpoint.arm
    info = None if endpoint.info is None else dict(endpoint.info)
    result.arms[arm.name] = {"flags": list(arm.flags), "url": arm.url, "model": arm.model, "info": info}


def beyond(task: Task, endpoint: Endpoint, prompts: int) -> str:
    """Why a load cannot be measured; empty when it can."""
    wanted, limit = task.load.concurrency, endpoint.max_requests
    if limit is not None and wanted > limit:
        return f"LEFT OUT: {task.load.label} of {task.arm.name}: the server runs {limit} requests at once."
    if wanted > prompts:
        return f"LEFT OUT: {task.load.label} on {task.set}: it has {prompts} prompts, too few to keep it up."
    return ""


def take(task: Task, endpoint: Endpoint, prompts: list[Prompt], settings: Settings) -> store.Cell:
    """Measure one cell."""
    flushed = endpoint.flush()
    before = endpoint.counters()
    seed = settings.seed + task.repeat
    with GpuWatch() as watch:
        requests, seconds = send(endpoint, prompts, task.load, settings.tokens, settings.request_body, seed)
    after = endpoint.counters()
    steps, drafted = delta(before, after)
    return store.Cell(
        arm=task.arm.name,
        set=task.set,
        load=task.load.label,
        repeat=task.repeat,
        seconds=round(seconds, 5),
        flushed=flushed,
        requests=requests,
        steps=steps,
        drafted=drafted,
        server=step_means(before, after),
        gpu=watch.figures,
    )
