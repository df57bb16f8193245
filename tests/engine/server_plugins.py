"""Test-only plugins of a server (``plugins/``): how a test loads them, and what they leave behind."""

from __future__ import annotations

import hashlib
import itertools
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

PLUGINS = str(Path(__file__).parent / "plugins")
#: SGLang's GPU code paths in Triton's interpreter.
INTERPRETER = {"TRITON_INTERPRET": "1", "SGLANG_PLATFORM": "ddtree_interpreter", "PYTHONPATH": PLUGINS}

#: A small pool, one program per head and request in decode attention, nothing to warm up: all of it costs time here.
INTERPRETER_FLAGS = (
    *("--dtype", "float32", "--skip-tokenizer-init", "--random-seed", "1", "--max-total-tokens", "2048"),
    *("--max-running-requests", "8", "--skip-server-warmup", "--triton-attention-num-kv-splits", "1"),
)


def recorder(directory: Path) -> dict[str, str]:
    """``ddtree_recorder`` with a new directory to write to."""
    directory.mkdir(parents=True)
    return {"DDTREE_RECORD": str(directory), "PYTHONPATH": PLUGINS}


def joined(*plugins: Mapping[str, str]) -> dict[str, str]:
    """The variables of several plugins, with all their paths."""
    found: dict[str, str] = {}
    for plugin in plugins:
        paths = dict.fromkeys(filter(None, (found.get("PYTHONPATH"), plugin.get("PYTHONPATH"))))
        found |= {**plugin, "PYTHONPATH": os.pathsep.join(paths)}
    return found


def recorded(directory: Path, kind: str, prompt: Sequence[int]) -> dict[int, Any]:
    """What ``ddtree_recorder`` wrote of one prompt, by the number of tokens that were in the cache."""
    name = f"{kind}-{hashlib.sha256(repr(list(prompt)).encode()).hexdigest()[:12]}"
    return {int(file.stem.rsplit("-", 1)[1]): torch.load(file) for file in directory.glob(f"{name}-*.pt")}


def compare_states(asked, plain, tree):
    """Every state that a tree's commit left is plain decoding's at that length; how many there were."""
    compared = 0
    for question in asked:
        want, have = (recorded(where, "states", question.input_ids) for where in (plain, tree))
        # The last commit may go beyond what plain decoding was asked for.
        for length, name in itertools.product(sorted(want.keys() & have.keys()), ("recurrent", "window")):
            torch.testing.assert_close(have[length][name], want[length][name], rtol=1e-4, atol=1e-4)
        compared += len(want.keys() & have.keys())
    return compared
