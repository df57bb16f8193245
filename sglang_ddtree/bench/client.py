"""Chat completions from one server through the official ``openai`` client, with their times and verify steps."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from openai import AsyncOpenAI

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
        first_token_seconds: from sending to the first streamed token; None when it was not streamed.
        seconds: from sending to the end.
    """

    text: str
    token_ids: list[int]
    finish_reason: str
    verify_steps: int
    accepted_drafts: int
    first_token_seconds: float | None
    seconds: float

    @property
    def acceptance_length(self) -> float | None:
        """Tokens that reached the client per verify step; the first token comes from the prefill and is left out."""
        return (len(self.token_ids) - 1) / self.verify_steps if self.verify_steps else None


def connect(url: str, timeout: float = 600) -> AsyncOpenAI:
    """A client for the server at ``url`` that never repeats a request on its own (that would spoil the times)."""
    return AsyncOpenAI(base_url=f"{url}/v1", api_key="none", timeout=timeout, max_retries=0)


async def ask(
    client: AsyncOpenAI,
    messages: Messages,
    max_tokens: int,
    *,
    stream: bool = True,
    on_text: Callable[[str], None] | None = None,
) -> Answer:
    """One greedy chat completion.

    Args:
        max_tokens: the answer ends there at the latest.
        stream: without it there is no time to first token.
        on_text: called with each piece of a streamed answer as it arrives.
    """
    request: dict[str, Any] = {
        "model": "default",  # SGLang serves one model, whatever the name
        "messages": list(messages),
        "max_tokens": max_tokens,
        "temperature": 0,
        "extra_body": _EXTENSIONS,
    }
    begin = time.perf_counter()
    if not stream:
        response = await client.chat.completions.create(**request)
        choice = response.choices[0]
        return _answer(choice.message.content or "", choice.finish_reason, response, None, begin)

    pieces: list[str] = []
    finish_reason, first, extended = "", None, None
    async for chunk in await client.chat.completions.create(stream=True, **request):
        if getattr(chunk, "sglext", None):
            extended = chunk
        for choice in chunk.choices:
            finish_reason = choice.finish_reason or finish_reason
            if piece := choice.delta.content:
                first = first or time.perf_counter() - begin
                pieces.append(piece)
                if on_text is not None:
                    on_text(piece)
    return _answer("".join(pieces), finish_reason, extended, first, begin)


def _answer(text: str, finish_reason: str, extended: Any, first: float | None, begin: float) -> Answer:
    """``extended`` is the response or chunk that carries SGLang's extension fields."""
    seconds = time.perf_counter() - begin
    fields = getattr(extended, "sglext", None)
    if not fields or not fields.get("output_ids"):
        raise ValueError("the server's answer carries no token ids: it is not SGLang 0.5.23, or it aborted the request")
    spec = fields.get("spec_tokens_details") or {}
    return Answer(
        text=text,
        token_ids=list(fields["output_ids"][0]),
        finish_reason=finish_reason,
        verify_steps=int(spec.get("spec_verify_ct", 0)),
        accepted_drafts=int(spec.get("spec_num_correct_drafts", 0)),
        first_token_seconds=first,
        seconds=seconds,
    )


def ask_together(url: str, prompts: Sequence[Messages], max_tokens: int, *, stream: bool = True) -> list[Answer]:
    """Send all ``prompts`` at once and wait for all answers, in the order of the prompts."""

    async def send() -> list[Answer]:
        async with connect(url) as client:
            return await asyncio.gather(*(ask(client, messages, max_tokens, stream=stream) for messages in prompts))

    return asyncio.run(send())
