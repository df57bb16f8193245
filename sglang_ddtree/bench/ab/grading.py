"""Which answers are right, where the prompt set says what is right; done once, after the measuring."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace

from sglang_ddtree.bench.ab.store import Cell, Request, Result
from sglang_ddtree.bench.tasks import Accuracy, Grader, graders

#: Grading these runs code that the model wrote.
RUNS_CODE = frozenset({"humaneval"})


def grade(result: Result, run_code: bool) -> None:
    """Set ``correct`` of every answer of a set with known answers, in place.

    Args:
        run_code: also grade the sets whose grading runs the model's code (:mod:`sglang_ddtree.bench.limited`).
    """
    known: dict[str, Mapping[str, Grader]] = {}
    verdicts: dict[tuple[str, str, str], bool] = {}

    def graded(name: str, request: Request) -> Request:
        grader = known[name].get(request.prompt)
        if grader is None or request.error:
            return request
        # Greedy answers repeat; each is graded once.
        key = (name, request.prompt, request.text)
        if key not in verdicts:
            verdicts[key] = grader(request.text)
        return replace(request, correct=verdicts[key])

    for i, cell in enumerate(result.cells):
        if cell.set in RUNS_CODE and not run_code:
            result.note(f"{cell.set} is not graded: its grading runs the model's code; --run-code allows that.")
            continue
        if cell.set not in known:
            known[cell.set] = graders(cell.set)
        result.cells[i] = replace(cell, requests=[graded(cell.set, request) for request in cell.requests])


def accuracy(cells: Iterable[Cell]) -> Accuracy | None:
    """Right answers of the graded ones; None when none was graded."""
    verdicts = [request.correct for cell in cells for request in cell.answered if request.correct is not None]
    return Accuracy(sum(verdicts), len(verdicts)) if verdicts else None


def became_wrong(old: Iterable[Cell], new: Iterable[Cell]) -> tuple[int, int, bool]:
    """Prompts answered right less often, and more often, than before; and whether that is more than chance.

    A sign test at about 2.5%: prompts that did not change say nothing, the others would fall either way equally often.
    """
    before, after = _rates(old), _rates(new)
    worse = sum(after[prompt] < before[prompt] for prompt in before.keys() & after.keys())
    better = sum(after[prompt] > before[prompt] for prompt in before.keys() & after.keys())
    return worse, better, worse - better > 2 * (worse + better) ** 0.5


def _rates(cells: Iterable[Cell]) -> dict[str, float]:
    verdicts: dict[str, list[bool]] = defaultdict(list)
    for cell in cells:
        for request in cell.answered:
            if request.correct is not None:
                verdicts[request.prompt].append(request.correct)
    return {prompt: sum(found) / len(found) for prompt, found in verdicts.items()}
