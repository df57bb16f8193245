"""The benchmark's arithmetic, its plan of servers, and its reading of answers; no SGLang, no model."""

from __future__ import annotations

import asyncio
import json
import os
import threading
import types
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from sglang_ddtree.bench import client, compare, cpu, machine, report, server
from sglang_ddtree.bench.arms import AR, DFLASH, Arm, make_arms, plan
from sglang_ddtree.bench.prompts import Prompt

TREE = Arm("DDTREE", 8)
SPEC = {"spec_verify_ct": 3, "spec_num_correct_drafts": 5}


# --- reading answers ---


class FakeServer(BaseHTTPRequestHandler):
    """Answers chat completions as SGLang 0.5.23 does; keeps what it was asked."""

    requests: list[dict] = []
    spec: dict | None = SPEC
    output_ids: list[int] | None = [7, 8, 9]

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        type(self).requests.append(body)
        if self.path == "/flush_cache":
            self.send("text/plain", "Cache flushed.\n")
            return
        sglext = {"spec_tokens_details": self.spec, "output_ids": self.output_ids and [self.output_ids]}
        head = {"id": "1", "created": 1, "model": "default"}
        if not body.get("stream"):
            meta = {"prefill_finished_time": 10.0, "request_finished_ts": 12.5}
            message = {"role": "assistant", "content": "Hello"}
            choice = {"index": 0, "message": message, "finish_reason": "stop", "meta_info": meta}
            self.send(
                "application/json",
                json.dumps({**head, "object": "chat.completion", "choices": [choice], "sglext": sglext}),
            )
            return
        deltas = [
            {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None},
            {"index": 0, "delta": {"content": "Hel"}, "finish_reason": None},
            {"index": 0, "delta": {"content": "lo"}, "finish_reason": None},
            {"index": 0, "delta": {}, "finish_reason": "length"},
        ]
        head["object"] = "chat.completion.chunk"
        chunks = [{**head, "choices": [delta]} for delta in deltas] + [{**head, "choices": [], "sglext": sglext}]
        self.send("text/event-stream", "".join(f"data: {json.dumps(c)}\n\n" for c in chunks) + "data: [DONE]\n\n")

    def send(self, kind: str, text: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def fake(monkeypatch):
    """A running FakeServer class and its URL."""
    handler = type("Handler", (FakeServer,), {"requests": []})
    http = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=http.serve_forever, daemon=True).start()
    # Nothing listens there: whoever asks a proxy fails.
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    yield handler, f"http://127.0.0.1:{http.server_port}"
    http.shutdown()
    http.server_close()


def test_whole_answers_keep_the_order_of_the_prompts(fake):
    handler, url = fake
    answers = client.ask_together(url, [[{"role": "user", "content": text}] for text in ("a", "b")], 5)
    assert [a.text for a in answers] == ["Hello", "Hello"]
    assert answers[0].token_ids == [7, 8, 9]
    assert answers[0].decode_span == (10.0, 12.5)
    assert answers[0].first_token_seconds is None
    assert (answers[0].verify_steps, answers[0].accepted_drafts) == (3, 5)
    sent = handler.requests[0]
    assert sent["temperature"] == 0 and sent["max_tokens"] == 5
    assert sent["return_spec_tokens_details"] and sent["return_output_ids_in_sglext"] and sent["return_meta_info"]


def test_streamed_answer_arrives_in_pieces(fake):
    _, url = fake
    pieces: list[str] = []

    async def run() -> client.Answer:
        async with client.connect(url) as openai_client:
            return await client.ask_streaming(openai_client, [{"role": "user", "content": "a"}], 5, pieces.append)

    answer = asyncio.run(run())
    assert pieces == ["Hel", "lo"] and answer.text == "Hello"
    assert answer.finish_reason == "length"
    assert answer.token_ids == [7, 8, 9]
    assert answer.decode_span is None
    assert answer.first_token_seconds is not None and 0 < answer.first_token_seconds <= answer.seconds


def test_plain_decoding_has_no_verify_steps(fake):
    handler, url = fake
    handler.spec = None
    [answer] = client.ask_together(url, [[{"role": "user", "content": "a"}]], 5)
    assert answer.verify_steps == 0 and answer.acceptance_length is None


