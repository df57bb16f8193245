"""The result as text: what must be known first, then one table per prompt set."""

from __future__ import annotations

from sglang_ddtree.bench.ab.findings import Findings
from sglang_ddtree.bench.ab.measures import Percentiles
from sglang_ddtree.bench.ab.store import Result
from sglang_ddtree.bench.ab.summary import Row

HEAD = (
    "load",
    "arm",
    "tok/s",
    "tok/s/user",
    "TTFT ms p50/p90/p99",
    "gap ms p50/p90/p99",
    "ms/token p50",
    "correct",
    "accept",
    "same answers",
    "speedup (95%)",
)


#: What servers tell of a decode step, where they do; with the heading and the form of each figure.
STEP = {
    "nodes": ("nodes", ".1f"),
    "depth": ("depth", ".1f"),
    "committed": ("committed", ".2f"),
    "draft": ("draft ms", ".2f"),
    "build": ("build ms", ".2f"),
    "verify": ("verify ms", ".2f"),
    "commit": ("commit ms", ".2f"),
    "power_w": ("GPU W", ".0f"),
    "memory_gb": ("GPU GiB", ".1f"),
}


def steps(rows: list[Row]) -> list[tuple[str, ...]]:
    """Head and one line per row whose server or GPU told something; empty when none did."""
    told = [(row, {**row.server, **row.gpu}) for row in rows if row.server or row.gpu]
    names = [name for name in STEP if any(name in figures for _, figures in told)]
    if not names:
        return []
    head = ("load", "arm", *(STEP[name][0] for name in names))
    body = [
        (row.load, row.arm, *(format(figures[name], STEP[name][1]) if name in figures else "-" for name in names))
        for row, figures in told
    ]
    return [head, *body]


def render(result: Result, found: Findings, rows: list[Row]) -> str:
    """The findings and the tables; a speedup that is not given says why in the findings."""
    parts = ["\n".join(found.lines)]
    for name in dict.fromkeys(row.set for row in rows):
        body = [cells(row, result, found) for row in rows if row.set == name]
        parts.append(f"{name}\n{columns([HEAD, *body])}")
        if told := steps([row for row in rows if row.set == name]):
            parts.append(f"{name}, per decode step\n{columns(told)}")
    return "\n\n".join(parts) + "\n"


def cells(row: Row, result: Result, found: Findings) -> tuple[str, ...]:
    """One row of the table, in the order of :data:`HEAD`."""
    same = f"{row.agreement.identical}/{row.agreement.compared}" if row.agreement else "-"
    if row.speedup is not None:
        speedup = str(row.speedup)
    elif row.arm == result.reference:
        speedup = "reference"
    else:
        speedup = "refused" if row.arm in found.refused else "-"
    return (
        row.load,
        row.arm,
        f"{row.total_rate.median:.1f}",
        f"{row.user_rate.median:.1f}",
        milliseconds(row.ttft),
        milliseconds(row.gap),
        "-" if row.token_time is None else f"{row.token_time.p50:.1f}",
        "-" if row.accuracy is None else f"{row.accuracy.correct}/{row.accuracy.graded}",
        "-" if row.acceptance is None else f"{row.acceptance:.2f}",
        same,
        speedup,
    )


def milliseconds(values: Percentiles | None) -> str:
    return "-" if values is None else f"{values.p50:.0f}/{values.p90:.0f}/{values.p99:.0f}"


def columns(lines: list[tuple[str, ...]]) -> str:
    """Text in columns; the first two are words, the others figures."""
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return "\n".join(
        "  ".join(
            text.ljust(width) if i < 2 else text.rjust(width) for i, (text, width) in enumerate(zip(line, widths))
        )
        for line in lines
    )
