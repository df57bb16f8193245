"""Chat completions from one server through the official ``openai`` client, with their times and verify steps."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from openai import AsyncOpenAI, DefaultAsyncHttpxClient

Messages = Sequence[dict[str, str]]

#: What SGLang adds to an answer on request (``sglext``): verify steps and the token ids themselves.
_EXTENSIONS = {"return_spec_tokens_details": True, "return_output_ids_in_sglext": True}


@dataclass(frozen=True)
class Answer:
    """One finished request.

    Attributes:
        text: the answer.
        token_ids: its tokens, as the server committed them.
        finish_reason: "stop" or "length".
        verify_steps: target passes that verified drafts; 0 under plain decoding.
        accepted_drafts: drafts that matched, over all of them (those past the end of the answer included).
        seconds: from sending to the end, on the client's clock.
        first_token_seconds: from sending to the first streamed token; None when not streamed.
        decode_span: end of the prefill and end of the answer on the server's clock; None when streamed, or when the
            server runs without ``--enable-metrics``.
        tokens: how many tokens the answer has; the server's count where it does not send the ids.
        accepted_histogram: entry k counts the verify steps that accepted k drafts; empty where not told.
    """

    text: str
    token_ids: list[int]
    finish_reason: str
    verify_steps: int
    accepted_drafts: int
    seconds: float
    first_token_seconds: float | None = None
    decode_span: tuple[float, float] | None = None
    tokens: int = 0
    accepted_histogram: tuple[int, ...] = ()

    @property
    def acceptance_length(self) -> float | None:
        """Tokens that reached the client per verify step; the first token comes from the prefill and is left out."""
        return (len(self.token_ids) - 1) / self.verify_steps if self.verify_steps else None


def connect(url: str, timeout: float = 600) -> AsyncOpenAI:
    """A client for the server at ``url`` that never repeats a request on its own (that would spoil the times)."""
    # trust_env: a server on this machine is never reached through a proxy.
    http = DefaultAsyncHttpxClient(trust_env=False)
    return AsyncOpenAI(base_url=f"{url}/v1", api_key="none", timeout=timeout, max_retries=0, http_client=http)


async def ask(client: AsyncOpenAI, messages: Messages, max_tokens: int) -> Answer:
    """One greedy chat completion, answered in one piece."""
    begin = time.perf_counter()
    response = await client.chat.completions.create(**_request(messages, max_tokens, return_meta_info=True))
    seconds = time.perf_counter() - begin
    choice = response.choices[0]
    times = getattr(choice, "meta_info", None) or {}
    prefilled, finished = times.get("prefill_finished_time"), times.get("request_finished_ts")
    return Answer(
        text=choice.message.content or "",
        finish_reason=choice.finish_reason,
        seconds=seconds,
        decode_span=None if prefilled is None or finished is None else (prefilled, finished),
        **_extensions(response),
    )


async def ask_streaming(
    client: AsyncOpenAI,
    messages: Messages,
    max_tokens: int,
    on_text: Callable[[str], None] = lambda piece: None,
    *,
    model: str = "default",
    body: Mapping[str, Any] | None = None,
    sglang: bool = True,
) -> Answer:
    """One chat completion; ``on_text`` gets each piece as it arrives.

    Args:
        model: the name that the server expects; SGLang takes any.
        body: fields of the request that add to, or replace, the greedy default.
        sglang: ask for SGLang's extension fields; without them there are no token ids and no verify steps.

    Raises:
        ValueError: the server ended the stream without an answer, or without what was asked of it.
        openai.OpenAIError: it refused, or could not be reached.
    """
    request = _request(messages, max_tokens, model=model, sglang=sglang, **(body or {}))
    begin = time.perf_counter()
    pieces: list[str] = []
    finish_reason, first, extended, counted = "", None, None, 0
    usage = {"include_usage": True}
    async for chunk in await client.chat.completions.create(stream=True, stream_options=usage, **request):
        if getattr(chunk, "sglext", None):
            extended = chunk
        if chunk.usage is not None:
            counted = chunk.usage.completion_tokens
        for choice in chunk.choices:
            finish_reason = choice.finish_reason or finish_reason
            # A model's thinking is text of the answer as well; servers with a reasoning parser send it apart.
            if piece := choice.delta.content or getattr(choice.delta, "reasoning_content", None):
                first = first or time.perf_counter() - begin
                pieces.append(piece)
                on_text(piece)
    seconds = time.perf_counter() - begin
    if not finish_reason:
        raise ValueError("the stream ended without a finish reason: the server aborted the request")
    details = _extensions(extended) if sglang else {"token_ids": [], "verify_steps": 0, "accepted_drafts": 0}
    details["tokens"] = details.get("tokens") or counted
    return Answer(
        text="".join(pieces), finish_reason=finish_reason, seconds=seconds, first_token_seconds=first, **details
    )


def _request(
    messages: Messages, max_tokens: int, *, model: str = "default", sglang: bool = True, **extra: Any
) -> dict[str, Any]:
    return {
        "model": model,  # SGLang serves one model, whatever the name
        "messages": list(messages),
        "max_tokens": max_tokens,
        "temperature": 0,
        "extra_body": {**(_EXTENSIONS if sglang else {}), **extra},
    }


def _extensions(extended: Any) -> dict[str, Any]:
    """Token ids and verify counts from the response, or the chunk, that carries SGLang's extension fields."""
    fields = getattr(extended, "sglext", None)
    if not fields or not fields.get("output_ids"):
        raise ValueError("the answer carries no token ids: the request was aborted, or the server is not SGLang 0.5.23")
    spec = fields.get("spec_tokens_details") or {}
    ids = list(fields["output_ids"][0])
    return {
        "token_ids": ids,
        "tokens": len(ids),
        "verify_steps": int(spec.get("spec_verify_ct", 0)),
        "accepted_drafts": int(spec.get("spec_num_correct_drafts", 0)),
        "accepted_histogram": tuple(spec.get("spec_correct_drafts_histogram") or ()),
    }


def ask_together(url: str, prompts: Sequence[Messages], max_tokens: int) -> list[Answer]:
    """Send all ``prompts`` at once and wait for all answers, in the order of the prompts."""

    async def send() -> list[Answer]:
        async with connect(url) as client:
            return await asyncio.gather(*(ask(client, messages, max_tokens) for messages in prompts))

    return asyncio.run(send())