def test_an_answer_without_token_ids_is_an_error(fake):
    handler, url = fake
    handler.output_ids = None
    with pytest.raises(ValueError, match="no token ids"):
        client.ask_together(url, [[{"role": "user", "content": "a"}]], 5)


# --- taking turns ---


def test_arms_take_turns_and_the_first_changes(fake, tmp_path):
    handler, url = fake
    running = server.Server(url, types.SimpleNamespace(pid=os.getpid()), tmp_path / "log", 0.0)
    prompts = [Prompt(str(i), "code", [{"role": "user", "content": f"question {i}"}]) for i in range(3)]
    setting = compare.Setting(tmp_path, tmp_path, "float32", 1, max_tokens=5, concurrency=2)
    said: list[str] = []
    turns, load = compare.take_turns({AR: running, TREE: running}, setting, prompts, said.append, rounds=(0, 1))
    assert [(turn.round, turn.arm.label, len(turn.prompts)) for turn in turns] == [
        (0, "AR", 2),
        (0, "DDTREE 8", 2),
        (0, "DDTREE 8", 1),
        (0, "AR", 1),
        (1, "DDTREE 8", 2),
        (1, "AR", 2),
        (1, "AR", 1),
        (1, "DDTREE 8", 1),
    ]
    assert all(turn.decode_seconds == 2.5 for turn in turns)
    assert [text.partition(":")[0] for text in said] == [
        f"round {number}, prompts {done} of 3" for number in (1, 2) for done in (2, 3)
    ]
    assert load.busy_cores >= load.other_cores >= 0
    warm_up = [request for request in handler.requests if request.get("max_tokens") == compare.WARM_UP_TOKENS]
    assert len(warm_up) == 2 * 2


# --- who is up when ---


def test_all_arms_together_where_they_fit():
    arms = make_arms([4, 8])
    [stint] = plan(arms, rounds=3, servers=4)
    assert stint.arms == tuple(arms) and stint.rounds == (0, 1, 2)


def test_groups_share_the_references():
    stints = plan(make_arms([4, 8, 16]), rounds=2, servers=4)
    assert [stint.arms[:2] for stint in stints] == [(AR, DFLASH)] * 2
    assert [stint.arms[2:] for stint in stints] == [(Arm("DDTREE", 4), Arm("DDTREE", 8)), (Arm("DDTREE", 16),)]
    assert [stint.group for stint in stints] == [0, 1]


def test_one_server_at_a_time_still_goes_in_rounds():
    stints = plan(make_arms([8]), rounds=2, servers=1)
    assert [(stint.arms[0].label, stint.rounds) for stint in stints] == [
        ("AR", (0,)),
        ("DFLASH", (0,)),
        ("DDTREE 8", (0,)),
        ("AR", (1,)),
        ("DFLASH", (1,)),
        ("DDTREE 8", (1,)),
    ]
    assert {stint.group for stint in stints} == {0}


def test_flags_of_the_arms():
    drafter = Path("drafter")
    assert AR.flags(drafter) == []
    assert "--speculative-ddtree-budget" not in DFLASH.flags(drafter)
    assert TREE.flags(drafter)[-2:] == ["--speculative-ddtree-budget", "8"]


# --- figures ---


def turn(arm: Arm, tokens: list[int], steps: int, seconds: float, *, round: int = 0, group: int = 0, prompt: str = "p"):
    answer = client.Answer("", tokens, "length", steps, 0, seconds, decode_span=(0.0, seconds / 2))
    kind = "code" if prompt == "p" else "chat"
    return compare.Turn(arm, group, round, (Prompt(prompt, kind, []),), (answer,), seconds, seconds / 2)


