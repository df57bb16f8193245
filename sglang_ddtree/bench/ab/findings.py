"""What the reader must know before the figures, the worst first; and whether a speedup may be printed at all."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from sglang_ddtree.bench.ab.correctness import agreement, exact, expected, is_wrong
from sglang_ddtree.bench.ab.fairness import differences
from sglang_ddtree.bench.ab.store import Cell, Result


@dataclass(frozen=True)
class Findings:
    """What is to be said first.

    Attributes:
        lines: one sentence each, the worst first; never empty.
        refused: by arm, why it gets no speedup.
        ok: nothing is wrong with the run.
    """

    lines: list[str]
    refused: dict[str, str]
    ok: bool


def cells_by_arm(result: Result) -> dict[str, list[Cell]]:
    found: dict[str, list[Cell]] = defaultdict(list)
    for cell in result.cells:
        found[cell.arm].append(cell)
    return found


def judge(result: Result) -> Findings:
    """Wrong outputs, then unequal arms, failed requests, an unfinished run, and notes."""
    by_arm = cells_by_arm(result)
    forced = bool(result.head["settings"]["force"])
    wrong = _wrong_outputs(result, by_arm)
    unequal = _unequal(result)
    lines = [f"WRONG OUTPUT: {text}" for text in wrong.values()]
    word = "FORCED although arms differ" if forced else "NOT COMPARABLE"
    lines += [f"{word}: {text}" for text in unequal.values()]
    for arm, cells in by_arm.items():
        failed = [request for cell in cells for request in cell.requests if request.error]
        if failed:
            lines.append(f"FAILED: {arm}: {len(failed)} requests without an answer, the first: {failed[0].error}")
    if not result.complete:
        lines.append(f"UNFINISHED: the run was stopped after {len(result.cells)} cells")
    ok = not lines
    refused = {} if forced else {**unequal, **wrong}
    if ok:
        lines.append(f"Arms differ in the algorithm only{_outputs(result, by_arm)}.")
    return Findings([*lines, *_near_ties(result), *_cut_answers(result, by_arm), *result.notes], refused, ok)


def _near_ties(result: Result) -> list[str]:
    """How sure the reference was where an arm's answers leave it."""
    gaps: dict[str, list[float]] = defaultdict(list)
    for one in result.differences:
        if one.gap is not None:
            gaps[one.arm].append(one.gap)
    return [
        f"Where {len(found)} answers of {arm} leave {result.reference}'s, its two best tokens are "
        f"{min(found):.2g} to {max(found):.2g} nats apart (0: a tie)."
        for arm, found in gaps.items()
    ]


def _cut_answers(result: Result, by_arm: dict[str, list[Cell]]) -> list[str]:
    """Answers that the token limit cut off before they could be right."""
    graded = [r for cells in by_arm.values() for cell in cells for r in cell.answered if r.correct is not None]
    cut = sum(request.finish == "length" and not request.correct for request in graded)
    if 2 * cut < max(1, len(graded)):
        return []
    limit = result.head["settings"]["tokens"]
    return [f"Right answers say little here: {cut} of {len(graded)} graded answers were cut off at {limit} tokens."]


def _wrong_outputs(result: Result, by_arm: dict[str, list[Cell]]) -> dict[str, str]:
    if not result.head["greedy"]:
        return {}
    found = {}
    reference = expected(result)
    for arm, cells in by_arm.items():
        if arm == result.reference:
            continue
        agreed, exactly = agreement(cells, reference), exact(result, arm)
        if agreed.compared and is_wrong(agreed, exactly):
            prompt, place = agreed.example or ("", 0)
            why = "in float32 they must be equal" if exactly else "too many and too early for rounding"
            found[arm] = (
                f"{arm}: {agreed.compared - agreed.identical} of {agreed.compared} greedy answers are not "
                f"{result.reference}'s, the first at position {place} of {prompt}; {why}"
            )
    return found


def _unequal(result: Result) -> dict[str, str]:
    """By arm, what it differs in from the reference beside the algorithm."""
    base = result.arms.get(result.reference, {}).get("info")
    found = {}
    for arm, about in result.arms.items():
        if arm == result.reference:
            continue
        apart = differences(about.get("info"), base, most_sent(result))
        if apart:
            more = f" and {len(apart) - 4} more" if len(apart) > 4 else ""
            found[arm] = f"{arm} against {result.reference}: {'; '.join(apart[:4])}{more}"
    return found


def most_sent(result: Result) -> int:
    settings: dict[str, Any] = result.head["settings"]
    return max(settings["concurrency"], default=0) or 1_000_000  # an open loop has no bound


def _outputs(result: Result, by_arm: dict[str, list[Cell]]) -> str:
    if not result.head["greedy"]:
        return "; answers are drawn at random and were not compared"
    reference = expected(result)
    agreed = [agreement(cells, reference) for arm, cells in by_arm.items() if arm != result.reference]
    same, compared = sum(a.identical for a in agreed), sum(a.compared for a in agreed)
    return f"; {same} of {compared} greedy answers are {result.reference}'s" if compared else ""
