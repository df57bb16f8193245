"""The result as one page that needs no network: findings, plots, tables, and how it was measured."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape

from sglang_ddtree.bench.ab import svg
from sglang_ddtree.bench.ab.findings import Findings, judge
from sglang_ddtree.bench.ab.store import Result
from sglang_ddtree.bench.ab.summary import Row, rows
from sglang_ddtree.bench.ab.table import HEAD, cells, steps

_STYLE = """
:root { color-scheme: light dark; --line: #8886; --bad: #c62828; --good: #2e7d32; }
body { font: 15px/1.45 system-ui, sans-serif; max-width: 1120px; margin: 2em auto; padding: 0 1em; }
h1 { font-size: 1.5em; } h2 { font-size: 1.2em; margin-top: 1.8em; } h3 { font-size: 1em; margin: .6em 0 .2em; }
.first { border-left: 5px solid var(--good); padding: .4em .8em; background: #8881; }
.first.bad { border-color: var(--bad); }
.first p { margin: .2em 0; overflow-wrap: anywhere; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(330px, 1fr)); gap: 1em 2em; }
svg { width: 100%; } svg text { font-size: 12px; fill: currentColor; } .grid { stroke: var(--line); }
.legend span { margin-right: 1.2em; white-space: nowrap; }
.legend svg { width: 26px; height: 10px; margin-right: .4em; }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 13px; }
th, td { padding: .2em .6em; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap; }
th { white-space: normal; vertical-align: bottom; }
th:nth-child(-n+2), td:nth-child(-n+2) { text-align: left; }
pre { overflow-x: auto; background: #8881; padding: .6em; font-size: 12px; }
"""

_MEANING = """
tok/s: output tokens of all users together per second, median over the repeats. tok/s/user: what one user gets, prefill
included. TTFT: time to the first text. gap: time between two pieces of the stream; with drafts a piece holds several
tokens, so ms/token is given beside it. correct: answers that are right, where the prompt set says what is.
accept: tokens per verify step. same answers: greedy answers equal to the
reference arm's first one. speedup: of tok/s/user over the reference, with the range that holds 95% of the bootstrap
draws. In the plots a whisker runs from the smallest to the largest repeat.
"""


def page(result: Result) -> str:
    """The whole page."""
    found = judge(result)
    figures = rows(result, found.refused)
    sections = "".join(_section(name, figures, result) for name in dict.fromkeys(row.set for row in figures))
    tables = "".join(_table(name, figures, result, found) for name in dict.fromkeys(row.set for row in figures))
    findings = "".join(f"<p>{escape(line)}</p>" for line in found.lines)
    bad = "" if found.ok else " bad"
    machine = result.head["machine"]
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width"><title>A/B benchmark</title>'
        f"<style>{_STYLE}</style><body><h1>A/B benchmark</h1>"
        f'<div class="first{bad}">{findings}</div>'
        f"<p>{escape(_where(machine))}, {escape(str(machine.get('date', '')))}</p>"
        f'<p class="legend">{_legend(list(result.arms))}</p>{sections}{tables}'
        f"<p>{escape(' '.join(_MEANING.split()))}</p><h2>How it was measured</h2>"
        f"<pre>{escape(str(result.head['command']))}</pre>"
        f"<pre>{escape(json.dumps(result.head['settings'], indent=1))}</pre>{_arms(result)}</body></html>\n"
    )


def _where(machine: dict[str, object]) -> str:
    gpus = machine.get("gpus")
    name = ", ".join(map(str, gpus)) if isinstance(gpus, list) and gpus else str(machine.get("cpu", ""))
    return f"{name}, {machine.get('usable_cores', '?')} CPU cores"


def _legend(arms: Sequence[str]) -> str:
    parts = []
    for number, arm in enumerate(arms):
        colour, dash = svg.style(number)
        line = f'<line x1="0" x2="26" y1="5" y2="5" stroke="{colour}" stroke-width="3" stroke-dasharray="{dash}"/>'
        parts.append(f'<span><svg viewBox="0 0 26 10">{line}</svg>{escape(arm)}</span>')
    return "".join(parts)


def _section(name: str, figures: list[Row], result: Result) -> str:
    """The plots of one prompt set."""
    arms = list(result.arms)
    own = [row for row in figures if row.set == name]
    charts = []
    for prefix, title in (("c", "requests at a time"), ("r", "requests per second")):
        part = [row for row in own if row.load.startswith(prefix)]
        if part:
            charts.append(("Output tokens per second, all users", _rates(part, "total_rate", title, arms)))
            charts.append(("Output tokens per second, one user", _rates(part, "user_rate", title, arms)))
    first = own[0].load
    accepted = {row.arm: row.acceptance for row in own if row.load == first and row.acceptance is not None}
    if accepted:
        charts.append((f"Tokens per verify step ({first})", svg.bars(accepted, arms)))
    if histograms := _histograms([row for row in own if row.load == first and any(row.histogram)], arms):
        charts.append((f"Accepted drafts per verify step, share of steps ({first})", histograms))
    drawn = "".join(f"<div><h3>{escape(title)}</h3>{chart}</div>" for title, chart in charts)
    return f'<h2>{escape(name)}</h2><div class="charts">{drawn}</div>'


def _rates(figures: list[Row], name: str, x_title: str, arms: list[str]) -> str:
    series: dict[str, dict[str, svg.Point]] = {}
    for row in figures:
        rate = getattr(row, name)
        series.setdefault(row.arm, {})[row.load[1:]] = svg.Point(rate.median, rate.low, rate.high)
    return svg.lines(x_title, list(dict.fromkeys(row.load[1:] for row in figures)), series, arms)


def _histograms(figures: list[Row], arms: list[str]) -> str:
    if not figures:
        return ""
    labels = [str(k) for k in range(max(len(row.histogram) for row in figures))]
    series = {}
    for row in figures:
        shares = [count / sum(row.histogram) for count in row.histogram]
        series[row.arm] = {str(k): svg.Point(share, share, share) for k, share in enumerate(shares)}
    return svg.lines("accepted drafts", labels, series, arms)


def _table(name: str, figures: list[Row], result: Result, found: Findings) -> str:
    own = [row for row in figures if row.set == name]
    text = f"<h2>{escape(name)}: figures</h2>" + _grid([HEAD, *(cells(row, result, found) for row in own)])
    told = steps(own)
    return text + (f"<h3>{escape(name)}: means per decode step, by the server</h3>{_grid(told)}" if told else "")


def _grid(lines: Sequence[tuple[str, ...]]) -> str:
    def row(line: tuple[str, ...], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{escape(text)}</{tag}>" for text in line) + "</tr>"

    body = "".join(row(line, "td") for line in lines[1:])
    return f'<div class="wide"><table>{row(lines[0], "th")}{body}</table></div>'


def _arms(result: Result) -> str:
    parts = []
    for name, about in result.arms.items():
        version = (about.get("info") or {}).get("version", "tells no version")
        how = about["url"] or " ".join(about["flags"]) or "no flags beyond the common ones"
        parts.append(f"{name} (server {version}): {how}")
    return f"<pre>{escape(chr(10).join(parts))}</pre>"
