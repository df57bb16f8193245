"""Send the prompts of one cell: a fixed number at a time, or at random moments with a given mean rate."""

from __future__ import annotations

import asyncio
import itertools
import random
import signal
import time
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, TypeVar

import httpx
from openai import AsyncOpenAI, OpenAIError

from sglang_ddtree.bench.ab.config import Load
from sglang_ddtree.bench.ab.endpoint import Endpoint
from sglang_ddtree.bench.ab.store import Request
from sglang_ddtree.bench.client import ask_streaming, connect
from sglang_ddtree.bench.prompts import Prompt

Found = TypeVar("Found")


def send(
    endpoint: Endpoint, prompts: Sequence[Prompt], load: Load, tokens: int, body: Mapping[str, Any], seed: int
) -> tuple[list[Request], float]:
    """Send every prompt once.

    Args:
        load: a closed loop keeps ``concurrency`` requests running; an open loop sends without waiting for answers.
        tokens: answer length at most.
        body: further fields of each request.
        seed: of the arrival times, so that every arm meets the same ones.

    Returns:
        the requests in the order of the prompts, and the seconds from the first sending to the last answer's end.
    """
    return run_interruptible(_send(endpoint, prompts, load, tokens, body, seed))


def run_interruptible(work: Coroutine[Any, Any, Found]) -> Found:
    """``asyncio.run``, but a signal's handler runs once the loop has ended.

    Inside, a handler that raises would do so in whatever task runs just then, and libraries wrap or log what they meet.
    """
    caught: list[int] = []

    async def guarded() -> Found | None:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None

        def stop(number: int) -> None:
            caught.append(number)
            task.cancel()

        handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
        own = {number: handler for number, handler in handlers.items() if callable(handler)}
        for number in own:
            loop.add_signal_handler(number, stop, number)
        try:
            return await work
        except asyncio.CancelledError:
            if not caught:
                raise
            return None
        finally:
            for number, handler in own.items():
                loop.remove_signal_handler(number)
                signal.signal(number, handler)

    done = asyncio.run(guarded())
    if caught:
        signal.raise_signal(caught[0])
    if done is None:
        raise asyncio.CancelledError
    return done


def arrivals(count: int, rate: float, seed: int) -> list[float]:
    """Seconds at which ``count`` requests of a Poisson process with ``rate`` a second arrive, the first at 0."""
    draw = random.Random(seed)
    moments = [0.0]
    while len(moments) < count:
        moments.append(moments[-1] + draw.expovariate(rate))
    return moments


async def _send(
    endpoint: Endpoint, prompts: Sequence[Prompt], load: Load, tokens: int, body: Mapping[str, Any], seed: int
) -> tuple[list[Request], float]:
    async with connect(endpoint.url) as client:
        begin = time.perf_counter()

        async def one(prompt: Prompt) -> Request:
            return await _measure(client, endpoint, prompt, tokens, body, begin)

        async def at(moment: float, prompt: Prompt) -> Request:
            await asyncio.sleep(begin + moment - time.perf_counter())
            return await one(prompt)

        if load.rate:
            moments = arrivals(len(prompts), load.rate, seed)
            found = await asyncio.gather(*(at(moment, prompt) for moment, prompt in zip(moments, prompts, strict=True)))
        else:
            slots = asyncio.Semaphore(load.concurrency)

            async def in_turn(prompt: Prompt) -> Request:
                async with slots:
                    return await one(prompt)

            found = await asyncio.gather(*(in_turn(prompt) for prompt in prompts))
        return list(found), time.perf_counter() - begin


async def _measure(
    client: AsyncOpenAI, endpoint: Endpoint, prompt: Prompt, tokens: int, body: Mapping[str, Any], begin: float
) -> Request:
    """One request; a refusal or a broken answer is a result too."""
    sent = time.perf_counter()
    moments: list[float] = []
    try:
        answer = await ask_streaming(
            client,
            prompt.messages,
            tokens,
            lambda piece: moments.append(time.perf_counter()),
            model=endpoint.arm.model,
            body=body,
            sglang=endpoint.sglang,
        )
    except (OpenAIError, httpx.HTTPError, ValueError, OSError) as error:
        text = " ".join(str(error).split()) or type(error).__name__
        return Request(prompt.id, sent - begin, time.perf_counter() - sent, error=text[:300])
    return Request(
        prompt=prompt.id,
        sent=round(sent - begin, 5),
        seconds=round(answer.seconds, 5),
        ttft=answer.first_token_seconds and round(answer.first_token_seconds, 5),
        gaps=[round(b - a, 5) for a, b in itertools.pairwise(moments)],
        tokens=answer.tokens,
        token_ids=answer.token_ids,
        text=answer.text,
        verify_steps=answer.verify_steps,
        accepted_drafts=answer.accepted_drafts,
        accepted_histogram=list(answer.accepted_histogram),
        finish=answer.finish_reason,
        # Speeds are per token: an answer that is not counted cannot be used.
        error="" if answer.tokens else "the server does not say how many tokens the answer has (usage)",
    )
