"""Sampled answers of a DDTREE server have the target's exact distribution, parameter by parameter.

A random target of 256 tokens; its exact probabilities come from plain decoding's log-probabilities. The drafter's
candidates are replaced by the tokens that are likely at each place, so that drafts are often right and siblings matter.
"""

from __future__ import annotations

import pytest
import random_models
import torch
from engines import STRICT

from sglang_ddtree.bench.distribution import Target, draw, exact, p_value
from sglang_ddtree.bench.server import running

PROMPT = [3, 77, 140, 9, 201, 54]
#: Of the first kind of sampling; a third of it of the others, since a step takes its time on a CPU.
DRAWS = 21_000
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


@pytest.fixture(scope="module")
def target(pair, tmp_path_factory):
    """Asked before the server under test starts, which needs to know what is likely."""
    log = tmp_path_factory.mktemp("plain") / "plain.log"
    with running(flags(pair[0]), log=log) as server:
        found = Target(server, PROMPT, random_models.VOCAB)
        found([()])
        found([(a,) for a in range(random_models.VOCAB)])
        for sampling in FILTERED:
            exact(found, sampling, 3)
        yield found


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


def drawn(server, sampling, tokens):
    """Of :func:`draw`, once per kind of sampling."""
    key = str((server.url, sampling, tokens))
    if key not in KNOWN:
        KNOWN[key] = draw(server, PROMPT, sampling, tokens, DRAWS if sampling == FILTERED[0] else DRAWS // 3)
    return KNOWN[key]


@pytest.mark.parametrize("sampling", FILTERED, ids=str)
def test_three_tokens_under_filters(server, target, sampling):
    counts, accepted = drawn(server, sampling, 3)
    assert accepted > 1.3, "the drafts were hardly ever right, so nothing was tested"
    assert p_value(counts, exact(target, sampling, 3)) > 1e-4


def test_two_tokens_of_the_whole_vocabulary(server, target):
    counts, _ = drawn(server, {"temperature": 1.0}, 2)
    assert p_value(counts, exact(target, {"temperature": 1.0}, 2)) > 1e-4


def test_the_test_has_power(server, target):
    """The same draws against a slightly wrong temperature."""
    counts, _ = drawn(server, FILTERED[0], 3)
    assert p_value(counts, exact(target, {**FILTERED[0], "temperature": 0.75}, 3)) < 1e-6
