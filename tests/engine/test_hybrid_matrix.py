"""Hybrid targets over budgets, SGLang's prefix caches of states, retraction, aborts and a drafter that is mostly wrong.

Every run is a scheduler of its own (``schedulers.py``) with SGLang's tree kernels in Triton's interpreter, in fp32, and
is compared with plain decoding. ``test_hybrid.py`` has some of it through a server, on a larger model.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
import random_hybrid
import random_models
from engines import STRICT, assert_equal
from schedulers import Schedulers, ask
from server_plugins import INTERPRETER, INTERPRETER_FLAGS, compare_states, joined, recorder

from sglang_ddtree.bench.lossless import Output, Question, acceptance_length

#: Of the prompts and of their answers. The drafter knows some tokens more: a step may go beyond the end of an answer.
LENGTHS, TOKENS, BEYOND = (7, 70, 131), (68, 30, 24), 8
#: Of the answer that is mostly drafted wrongly: at 1.3 tokens a step, more than 100 steps.
REJECTED_TOKENS = 140
FLAGS = (
    *INTERPRETER_FLAGS,
    # So that a state is cached while a request decodes: one for each 64 tokens.
    *("--max-mamba-cache-size", "60", "--mamba-track-interval", "64"),
)
NO_OVERLAP = "--disable-overlap-schedule"
STRATEGY = "--mamba-radix-cache-strategy"


class Plain(NamedTuple):
    """Plain decoding: a first turn, a second one that continues it, two long answers, and where the states are.

    ``first`` and ``second`` are pairs of questions and of answers, with some tokens more than will be asked for.
    """

    first: tuple[list[Question], list[Output]]
    second: tuple[list[Question], list[Output]]
    rejected: tuple[list[Question], list[Output]]
    states: Path


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tmp_path_factory.mktemp("hybrid")


@pytest.fixture(scope="module")
def schedulers(directory):
    found = start_schedulers(directory)
    yield found
    found.close()


def start_schedulers(directory, *more):
    # In fp32 throughout: a window rounded between two steps would differ from one inside a tree.
    fp32 = {"SGLANG_MAMBA_CONV_DTYPE": "float32"}
    plugins = (recorder(directory / "nothing"), random_models.write_oracle(directory / "oracle", []))
    return Schedulers(directory, joined(INTERPRETER, STRICT, fp32, *plugins, *more))


@pytest.fixture(scope="module")
def target(directory):
    """One Gated DeltaNet layer and one of full attention: the interpreter's time goes by layers."""
    return ["--model-path", str(random_hybrid.write_target(directory / "target", layers=2)), *FLAGS]


@pytest.fixture(scope="module")
def ddtree(target, directory):
    drafter = random_models.write_drafter(directory / "drafter", target_layers=2, taps=(0,))
    flags = [*target, "--speculative-algorithm", "DDTREE", "--speculative-draft-model-path", str(drafter)]
    return lambda budget: [*flags, "--speculative-ddtree-budget", str(budget)]


@pytest.fixture(scope="module")
def plain(schedulers, target, directory):
    asked, rejected = random_models.questions(11, LENGTHS), random_models.questions(12, (5, 6))
    env = recorder(directory / "plain")
    lengths = [*(tokens + BEYOND for tokens in TOKENS), REJECTED_TOKENS, 16]
    steps = [("write", str(directory / "plain" / "states"), ""), ask([*asked, *rejected], lengths)]
    answers = schedulers.run("plain", target, steps, env).answers[0]
    again = [
        Question(f"{q.id}/2", [*q.input_ids, *a.ids[:tokens], 5, 6])
        for q, a, tokens in zip(asked, answers, TOKENS, strict=False)
    ]
    # Without a cache, which is what prefix hits are compared with.
    second = schedulers.run("plain-2", [*target, "--disable-radix-cache"], [ask(again, [8] * 3)]).answers[0]
    return Plain((asked, answers[:3]), (again, second), (rejected, answers[3:]), directory / "plain")


def oracle(plain, file):
    known, wrong = (
        [(q.input_ids, a.ids) for turn in turns for q, a in zip(*turn, strict=True)]
        for turns in ((plain.first, plain.second), (plain.rejected,))
    )
    return random_models.write_answers(file, known, wrong)


def assert_prefixes(turn, tokens, got):
    """The answers are the first tokens of plain decoding's longer ones."""
    asked, answers = turn
    want = [replace(a, ids=a.ids[:n], finish={"type": "length", "length": n}) for a, n in zip(answers, tokens)]
    assert_equal(asked[: len(tokens)], want, got)


#: A state that is cached belongs to a multiple of the interval (64 tokens) ...
INTERVAL = [64, 64, 128]
#: ... or, where the request's own is kept, to everything it had. When its last step went further than its answer, there
#: is only the one of its prompt.
OWN, PROMPT = [74, 99, 154], list(LENGTHS)


