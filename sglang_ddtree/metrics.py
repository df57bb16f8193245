"""What a decode step does, as Prometheus histograms beside SGLang's own (``--enable-metrics``); see docs/metrics.md.

The scheduler process writes them; SGLang's ``/metrics`` collects them from the directory that all its processes share.
Nothing here waits for the device: on a CPU the numbers are at hand, elsewhere they are copied in the background and
counted at a later step, once they have arrived.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from sglang_ddtree.config import DDTreeConfig
from sglang_ddtree.tree.draft_tree import DraftTree

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry, Histogram

#: The parts of a decode step, in their order.
STAGES = ("draft", "build", "verify", "commit")

#: Seconds; from a small model's stage on a GPU to a large batch on a CPU.
_STAGE_BUCKETS = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)


class NoMetrics:
    """Stands in for :class:`StepMetrics` where a server exports none."""

    def begin(self) -> None:
        pass

    def mark(self, stage: str) -> None:
        pass

    def end(self, tree: DraftTree, committed: torch.Tensor) -> None:
        pass


@dataclass
class _Step:
    """One step's marks (``perf_counter`` seconds on a CPU, else device events) and its numbers, once copied."""

    start: Any
    marks: list[tuple[str, Any]] = field(default_factory=list)
    numbers: torch.Tensor | None = None


class StepMetrics:
    """Counts decode steps: ``begin``, ``mark`` at the end of each stage, ``end``."""

    def __init__(
        self, config: DDTreeConfig, model_name: str, device: torch.device, registry: CollectorRegistry | None = None
    ):
        # Imported late: prometheus_client chooses its storage by PROMETHEUS_MULTIPROC_DIR, which SGLang sets first.
        from prometheus_client import REGISTRY, Histogram

        def histogram(name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
            names = ("model_name", *labels)
            return Histogram(f"sglang:ddtree_{name}", text, names, buckets=buckets, registry=registry or REGISTRY)

        nodes = histogram("tree_nodes", "Nodes below the root, per request and step.", _node_buckets(config.budget))
        depth = histogram("tree_depth", "Deepest node, per request and step.", _each(0, config.depth))
        committed = histogram(
            "committed_tokens",
            "Tokens committed, the bonus included, per request and step.",
            _each(1, config.depth + 1),
        )
        seconds = histogram("stage_seconds", "Time of a decode step's stage.", _STAGE_BUCKETS, "stage")
        self._per_request = [metric.labels(model_name) for metric in (nodes, depth, committed)]
        self._seconds = {stage: seconds.labels(model_name, stage) for stage in STAGES}
        self._on_cpu = device.type == "cpu"
        self._device_module = None if self._on_cpu else torch.get_device_module(device)
        self._step = _Step(None)
        self._pending: deque[_Step] = deque()

    def begin(self) -> None:
        self._step = _Step(self._now())

    def mark(self, stage: str) -> None:
        """``stage`` (one of ``STAGES``) ends here; it began at the mark before."""
        self._step.marks.append((stage, self._now()))

    def end(self, tree: DraftTree, committed: torch.Tensor) -> None:
        """The step is done.

        Args:
            tree: the ``bs`` trees that were verified.
            committed: int ``[bs]``, tokens committed, the bonus included.
        """
        numbers = torch.stack((tree.num_nodes - 1, tree.depths.amax(dim=1), committed.to(torch.int64)))
        # On a GPU this goes to pinned memory without waiting; the event after it says when it is there.
        self._step.numbers = numbers.to("cpu", non_blocking=True)
        self._step.marks.append(("", self._now()))
        self._pending.append(self._step)
        while self._pending and self._arrived(self._pending[0]):
            self._count(self._pending.popleft())

    def _now(self) -> Any:
        if self._on_cpu:
            return time.perf_counter()
        event = self._device_module.Event(enable_timing=True)  # type: ignore[union-attr]
        event.record()
        return event

    def _arrived(self, step: _Step) -> bool:
        return self._on_cpu or bool(step.marks[-1][1].query())

    def _count(self, step: _Step) -> None:
        assert step.numbers is not None
        for metric, values in zip(self._per_request, step.numbers.tolist(), strict=True):
            _observe(metric, Counter(values))
        before = step.start
        for stage, mark in step.marks[:-1]:
            seconds = mark - before if self._on_cpu else before.elapsed_time(mark) / 1000
            self._seconds[stage].observe(seconds)
            before = mark


def make_metrics(config: DDTreeConfig, device: str | torch.device) -> StepMetrics | NoMetrics:
    """The metrics of this server's steps: on its first rank, and only with ``--enable-metrics``."""
    from sglang.srt.runtime_context import get_observability, get_parallel, get_serving

    if not get_observability().enable_metrics or get_parallel().attn_tp_rank != 0:
        return NoMetrics()
    return StepMetrics(config, get_serving().served_model_name, torch.device(device))


def _observe(histogram: Any, counts: Counter[int]) -> None:
    """Observe whole numbers, each ``counts[value]`` times, at the price of one observation per distinct value.

    prometheus_client has no public call for that; SGLang does the same for its inter-token latency.
    """
    histogram._sum.inc(sum(value * count for value, count in counts.items()))
    for value, count in counts.items():
        histogram._buckets[bisect_left(histogram._upper_bounds, value)].inc(count)


def _each(first: int, last: int) -> tuple[float, ...]:
    return tuple(float(value) for value in range(first, last + 1))


def _node_buckets(budget: int) -> tuple[float, ...]:
    """Powers of two below the budget, and the budget: a full tree has a bucket of its own."""
    powers = [float(2**exponent) for exponent in range(budget.bit_length()) if 2**exponent < budget]
    return (*powers, *([float(budget - 1)] if budget > 2 and budget - 1 not in powers else []), float(budget))
