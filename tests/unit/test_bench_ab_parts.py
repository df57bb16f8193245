"""The benchmark's pure parts: figures, fairness, turns, prompt files."""

from __future__ import annotations

import json

import pytest

from sglang_ddtree.bench.ab import grading, measures, svg
from sglang_ddtree.bench.ab.config import Arm, ConfigError, Settings, parse_arm
from sglang_ddtree.bench.ab.endpoint import running_limit
from sglang_ddtree.bench.ab.fairness import differences
from sglang_ddtree.bench.ab.files import read_prompts
from sglang_ddtree.bench.ab.findings import judge
from sglang_ddtree.bench.ab.load import arrivals
from sglang_ddtree.bench.ab.run import schedule
from sglang_ddtree.bench.ab.store import Cell, Request, Result


def cell(repeat: int, seconds: list[float], **changes) -> Cell:
    requests = [Request(f"p{i}", 0.0, s, ttft=s / 10, tokens=10) for i, s in enumerate(seconds)]
    return Cell("A", "s", "c1", repeat, sum(seconds), True, requests, **changes)


def test_a_ratio_is_of_sums_and_its_interval_holds_the_spread_of_repeats():
    slow = [cell(0, [2.0, 4.0]), cell(1, [2.0, 4.0])]
    fast = [cell(0, [1.0, 2.0]), cell(1, [1.0, 2.0])]
    found = measures.ratio(fast, slow, measures.user_rate, paired=True)
    assert found is not None and (found.value, found.low, found.high) == pytest.approx((2, 2, 2))
    # One repeat in which both were slow cancels out when they are paired, and only then.
    worse_slow, worse_fast = [slow[0], cell(1, [4.0, 8.0])], [fast[0], cell(1, [2.0, 4.0])]
    paired = measures.ratio(worse_fast, worse_slow, measures.user_rate, paired=True)
    apart = measures.ratio(worse_fast, worse_slow, measures.user_rate, paired=False)
    assert paired is not None and apart is not None
    assert (paired.low, paired.high) == pytest.approx((2, 2))
    assert apart.low == pytest.approx(1) and apart.high == pytest.approx(4)


def test_a_ratio_uses_only_what_both_answered_always():
    broken = Request("p0", 0.0, 9.0, error="no")
    part = Cell("A", "s", "c1", 0, 1.0, True, [broken, Request("p1", 0.0, 2.0, tokens=10)])
    found = measures.ratio([part], [cell(0, [1.0, 4.0])], measures.user_rate, paired=True)
    assert found is not None and found.value == pytest.approx(2)
    nothing = Cell("A", "s", "c1", 0, 1.0, True, [broken])
    assert measures.ratio([nothing], [cell(0, [1.0])], measures.user_rate, paired=True) is None


def test_percentiles_and_token_time():
    found = measures.percentiles([i / 1000 for i in range(101)])
    assert found is not None and (found.p50, found.p90, found.p99) == pytest.approx((50, 90, 99))
    assert measures.percentiles([]) is None
    assert measures.token_time([Request("p", 0, 1.0, ttft=0.1, tokens=10)]) == pytest.approx([0.1])


def test_acceptance_prefers_the_requests_own_counts():
    drafted = [Request("p", 0, 1.0, tokens=13, verify_steps=4), Request("q", 0, 1.0, tokens=9, verify_steps=4)]
    told = Cell("A", "s", "c1", 0, 1.0, True, drafted, steps=99)
    assert measures.acceptance_length([told]) == (2.5, "requests")
    assert measures.acceptance_length([cell(0, [1.0, 1.0], steps=6.0)]) == (3.0, "counters")
    assert measures.acceptance_length([cell(0, [1.0], steps=10.0, drafted=15.0)]) == (2.5, "counters")
    assert measures.acceptance_length([cell(0, [1.0])]) == (None, "")


def test_fairness_looks_at_everything_but_algorithm_and_addresses():
    base = {"dtype": "float32", "port": 1, "speculative_algorithm": None, "max_running_requests": None, "new_flag": 1}
    other = {**base, "port": 2, "speculative_algorithm": "DDTREE", "max_running_requests": 48}
    assert differences(other, base, 48) == []
    assert differences(other, base, 64) == ["max_running_requests 48 against not set"]
    assert differences({**other, "new_flag": 2}, base, 8) == ["new_flag 2 against 1"]
    assert "does not tell" in differences(other, None, 8)[0]


def test_the_limit_in_force_is_that_of_all_replicas():
    states = [{"effective_max_running_requests_per_dp": 6}] * 2
    assert running_limit({"max_running_requests": 48, "internal_states": states}) == 12
    assert running_limit({"max_running_requests": 48}) == 48 and running_limit({}) is None


def test_turns():
    arms = tuple(Arm(name) for name in "ABC")
    settings = Settings(arms=arms, concurrency=(1,), repeats=2)
    order = [(task.arm.name, task.set, task.repeat) for task in schedule(settings, ["s", "t"])]
    assert [name for name, *_ in order] == list("AABBCC" + "BBCCAA")
    assert order[:2] == [("A", "s", 0), ("A", "t", 0)]
    settings = Settings(arms=arms, concurrency=(1,), repeats=2, together=True)
    assert [task.arm.name for task in schedule(settings, ["s"])] == list("ABCBCA")


