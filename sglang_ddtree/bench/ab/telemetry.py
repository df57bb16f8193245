"""What a server and a GPU tell of themselves during a cell: tree sizes and stage times, power and memory."""

from __future__ import annotations

import shutil
import subprocess
import threading
from collections.abc import Iterable, Mapping
from types import TracebackType

from prometheus_client.samples import Sample

_PREFIX = "sglang:ddtree_"
#: DDTREE's histograms of a decode step (docs/metrics.md): what a figure is called here, and its unit.
_PER_STEP = {"tree_nodes": ("nodes", 1.0), "tree_depth": ("depth", 1.0), "committed_tokens": ("committed", 1.0)}
_STAGE = "stage_seconds"


def ddtree_sums(samples: Iterable[Sample]) -> dict[str, float]:
    """The ``_sum`` and ``_count`` of DDTREE's histograms, added up over everything but the stage."""
    found: dict[str, float] = {}
    for sample in samples:
        if sample.name.startswith(_PREFIX) and sample.name.endswith(("_sum", "_count")):
            name, _, kind = sample.name.removeprefix(_PREFIX).rpartition("_")
            key = f"{name}/{sample.labels.get('stage', '')}/{kind}"
            found[key] = found.get(key, 0.0) + sample.value
    return found


def step_means(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """Means per decode step between two readings of :func:`ddtree_sums`; other keys are passed over.

    Returns:
        ``nodes``, ``depth``, ``committed`` (per request and step) and ``draft``, ``build``, ``verify``, ``commit``
        (milliseconds per step); without the ones that the server does not count, or did not count meanwhile.
    """
    means = {}
    for key, total in after.items():
        name, _, rest = key.partition("/")
        stage, _, kind = rest.partition("/")
        if kind != "sum":
            continue
        counted = f"{name}/{stage}/count"
        count = after.get(counted, 0.0) - before.get(counted, 0.0)
        label, unit = (stage, 1000.0) if name == _STAGE else _PER_STEP.get(name, ("", 0.0))
        if count > 0 and label:
            means[label] = round(unit * (total - before.get(key, 0.0)) / count, 4)
    return means


class GpuWatch:
    """Context manager: reads ``nvidia-smi`` once a second in a thread; ``figures`` afterwards.

    ``figures`` holds ``power_w`` (mean) and ``memory_gb`` (largest), each summed over the machine's GPUs, whoever uses
    them; it is empty where there is no ``nvidia-smi``.
    """

    QUERY = ("nvidia-smi", "--query-gpu=power.draw,memory.used", "--format=csv,noheader,nounits")

    def __init__(self, every: float = 1.0) -> None:
        self.figures: dict[str, float] = {}
        self._every, self._stop = every, threading.Event()
        self._readings: list[tuple[float, float]] = []
        self._thread = threading.Thread(target=self._run, daemon=True) if shutil.which(self.QUERY[0]) else None

    def __enter__(self) -> GpuWatch:
        if self._thread:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._thread:
            self._stop.set()
            self._thread.join()
        if self._readings:
            power, memory = zip(*self._readings)
            self.figures = {"power_w": round(sum(power) / len(power), 1), "memory_gb": round(max(memory) / 1024, 2)}

    def _run(self) -> None:
        while True:
            try:
                done = subprocess.run(self.QUERY, capture_output=True, text=True, check=True, timeout=20)
                lines = [[float(part) for part in line.split(",")] for line in done.stdout.strip().splitlines()]
                self._readings.append((sum(line[0] for line in lines), sum(line[1] for line in lines)))
            except (OSError, ValueError, IndexError, subprocess.SubprocessError):
                return  # "[N/A]" on some cards; the rest of the run does not need it
            if self._stop.wait(self._every):
                return
