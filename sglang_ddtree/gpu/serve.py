"""A small model served with DDTREE and with plain decoding on the same attention backend: are the tokens the same, and
how many come in a second? FlashInfer verifies once by the tree's bits and once by its own mask.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sglang_ddtree.attention.flashinfer_choice import ENV
from sglang_ddtree.bench import lossless
from sglang_ddtree.bench.lossless import Output, Question
from sglang_ddtree.bench.server import Server, running

#: Where the answers part, plain decoding's two best tokens may be so far apart in log-probability. In float32 they must
#: not part at all; in bfloat16 sums of another order turn near-ties, and a wrong mask or position gives larger gaps.
GAPS = {"float32": 0.0, "bfloat16": 0.5}

CONCURRENCY = 4


class OutOfTime(Exception):
    """No server is started any more."""


@dataclass(frozen=True)
class Setting:
    """One DDTREE server; plain decoding shares ``dtype`` and ``backend``.

    Attributes:
        mask: FlashInfer's, ``SGLANG_DDTREE_FLASHINFER``; empty with another backend.
    """

    dtype: str
    backend: str
    graphs: bool
    mask: str = ""

    @property
    def name(self) -> str:
        backend = f"{self.backend} ({self.mask} mask)" if self.mask else self.backend
        return f"{self.dtype}, {backend}, {'CUDA graphs' if self.graphs else 'eager'}"


@dataclass(frozen=True)
class Answer:
    """Tokens, and for each how far plain decoding's best token was ahead of the second, in log-probability."""

    output: Output
    gaps: list[float]


@dataclass(frozen=True)
class Served:
    """What one server gave: answers in the order of the questions, and tokens per second when asked again."""

    answers: list[Answer]
    speed: float


def settings(device: str) -> list[Setting]:
    """FlashInfer computes no float32, and there are no CUDA graphs on a CPU. The stock mask comes before the variant,
    which a server that is told to use it cannot start without."""
    if device == "cpu":
        return [Setting("float32", "torch_native", False)]
    found = [Setting(dtype, "triton", graphs) for dtype in ("float32", "bfloat16") for graphs in (False, True)]
    masks = (("stock", True), ("tree", False), ("tree", True))
    return found + [Setting("bfloat16", "flashinfer", graphs, mask) for mask, graphs in masks]


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
    """One row per setting: how many answers are plain decoding's, where and how widely others part, acceptance, tokens
    per second, and the variant of FlashInfer beside its stock mask.

    Args:
        until: of the monotonic clock; no server starts after it.

    Raises:
        OutOfTime: it is past ``until``.
        ServerError: a server did not start.
    """
    asked = lossless.questions(lossless.load_tokenizer(model), prompts)

    def run(setting: Setting, with_drafter: Path | None, name: str) -> Served:
        if time.monotonic() > until:
            raise OutOfTime
        arguments = flags(setting, model, with_drafter, budget)
        env = {ENV: setting.mask} if setting.mask and with_drafter else {}
        return serve(arguments, env, asked, tokens, f"{name} {setting.name}", logs, say)

    plain: dict[tuple[str, str], Served] = {}
    done: dict[Setting, Served] = {}
    for setting in settings(device):
        key = setting.dtype, setting.backend
        if key not in plain:
            plain[key] = run(replace(setting, mask=""), None, "AR")
        got = done[setting] = run(setting, drafter, "DDTREE")
        row = {
            "setting": setting.name,
            **judge(plain[key].answers, got.answers, GAPS[setting.dtype]),
            "speed": got.speed,
            "over_plain": got.speed / plain[key].speed,
        }
        stock = done.get(replace(setting, mask="stock"))
        if setting.mask == "tree" and stock is not None:
            beside = judge(stock.answers, got.answers, GAPS[setting.dtype])
            row["beside_stock"] = {
                "identical": beside["identical"],
                "differences": beside["differences"],
                "speed": got.speed / stock.speed,
            }
            row["passed"] = row["passed"] and beside["passed"]
        yield row


def serve(
    arguments: Sequence[str],
    env: dict[str, str],
    asked: Sequence[Question],
    tokens: int,
    name: str,
    logs: Path,
    say: Callable[[str], None],
) -> Served:
    """What one server says, and how fast it says it again; it is stopped in the end.

    Args:
        env: variables to add to the server's environment.

    Raises:
        ServerError: it did not start.
    """
    log = logs / f"{re.sub('[^A-Za-z0-9]+', '-', name)}.log"
    say(f"{name}: starting, log {log}")
    with running(arguments, log=log, timeout=900, env=env) as server, ThreadPoolExecutor(CONCURRENCY) as pool:
        say(f"{name}: answers after {server.start_seconds:.0f} s")
        answers = list(pool.map(lambda question: ask(server, question, tokens), asked))
        return Served(answers, measure(server, asked, tokens))


def measure(server: Server, asked: Sequence[Question], tokens: int) -> float:
    """Tokens per second of all answers together, without log-probabilities; the prompts are in the prefix cache."""
    begin = time.perf_counter()
    outputs = lossless.generate_all(server, asked, tokens, CONCURRENCY)
    return sum(len(output.ids) for output in outputs) / (time.perf_counter() - begin)


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
