"""The result file: everything measured, written after every cell; docs/benchmark.md describes its schema."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from sglang_ddtree.bench.ab import typed
from sglang_ddtree.bench.ab.config import ConfigError

#: Raised by one whenever a reader of the old form would misread the new one.
SCHEMA = "sglang-ddtree-bench/1"

#: What is read of ``head`` and of its settings.
_HEAD = {"command": str, "machine": dict[str, Any], "reference": str, "greedy": bool, "settings": dict[str, Any]}
_SETTINGS = {
    **{"force": bool, "tokens": int, "fixed_length": bool, "split": str},
    **{"body": dict[str, Any], "concurrency": list[int]},
}

_T = TypeVar("_T")


@dataclass(frozen=True)
class Request:
    """One request.

    Attributes:
        prompt: id of the prompt.
        sent: seconds from the begin of the cell.
        seconds: from sending to the end of the answer.
        ttft: seconds to the first text; None when there was none.
        gaps: seconds between successive pieces of text. With drafts a piece holds several tokens.
        tokens: of the answer.
        token_ids: of the answer; empty where the server does not send them.
        text: the answer.
        verify_steps, accepted_drafts, accepted_histogram: as the server counts them; 0 and empty without drafts.
        finish: "stop" or "length".
        error: why there is no answer; empty when there is one.
        correct: the answer is right; None where that is not known.
    """

    prompt: str
    sent: float
    seconds: float
    ttft: float | None = None
    gaps: list[float] = field(default_factory=list)
    tokens: int = 0
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    verify_steps: int = 0
    accepted_drafts: int = 0
    accepted_histogram: list[int] = field(default_factory=list)
    finish: str = ""
    error: str = ""
    correct: bool | None = None


@dataclass(frozen=True)
class Cell:
    """One arm under one load on one prompt set, once.

    Attributes:
        load: ``cN`` (N requests at a time) or ``rX`` (X requests a second).
        repeat: number of the repeat, from 0.
        seconds: from the first sending to the end of the last answer.
        flushed: the prefix cache was emptied before.
        steps, drafted: verify steps, and accepted drafts, by the server's counters over the cell; None without.
        server, gpu: what :mod:`sglang_ddtree.bench.ab.telemetry` read meanwhile.
    """

    arm: str
    set: str
    load: str
    repeat: int
    seconds: float
    flushed: bool
    requests: list[Request]
    steps: float | None = None
    drafted: float | None = None
    server: dict[str, float] = field(default_factory=dict)
    gpu: dict[str, float] = field(default_factory=dict)

    @property
    def answered(self) -> list[Request]:
        return [request for request in self.requests if not request.error]


@dataclass
class Difference:
    """An arm's greedy answer that leaves the reference's at token ``position`` (from 0).

    ``gap``: the reference's log-probabilities of its best two tokens there, one minus the other; None when unknown.
    """

    arm: str
    set: str
    prompt: str
    position: int
    gap: float | None = None


@dataclass
class Result:
    """A whole run, finished or not.

    Attributes:
        head: command, machine, settings, reference arm and the like.
        arms: by name: flags, url, and what the server says of itself (``info``; None when it says nothing).
        notes: what was left out, and why.
        cells: in the order in which they were measured.
        complete: every planned cell is there.
        differences: some of the greedy answers that are not the reference's.
    """

    head: dict[str, Any]
    arms: dict[str, dict[str, Any]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    cells: list[Cell] = field(default_factory=list)
    complete: bool = False
    differences: list[Difference] = field(default_factory=list)

    @property
    def reference(self) -> str:
        return str(self.head["reference"])

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)


def write(path: Path, result: Result) -> None:
    """Replace the file at once: whoever reads it, or kills this program, never sees half of it."""
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps({"schema": SCHEMA, **asdict(result)}) + "\n", encoding="utf-8")
    os.replace(part, path)


def read(path: Path) -> Result:
    """The result in a file.

    Raises:
        ConfigError: it cannot be read, or is of another schema.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        schema = data.pop("schema") if isinstance(data, dict) else None
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"{path} is not a result of this benchmark: {error}") from error
    if schema != SCHEMA:
        raise ConfigError(f"{path}: schema {schema!r}, this version reads {SCHEMA!r}")
    try:
        cells = [
            _make(Cell, {**cell, "requests": [_make(Request, one) for one in cell["requests"]]})
            for cell in data["cells"]
        ]
        differences = [_make(Difference, one) for one in data.pop("differences", [])]
        result = _make(Result, {**data, "cells": cells, "differences": differences})
        _check(result)
        return result
    except KeyError as error:
        raise ConfigError(f"{path}: does not follow {SCHEMA}: it lacks {error}") from error
    except TypeError as error:
        raise ConfigError(f"{path}: does not follow {SCHEMA}: {error}") from error


def _make(cls: type[_T], values: dict[str, Any]) -> _T:
    made = cls(**values)
    typed.check(cls, values)
    return made


def _check(result: Result) -> None:
    """Raises KeyError and TypeError for what the types do not say and the tables need."""
    for key, kind in _HEAD.items():
        if not typed.fits(result.head[key], kind):
            raise TypeError(f"{key} in head is {str(result.head[key])[:80]!r}")
    for key, kind in _SETTINGS.items():
        if not typed.fits(result.head["settings"][key], kind):
            raise TypeError(f"{key} in settings is {str(result.head['settings'][key])[:80]!r}")
    for cell in result.cells:
        if cell.arm not in result.arms:
            raise TypeError(f"a cell is of {cell.arm!r}, which is none of the arms")
        if cell.seconds <= 0:
            raise TypeError(f"a cell of {cell.arm} took {cell.seconds} seconds")
