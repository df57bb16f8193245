"""Prompt files: chat messages, plain prompts, MT-bench/Spec-Bench questions and ShareGPT conversations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sglang_ddtree.bench.ab.config import ConfigError
from sglang_ddtree.bench.prompts import Prompt

_ROLES = {"system": "system", "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant"}


def read_prompts(path: Path) -> list[Prompt]:
    """The prompts of a JSONL file, or of a JSON file that is one list.

    Of a conversation, everything up to the first user turn is asked; an answer in the file is not used.

    Raises:
        ConfigError: the file cannot be read, or an entry is of no known form; the message names it.
    """
    try:
        text = path.read_text(encoding="utf-8")
        if text.lstrip().startswith("["):
            entries = json.loads(text)
        else:
            entries = [json.loads(line) for line in text.splitlines() if line.strip()]
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: {' '.join(str(error).split())}") from error
    found = []
    for number, entry in enumerate(entries, start=1):
        messages = _messages(entry)
        if not messages:
            raise ConfigError(
                f"{path}: entry {number} has no user turn; known are messages, prompt, turns and conversations"
            )
        name = entry.get("id", entry.get("question_id", number))
        found.append(Prompt(f"{path.stem}/{name}", str(entry.get("category", path.stem)), messages))
    if not found:
        raise ConfigError(f"{path}: no prompts in it")
    if len({prompt.id for prompt in found}) < len(found):
        found = [Prompt(f"{path.stem}/{i}", p.kind, p.messages) for i, p in enumerate(found, start=1)]
    return found


def _messages(entry: Any) -> list[dict[str, str]]:
    """The messages up to the first user turn; empty where there is none."""
    if not isinstance(entry, dict):
        return []
    if isinstance(entry.get("prompt"), str):
        return [{"role": "user", "content": entry["prompt"]}]
    if isinstance(entry.get("turns"), list) and entry["turns"]:
        return [{"role": "user", "content": str(entry["turns"][0])}]
    kept: list[dict[str, str]] = []
    turns = entry.get("messages") or entry.get("conversations")
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        return []
    for turn in turns:
        role = _ROLES.get(str(turn.get("role", turn.get("from"))), "")
        content = turn.get("content", turn.get("value"))
        if not role or not isinstance(content, str):
            return []
        kept.append({"role": role, "content": content})
        if role == "user":
            return kept
    return []