def test_arrivals_have_the_rate_and_are_the_same_for_every_arm():
    moments = arrivals(2000, 50.0, seed=3)
    assert moments == arrivals(2000, 50.0, seed=3) != arrivals(2000, 50.0, seed=4)
    assert moments[0] == 0 and moments[-1] == pytest.approx(40, rel=0.1)


def test_arms_from_flags():
    assert parse_arm("v=http://h:1/v1#m") == Arm("v", url="http://h:1/v1", model="m")
    assert parse_arm("T 8=--model-path 'a b'") == Arm("T 8", flags=("--model-path", "a b"))
    for bad in ("http://h", "=x", "a='"):
        with pytest.raises(ConfigError):
            parse_arm(bad)


def test_prompt_files(tmp_path):
    def read(name, text):
        (tmp_path / name).write_text(text)
        return [(p.id, p.kind, p.messages) for p in read_prompts(tmp_path / name)]

    asked = [{"role": "user", "content": "hi"}]
    assert read("a.jsonl", '{"prompt": "hi"}\n\n') == [("a/1", "a", asked)]
    bench = '{"question_id": 81, "category": "writing", "turns": ["hi", "more"]}'
    assert read("b.jsonl", bench) == [("b/81", "writing", asked)]
    system = {"role": "system", "content": "s"}
    turns = [system, *asked, {"role": "assistant", "content": "old"}]
    assert read("c.jsonl", json.dumps({"messages": turns})) == [("c/1", "c", [system, *asked])]
    share = [{"id": "x", "conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "old"}]}]
    assert read("d.json", json.dumps(share)) == [("d/x", "d", asked)]
    strange = ('{"messages": "hi"}', '{"messages": {"a": 1}}', '{"conversations": [1, 2]}', '{"turns": 3}')
    for bad in ("", "{}", "no", "[1]", '{"messages": [{"role": "robot", "content": "x"}]}', *strange):
        with pytest.raises(ConfigError):
            read("e.jsonl", bad)


@pytest.mark.parametrize(("top", "last"), [(0, 1), (0.83, 1), (7, 8), (43, 50), (1234, 1250)])
def test_axis_ends_on_a_round_number(top, last):
    marks = svg.ticks(top)
    assert marks[0] == 0 and marks[-1] == pytest.approx(last) and len(marks) <= 7


def answered(name: str, prompt: str, text: str) -> Cell:
    return Cell("A", name, "c1", 0, 1.0, True, [Request(prompt, 0.0, 1.0, tokens=1, text=text)])


def test_grading_marks_answers_once_and_runs_code_only_when_allowed(monkeypatch):
    ran: list[str] = []

    def known(name):
        def grader(text: str) -> bool:
            ran.append(text)
            return text == "right"

        return {} if name == "mtbench" else {"p": grader}

    monkeypatch.setattr(grading, "graders", known)
    cells = [answered("gsm8k", "p", text) for text in ("right", "wrong", "right")]
    cells += [answered("humaneval", "p", "right"), answered("mtbench", "p", "right"), answered("gsm8k", "q", "?")]
    cells.append(Cell("A", "gsm8k", "c1", 0, 1.0, True, [Request("p", 0.0, 1.0, error="no")]))
    result = Result({}, cells=list(cells))
    grading.grade(result, run_code=False)
    assert [cell.requests[0].correct for cell in result.cells] == [True, False, True, None, None, None, None]
    assert ran == ["right", "wrong"] and result.notes == [
        "humaneval is not graded: its grading runs the model's code; --run-code allows that."
    ]
    found = grading.accuracy(result.cells)
    assert found is not None and (found.correct, found.graded) == (2, 3) and grading.accuracy(cells) is None
    grading.grade(result, run_code=True)
    assert result.cells[3].requests[0].correct is True


@pytest.mark.parametrize(
    ("old", "new", "flagged"),
    [
        ("11111111", "11100000", True),
        ("11111111", "11110000", False),  # four of four fall the same way once in eight times
        ("11110000", "00001111", False),
        ("00000000", "11111111", False),
        ("", "", False),
    ],
)
def test_answers_that_became_wrong(old, new, flagged):
    def cells(verdicts: str) -> list[Cell]:
        requests = [Request(f"p{i}", 0.0, 1.0, correct=verdict == "1") for i, verdict in enumerate(verdicts)]
        return [Cell("A", "s", "c1", repeat, 1.0, True, requests) for repeat in range(2)]

    assert grading.became_wrong(cells(old), cells(new))[2] is flagged


def test_answers_that_the_limit_cut_off_are_said():
    def said(*ends: tuple[str, bool | None]) -> list[str]:
        requests = [Request(f"p{i}", 0.0, 1.0, finish=end, correct=right) for i, (end, right) in enumerate(ends)]
        cells = [Cell("A", "s", "c1", 0, 1.0, True, requests)]
        head = {"greedy": True, "reference": "A", "settings": {"force": False, "concurrency": [1], "tokens": 32}}
        lines = judge(Result(head, arms={"A": {}}, cells=cells, complete=True)).lines
        return [line for line in lines if "cut off" in line]

    assert said(("length", False), ("length", False), ("stop", True)) == [
        "Right answers say little here: 2 of 3 graded answers were cut off at 32 tokens."
    ]
    assert said(("length", False), ("stop", True), ("stop", False)) == []
    assert said(("length", True), ("length", None)) == said() == []
