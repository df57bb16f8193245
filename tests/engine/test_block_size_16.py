"""Block size 16, verify widths 25 and 6, on a random model whose drafter an oracle makes right at scattered ranks."""

from __future__ import annotations

import random

import pytest
import random_models
from engines import STRICT, assert_equal, log_has

from sglang_ddtree.bench.lossless import Question, acceptance_length, generate_all

TOKENS = 40


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    directory = tmp_path_factory.mktemp("random")
    return random_models.write_target(directory / "target"), random_models.write_drafter(directory / "drafter")


@pytest.fixture(scope="module")
def flags(models):
    target, _ = models
    return ["--model-path", str(target), "--dtype", "float32", "--skip-tokenizer-init", "--max-total-tokens", "4096"]


@pytest.fixture(scope="module")
def turns(serve, flags):
    """Prompts and plain decoding's answers, and a second turn of each."""
    rng = random.Random(3)
    first = [Question(str(n), [rng.randrange(3, 250) for _ in range(rng.randrange(5, 90))]) for n in range(12)]
    with serve("random AR", flags) as server:
        answers = generate_all(server, first, TOKENS, 8, ignore_eos=True)
        second = [
            Question(f"{q.id}/2", [*q.input_ids, *a.ids, rng.randrange(3, 250)])
            for q, a in zip(first, answers, strict=True)
        ]
        return [(first, answers), (second, generate_all(server, second, TOKENS, 8, ignore_eos=True))]


@pytest.mark.parametrize("budget", [24, 5])
def test_scattered_paths(serve, models, flags, turns, budget, tmp_path):
    known = [(q.input_ids, a.ids) for asked, answers in turns for q, a in zip(asked, answers, strict=True)]
    env = {**STRICT, **random_models.write_oracle(tmp_path / "oracle", known)}
    ddtree = [
        *("--speculative-algorithm", "DDTREE", "--speculative-draft-model-path", str(models[1])),
        *("--speculative-ddtree-budget", str(budget)),
    ]
    with serve(f"random {budget}", [*flags, *ddtree], env) as server:
        for asked, answers in turns:
            got = generate_all(server, asked, TOKENS, 8, ignore_eos=True)
            assert_equal(asked, answers, got)
            assert acceptance_length(got) > 2
        # The second turn's cached prefix holds what the first turn's trees committed.
        reused = [o.cached_tokens > len(q.input_ids) for o, q in zip(got, turns[0][0], strict=True)]
        assert sum(reused) > len(reused) // 2
        assert not log_has(server, "leak detected")
