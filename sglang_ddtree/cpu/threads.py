"""How many torch threads a CPU server should use.

Two OpenMP threads on two cores, one of them taken by another program, decode ten times slower than one thread: each
small parallel region waits for the preempted thread. So the count follows the cores that are free when the server
starts, and is printed; the user can set it.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

from sglang_ddtree.errors import DDTreeError

ENV = "SGLANG_DDTREE_CPU_THREADS"
#: A core counts as busy when it spends more than this share of the probe on something else.
_BUSY = 0.35
_PROBE_SECONDS = 0.25


@dataclass(frozen=True)
class ThreadPlan:
    """``count`` torch threads, and why."""

    count: int
    reason: str


def choose() -> ThreadPlan:
    """The thread count from ``SGLANG_DDTREE_CPU_THREADS``, else ``OMP_NUM_THREADS``, else the free cores.

    Raises:
        DDTreeError: ``SGLANG_DDTREE_CPU_THREADS`` is not a positive whole number.
    """
    for name in (ENV, "OMP_NUM_THREADS"):
        text = os.environ.get(name, "").strip()
        if not text:
            continue
        if not text.isdecimal() or int(text) < 1:
            if name == ENV:
                raise DDTreeError(f"{ENV} must be a positive whole number, got {text!r}.")
            continue
        return ThreadPlan(int(text), f"{name}={text}")
    allowed = sorted(os.sched_getaffinity(0))
    busy = _busy_cores(set(allowed))
    free = max(1, len(allowed) - busy)
    return ThreadPlan(free, f"{len(allowed)} usable cores, {busy} busy with other work; {ENV} overrides")


def _busy_cores(cores: set[int]) -> int:
    """Cores' worth of other processes' work among ``cores`` during a short probe (Linux; 0 elsewhere)."""
    before = _idle_and_total(cores)
    if before is None:
        return 0
    time.sleep(_PROBE_SECONDS)
    after = _idle_and_total(cores)
    if after is None:
        return 0
    load = 0.0
    for core, (idle, total) in after.items():
        elapsed = total - before[core][1]
        if elapsed > 0:
            load += 1 - (idle - before[core][0]) / elapsed
    return int(load + 1 - _BUSY)


def _idle_and_total(cores: set[int]) -> dict[int, tuple[int, int]] | None:
    try:
        lines = Path("/proc/stat").read_text().splitlines()
    except OSError:
        return None
    result = {}
    for line in lines:
        name, *fields = line.split()
        if name.startswith("cpu") and name[3:].isdigit() and int(name[3:]) in cores:
            ticks = [int(f) for f in fields[:8]]
            result[int(name[3:])] = (ticks[3] + ticks[4], sum(ticks))
    return result or None
