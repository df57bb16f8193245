"""A small model served with DDTREE and with plain decoding on the same attention backend: are the tokens the same?"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_ddtree.bench import lossless
from sglang_ddtree.bench.lossless import Output, Question
from sglang_ddtree.bench.server import Server, running

#: Where the answers part, plain decoding's two best tokens may be so far apart in log-probability. In float32 they must
#: not part at all; in bfloat16 sums of another order turn near-ties, and a wrong mask or position gives larger gaps.
GAPS = {"float32": 0.0, "bfloat16": 0.5}


class OutOfTime(Exception):
    """No server is started any more."""


@dataclass(frozen=True)
class Setting:
    """One DDTREE server; plain decoding shares ``dtype`` and ``backend``."""

    dtype: str
    backend: str
    graphs: bool

    @property
    def name(self) -> str:
        return f"{self.dtype}, {self.backend}, {'CUDA graphs' if self.graphs else 'eager'}"


@dataclass(frozen=True)
class Answer:
    """Tokens, and for each how far plain decoding's best token was ahead of the second, in log-probability."""

    output: Output
    gaps: list[float]


def settings(device: str) -> list[Setting]:
    """FlashInfer computes no float32, and there are no CUDA graphs on a CPU."""
    if device == "cpu":
        return [Setting("float32", "torch_native", False)]
    pairs = (("float32", "triton"), ("bfloat16", "triton"), ("bfloat16", "flashinfer"))
    return [Setting(dtype, backend, graphs) for dtype, backend in pairs for graphs in (False, True)]


def flags(setting: Setting, model: Path, drafter: Path | None, budget: int) -> list[str]:
    """Arguments of the server; without a drafter, plain decoding."""
    chosen = ["--model-path", str(model), "--dtype", setting.dtype, "--attention-backend", setting.backend]
    chosen += ["--random-seed", "1", "--max-total-tokens", "16384"]
    if not setting.graphs:
        chosen.append("--disable-cuda-graph")
    if drafter is not None:
        chosen += ["--speculative-algorithm", "DDTREE", "--speculative-draft-model-path", str(drafter)]
        chosen += ["--speculative-ddtree-budget", str(budget)]
    return chosen


def check_served(
    model: Path,
    drafter: Path,
    *,
    device: str,
    budget: int,
    prompts: int,
    tokens: int,
    logs: Path,
    say: Callable[[str], None],
    until: float,
) -> Iterator[dict[str, Any]]:
    """One row per setting: how many answers are plain decoding's, where and how widely others part, acceptance.

    Args:
        until: of the monotonic clock; no server starts after it.

    Raises:
        OutOfTime: it is past ``until``.
        ServerError: a server did not start.
    """
    asked = lossless.questions(lossless.load_tokenizer(model), prompts)
    plain: dict[tuple[str, str], list[Answer]] = {}
    for setting in settings(device):
        key = setting.dtype, setting.backend
        if key not in plain:
            plain[key] = answers(
                flags(setting, model, None, budget), asked, tokens, f"AR {setting.name}", logs, say, until
            )
        got = answers(flags(setting, model, drafter, budget), asked, tokens, f"DDTREE {setting.name}", logs, say, until)
        yield {"setting": setting.name, **judge(plain[key], got, GAPS[setting.dtype])}


def answers(
    arguments: Sequence[str],
    asked: Sequence[Question],
    tokens: int,
    name: str,
    logs: Path,
    say: Callable[[str], None],
    until: float,
) -> list[Answer]:
    """What one server says; it is stopped again.

    Raises:
        OutOfTime: it is past ``until``.
        ServerError: it did not start.
    """
    if time.monotonic() > until:
        raise OutOfTime
    log = logs / f"{re.sub('[^A-Za-z0-9]+', '-', name)}.log"
    say(f"{name}: starting, log {log}")
    with running(arguments, log=log, timeout=900) as server, ThreadPoolExecutor(4) as pool:
        say(f"{name}: answers after {server.start_seconds:.0f} s")
        return list(pool.map(lambda question: ask(server, question, tokens), asked))


def ask(server: Server, question: Question, tokens: int) -> Answer:
    """One greedy request with the log-probabilities of the two best tokens at every position."""
    body = {
        "input_ids": question.input_ids,
        "sampling_params": {"temperature": 0, "max_new_tokens": tokens},
        "return_logprob": True,
        "top_logprobs_num": 2,
    }
    raw = server.post("/generate", body)
    top = raw["meta_info"]["output_top_logprobs"]
    return Answer(lossless.as_output(raw), [best[0] - second[0] for best, second in top])


def judge(plain: Sequence[Answer], got: Sequence[Answer], allowed_gap: float) -> dict[str, Any]:
    """Compare answer by answer.

    Returns:
        ``answers``, ``identical``, ``differences`` (token index and plain decoding's gap there, None where one answer
        merely ends earlier), ``acceptance`` (tokens per verify step) and ``passed``: no gap above ``allowed_gap``, and
        drafts were accepted.
    """
    differences = []
    for want, have in zip(plain, got, strict=True):
        at = lossless.first_difference(want.output, have.output)
        if at is not None:
            # One answer may be longer than the other; no gap excuses that.
            gap = want.gaps[at] if at < min(len(want.gaps), len(have.output.ids)) else None
            differences.append({"at": at, "gap": gap})
    if allowed_gap == 0:
        allowed = not differences
    else:
        allowed = all(part["gap"] is not None and part["gap"] <= allowed_gap for part in differences)
    acceptance = lossless.acceptance_length([answer.output for answer in got])
    return {
        "answers": len(got),
        "identical": len(got) - len(differences),
        "differences": differences,
        "acceptance": acceptance,
        "passed": allowed and acceptance is not None and acceptance > 1.0,
    }
