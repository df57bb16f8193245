"""Are sampled answers distributed as the target says? Exact probabilities from plain decoding, and a G-test.

The exact side shares no code with the sampler: plain decoding's log-probabilities of all tokens, and the definitions of
temperature, top-k, top-p and min-p applied to them in float64.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from scipy.stats import power_divergence

from sglang_ddtree.bench.server import Server

Answer = tuple[int, ...]

#: Requests of one call.
CALL = 500


@dataclass
class Target:
    """log P(next token | prompt + answer so far), asked of a plain server and kept."""

    server: Server
    prompt: Sequence[int]
    vocab_size: int
    known: dict[Answer, torch.Tensor] = field(default_factory=dict)

    def __call__(self, answers: Sequence[Answer]) -> list[torch.Tensor]:
        """A row float64 ``[vocab_size]`` for each answer so far."""
        new = [answer for answer in answers if answer not in self.known]
        for part in _parts(new, CALL):
            got = self.server.post(
                "/generate",
                {
                    "input_ids": [[*self.prompt, *answer] for answer in part],
                    "sampling_params": {"temperature": 0, "max_new_tokens": 1},
                    "return_logprob": True,
                    "top_logprobs_num": self.vocab_size,
                },
            )
            for answer, reply in zip(part, got, strict=True):
                row = torch.full((self.vocab_size,), -torch.inf, dtype=torch.float64)
                values, tokens, _ = zip(*reply["meta_info"]["output_top_logprobs"][0], strict=True)
                row[list(tokens)] = torch.tensor(values, dtype=torch.float64)
                self.known[answer] = row
        return [self.known[answer] for answer in answers]


def adjusted(log_probs: torch.Tensor, sampling: Mapping[str, float]) -> torch.Tensor:
    """The distribution ``[vocab]`` that SGLang's sampling parameters make of a row, by their definitions."""
    p = (log_probs / sampling["temperature"]).softmax(-1)
    order = p.argsort(descending=True)
    ranked = p[order]
    keep = torch.arange(len(p)) < sampling.get("top_k", len(p))
    keep &= ranked.cumsum(0) - ranked <= sampling.get("top_p", 1.0)
    keep &= ranked >= ranked[0] * sampling.get("min_p", 0.0)
    result = torch.zeros_like(p)
    result[order[keep]] = ranked[keep]
    return result / result.sum()


def exact(target: Target, sampling: Mapping[str, float], tokens: int) -> dict[Answer, float]:
    """Probability of every possible answer of ``tokens`` tokens; filters must leave few."""
    joint: dict[Answer, float] = {(): 1.0}
    for _ in range(tokens):
        rows = target(list(joint))
        joint = {
            (*prefix, token): weight * float(p[token])
            for (prefix, weight), row in zip(joint.items(), rows, strict=True)
            for p in [adjusted(row, sampling)]
            for token in p.nonzero().flatten().tolist()
        }
    return joint


def draw(
    server: Server, prompt: Sequence[int], sampling: Mapping[str, float], tokens: int, draws: int
) -> tuple[dict[Answer, int], float]:
    """How often each answer came in ``draws`` requests, and committed tokens per verify step."""
    counts: dict[Answer, int] = {}
    steps = committed = 0
    parameters = {**sampling, "max_new_tokens": tokens, "ignore_eos": True}
    for part in _parts(range(draws), CALL):
        body = {"sampling_params": parameters, "input_ids": [list(prompt)] * len(part)}
        for reply in server.post("/generate", body, timeout=1800):
            ids = tuple(reply["output_ids"])
            counts[ids] = counts.get(ids, 0) + 1
            steps += reply["meta_info"].get("spec_verify_ct") or 0
            committed += len(ids) - 1
    return counts, committed / max(steps, 1)


def p_value(counts: Mapping[Answer, int], joint: Mapping[Answer, float]) -> float:
    """Of a G-test; answers that are expected fewer than five times are one cell. 0 if an impossible answer came."""
    if not set(counts) <= set(joint):
        return 0.0
    draws = sum(counts.values())
    cells = [(counts.get(answer, 0), weight * draws) for answer, weight in joint.items()]
    common = [cell for cell in cells if cell[1] >= 5]
    rare = [cell for cell in cells if cell[1] < 5]
    if sum(weight for _, weight in rare) > 1e-6:
        common.append((sum(count for count, _ in rare), sum(weight for _, weight in rare)))
    seen, expected = zip(*common, strict=True)
    scale = sum(seen) / sum(expected)
    return float(power_divergence(seen, [x * scale for x in expected], lambda_="log-likelihood").pvalue)


def marginal(counts: Mapping[Answer, float], place: int) -> dict[Answer, float]:
    """The same for the token at ``place`` alone."""
    result: dict[Answer, float] = {}
    for answer, weight in counts.items():
        key = (answer[place],)
        result[key] = result.get(key, 0) + weight
    return result


def _parts(items: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    for low in range(0, len(items), size):
        yield items[low : low + size]
