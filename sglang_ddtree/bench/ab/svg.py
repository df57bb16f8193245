"""Two charts as inline SVG: lines over categories, and bars. Nothing is loaded; colours follow the page's style."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

#: Colours that stay apart for colour-blind readers (Okabe and Ito); the dash changes when they repeat.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7a6a00", "#777777")
_DASHES = ("", "6 3", "2 3")
WIDTH, HEIGHT = 460, 280
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 12, 12, 40


@dataclass(frozen=True)
class Point:
    """A value with the ends of its whisker."""

    y: float
    low: float
    high: float


def style(index: int) -> tuple[str, str]:
    """Colour and dash pattern of the arm with this number."""
    return COLOURS[index % len(COLOURS)], _DASHES[index // len(COLOURS) % len(_DASHES)]


def ticks(top: float) -> list[float]:
    """Round numbers from 0 to at least ``top``, four to six of them."""
    if top <= 0:
        return [0.0, 1.0]
    step = 10.0 ** math.floor(math.log10(top / 4))
    step *= next(factor for factor in (1, 2, 2.5, 5, 10) if top / (step * factor) <= 5)
    return [i * step for i in range(math.ceil(top / step - 1e-9) + 1)]


def lines(x_title: str, labels: Sequence[str], series: Mapping[str, Mapping[str, Point]], arms: Sequence[str]) -> str:
    """One line per arm over the categories ``labels``; a missing category leaves its point out.

    Args:
        series: by arm, by label.
        arms: all arms of the page, which give each its colour.
    """
    top = max((point.high for points in series.values() for point in points.values()), default=1.0)
    marks = ticks(top)
    body = [_frame(marks, x_title)]
    width = WIDTH - _LEFT - _RIGHT
    at = {label: _LEFT + width * (i + 0.5) / len(labels) for i, label in enumerate(labels)}
    body += [_text(x, HEIGHT - _BOTTOM + 15, label, "middle") for label, x in at.items()]
    for arm, points in series.items():
        colour, dash = style(arms.index(arm))
        known = [(at[label], points[label]) for label in labels if label in points]
        path = " ".join(f"{x:.1f},{_y(point.y, marks):.1f}" for x, point in known)
        body.append(
            f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2" stroke-dasharray="{dash}"/>'
        )
        for x, point in known:
            low, high = _y(point.low, marks), _y(point.high, marks)
            tip = f"<title>{escape(arm)}: {point.y:.4g} ({point.low:.4g} to {point.high:.4g})</title>"
            body.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{low:.1f}" y2="{high:.1f}" stroke="{colour}"/>')
            body.append(f'<circle cx="{x:.1f}" cy="{_y(point.y, marks):.1f}" r="3.5" fill="{colour}">{tip}</circle>')
    return _svg(body, HEIGHT)


def bars(values: Mapping[str, float], arms: Sequence[str]) -> str:
    """One horizontal bar per arm with its value beside it."""
    left, row = 12 + 9 * max((len(arm) for arm in values), default=0), 26
    top = max(values.values(), default=1.0) or 1.0
    body = []
    for i, (arm, value) in enumerate(values.items()):
        colour, _ = style(arms.index(arm))
        length = (WIDTH - left - 56) * value / top
        body.append(_text(left - 6, i * row + 18, arm, "end"))
        body.append(f'<rect x="{left}" y="{i * row + 5}" width="{length:.1f}" height="17" fill="{colour}"/>')
        body.append(_text(left + length + 5, i * row + 18, f"{value:.2f}", "start"))
    return _svg(body, row * len(values) + 8)


def _y(value: float, marks: Sequence[float]) -> float:
    return HEIGHT - _BOTTOM - (HEIGHT - _TOP - _BOTTOM) * value / marks[-1]


def _frame(marks: Sequence[float], x_title: str) -> str:
    parts = []
    for mark in marks:
        y = _y(mark, marks)
        parts.append(f'<line x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}" class="grid"/>')
        parts.append(_text(_LEFT - 6, y + 4, f"{mark:g}", "end"))
    parts.append(_text((_LEFT + WIDTH - _RIGHT) / 2, HEIGHT - 6, x_title, "middle"))
    return "".join(parts)


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _svg(body: Sequence[str], height: float) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img">{"".join(body)}</svg>'
