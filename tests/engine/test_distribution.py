"""Sampled answers of a DDTREE server have the target's exact distribution, parameter by parameter.

A random target of 256 tokens; its exact probabilities come from plain decoding's log-probabilities. The drafter's
candidates are replaced by the tokens that are likely at each place, so that drafts are often right and siblings matter.
"""

from __future__ import annotations

import pytest
import random_models
import torch
from engines import STRICT
from scipy.stats import power_divergence

from sglang_ddtree.bench.server import running

PROMPT = [3, 77, 140, 9, 201, 54]
#: Of the first kind of sampling; a third of it of the others, since a step takes its time on a CPU.
DRAWS = 21_000
CALL = 500
#: Enough parameters to leave the third token few values, so that all three can be enumerated.
FILTERED = [
    {"temperature": 0.7, "top_k": 4},
    {"temperature": 1.0, "top_k": 6, "top_p": 0.8},
    {"temperature": 1.0, "top_k": 8, "min_p": 0.25},
]
KNOWN: dict[str, tuple[dict[tuple[int, ...], int], float]] = {}


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    directory = tmp_path_factory.mktemp("random")
    return random_models.write_target(directory / "target"), random_models.write_drafter(directory / "drafter")


def flags(target):
    return ["--model-path", str(target), "--dtype", "float32", "--skip-tokenizer-init", "--max-total-tokens", "16384"]


class Target:
    """log P(next token | prefix) of the target, [256], asked of a plain server and kept."""

    def __init__(self, server):
        self.server, self.known = server, {}

    def __call__(self, prefixes):
        new = [p for p in prefixes if p not in self.known]
        for low in range(0, len(new), CALL):
            part = new[low : low + CALL]
            answers = self.server.post(
                "/generate",
                {
                    "input_ids": [PROMPT + list(p) for p in part],
                    "sampling_params": {"temperature": 0, "max_new_tokens": 1},
                    "return_logprob": True,
                    "top_logprobs_num": random_models.VOCAB,
                },
            )
            for prefix, answer in zip(part, answers, strict=True):
                row = torch.full((random_models.VOCAB,), -torch.inf, dtype=torch.float64)
                for value, token, _ in answer["meta_info"]["output_top_logprobs"][0]:
                    row[token] = value
                self.known[prefix] = row
        return [self.known[p] for p in prefixes]


@pytest.fixture(scope="module")
def target(pair, tmp_path_factory):
    """Asked before the server under test starts, which needs to know what is likely."""
    log = tmp_path_factory.mktemp("plain") / "plain.log"
    with running(flags(pair[0]), log=log) as server:
        found = Target(server)
        found([()])
        found([(a,) for a in range(random_models.VOCAB)])
        for sampling in FILTERED:
            exact(found, sampling, 3)
        yield found


def adjusted(log_probs, sampling):
    """The distribution that the parameters make of a row, by their definitions."""
    p = (log_probs / sampling["temperature"]).softmax(-1)
    order = p.argsort(descending=True)
    ranked = p[order]
    keep = torch.arange(len(p)) < sampling.get("top_k", len(p))
    keep &= ranked.cumsum(0) - ranked <= sampling.get("top_p", 1.0)
    keep &= ranked >= ranked[0] * sampling.get("min_p", 0.0)
    result = torch.zeros_like(p)
    result[order[keep]] = ranked[keep]
    return result / result.sum()


def exact(target, sampling, tokens):
    """Probability of every possible answer of ``tokens`` tokens."""
    joint = {(): 1.0}
    for _ in range(tokens):
        rows = target(list(joint))
        joint = {
            (*prefix, token): weight * float(p[token])
            for (prefix, weight), row in zip(joint.items(), rows, strict=True)
            for p in [adjusted(row, sampling)]
            for token in p.nonzero().flatten().tolist()
        }
    return joint


@pytest.fixture(scope="module")
def server(pair, target, tmp_path_factory):
    directory = tmp_path_factory.mktemp("likely")
    rows = {0: target([()])}
    rows[1] = target([(a,) for a in rows[0][0].topk(8).indices.tolist()])
    rows[2] = target([(a, b) for a in rows[0][0].topk(4).indices.tolist() for b in range(0, 256, 16)])
    places = [torch.stack(rows[place]).exp().mean(0).topk(8).indices.tolist() for place in range(3)]
    env = {**STRICT, **random_models.write_likely(directory / "plugin", places)}
    asked = [*flags(pair[0]), "--speculative-algorithm", "DDTREE", "--speculative-draft-model-path", str(pair[1])]
    with running([*asked, "--speculative-ddtree-budget", "24"], log=directory / "server.log", env=env) as started:
        yield started


def draw(server, sampling, tokens):
    """Counts of answers, and committed tokens per verify step; drawn once per kind of sampling."""
    key = str((server.url, sampling, tokens))
    if key not in KNOWN:
        KNOWN[key] = _draw(server, sampling, tokens, DRAWS if sampling == FILTERED[0] else DRAWS // 3)
    return KNOWN[key]


def _draw(server, sampling, tokens, draws):
    counts, steps, committed = {}, 0, 0
    body = {"sampling_params": {**sampling, "max_new_tokens": tokens, "ignore_eos": True}}
    for _ in range(draws // CALL):
        for answer in server.post("/generate", {**body, "input_ids": [PROMPT] * CALL}):
            ids = tuple(answer["output_ids"])
            counts[ids] = counts.get(ids, 0) + 1
            steps += answer["meta_info"]["spec_verify_ct"]
            committed += len(ids) - 1
    return counts, committed / steps


def p_value(counts, joint):
    """Of a G-test; answers that are expected fewer than five times are one cell."""
    assert set(counts) <= set(joint), "an answer that the parameters forbid"
    draws = sum(counts.values())
    cells = {answer: (counts.get(answer, 0), weight * draws) for answer, weight in joint.items()}
    common = [cell for cell in cells.values() if cell[1] >= 5]
    rare = [cell for cell in cells.values() if cell[1] < 5]
    if sum(weight for _, weight in rare) > 1e-6:
        common.append((sum(count for count, _ in rare), sum(weight for _, weight in rare)))
    seen, expected = zip(*common, strict=True)
    scale = sum(seen) / sum(expected)
    return float(power_divergence(seen, [x * scale for x in expected], lambda_="log-likelihood").pvalue)


@pytest.mark.parametrize("sampling", FILTERED, ids=str)
def test_three_tokens_under_filters(server, target, sampling):
    counts, accepted = draw(server, sampling, 3)
    assert accepted > 1.3, "the drafts were hardly ever right, so nothing was tested"
    assert p_value(counts, exact(target, sampling, 3)) > 1e-4


def test_two_tokens_of_the_whole_vocabulary(server, target):
    counts, _ = draw(server, {"temperature": 1.0}, 2)
    assert p_value(counts, exact(target, {"temperature": 1.0}, 2)) > 1e-4


def test_the_test_has_power(server, target):
    """The same draws against a slightly wrong temperature."""
    counts, _ = draw(server, FILTERED[0], 3)
    assert p_value(counts, exact(target, {**FILTERED[0], "temperature": 0.75}, 3)) < 1e-6
