"""Are an arm's greedy answers those of the reference arm?"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from sglang_ddtree.bench.ab.store import Cell, Request, Result
from sglang_ddtree.bench.report import first_difference

#: Rounding lets near-ties fall the other way, now and then. An arm most of whose answers part from the reference within
#: so many tokens computes something else.
EARLY_TOKENS = 8
#: The same in characters, where the server sends no token ids.
EARLY_CHARACTERS = 24


@dataclass(frozen=True)
class Agreement:
    """Answers compared with the reference's first answer to the same prompt.

    Attributes:
        compared, identical: answers, over all repeats and loads given.
        early: answers that differ within the first few tokens.
        example: the first one that differs: prompt and position.
    """

    compared: int
    identical: int
    early: int
    example: tuple[str, int] | None = None

    @property
    def rate(self) -> float:
        return self.identical / self.compared if self.compared else 1.0


def expected(result: Result) -> dict[tuple[str, str], Request]:
    """The reference arm's first answer, by prompt set and prompt."""
    found: dict[tuple[str, str], Request] = {}
    for cell in result.cells:
        if cell.arm == result.reference:
            for request in cell.answered:
                found.setdefault((cell.set, request.prompt), request)
    return found


def agreement(cells: Iterable[Cell], reference: dict[tuple[str, str], Request]) -> Agreement:
    """Compare token ids where both sides have them, else the texts."""
    compared = identical = early = 0
    example = None
    for cell in cells:
        for request in cell.answered:
            other = reference.get((cell.set, request.prompt))
            if other is None:
                continue
            compared += 1
            with_ids = bool(request.token_ids and other.token_ids)
            ours: Sequence[Any] = request.token_ids if with_ids else request.text
            theirs: Sequence[Any] = other.token_ids if with_ids else other.text
            if ours == theirs:
                identical += 1
                continue
            place = first_difference(ours, theirs)
            early += place < (EARLY_TOKENS if with_ids else EARLY_CHARACTERS)
            example = example or (request.prompt, place)
    return Agreement(compared, identical, early, example)


def exact(result: Result, arm: str) -> bool:
    """Both arms compute in float32, where a correct algorithm gives the reference's tokens."""
    infos = [result.arms.get(name, {}).get("info") or {} for name in (arm, result.reference)]
    return all(info.get("dtype") in ("float32", "float") for info in infos)


def is_wrong(found: Agreement, exactly: bool) -> bool:
    """The differences are not rounding: any in float32, else when half of the answers part at once."""
    return found.identical < found.compared if exactly else found.early * 2 >= max(found.compared, 1)
