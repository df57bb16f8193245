"""Are answers right? GSM8K by its number, HumanEval by running its tests; speed says nothing without it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import Any

from sglang_ddtree.bench.limited import run_limited
from sglang_ddtree.bench.prompts import gsm8k_cases, humaneval_cases

Grader = Callable[[str], bool]

_NUMBER = r"-?\$?\s?\d[\d,]*(?:\.\d+)?"
#: Where answers say which of their numbers is the result, the surest form first.
_MARKED = (rf"####\s*({_NUMBER})", rf"\\boxed\{{\s*({_NUMBER})", rf"answer(?:\s+is)?:?\s*\**\s*({_NUMBER})")
_FENCED = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL | re.IGNORECASE)


@dataclass(frozen=True)
class Accuracy:
    """``correct`` of ``graded`` answers."""

    correct: int
    graded: int

    @property
    def rate(self) -> float | None:
        return self.correct / self.graded if self.graded else None


def graders(set_name: str) -> dict[str, Grader]:
    """A grader by prompt id for ``"gsm8k"`` and ``"humaneval"``; none for other sets, which have no answers."""
    if set_name == "gsm8k":
        return {case["id"]: _number_grader(str(case["expected"])) for case in gsm8k_cases()}
    if set_name == "humaneval":
        return {case["task_id"]: _test_grader(case) for case in humaneval_cases()}
    return {}


def accuracy(answers: Iterable[tuple[str, str]], by_prompt: dict[str, Grader]) -> Accuracy:
    """Grade ``(prompt id, answer)`` pairs; prompts without a grader are left out. An equal pair is graded once."""
    pairs = [pair for pair in answers if pair[0] in by_prompt]
    verdicts = {pair: by_prompt[pair[0]](pair[1]) for pair in dict.fromkeys(pairs)}
    return Accuracy(sum(verdicts[pair] for pair in pairs), len(pairs))


def final_number(answer: str) -> Decimal | None:
    """The last number marked as the result (``#### 5``, ``\\boxed{5}``, "the answer is 5"), else the last number."""
    for pattern in (*_MARKED, rf"({_NUMBER})"):
        found = re.findall(pattern, answer, re.IGNORECASE)
        if found:
            try:
                return Decimal(re.sub(r"[$,\s]", "", found[-1]))
            except InvalidOperation:
                return None
    return None


def extract_code(answer: str) -> str:
    """The fenced code blocks of an answer, joined, an unfinished one included; without any, the whole answer."""
    blocks = _FENCED.findall(answer)
    return "\n\n".join(blocks) if blocks else answer


def humaneval_program(case: dict[str, Any], answer: str) -> str:
    """The problem's header, the answer's code, and the problem's own tests.

    The header is a whole function (its docstring is its body), so the answer may define it again, or only continue it.
    """
    return f"{case['prompt']}\n{extract_code(answer)}\n\n{case['test']}\n\ncheck({case['entry_point']})\n"


def _number_grader(expected: str) -> Grader:
    right = Decimal(expected.replace(",", ""))
    return lambda answer: final_number(answer) == right


def _test_grader(case: dict[str, Any]) -> Grader:
    return lambda answer: run_limited(humaneval_program(case, answer))
