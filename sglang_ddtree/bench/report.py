"""From turns to figures: one row per arm, as a dict, as Markdown and as JSON."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sglang_ddtree.bench.arms import AR, DFLASH, Arm
from sglang_ddtree.bench.compare import Turn


@dataclass(frozen=True)
class Spread:
    """A median over rounds with the smallest and largest; rounds of several groups all count."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        if self.low == self.high:
            return f"{self.median:.2f}"
        return f"{self.median:.2f} ({self.low:.2f} to {self.high:.2f})"


@dataclass(frozen=True)
class Row:
    """One arm.

    Attributes:
        tokens_per_second: answer tokens over the whole time of the requests, prefill included.
        decode_tokens_per_second: tokens after each answer's first, over the time after the prefill.
        over_ar, over_dflash: ``tokens_per_second`` as a multiple of that arm's, round by round.
        acceptance_length: answer tokens after the first per verify step, over all prompts; None for AR.
        verify_steps: for one round's prompts; AR's are its decode steps, one per token.
        acceptance_by_kind: the same for the code, maths and chat prompts alone.
        identical, prompts: prompts whose tokens equal AR's in every round, and how many there are.
    """

    arm: str
    tokens_per_second: Spread
    decode_tokens_per_second: Spread
    over_ar: Spread
    over_dflash: Spread
    acceptance_length: float | None
    verify_steps: float
    acceptance_by_kind: dict[str, float]
    identical: int
    prompts: int


def spread(values: Sequence[float]) -> Spread:
    return Spread(statistics.median(values), min(values), max(values))


def rows(turns: Sequence[Turn]) -> list[Row]:
    """One row per arm, in the order in which the arms first appear."""
    arms = list(dict.fromkeys(turn.arm for turn in sorted(turns, key=_arm_order)))
    speed = {arm: _per_round(turns, arm, _tokens_per_second) for arm in arms}
    expected = reference_tokens(turns)
    return [
        Row(
            arm=arm.label,
            tokens_per_second=spread(list(speed[arm].values())),
            decode_tokens_per_second=spread(list(_per_round(turns, arm, _decode_tokens_per_second).values())),
            over_ar=_ratio(speed[arm], speed[AR]),
            over_dflash=_ratio(speed[arm], speed[DFLASH]),
            acceptance_length=acceptance_length(turns, arm),
            verify_steps=statistics.mean(_per_round(turns, arm, _steps).values()),
            acceptance_by_kind=_by_kind(turns, arm),
            identical=len(expected) - len(differing(turns, arm, expected)),
            prompts=len(expected),
        )
        for arm in arms
    ]


def _arm_order(turn: Turn) -> tuple[int, int]:
    return (0, 0) if turn.arm == AR else (1, 0) if turn.arm == DFLASH else (2, turn.arm.budget or 0)


def _per_round(turns: Sequence[Turn], arm: Arm, figure: Callable[[list[Turn]], float]) -> dict[tuple[int, int], float]:
    """``figure`` of each (group, round)."""
    parts: dict[tuple[int, int], list[Turn]] = {}
    for turn in turns:
        if turn.arm == arm:
            parts.setdefault((turn.group, turn.round), []).append(turn)
    return {key: figure(part) for key, part in parts.items()}


def _ratio(ours: dict[tuple[int, int], float], theirs: dict[tuple[int, int], float]) -> Spread:
    return spread([ours[key] / theirs[key] for key in ours])


def _tokens_per_second(turns: list[Turn]) -> float:
    return sum(len(a.token_ids) for t in turns for a in t.answers) / sum(t.seconds for t in turns)


def _decode_tokens_per_second(turns: list[Turn]) -> float:
    return sum(len(a.token_ids) - 1 for t in turns for a in t.answers) / sum(t.decode_seconds for t in turns)


def _steps(turns: list[Turn]) -> float:
    return sum(_answer_steps(a) for t in turns for a in t.answers)


def _answer_steps(answer: Any) -> int:
    return answer.verify_steps or len(answer.token_ids) - 1


def acceptance_length(turns: Iterable[Turn], arm: Arm, kind: str | None = None) -> float | None:
    """Tokens after the first per verify step; None without verify steps."""
    answers = [
        answer
        for turn in turns
        if turn.arm == arm
        for prompt, answer in zip(turn.prompts, turn.answers, strict=True)
        if kind is None or prompt.kind == kind
    ]
    steps = sum(answer.verify_steps for answer in answers)
    return sum(len(answer.token_ids) - 1 for answer in answers) / steps if steps else None


def _by_kind(turns: Sequence[Turn], arm: Arm) -> dict[str, float]:
    kinds = sorted({prompt.kind for turn in turns for prompt in turn.prompts})
    found = {kind: acceptance_length(turns, arm, kind) for kind in kinds}
    return {kind: value for kind, value in found.items() if value is not None}


