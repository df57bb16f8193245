"""Budget 64 in a context of 256: requests that reach the limit return, and their neighbours' answers stay right.

Near the limit a step reserves up to two windows of 65 slots past the last position, so the slot table's rows must be
wider than the context. ``tests/unit/test_slots.py`` shows that they would not be without our hook, and that a write
past a row raises on this platform, which would end the server here.
"""

from __future__ import annotations

import urllib.error

import pytest
from engines import STRICT, assert_equal, at_once, base_flags, ddtree_flags, log_has, request

from sglang_ddtree.bench.lossless import Question, as_output

CONTEXT = 256
#: SGLang lets a request have this many tokens altogether, and a prompt this many.
MOST_TOKENS, LONGEST_PROMPT = CONTEXT - 2, CONTEXT - 7


@pytest.fixture(scope="module")
def server(serve, model):
    flags = [*base_flags(model), *ddtree_flags(64), "--max-total-tokens", "8192", "--context-length", str(CONTEXT)]
    with serve("context limit", flags, STRICT) as started:
        yield started


@pytest.fixture(scope="module")
def text(questions):
    """Enough real tokens to cut prompts of any length from."""
    return [token for question in questions for token in question.input_ids]


def prompt(text, start, length):
    return Question(f"tokens {start} to {start + length}", text[start : start + length])


def run(server, reference, cases):
    """Cases ``(question, tokens asked, tokens got)``, all at once, against plain decoding without a limit."""
    bodies = [request(question.input_ids, asked, ignore_eos=True) for question, asked, _ in cases]
    got = [as_output(answer) for answer in at_once(server, bodies)]
    unlimited = [request(question.input_ids, most, ignore_eos=True) for question, _, most in cases]
    expected = [as_output(answer) for answer in reference.post(unlimited)]
    assert_equal([question for question, _, _ in cases], expected, got)
    assert server.alive()


def test_requests_that_end_at_the_limit_and_just_before(server, reference, text):
    """Alternating with short ones, which hold the rows in between, and longer-lived ones after them."""
    cases = []
    for number, length in enumerate((LONGEST_PROMPT, LONGEST_PROMPT - 1, 240, 226)):
        most = MOST_TOKENS - length
        cases.append((prompt(text, 50 * number, length), CONTEXT - length, most))
        cases.append((prompt(text, 37 * number, 60 + number), 30, 30))
        cases.append((prompt(text, 50 * number + 7, length), most - 1, most - 1))
    run(server, reference, cases)


def test_every_end_near_the_limit(server, reference, text):
    """Whatever the place in the window where the last step begins."""
    run(server, reference, [(prompt(text, 11, 240), 16 - short, min(16 - short, 14)) for short in range(8)])


def test_beyond_the_limit_is_refused_and_the_server_goes_on(server, reference, text):
    for length, tokens in ((CONTEXT, 1), (200, 57)):
        with pytest.raises(urllib.error.HTTPError) as refused:
            server.post("/generate", request(text[:length], tokens))
        assert refused.value.code == 400
    run(server, reference, [(prompt(text, 3, 40), 10, 10)])
    assert not log_has(server, "Traceback")
