"""Tensor parallelism: three ranks, each with a third of the heads and of the vocabulary, on gloo."""

from __future__ import annotations

import os

from engines import STRICT, assert_equal, base_flags, ddtree_flags, log_has

from sglang_ddtree.bench.lossless import acceptance_length, generate_all

TOKENS = 32


def test_three_ranks(serve, model, questions, reference):
    cores = sorted(os.sched_getaffinity(0))
    env = {**STRICT, "SGLANG_CPU_OMP_THREADS_BIND": "|".join(str(cores[rank % len(cores)]) for rank in range(3))}
    # SmolLM2-135M has nine heads, three of them for keys and values.
    flags = [*base_flags(model), *ddtree_flags(8), "--tp-size", "3", "--max-total-tokens", "8192"]
    with serve("three ranks", flags, env) as server:
        got = generate_all(server, questions[:6], TOKENS, 3)
        assert_equal(questions[:6], reference.answers(questions[:6], TOKENS), got)
        # Candidates of one third of the vocabulary, or of the wrong third, would hardly ever be right.
        assert acceptance_length(got) > 1.7
        assert not log_has(server, "leak detected")
