"""``compare OLD NEW``: did an arm become slower, accept less, or answer otherwise, by more than the noise?"""

from __future__ import annotations

from dataclasses import dataclass

from sglang_ddtree.bench.ab import measures
from sglang_ddtree.bench.ab.config import ConfigError
from sglang_ddtree.bench.ab.correctness import agreement, expected
from sglang_ddtree.bench.ab.grading import became_wrong
from sglang_ddtree.bench.ab.measures import Interval
from sglang_ddtree.bench.ab.store import Cell, Result
from sglang_ddtree.bench.ab.summary import Key, grouped
from sglang_ddtree.bench.ab.table import columns

#: What is compared: name, part, and whether more is better.
FIGURES: tuple[tuple[str, measures.Part, bool], ...] = (
    ("tok/s/user", measures.user_rate, True),
    ("TTFT", measures.first_token, False),
    ("accept", measures.acceptance, True),
)
#: Request settings that must be the same in both runs.
_SAME = ("tokens", "fixed_length", "body", "split")


@dataclass(frozen=True)
class Change:
    """New over old of one figure; ``verdict`` is "worse", "better" or "equal" (within noise and tolerance)."""

    key: Key
    figure: str
    ratio: Interval
    verdict: str


@dataclass(frozen=True)
class Comparison:
    """All changes, and in words what else became worse or could not be compared."""

    changes: list[Change]
    worse: list[str]
    notes: list[str]

    @property
    def regressed(self) -> bool:
        return bool(self.worse) or any(change.verdict == "worse" for change in self.changes)


def compare(old: Result, new: Result, tolerance: float) -> Comparison:
    """Compare what both results have.

    Args:
        tolerance: a change is one only if the whole interval lies further than this from 1; runs at different times
            differ by more than their repeats show.

    Raises:
        ConfigError: the runs asked for different answers, or have nothing in common.
    """
    for key in _SAME:
        if old.head["settings"][key] != new.head["settings"][key]:
            raise ConfigError(
                f"the runs differ in {key}: {old.head['settings'][key]!r} and {new.head['settings'][key]!r}"
            )
    before, after = grouped(old), grouped(new)
    common = [key for key in before if key in after]
    if not common:
        raise ConfigError("the runs have no arm, load and prompt set in common")
    notes = [f"only in one of the runs: {' '.join(key)}" for key in {**before, **after} if key not in common]
    if old.head["machine"].get("cpu") != new.head["machine"].get("cpu") or old.head["machine"].get("gpus") != new.head[
        "machine"
    ].get("gpus"):
        notes.insert(0, "the runs are from different machines: speeds say nothing about the software")
    changes = [change for key in common for change in _changes(key, before[key], after[key], tolerance)]
    worse = [text for key in common for text in _failures(key, before[key], after[key])]
    worse += [text for key in common if (text := _accuracy(key, before[key], after[key]))]
    if old.head["greedy"] and new.head["greedy"] and old.reference == new.reference:
        worse += [text for key in common if (text := _answers(key, (old, before[key]), (new, after[key])))]
    return Comparison(changes, worse, notes)


def _changes(key: Key, old: list[Cell], new: list[Cell], tolerance: float) -> list[Change]:
    found = []
    for name, part, more_is_better in FIGURES:
        ratio = measures.ratio(new, old, part, paired=False)
        if ratio is None:
            continue
        verdict = "equal"
        if ratio.high < 1 - tolerance:
            verdict = "worse" if more_is_better else "better"
        elif ratio.low > 1 + tolerance:
            verdict = "better" if more_is_better else "worse"
        found.append(Change(key, name, ratio, verdict))
    return found


def _failures(key: Key, old: list[Cell], new: list[Cell]) -> list[str]:
    failed = [sum(len(cell.requests) - len(cell.answered) for cell in cells) for cells in (old, new)]
    return [f"{' '.join(key)}: {failed[1]} requests failed, before {failed[0]}"] if failed[1] > failed[0] else []


def _accuracy(key: Key, old: list[Cell], new: list[Cell]) -> str:
    worse, better, flagged = became_wrong(old, new)
    return f"{' '.join(key)}: {worse} prompts answered right less often, {better} more often" if flagged else ""


def _answers(key: Key, old: tuple[Result, list[Cell]], new: tuple[Result, list[Cell]]) -> str:
    rates = [agreement(cells, expected(result)) for result, cells in (old, new)]
    # One answer in a hundred may fall the other way between two runs of a server that rounds.
    if rates[1].rate < rates[0].rate - 0.01:
        return (
            f"{' '.join(key)}: {rates[1].identical}/{rates[1].compared} answers as the reference's, "
            f"before {rates[0].identical}/{rates[0].compared}"
        )
    return ""


def render(found: Comparison) -> str:
    """First line: the verdict; then every figure, new over old."""
    worse = [change for change in found.changes if change.verdict == "worse"]
    count = len(worse) + len(found.worse)
    first = f"REGRESSION: {count} figures are worse" if found.regressed else "No regression beyond the noise."
    lines: list[tuple[str, ...]] = [("set load arm", "figure", "new/old (95%)", "verdict")]
    lines += [(" ".join(c.key), c.figure, str(c.ratio), c.verdict) for c in found.changes]
    return "\n".join([first, *found.worse, *found.notes, "", columns(lines)]) + "\n"
