"""DDTREE on a Gated DeltaNet hybrid with ``SGLANG_DDTREE_STATES=deltas``: no state per node, the same answers.

As ``test_hybrid.py``, with the project's kernels for verification and commit in Triton's interpreter. A commit that
stops one node short must be seen in the answers.
"""

from __future__ import annotations

from engines import STRICT, assert_equal, log_has
from server_plugins import INTERPRETER, joined, recorder

# Its fixtures too: the target, the drafter and plain decoding's answers with their states.
from test_hybrid import (  # noqa: F401
    FP32,
    TOKENS,
    ask,
    assert_states_equal,
    ddtree,
    dense,
    drafter,
    first,
    flags,
    oracle,
    plain,
)

from sglang_ddtree.bench.lossless import acceptance_length

DELTAS = {"SGLANG_DDTREE_STATES": "deltas"}


def test_answers_and_states_from_deltas(serve, dense, drafter, first, plain, tmp_path):  # noqa: F811
    answers, second, second_answers, plain_states = plain
    directory = tmp_path / "record"
    known = oracle(tmp_path / "oracle", (first, answers), (second, second_answers))
    env = joined(INTERPRETER, STRICT, FP32, DELTAS, recorder(directory), known)
    with serve("hybrid deltas", flags(dense, *ddtree(drafter, 16)), env) as server:
        assert log_has(server, "DDTREE: deltas instead of states of the verify pass: width 17 x")
        assert log_has(server, "DDTREE: deltas of the verify pass are allocated")
        (directory / "states").touch()
        got = ask(server, first, TOKENS)
        (directory / "states").unlink()
        assert_equal(first, answers, got)
        assert acceptance_length(got) > 2
        assert_states_equal(first, plain_states, directory)

        # What the prefix cache keeps of a tree's commits is folded too.
        again = ask(server, second, (8, 8, 8))
        assert_equal(second, second_answers, again)
        assert [answer.cached_tokens for answer in again] == [64, 64, 128]

        server.get("/flush_cache")
        (directory / "fault").write_text("short fold")
        broken = ask(server, first[1:2], (14,))
        assert broken[0].ids != answers[1].ids[:14], "a short fold went unnoticed"
        assert not log_has(server, "leak detected")
