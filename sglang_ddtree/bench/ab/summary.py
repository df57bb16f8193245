"""One row per prompt set, load and arm: the figures that the table and the page show."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from sglang_ddtree.bench.ab import measures
from sglang_ddtree.bench.ab.correctness import Agreement, agreement, expected
from sglang_ddtree.bench.ab.grading import accuracy
from sglang_ddtree.bench.ab.measures import Interval, Percentiles
from sglang_ddtree.bench.ab.store import Cell, Result
from sglang_ddtree.bench.report import Spread
from sglang_ddtree.bench.tasks import Accuracy

Key = tuple[str, str, str]


@dataclass(frozen=True)
class Row:
    """One arm under one load on one prompt set, over all repeats.

    Attributes:
        total_rate: output tokens per second of all users together.
        user_rate: output tokens per second that one user gets, prefill included.
        ttft, gap, token_time: milliseconds: to the first text; between two pieces of the stream; per token after the
            first text.
        accuracy: right answers of the graded ones; None where nothing says what is right.
        acceptance: tokens per verify step; ``acceptance_source`` says whose count.
        agreement: with the reference's greedy answers; None for drawn answers.
        server, gpu: means over the repeats of what the cells hold under these names.
        speedup: of ``user_rate`` over the reference's; None when refused, or for the reference.
    """

    set: str
    load: str
    arm: str
    repeats: int
    requests: int
    failed: int
    mean_tokens: float
    total_rate: Spread
    user_rate: Spread
    ttft: Percentiles | None
    gap: Percentiles | None
    token_time: Percentiles | None
    accuracy: Accuracy | None
    acceptance: float | None
    acceptance_source: str
    histogram: list[int]
    server: dict[str, float]
    gpu: dict[str, float]
    agreement: Agreement | None
    speedup: Interval | None


def grouped(result: Result) -> dict[Key, list[Cell]]:
    """The cells by prompt set, load and arm, in the order in which these first appear."""
    found: dict[Key, list[Cell]] = defaultdict(list)
    for cell in result.cells:
        found[cell.set, cell.load, cell.arm].append(cell)
    sets, loads = (list(dict.fromkeys(key[i] for key in found)) for i in (0, 1))
    arms = list(result.arms)
    return dict(
        sorted(found.items(), key=lambda it: (sets.index(it[0][0]), loads.index(it[0][1]), arms.index(it[0][2])))
    )


def _means(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    found: dict[str, list[float]] = defaultdict(list)
    for part in parts:
        for name, value in part.items():
            found[name].append(value)
    return {name: sum(values) / len(values) for name, values in found.items()}


def rows(result: Result, refused: Mapping[str, str]) -> list[Row]:
    """All rows; arms in ``refused`` get no speedup. Cells in which nothing was answered give none."""
    cells_of = grouped(result)
    reference = expected(result)
    found = []
    for (name, load, arm), cells in cells_of.items():
        requests = measures.requests_of(cells)
        user_rate = measures.per_repeat(cells, measures.user_rate)
        if user_rate is None:
            continue
        theirs = cells_of.get((name, load, result.reference), [])
        compare = bool(theirs) and arm != result.reference and arm not in refused
        acceptance, source = measures.acceptance_length(cells)
        found.append(
            Row(
                set=name,
                load=load,
                arm=arm,
                repeats=len(cells),
                requests=len(requests),
                failed=sum(len(cell.requests) for cell in cells) - len(requests),
                mean_tokens=sum(request.tokens for request in requests) / len(requests),
                total_rate=measures.total_rate(cells),
                user_rate=user_rate,
                ttft=measures.percentiles([r.ttft for r in requests if r.ttft is not None]),
                gap=measures.percentiles([gap for r in requests for gap in r.gaps]),
                token_time=measures.percentiles(measures.token_time(requests)),
                accuracy=accuracy(cells),
                acceptance=acceptance,
                acceptance_source=source,
                histogram=measures.histogram(cells),
                server=_means(cell.server for cell in cells),
                gpu=_means(cell.gpu for cell in cells),
                agreement=agreement(cells, reference) if result.head["greedy"] else None,
                speedup=measures.ratio(cells, theirs, measures.user_rate, paired=True) if compare else None,
            )
        )
    return found