def reference_tokens(turns: Iterable[Turn]) -> dict[str, list[int]]:
    """AR's tokens of its first answer to each prompt."""
    expected: dict[str, list[int]] = {}
    for turn in turns:
        if turn.arm == AR:
            for prompt, answer in zip(turn.prompts, turn.answers, strict=True):
                expected.setdefault(prompt.id, answer.token_ids)
    return expected


def differing(turns: Iterable[Turn], arm: Arm, expected: dict[str, list[int]]) -> dict[str, int]:
    """Prompts that ``arm`` answered otherwise than expected, with the first position that differs."""
    found: dict[str, int] = {}
    for turn in turns:
        if turn.arm != arm:
            continue
        for prompt, answer in zip(turn.prompts, turn.answers, strict=True):
            if answer.token_ids != expected[prompt.id] and prompt.id not in found:
                found[prompt.id] = first_difference(answer.token_ids, expected[prompt.id])
    return found


def first_difference(a: Sequence[int], b: Sequence[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def table(found: Sequence[Row]) -> str:
    """The rows as a Markdown table."""
    kinds = sorted({kind for row in found for kind in row.acceptance_by_kind})
    head = ["", "tokens/s", "decode tokens/s", "x AR", "x DFLASH", "acceptance length", *kinds]
    head += ["verify steps", "identical to AR"]
    lines = [head, ["---"] * len(head)]
    for row in found:
        lines.append(
            [
                row.arm,
                str(row.tokens_per_second),
                str(row.decode_tokens_per_second),
                str(row.over_ar),
                str(row.over_dflash),
                _number(row.acceptance_length),
                *(_number(row.acceptance_by_kind.get(kind)) for kind in kinds),
                f"{row.verify_steps:.0f}",
                f"{row.identical}/{row.prompts}",
            ]
        )
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines) + "\n"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def markdown(head: dict[str, Any], parts: Mapping[str, Sequence[Turn]]) -> str:
    """The whole result as a page."""
    facts, settings = head["machine"], head["settings"]
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    lines = [
        "# AR, DFLASH and DDTREE on a CPU",
        "",
        f"`{head['command'].strip()}`, {facts['date']}, {head['minutes']} minutes.",
        "",
        f"- Machine: {facts['cpu']}, {facts['usable_cores']} usable cores, {facts['memory_gb']} GB; "
        f"{facts['torch_threads']} torch thread(s), {facts['torch_cpu_capability']}",
        f"- Python {facts['python']}, {versions}; commit {facts['commit']}",
        f"- {settings['rounds']} rounds in turns, {settings['concurrency']} request(s) at a time, greedy, at most "
        f"{settings['tokens']} tokens, {settings['prompts']} {settings['split']} prompts of each set; "
        f"{head['servers_at_once']} servers fitted into memory at once",
        "- tokens/s: median over the rounds (smallest to largest), prefill included; ratios are taken round by round",
        "- acceptance length: answer tokens after the first per verify step (the first comes from the prefill; drafts "
        "accepted past the end of an answer do not count)",
        "- verify steps: for all prompts of a round; AR's are its decode steps",
        "",
    ]
    for dtype, turns in parts.items():
        others = ", ".join(f"{load['other_cores']:.1f}" for load in head["load"][dtype])
        lines += [f"## {dtype}", "", table(rows(turns)), f"Cores kept busy by other programs meanwhile: {others}.", ""]
        if head["servers_at_once"] < 3:
            lines += ["One server at a time: the ratios are between measurements taken minutes apart.", ""]
    return "\n".join(lines)


def write_json(path: Path, head: dict[str, Any], parts: Mapping[str, Sequence[Turn]]) -> None:
    """Everything measured: the head, the rows and every single request, by dtype."""
    result = {
        **head,
        "results": {dtype: [asdict(row) for row in rows(turns)] for dtype, turns in parts.items()},
        "requests": {dtype: [entry for turn in turns for entry in _requests(turn)] for dtype, turns in parts.items()},
    }
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def _requests(turn: Turn) -> list[dict[str, Any]]:
    return [
        {
            "arm": turn.arm.label,
            "group": turn.group,
            "round": turn.round,
            "prompt": prompt.id,
            "tokens": len(answer.token_ids),
            "verify_steps": answer.verify_steps,
            "accepted_drafts": answer.accepted_drafts,
            "finish_reason": answer.finish_reason,
            "seconds": round(answer.seconds, 4),
            "turn_seconds": round(turn.seconds, 4),
            "decode_seconds": round(turn.decode_seconds, 4),
        }
        for prompt, answer in zip(turn.prompts, turn.answers, strict=True)
    ]