def test_rows():
    turns = [
        turn(AR, [1] * 11, 0, 10.0),
        turn(DFLASH, [1] * 11, 5, 8.0),
        turn(TREE, [1] * 11, 4, 5.0),
        turn(AR, [1] * 11, 0, 11.0, round=1),
        turn(DFLASH, [1] * 11, 5, 11.0, round=1),
        turn(TREE, [1] * 11, 4, 5.5, round=1),
    ]
    ar, dflash, tree = report.rows(turns)
    assert (ar.arm, dflash.arm, tree.arm) == ("AR", "DFLASH", "DDTREE 8")
    assert ar.tokens_per_second.high == pytest.approx(1.1)
    assert ar.decode_tokens_per_second.high == pytest.approx(2.0)
    assert tree.over_ar.low == pytest.approx(2.0) and tree.over_ar.high == pytest.approx(2.0)
    assert tree.over_dflash.low == pytest.approx(1.6) and tree.over_dflash.high == pytest.approx(2.0)
    assert ar.acceptance_length is None and ar.verify_steps == 10
    assert dflash.acceptance_length == pytest.approx(2.0) and dflash.verify_steps == 5
    assert tree.acceptance_length == pytest.approx(2.5) and tree.acceptance_by_kind == {"code": pytest.approx(2.5)}
    assert tree.identical == tree.prompts == 1


def test_ratios_stay_within_their_group():
    turns = [
        turn(AR, [1, 2], 0, 10.0),
        turn(DFLASH, [1, 2], 1, 10.0),
        turn(TREE, [1, 2], 1, 5.0),
        # A second group on a machine that had become twice as fast.
        turn(AR, [1, 2], 0, 5.0, group=1),
        turn(DFLASH, [1, 2], 1, 5.0, group=1),
        turn(Arm("DDTREE", 16), [1, 2], 1, 5.0, group=1),
    ]
    found = {row.arm: row for row in report.rows(turns)}
    assert found["DDTREE 8"].over_ar.median == pytest.approx(2.0)
    assert found["DDTREE 16"].over_ar.median == pytest.approx(1.0)
    assert found["AR"].tokens_per_second.median == pytest.approx((0.2 + 0.4) / 2)


def test_a_difference_in_any_round_counts():
    turns = [
        turn(AR, [1, 2, 3], 0, 1.0),
        turn(DFLASH, [1, 2, 3], 1, 1.0),
        turn(DFLASH, [1, 9, 3], 1, 1.0, round=1),
        turn(AR, [1, 2, 3], 0, 1.0, round=1),
        turn(AR, [4], 0, 1.0, prompt="q"),
        turn(DFLASH, [4, 5], 1, 1.0, prompt="q"),
    ]
    expected = report.reference_tokens(turns)
    assert report.differing(turns, DFLASH, expected) == {"p": 1, "q": 1}
    assert report.differing(turns, AR, expected) == {}
    row = report.rows(turns)[1]
    assert (row.identical, row.prompts) == (0, 2)


def test_prompts_are_interleaved():
    a, b = ([Prompt(f"{name}{i}", "chat", []) for i in range(count)] for name, count in (("a", 3), ("b", 1)))
    assert [prompt.id for prompt in compare.interleaved([a, b])] == ["a0", "b0", "a1", "a2"]


def test_page_and_json(tmp_path):
    turns = {"float32": [turn(AR, [1, 2], 0, 4.0), turn(DFLASH, [1, 2], 1, 2.0), turn(TREE, [1, 2], 1, 1.0)]}
    head = {
        "command": "scripts/bench_cpu.py",
        "minutes": 1.0,
        "machine": machine.facts(threads=1),
        "settings": {name: str(value) for name, value in vars(cpu.parse([])).items()},
        "servers_at_once": 3,
        "load": {"float32": [{"busy_cores": 1.5, "other_cores": 0.5}]},
    }
    page = report.markdown(head, turns)
    assert "| DDTREE 8 | 2.00 |" in page and "Cores kept busy by other programs meanwhile: 0.5." in page
    report.write_json(tmp_path / "r.json", head, turns)
    saved = json.loads((tmp_path / "r.json").read_text())
    assert [row["arm"] for row in saved["results"]["float32"]] == ["AR", "DFLASH", "DDTREE 8"]
    assert saved["requests"]["float32"][2]["verify_steps"] == 1


def test_bad_budget_is_refused(capsys):
    with pytest.raises(SystemExit):
        cpu.parse(["--budgets", "0"])
    assert "between 1 and" in capsys.readouterr().err


def test_machine_facts():
    facts = machine.facts(threads=2)
    assert facts["torch_threads"] == 2 and facts["usable_cores"] >= 1 and facts["memory_gb"] > 0
    assert machine.servers_that_fit() >= 1
    assert machine.busy_seconds() > 0
