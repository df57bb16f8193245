"""fp32, greedy: the tokens of DFLASH and of DDTREE are those of plain decoding, whatever the scheduler does."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from engines import STRICT, assert_equal, base_flags, ddtree_flags, dflash_flags, log_has

from sglang_ddtree.bench.lossless import acceptance_length, follow_ups, generate_all

TOKENS = 40


@dataclass(frozen=True)
class Setting:
    """One server: its flags, and the line in its log that proves it did what the setting is about."""

    name: str
    flags: list[str]
    proof: str | None = None
    env: dict[str, str] = field(default_factory=dict)
    pool: int = 8192


SETTINGS = [
    Setting("dflash", dflash_flags()),
    Setting("budget 7, overlap, page 1", ddtree_flags(7)),
    Setting(
        "budget 32, no overlap, page 16, chunked prefill",
        [*ddtree_flags(32), "--disable-overlap-schedule", "--page-size", "16", "--chunked-prefill-size", "64"],
        proof="#new-token: 64,",
    ),
    Setting(
        # Narrower than the draft block of 8, and so few KV slots that requests are taken off and resumed.
        "budget 2, overlap, page 16, retraction",
        [*ddtree_flags(2), "--speculative-eagle-topk", "2", "--page-size", "16", "--schedule-conservativeness", "0.05"],
        proof="Testing retraction",
        # The small pool alone does it with some drafters only; SGLang's own test mode does it on every 16th pass.
        env={"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "16"},
        pool=1280,
    ),
]


@pytest.fixture(scope="module", params=SETTINGS, ids=lambda setting: setting.name)
def setting(request):
    return request.param


@pytest.fixture(scope="module")
def server(setting, serve, model):
    flags = [*base_flags(model), *setting.flags, "--max-total-tokens", str(setting.pool)]
    with serve(setting.name, flags, {**STRICT, **setting.env}) as started:
        yield started


@pytest.fixture(scope="module")
def expected(reference, questions):
    return reference.answers(questions, TOKENS)


def test_one_at_a_time(server, questions, expected):
    got = generate_all(server, questions[:4], TOKENS, 1)
    assert_equal(questions[:4], expected[:4], got)
    assert acceptance_length(got) > 1.2


def test_eight_at_once(server, questions, expected):
    got = generate_all(server, questions, TOKENS, 8)
    assert_equal(questions, expected, got)
    hits = sum(output.cached_tokens > 0 for output in got)
    assert hits >= len(questions) // 2


def test_second_turn(server, setting, tokenizer, reference, questions, expected):
    """The cache now holds tokens that the server committed itself: wrong keys or values would show here."""
    asked = follow_ups(tokenizer, questions[:8], expected[:8])
    got = generate_all(server, asked, 16, 8)
    assert_equal(asked, reference.answers(asked, 16), got)
    reused = [output.cached_tokens > len(first.input_ids) for output, first in zip(got, questions)]
    # A pool so small that requests are taken off keeps no answers.
    assert any(reused) or setting.pool < 4096


def test_the_server_did_what_the_setting_is_about(server, setting):
    assert server.alive()
    if setting.proof is not None:
        assert log_has(server, setting.proof)
