"""Questions out of the PyPI package ``evals``: user turns of its sample files, its word list, its text passages."""

from __future__ import annotations

import json
import random

from sglang_ddtree.bench.prompts import Prompt, ask
from sglang_ddtree.demo.packages import read_member

ROOT = "evals/registry/data"
MAX_CHARACTERS = 900


def read_lines(name: str) -> list[dict]:
    """The records of one JSON-lines file of the package."""
    lines = read_member("evals", f"{ROOT}/{name}.jsonl").decode().splitlines()
    return [json.loads(line) for line in lines if line.strip()]


def user_questions(names: tuple[str, ...], kind: str, rng: random.Random, per_file: int) -> list[Prompt]:
    """Up to ``per_file`` last user turns of each file, without the system prompts that ask for one-word answers."""
    prompts = []
    for name in names:
        records = read_lines(name)
        rng.shuffle(records)
        for number, record in enumerate(records[:per_file]):
            text = record["input"] if isinstance(record["input"], str) else record["input"][-1]["content"]
            if 20 <= len(text) <= MAX_CHARACTERS:
                prompts.append(ask(f"evals/{name}/{number}", kind, text))
    return prompts


def nouns() -> list[str]:
    """About 2,700 English nouns, common ones first."""
    records = sorted(read_lines("twenty_questions/lexicon_nouns"), key=lambda record: record["difficulty"])
    return [record["word"] for record in records]


def passages(rng: random.Random, count: int, length: int = 500) -> list[str]:
    """``count`` distinct passages of web and encyclopaedia text, cut at a sentence's end before ``length``."""
    texts = {
        text[:length].rsplit(". ", 1)[0] + "."
        for name in ("schelling_point/wikipedia_5", "schelling_point/owt_5")
        for record in read_lines(name)
        for key, text in record.items()
        if key.isdigit() and len(text) > 200
    }
    return rng.sample(sorted(texts), min(count, len(texts)))
