"""What the engine tests share: flags, the AR reference, and comparisons that name the prompt and the token."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from sglang_ddtree.bench.lossless import Output, Question, as_output, first_difference
from sglang_ddtree.bench.server import Server, running

REPOSITORY = Path(__file__).resolve().parents[2]

#: SGLang checks its KV pool after every step and dies when a token is lost or a page has two owners.
STRICT = {
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": "1",
    "SGLANG_CHECK_KV_PAGE_INVARIANTS": "1",
}


def drafter_path() -> Path:
    """The shipped drafter, or the one in SGLANG_DDTREE_TEST_DRAFTER."""
    return Path(os.environ.get("SGLANG_DDTREE_TEST_DRAFTER", REPOSITORY / "drafters/smollm2-135m-dflash-b8"))


def base_flags(model: Path, dtype: str = "float32") -> list[str]:
    return ["--model-path", str(model), "--dtype", dtype, "--random-seed", "1"]


def ddtree_flags(budget: int) -> list[str]:
    drafter = str(drafter_path())
    return [
        *("--speculative-algorithm", "DDTREE", "--speculative-draft-model-path", drafter),
        *("--speculative-ddtree-budget", str(budget)),
    ]


def dflash_flags() -> list[str]:
    return ["--speculative-algorithm", "DFLASH", "--speculative-draft-model-path", str(drafter_path())]


class Reference:
    """Plain decoding's answers, each asked once. Its server starts on the first question.

    SGLANG_DDTREE_TEST_REFERENCE may hold the URL of a running one, for repeated runs by hand.
    """

    def __init__(self, flags: Sequence[str], log: Path):
        self._flags, self._log = flags, log
        self._stack = ExitStack()
        self._server: Server | None = None
        self._known: dict[str, dict[str, Any]] = {}

    def post(self, bodies: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """The raw answers of ``/generate``; unknown ones are asked eight at a time."""
        keys = [json.dumps(body, sort_keys=True) for body in bodies]
        unknown = {key: body for key, body in zip(keys, bodies, strict=True) if key not in self._known}
        if unknown:
            server = self.server()
            with ThreadPoolExecutor(8) as pool:
                answers = pool.map(lambda body: server.post("/generate", body), unknown.values())
                self._known.update(zip(unknown, answers, strict=True))
        return [self._known[key] for key in keys]

    def answer(self, input_ids: Sequence[int], max_new_tokens: int, **sampling: Any) -> Output:
        return as_output(self.post([request(input_ids, max_new_tokens, **sampling)])[0])

    def answers(self, asked: Sequence[Question], max_new_tokens: int, **sampling: Any) -> list[Output]:
        bodies = [request(question.input_ids, max_new_tokens, **sampling) for question in asked]
        return [as_output(answer) for answer in self.post(bodies)]

    def server(self) -> Server:
        """Plain decoding's server, started when first asked for."""
        if self._server is None:
            url = os.environ.get("SGLANG_DDTREE_TEST_REFERENCE")
            if url:
                self._server = Server(url, None, self._log, 0.0)  # type: ignore[arg-type]
            else:
                self._server = self._stack.enter_context(running(self._flags, log=self._log))
        return self._server

    def close(self) -> None:
        self._stack.close()


def request(input_ids: Sequence[int], max_new_tokens: int, **sampling: Any) -> dict[str, Any]:
    """The body of a greedy ``/generate`` request; ``sampling`` adds or replaces sampling parameters."""
    return {
        "input_ids": list(input_ids),
        "sampling_params": {"temperature": 0, "max_new_tokens": max_new_tokens, **sampling},
    }


def at_once(server: Server, bodies: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Raw answers to requests that are all in flight together."""
    with ThreadPoolExecutor(len(bodies)) as pool:
        return list(pool.map(lambda body: server.post("/generate", body), bodies))


def assert_equal(asked: Sequence[Question], expected: Sequence[Output], got: Sequence[Output]) -> None:
    """Token ids and finish reasons are those of plain decoding."""
    wrong = []
    for question, want, have in zip(asked, expected, got, strict=True):
        at = first_difference(want, have)
        if at is not None:
            wrong.append(f"{question.id} at token {at}: {want.ids[at : at + 3]} became {have.ids[at : at + 3]}")
        elif want.finish != have.finish:
            wrong.append(f"{question.id}: finish reason {want.finish} became {have.finish}")
    assert not wrong, f"{len(wrong)} of {len(asked)} answers differ from plain decoding: {'; '.join(wrong)}"


def log_has(server: Server, text: str) -> bool:
    return text in server.log.read_text(errors="replace")


def wait_until(condition: Callable[[], bool], seconds: float = 60) -> bool:
    import time

    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.2)
    return True