@pytest.mark.parametrize(
    ("budget", "flags", "cached"),
    [
        (7, [STRATEGY, "no_buffer", NO_OVERLAP], OWN),
        (32, [STRATEGY, "extra_buffer", NO_OVERLAP, "--page-size", "16"], INTERVAL),
        (16, [STRATEGY, "extra_buffer_lazy"], INTERVAL),
    ],
    ids=["7-no_buffer", "32-extra_buffer", "16-lazy"],
)
def test_answers(schedulers, ddtree, plain, tmp_path, budget, flags, cached):
    """Several requests at once, a second turn on what the trees' commits left in the cache, aborts, retraction."""
    steps = [
        ask(plain.first[0], TOKENS),
        ask(plain.second[0], (8, 8, 8)),
        ask(plain.first[0][1:], (30, 24), abort_at=4),
        ("retract", 4),
        ask(plain.first[0][:2], (16, 16)),
    ]
    run = schedulers.run("answers", [*ddtree(budget), *flags], steps, oracle(plain, tmp_path / "known.json"))
    got, again, aborted, retracted = run.answers
    assert_prefixes(plain.first, TOKENS, got)
    assert acceptance_length(got) > 2
    assert_prefixes(plain.second, (8, 8, 8), again)
    found = [answer.cached_tokens for answer in again]
    if cached is OWN:
        assert all(a in pair for a, *pair in zip(found, OWN, PROMPT)) and found not in (OWN, PROMPT)
    else:
        assert found == cached
    for answer, want in zip(aborted, plain.first[1][1:], strict=True):
        assert answer.finish["type"] == "abort" and answer.ids == want.ids[: len(answer.ids)]
    assert_prefixes((plain.first[0][:2], plain.first[1][:2]), (16, 16), retracted)
    assert sum(run.retractions[3]) >= 1 and not sum(run.retractions[0])


def test_rejected_siblings_leave_no_trace(schedulers, ddtree, plain, tmp_path):
    """More than 100 steps of a drafter that is mostly wrong, beside other requests: every state is plain decoding's."""
    record = tmp_path / "record"
    env = {**recorder(record), **oracle(plain, tmp_path / "known.json")}
    rejected, broken = plain.rejected[0]
    steps = [
        ("write", str(record / "states"), ""),
        ask([*plain.first[0], rejected], (*TOKENS, REJECTED_TOKENS)),
        # The state of another node than the last accepted one, which a test like this must see.
        ("write", str(record / "fault"), "commit length"),
        ask([broken], (12,)),
    ]
    got = schedulers.run("rejected", ddtree(7), steps, env).answers[0]
    assert_prefixes(plain.first, TOKENS, got[:3])
    assert_prefixes(plain.rejected, (REJECTED_TOKENS,), got[3:])
    assert got[3].verify_steps >= 100
    assert compare_states([rejected], plain.states, record) >= 100
    assert compare_states(plain.first[0], plain.states, record) > 30
    with pytest.raises(AssertionError, match="Tensor-likes are not close"):
        compare_states([broken], plain.states, record)


def test_deltas_instead_of_states(ddtree, plain, tmp_path):
    """``SGLANG_DDTREE_STATES=deltas``: no state per node, the same answers and states, in the prefix cache too."""
    record = tmp_path / "record"
    env = {**recorder(record), **oracle(plain, tmp_path / "known.json")}
    steps = [
        ("write", str(record / "states"), ""),
        ask(plain.first[0], TOKENS),
        ("remove", str(record / "states")),
        ask(plain.second[0], (8, 8, 8)),
        ("flush",),
        # A fold that leaves out the last accepted node.
        ("write", str(record / "fault"), "short fold"),
        ask(plain.first[0][1:2], (14,)),
    ]
    # Its hooks are there in a process that begins with it only.
    schedulers = start_schedulers(tmp_path, {"SGLANG_DDTREE_STATES": "deltas"})
    run = schedulers.run("deltas", ddtree(16), steps, env)
    schedulers.close()
    assert "DDTREE: deltas instead of states of the verify pass: width 17 x" in run.log
    assert "DDTREE: deltas of the verify pass are allocated" in run.log
    got, again, broken = run.answers
    assert_prefixes(plain.first, TOKENS, got)
    assert acceptance_length(got) > 2
    assert compare_states(plain.first[0], plain.states, record) > 30
    assert_prefixes(plain.second, (8, 8, 8), again)
    assert [answer.cached_tokens for answer in again] == INTERVAL
    assert broken[0].ids != plain.first[1][1].ids[:14], "a short fold went unnoticed"


def test_mixture_of_experts(schedulers, directory, tmp_path):
    target = ["--model-path", str(random_hybrid.write_target(tmp_path / "target", experts=True)), *FLAGS]
    drafter = random_models.write_drafter(tmp_path / "drafter")
    asked, tokens = random_models.questions(13, (7, 70)), (32, 16)
    answers = schedulers.run("experts", target, [ask(asked, tokens)]).answers[0]
    known = [(q.input_ids, a.ids) for q, a in zip(asked, answers, strict=True)]
    flags = [*target, "--speculative-algorithm", "DDTREE", "--speculative-draft-model-path", str(drafter)]
    env = random_models.write_answers(tmp_path / "known.json", known)
    got = schedulers.run("experts-16", [*flags, "--speculative-ddtree-budget", "16"], [ask(asked, tokens)], env)
    assert_equal(asked, answers, got.answers[0])
    assert acceptance_length(got.answers[0]) > 2
