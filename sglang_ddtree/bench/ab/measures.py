"""Figures from cells: rates, percentiles, acceptance, and ratios with bootstrap intervals. Pure functions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from sglang_ddtree.bench.ab.store import Cell, Request
from sglang_ddtree.bench.report import Spread, spread

DRAWS = 2000
#: Share of the bootstrap draws that an interval holds.
COVERED = 0.95
PERCENTILES = (50, 90, 99)

#: What a request adds to a numerator and to a denominator; sums of both make the figure.
Part = Callable[[Request], tuple[float, float]]


def user_rate(request: Request) -> tuple[float, float]:
    """Tokens over seconds, prefill included: what one user gets."""
    return request.tokens, request.seconds


def first_token(request: Request) -> tuple[float, float]:
    """Seconds to the first text, per request."""
    return request.ttft if request.ttft is not None else request.seconds, 1.0


def acceptance(request: Request) -> tuple[float, float]:
    """Tokens after the first (which the prefill makes) over verify steps."""
    return (request.tokens - 1, request.verify_steps) if request.verify_steps else (0.0, 0.0)


@dataclass(frozen=True)
class Interval:
    """A ratio, and where 95% of its bootstrap draws lie."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.2f} ({self.low:.2f} to {self.high:.2f})"


@dataclass(frozen=True)
class Percentiles:
    """Milliseconds."""

    p50: float
    p90: float
    p99: float


def percentiles(seconds: Sequence[float]) -> Percentiles | None:
    """Of all requests, or gaps, pooled over the repeats; None without any."""
    if not seconds:
        return None
    return Percentiles(*(1000 * np.asarray(np.percentile(seconds, PERCENTILES))).tolist())


def requests_of(cells: Iterable[Cell]) -> list[Request]:
    return [request for cell in cells for request in cell.answered]


def total_rate(cells: Sequence[Cell]) -> Spread:
    """Tokens of all users per second of a cell, over the repeats."""
    return spread([sum(request.tokens for request in cell.answered) / cell.seconds for cell in cells])


def totals(requests: Iterable[Request], part: Part) -> tuple[float, float]:
    """Sums of numerators and of denominators."""
    parts = [part(request) for request in requests]
    return sum(num for num, _ in parts), sum(den for _, den in parts)


def per_repeat(cells: Sequence[Cell], part: Part) -> Spread | None:
    """A figure of each repeat's requests together; None where its denominator is 0."""
    sums = [totals(cell.answered, part) for cell in cells if cell.answered]
    found = [num / den for num, den in sums if den]
    return spread(found) if found else None


def token_time(requests: Iterable[Request]) -> list[float]:
    """Seconds per token after the first text, of each request with more than one token."""
    return [(r.seconds - r.ttft) / (r.tokens - 1) for r in requests if r.ttft is not None and r.tokens > 1]


def acceptance_length(cells: Sequence[Cell]) -> tuple[float | None, str]:
    """Tokens per verify step, and where it comes from: "requests", "counters", or nothing.

    A counter is of the whole server, so another client's requests meanwhile would be in it.
    """
    told = per_repeat(cells, acceptance)
    if told is not None:
        num, den = totals(requests_of(cells), acceptance)
        return num / den, "requests"
    steps = sum(cell.steps or 0 for cell in cells)
    if not steps:
        return None, ""
    if any(cell.drafted is not None for cell in cells):
        # Every step commits the accepted drafts and one token of the target.
        return 1 + sum(cell.drafted or 0 for cell in cells) / steps, "counters"
    return sum(request.tokens - 1 for request in requests_of(cells)) / steps, "counters"


def histogram(cells: Sequence[Cell]) -> list[int]:
    """Entry k: verify steps that accepted k drafts."""
    rows = [request.accepted_histogram for request in requests_of(cells)]
    width = max((len(row) for row in rows), default=0)
    return [sum(row[k] for row in rows if k < len(row)) for k in range(width)]


def ratio(ours: Sequence[Cell], theirs: Sequence[Cell], part: Part, *, paired: bool, seed: int = 1) -> Interval | None:
    """``ours`` over ``theirs`` on the prompts that both answered in every repeat.

    The bootstrap draws repeats and prompts, both with replacement. With one repeat it draws prompts only, and what
    differs from one repeat to the next is not in the interval.

    Args:
        paired: repeat i of both was measured in the same turn, so both are drawn together.

    Returns:
        None where nothing is common, or a denominator is 0.
    """
    common = _answered_always(ours) & _answered_always(theirs)
    if not common:
        return None
    if paired:
        both = {cell.repeat for cell in ours} & {cell.repeat for cell in theirs}
        ours, theirs = ([c for c in cells if c.repeat in both] for cells in (ours, theirs))
    names = sorted(common)
    sums_a, sums_b = (_grids(cells, names, part) for cells in (ours, theirs))
    if not len(sums_a[0]) or not len(sums_b[0]):
        return None
    draw = np.random.default_rng(seed)
    prompts = _weights(draw, len(names))
    repeats_a = _weights(draw, len(sums_a[0]))
    repeats_b = repeats_a if paired else _weights(draw, len(sums_b[0]))

    def figure(sums: tuple[np.ndarray, np.ndarray], repeats: np.ndarray, over: np.ndarray) -> np.ndarray:
        num, den = (np.einsum("dr,rp,dp->d", repeats, grid, over) for grid in sums)
        return num / den

    with np.errstate(divide="ignore", invalid="ignore"):
        ones = np.ones((1, len(names)))
        whole_a = figure(sums_a, np.ones((1, len(sums_a[0]))), ones)
        whole_b = figure(sums_b, np.ones((1, len(sums_b[0]))), ones)
        value = float((whole_a / whole_b)[0])
        draws = figure(sums_a, repeats_a, prompts) / figure(sums_b, repeats_b, prompts)
    draws = draws[np.isfinite(draws)]
    if not np.isfinite(value) or not len(draws):
        return None
    low, high = (float(np.quantile(draws, end)) for end in ((1 - COVERED) / 2, (1 + COVERED) / 2))
    return Interval(value, low, high)


def _answered_always(cells: Sequence[Cell]) -> set[str]:
    sets = [{request.prompt for request in cell.answered} for cell in cells]
    return set.intersection(*sets) if sets else set()


def _grids(cells: Sequence[Cell], names: Sequence[str], part: Part) -> tuple[np.ndarray, np.ndarray]:
    """Numerators and denominators, each [repeats, prompts]."""
    rows = []
    for cell in cells:
        found = {request.prompt: part(request) for request in cell.answered}
        rows.append([found[name] for name in names])
    grid = np.asarray(rows, dtype=float).reshape(len(cells), len(names), 2)
    return grid[:, :, 0], grid[:, :, 1]


def _weights(draw: np.random.Generator, count: int) -> np.ndarray:
    """How often each of ``count`` things is drawn, in every bootstrap draw: [DRAWS, count]."""
    return draw.multinomial(count, np.full(count, 1 / count), size=DRAWS).astype(float)
