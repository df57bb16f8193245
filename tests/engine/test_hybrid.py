"""DDTREE on a Gated DeltaNet hybrid (Qwen3.5), with SGLang's own tree kernels in Triton's interpreter, in fp32, through
a server; ``test_hybrid_matrix.py`` has the rest.

A tree over such a model needs every node's convolution window and recurrent state to come from its ancestors, and the
state to keep is that of the last accepted node. Answers and states are compared with plain decoding; two faults that
others have made must be seen.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import random_hybrid
import random_models
from engines import STRICT, assert_equal, log_has, request, wait_until
from server_plugins import INTERPRETER, INTERPRETER_FLAGS, compare_states, joined, recorder

from sglang_ddtree.bench.lossless import Question, acceptance_length, generate

#: Of each answer, with the prompts' lengths: one is long enough to have many commits, the others share its batches.
LENGTHS, TOKENS = (7, 70, 131), (68, 24, 24)
FLAGS = (
    *INTERPRETER_FLAGS,
    # So that a state is cached while a request decodes: one for each 64 tokens.
    *("--max-mamba-cache-size", "60", "--mamba-track-interval", "64"),
)
#: In fp32 throughout: a window rounded between two steps would differ from one inside a tree.
FP32 = {"SGLANG_MAMBA_CONV_DTYPE": "float32"}


@pytest.fixture(scope="module")
def drafter(tmp_path_factory):
    return random_models.write_drafter(tmp_path_factory.mktemp("random") / "drafter", windows=(24, None))


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    return random_hybrid.write_target(tmp_path_factory.mktemp("random") / "dense")


@pytest.fixture(scope="module")
def first():
    return random_models.questions(11, LENGTHS)


def ask(server, asked, tokens):
    """All at once, each answer of its own length."""
    with ThreadPoolExecutor(len(asked)) as pool:
        return list(pool.map(lambda q, n: generate(server, q.input_ids, n, ignore_eos=True), asked, tokens))


def flags(target, *more):
    return ["--model-path", str(target), *FLAGS, *more]


def ddtree(drafter, budget):
    return [
        *("--speculative-algorithm", "DDTREE", "--speculative-draft-model-path", str(drafter)),
        *("--speculative-ddtree-budget", str(budget)),
    ]


@pytest.fixture(scope="module")
def plain(serve, dense, first, tmp_path_factory):
    """Plain decoding's answers to a first turn, with its states, and to a second one that continues it."""
    directory = tmp_path_factory.mktemp("plain") / "record"
    with serve("hybrid AR", flags(dense), joined(INTERPRETER, FP32, recorder(directory))) as server:
        (directory / "states").touch()
        answers = ask(server, first, TOKENS)
        (directory / "states").unlink()
        second = [Question(f"{q.id}/2", [*q.input_ids, *a.ids, 5, 6]) for q, a in zip(first, answers, strict=True)]
        return answers, second, ask(server, second, (8, 8, 8)), directory


def oracle(directory, *turns):
    known = [(q.input_ids, a.ids) for asked, answers in turns for q, a in zip(asked, answers, strict=True)]
    return random_models.write_oracle(directory, known)


def test_answers_and_states(serve, dense, drafter, first, plain, tmp_path):
    """Overlap scheduling and a prefix cache of states (SGLang's ``extra_buffer``)."""
    answers, second, second_answers, plain_states = plain
    directory = tmp_path / "record"
    known = oracle(tmp_path / "oracle", (first, answers), (second, second_answers))
    env = joined(INTERPRETER, STRICT, FP32, recorder(directory), known)
    with serve("hybrid 16", flags(dense, *ddtree(drafter, 16)), env) as server:
        assert log_has(server, "'mamba_radix_cache_strategy': 'extra_buffer'")
        (directory / "states").touch()
        got = ask(server, first, TOKENS)
        (directory / "states").unlink()
        assert_equal(first, answers, got)
        assert acceptance_length(got) > 2
        assert compare_states(first, plain_states, directory) > 30

        # The prompt of 7 tokens has no state of its own to cache: what is reused comes from the tree's commits.
        again = ask(server, second, (8, 8, 8))
        assert_equal(second, second_answers, again)
        assert [answer.cached_tokens for answer in again] == [64, 64, 128]

        # A request that is given up leaves its slot to the next one.
        endless = {**request(first[2].input_ids, 300, ignore_eos=True), "rid": "given-up"}
        given_up = threading.Thread(target=server.post, args=("/generate", endless))
        given_up.start()
        assert wait_until(lambda: server.get("/v1/loads")["loads"][0]["num_running_reqs"] == 1)
        server.post("/abort_request", {"rid": "given-up"})
        given_up.join()
        assert_equal(first[1:2], answers[1:2], ask(server, first[1:2], TOKENS[1:2]))

        for fault in ("commit length", "flat convolution"):
            server.get("/flush_cache")
            (directory / "fault").write_text(fault)
            broken = ask(server, first[1:2], (14,))
            assert broken[0].ids != answers[1].ids[:14], f"{fault} went unnoticed"
        assert not log_has(server, "leak detected")
