"""Greedy answers as token ids from one server, and where two lists of them part: the means of every equality check."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from sglang_ddtree.bench.prompts import SETS, load_prompts
from sglang_ddtree.bench.server import Server

#: Two instructions, each shared by a third of the questions, so that a prefix cache has something to hit beyond the
#: chat template's own first line. The last third has none.
INSTRUCTIONS = (
    "You are a patient teacher. Think about what the reader already knows, say what the question asks for in your own "
    "words, then answer it in short steps. Name every quantity that you use, and give the result in the last sentence.",
    "You answer questions for busy engineers. Start with the answer itself, then give the reasons in order of weight. "
    "Use plain words, no greetings and no apologies, and show code in a fenced block when the question asks for code.",
)
FOLLOW_UP = (
    "<|im_end|>\n<|im_start|>user\nSay the most important part of that again, in other words.<|im_end|>\n"
    "<|im_start|>assistant\n"
)


@dataclass(frozen=True)
class Question:
    """A prompt as the server sees it; ``sampling`` are SGLang's sampling parameters, greedy when empty."""

    id: str
    input_ids: list[int]
    sampling: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Output:
    """One finished request of ``/generate``.

    Attributes:
        ids: the answer's tokens.
        finish: SGLang's finish reason: ``{"type": "length" | "stop" | "abort", ...}``.
        cached_tokens: prompt tokens that the prefix cache supplied.
        verify_steps: target passes that verified drafts; 0 under plain decoding.
    """

    ids: list[int]
    finish: dict[str, Any]
    cached_tokens: int
    verify_steps: int


def load_tokenizer(model: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(model))


def questions(tokenizer: Any, count: int) -> list[Question]:
    """``count`` held-out prompts, the sets in turns; two thirds of them share one of two long instructions."""
    sets = [load_prompts(name, "heldout", -(-count // len(SETS))) for name in SETS]
    prompts = [prompt for row in zip(*sets, strict=True) for prompt in row][:count]
    asked = []
    for number, prompt in enumerate(prompts):
        messages = prompt.messages
        kind = number // len(SETS) % (len(INSTRUCTIONS) + 1)
        if kind < len(INSTRUCTIONS):
            messages = [{"role": "system", "content": INSTRUCTIONS[kind]}, *messages]
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        asked.append(Question(prompt.id, [int(token) for token in ids]))
    return asked


def seeded(asked: Sequence[Question]) -> list[Question]:
    """The same prompts, each with a seed of its own and one of four kinds of sampling."""
    kinds = ({"temperature": 0.7}, {"temperature": 1.0}, {"temperature": 0.8, "top_p": 0.9}, {"top_k": 40})
    return [
        replace(question, sampling={"temperature": 1.0, **kinds[number % len(kinds)], "sampling_seed": 1000 + number})
        for number, question in enumerate(asked)
    ]


def follow_ups(tokenizer: Any, asked: Sequence[Question], answers: Sequence[Output]) -> list[Question]:
    """The next turn of each conversation: the cached part now includes tokens that the server itself committed."""
    turn = tokenizer.encode(FOLLOW_UP, add_special_tokens=False)
    end = tokenizer.eos_token_id
    return [
        Question(f"{question.id}/2", question.input_ids + [t for t in answer.ids if t != end] + turn, question.sampling)
        for question, answer in zip(asked, answers, strict=True)
    ]


def generate(server: Server, input_ids: Sequence[int], max_new_tokens: int, **sampling: Any) -> Output:
    """One request, greedy unless ``sampling`` (SGLang's sampling parameters) says otherwise."""
    body = {
        "input_ids": list(input_ids),
        "sampling_params": {"temperature": 0, "max_new_tokens": max_new_tokens, **sampling},
    }
    return as_output(server.post("/generate", body, timeout=1800))


def as_output(answer: dict[str, Any]) -> Output:
    """The parts of a ``/generate`` answer that are compared."""
    meta = answer["meta_info"]
    return Output(
        ids=list(answer["output_ids"]),
        finish=meta["finish_reason"],
        cached_tokens=int(meta["cached_tokens"]),
        verify_steps=int(meta.get("spec_verify_ct") or 0),
    )


def generate_all(
    server: Server, asked: Sequence[Question], max_new_tokens: int, concurrency: int, **sampling: Any
) -> list[Output]:
    """Answers in the order of ``asked``, ``concurrency`` requests in flight."""
    with ThreadPoolExecutor(concurrency) as pool:
        return list(
            pool.map(lambda q: generate(server, q.input_ids, max_new_tokens, **{**q.sampling, **sampling}), asked)
        )


def flush_cache(server: Server) -> None:
    """Empty the prefix cache.

    Raises:
        urllib.error.HTTPError: a request is still running.
    """
    server.get("/flush_cache", timeout=120)


def first_difference(expected: Output, got: Output) -> int | None:
    """Index of the first token that differs (a missing one counts), None when the ids are equal."""
    for index, (a, b) in enumerate(zip(expected.ids, got.ids, strict=False)):
        if a != b:
            return index
    return None if len(expected.ids) == len(got.ids) else min(len(expected.ids), len(got.ids))


def acceptance_length(outputs: Sequence[Output]) -> float | None:
    """Tokens per verify step; each answer's first token comes from its prefill and is left out."""
    steps = sum(output.verify_steps for output in outputs)
    return sum(len(output.ids) - 1 for output in outputs if output.verify_steps) / steps if steps else None
