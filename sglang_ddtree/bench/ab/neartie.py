"""Where an arm's greedy answer leaves the reference's: how close were the reference's two best tokens there?

Rounding can only turn a near-tie. A gap of several nats says that an arm computes something else.
"""

from __future__ import annotations

from openai import DefaultHttpxClient, OpenAI, OpenAIError

from sglang_ddtree.bench.ab.correctness import expected
from sglang_ddtree.bench.ab.endpoint import Endpoint
from sglang_ddtree.bench.ab.store import Difference, Result
from sglang_ddtree.bench.prompts import Prompt
from sglang_ddtree.bench.report import first_difference

#: Answers per arm that are looked at; each costs the reference one request.
MOST = 8


def differences(result: Result) -> list[Difference]:
    """The first answers of each arm that differ in a token id, each prompt once, at most ``MOST`` an arm."""
    reference = expected(result)
    found: dict[tuple[str, str, str], Difference] = {}
    count: dict[str, int] = {}
    for cell in result.cells:
        for request in cell.answered:
            other = reference.get((cell.set, request.prompt))
            key = (cell.arm, cell.set, request.prompt)
            if other is None or key in found or not request.token_ids or not other.token_ids:
                continue
            if request.token_ids == other.token_ids or count.get(cell.arm, 0) >= MOST:
                continue
            count[cell.arm] = count.get(cell.arm, 0) + 1
            place = first_difference(request.token_ids, other.token_ids)
            found[key] = Difference(cell.arm, cell.set, request.prompt, place)
    return list(found.values())


def measure_gaps(found: list[Difference], endpoint: Endpoint, prompts: dict[str, list[Prompt]], body: dict) -> None:
    """Set ``gap`` of each, by asking the reference once more for its log-probabilities, in place.

    ``gap`` stays None where the server gives none, or answers otherwise than before.
    """
    by_id = {(name, prompt.id): prompt for name, part in prompts.items() for prompt in part}
    http = DefaultHttpxClient(trust_env=False)  # as in bench.client
    with OpenAI(base_url=f"{endpoint.url}/v1", api_key="none", timeout=600, max_retries=0, http_client=http) as client:
        for one in found:
            try:
                answer = client.chat.completions.create(
                    model=endpoint.arm.model,
                    messages=by_id[one.set, one.prompt].messages,  # type: ignore[arg-type]
                    temperature=0,
                    max_tokens=one.position + 1,
                    logprobs=True,
                    top_logprobs=2,
                    extra_body=body,
                )
            except OpenAIError:
                continue
            told = answer.choices[0].logprobs
            tokens = (told.content if told else None) or []
            if len(tokens) > one.position and len(tokens[one.position].top_logprobs) >= 2:
                best, second = sorted((top.logprob for top in tokens[one.position].top_logprobs), reverse=True)[:2]
                one.gap = round(best - second, 6)
