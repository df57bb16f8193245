"""SGLang's schedulers with their workers, without a server: a start takes some seconds instead of a minute.

HTTP, the tokenizer and the streams of output are not there; batches, caches, overlap, the target and the drafter are.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from sglang_ddtree.bench.lossless import Output, Question


class Run(NamedTuple):
    """What a scheduler did: the answers of each ``ask``, how often each request was retracted, and its log."""

    answers: list[list[Output]]
    retractions: list[list[int]]
    log: str


class Schedulers:
    """One process that has SGLang imported, with ``env``; every run is a fork of it."""

    def __init__(self, directory: Path, env: Mapping[str, str]):
        self._directory = directory
        self._log = directory / "schedulers.log"
        program = Path(__file__).with_name("scheduler_process.py")
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, str(program)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**os.environ, **env},
            )

    def run(
        self,
        name: str,
        flags: Sequence[str],
        steps: Sequence[Sequence[Any]],
        env: Mapping[str, str] | None = None,
        *,
        draft_passes: Path | None = None,
    ) -> Run:
        """Start a scheduler with ``flags``, take it through ``steps``, and end it.

        Args:
            steps: ``("ask", requests)`` (see :func:`ask`), ``("retract", n)``: from now on a request is retracted
                every n forward passes, ``("flush",)``, ``("write", path, text)`` and ``("remove", path)``; each
                begins when nothing runs any more.
            env: variables that SGLang and its plugins read late.
            draft_passes: a file for what the draft model was given and gave (``torch.load``).

        Raises:
            AssertionError: the scheduler ended with an error, or found a leak; with the end of its log.
        """
        out, log = self._directory / f"{name}.json", self._directory / f"{name}.log"
        job = {
            "flags": list(flags),
            "steps": steps,
            "env": dict(env or {}),
            "out": str(out),
            "log": str(log),
            "draft_passes": str(draft_passes) if draft_passes else None,
        }
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        stdin.write(json.dumps(job) + "\n")
        stdin.flush()
        line = stdout.readline()
        assert line, f"the schedulers' process ended:\n{self._log.read_text()[-4000:]}"
        text = log.read_text(errors="replace") if log.exists() else ""
        assert json.loads(line)["status"] == 0, f"{name} failed:\n{text[-6000:]}"
        assert "leak detected" not in text
        found = json.loads(out.read_text())
        retractions = [[one.pop("retractions") for one in answers] for answers in found]
        return Run([[Output(**one) for one in answers] for answers in found], retractions, text)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)


def ask(asked: Sequence[Question], tokens: Sequence[int], abort_at: int | None = None) -> tuple[str, list[Any]]:
    """A step that sends greedy requests at once; ``abort_at`` aborts each when it has so many tokens."""
    requests = [{"ids": q.input_ids, "tokens": n} for q, n in zip(asked, tokens, strict=True)]
    for one in requests:
        if abort_at is not None:
            one["abort_at"] = abort_at
    return "ask", requests
