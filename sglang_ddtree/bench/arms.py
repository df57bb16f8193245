"""What is compared: plain decoding (AR), DFLASH, and DDTREE at a budget, all on the same SGLang with the same flags."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

#: The drafter that the repository ships for the demo's target.
DRAFTER = Path(__file__).parents[2] / "drafters" / "smollm2-135m-dflash-b8"


@dataclass(frozen=True)
class Arm:
    """One way to decode; ``budget`` is None where there is no tree."""

    algorithm: str
    budget: int | None = None

    @property
    def label(self) -> str:
        return self.algorithm if self.budget is None else f"{self.algorithm} {self.budget}"

    def flags(self, drafter: Path) -> list[str]:
        """The server flags that make this arm."""
        if self.algorithm == "AR":
            return []
        flags = ["--speculative-algorithm", self.algorithm, "--speculative-draft-model-path", str(drafter)]
        return flags if self.budget is None else [*flags, "--speculative-ddtree-budget", str(self.budget)]


AR = Arm("AR")
DFLASH = Arm("DFLASH")


def make_arms(budgets: Sequence[int]) -> list[Arm]:
    """AR and DFLASH, which everything is compared with, and DDTREE at each budget."""
    return [AR, DFLASH, *(Arm("DDTREE", budget) for budget in budgets)]


def common_flags(target: Path, dtype: str, max_total_tokens: int = 8192) -> list[str]:
    """The flags of every arm. A small KV pool: several servers may be up at once."""
    return [
        *("--model-path", str(target)),
        *("--dtype", dtype),
        *("--max-total-tokens", str(max_total_tokens)),
        # The server's own time stamps, so that the decode phase is known without streaming.
        "--enable-metrics",
    ]


@dataclass(frozen=True)
class Stint:
    """Servers that are up together, and the rounds they serve.

    ``group`` says which measurements may be divided by each other: those of one group and round.
    """

    arms: tuple[Arm, ...]
    rounds: tuple[int, ...]
    group: int


def plan(arms: Sequence[Arm], rounds: int, servers: int) -> list[Stint]:
    """Who is up when, with at most ``servers`` servers at a time.

    All together where they fit. Else several groups, AR and DFLASH in each, so that no ratio is between measurements
    taken minutes apart. With room for fewer than three, one server after the other in every round.
    """
    every = tuple(range(rounds))
    if servers >= len(arms):
        return [Stint(tuple(arms), every, 0)]
    if servers >= 3:
        trees = [arm for arm in arms if arm.budget is not None]
        size = servers - 2
        chunks = [trees[i : i + size] for i in range(0, len(trees), size)]
        return [Stint((AR, DFLASH, *chunk), every, group) for group, chunk in enumerate(chunks)]
    return [Stint((arm,), (number,), 0) for number in every for arm in arms]
