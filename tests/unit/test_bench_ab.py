"""``sglang-ddtree bench`` against servers whose speed and honesty are known."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import random
from pathlib import Path

import pytest
from fake_openai import Behaviour, server_info, serving

from sglang_ddtree.bench.ab import cli, store

PROMPTS = 8


@pytest.fixture
def bench(tmp_path, monkeypatch):
    """Run the benchmark over named behaviours; gives exit code and result."""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # nothing listens there: a proxy would fail
    monkeypatch.setenv("SGLANG_DDTREE_CACHE", str(tmp_path / "cache"))
    # The signal handlers are the process's; the test of a killed run has its own process.
    monkeypatch.setattr(cli, "stop_on_signals", lambda say: None)
    questions = tmp_path / "q.jsonl"
    questions.write_text("".join(json.dumps({"prompt": f"question {i}"}) + "\n" for i in range(PROMPTS)))

    def run(arms: dict[str, Behaviour], *flags: str, out: str = "r", load: str = "4") -> tuple[int, store.Result]:
        with contextlib.ExitStack() as stack:
            named = [f"{name}={stack.enter_context(serving(one))}" for name, one in arms.items()]
            argv = ["run", *(part for arm in named for part in ("--arm", arm)), "--sets", "--files", str(questions)]
            argv += ["--concurrency", *load.split(), "--tokens", "16", "--repeats", "2", "--together", *flags]
            status = cli.main([*argv, "--out", str(tmp_path / out)])
        return status, store.read(tmp_path / f"{out}.json")

    run.path = tmp_path  # type: ignore[attr-defined]
    return run


def tree(**changes) -> Behaviour:
    """Two tokens a step, at the price of one and a half steps."""
    info = server_info(speculative_algorithm="DDTREE", port=2, speculative_num_draft_tokens=9)
    return Behaviour(**{"seconds": 0.009, "per_step": 2, "info": info, **changes})


def user_rate(result: store.Result, arm: str, load: str) -> float:
    """Tokens per second of a request, over all requests of the arm together."""
    requests = [one for cell in result.cells if (cell.arm, cell.load) == (arm, load) for one in cell.requests]
    return sum(one.tokens for one in requests) / sum(one.seconds for one in requests)


def retimed(result: store.Result, path: Path, token_seconds: float, seed: int) -> str:
    """The same run at a known speed, 1% noise on every request: what a machine with other work cannot be asked for."""
    rng = random.Random(seed)

    def timed(one: store.Request) -> store.Request:
        each = token_seconds * rng.gauss(1, 0.01)
        return dataclasses.replace(one, ttft=each, seconds=each * one.tokens, gaps=[each] * len(one.gaps))

    cells = [dataclasses.replace(cell, requests=[timed(one) for one in cell.requests]) for cell in result.cells]
    store.write(path, dataclasses.replace(result, cells=cells))
    return str(path)


def first_line(capsys) -> str:
    return capsys.readouterr().out.splitlines()[0]


def test_an_honest_comparison(bench, capsys):
    plain, drafted = Behaviour(), tree()
    status, result = bench({"AR": plain, "DDTREE": drafted}, load="1 4")
    out = capsys.readouterr().out
    assert status == 0 and result.complete
    assert out.splitlines()[0] == "Arms differ in the algorithm only; 32 of 32 greedy answers are AR's."
    # Arms in turns: A B, then B A.
    assert [cell.arm for cell in result.cells] == ["AR", "DDTREE", "DDTREE", "AR"] * 2
    assert [cell.load for cell in result.cells[:4]] == ["c1", "c1", "c4", "c4"]
    assert plain.most_running == 4 and plain.flushes == 4 and all(cell.flushed for cell in result.cells)
    # The warm-up is sent, but not kept: 2 sizes before, 2 loads x 2 repeats after.
    assert len(plain.bodies) == 1 + 4 + 4 * PROMPTS and sum(len(c.requests) for c in result.cells) == 8 * PROMPTS

    [row] = [line.split() for line in out.splitlines() if line.startswith("c1") and "DDTREE" in line]
    rate = {arm: user_rate(result, arm, "c1") for arm in ("AR", "DDTREE")}
    assert float(row[-4]) == pytest.approx(rate["DDTREE"] / rate["AR"], abs=0.01) and row[-5] == "16/16"
    assert float(row[-6]) == pytest.approx(15 / 7, abs=0.01)
    request = result.cells[1].requests[0]
    assert len(request.gaps) == 7 and 0.009 <= request.ttft < request.seconds
    assert request.accepted_histogram == [0, 7] and request.tokens == 16
    assert "hidden" not in (bench.path / "r.json").read_text()

    page = (bench.path / "r.html").read_text()
    assert page.count("<svg") > 4 and "http://" not in page.replace("http://127.0.0.1", "") and "https://" not in page
    assert "Accepted drafts per verify step" in page and 'class="first"' in page


def test_wrong_answers_are_the_first_line(bench, capsys):
    status, _ = bench({"AR": Behaviour(), "DDTREE": tree(wrong=lambda prompt: prompt.endswith("3"))})
    lines = capsys.readouterr().out.splitlines()
    assert status == 1
    assert lines[0].startswith(
        "WRONG OUTPUT: DDTREE: 2 of 16 greedy answers are not AR's, the first at position 1 of q/4"
    )
    assert any("DDTREE" in line and line.endswith("refused") for line in lines)
    assert 'class="first bad"><p>WRONG OUTPUT' in (bench.path / "r.html").read_text()


def test_in_bfloat16_only_early_differences_are_wrong(bench, capsys):
    def arms(wrong):
        info = server_info(dtype="bfloat16")
        return {"AR": Behaviour(info=info), "X": tree(info={**info, "speculative_algorithm": "DDTREE"}, wrong=wrong)}

    assert bench(arms(lambda prompt: prompt.endswith("3")), out="few")[0] == 0
    assert "14 of 16 greedy answers are AR's" in first_line(capsys)
    assert bench(arms(lambda prompt: True), out="all")[0] == 1
    assert "too many and too early for rounding" in first_line(capsys)


@pytest.mark.parametrize("gap", [0.25, None])
def test_how_sure_the_reference_was_where_answers_differ(bench, capsys, gap):
    arms = {"AR": Behaviour(logprob_gap=gap), "DDTREE": tree(wrong=lambda prompt: prompt.endswith(("3", "5")))}
    _, result = bench(arms)
    assert [(one.arm, one.prompt, one.position, one.gap) for one in result.differences] == [
        ("DDTREE", "q/4", 1, gap),
        ("DDTREE", "q/6", 1, gap),
    ]
    said = "Where 2 answers of DDTREE leave AR's, its two best tokens are 0.25 to 0.25 nats apart (0: a tie)."
    assert (said in capsys.readouterr().out) is (gap is not None)


def test_what_servers_and_gpus_tell(bench, capsys, monkeypatch, tmp_path):
    """Counters of /metrics are differences; nvidia-smi's figures are sums over the GPUs."""
    smi = tmp_path / "bin" / "nvidia-smi"
    smi.parent.mkdir()
    smi.write_text("#!/bin/sh\necho '100.5, 1024'\necho '200, 2048'\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{smi.parent}:{os.environ['PATH']}")
    # {steps} grows with every request; draft's sum does not.
    series = """\
# TYPE sglang:ddtree_tree_nodes histogram
sglang:ddtree_tree_nodes_sum {steps}
sglang:ddtree_tree_nodes_count {steps}
# TYPE sglang:ddtree_stage_seconds histogram
sglang:ddtree_stage_seconds_sum{stage="verify"} {steps}
sglang:ddtree_stage_seconds_count{stage="verify"} {steps}
sglang:ddtree_stage_seconds_sum{stage="draft"} 5
sglang:ddtree_stage_seconds_count{stage="draft"} {steps}
"""
    _, result = bench({"AR": Behaviour(), "DDTREE": tree(metrics=series)})
    cell = next(cell for cell in result.cells if cell.arm == "DDTREE")
    assert cell.server == {"nodes": 1, "verify": 1000, "draft": 0}
    assert cell.gpu == {"power_w": 300.5, "memory_gb": 3.0}
    out = capsys.readouterr().out
    assert "q, per decode step" in out and "verify ms" in out and "300" in out
    assert "means per decode step, by the server" in (bench.path / "r.html").read_text()


def test_an_arm_of_another_dtype_gets_no_speedup_unless_forced(bench, capsys):
    arms = {"AR": Behaviour(), "DDTREE": tree(info=server_info(dtype="bfloat16", max_running_requests=32))}
    assert bench(arms)[0] == 1
    out = capsys.readouterr().out.splitlines()
    # 32 at once are as good as 48 when 4 are sent.
    assert out[0] == "NOT COMPARABLE: DDTREE against AR: dtype bfloat16 against float32"
    assert out[-1].endswith("refused")
    assert bench(arms, "--force", out="forced")[0] == 1
    out = capsys.readouterr().out.splitlines()
    assert out[0].startswith("FORCED although arms differ: DDTREE against AR: dtype") and " to " in out[-1]


def test_a_server_that_is_not_sglang(bench, capsys):
    counters = "# TYPE vllm:spec_decode_num_drafts counter\nvllm:spec_decode_num_drafts_total {steps}\n"
    counters += (
        "# TYPE vllm:spec_decode_num_accepted_tokens counter\nvllm:spec_decode_num_accepted_tokens_total {steps}\n"
    )
    other = Behaviour(info=None, metrics=counters, refuses=lambda prompt: prompt.endswith("5"))
    status, result = bench({"AR": Behaviour(), "vllm": other})
    out = capsys.readouterr().out
    assert status == 1 and "does not tell its settings" in out.splitlines()[0]
    assert "FAILED: vllm: 2 requests without an answer, the first: Error code: 400" in out.splitlines()[1]
    assert not any("return_output_ids_in_sglext" in body for body in other.bodies)
    cell = next(cell for cell in result.cells if cell.arm == "vllm")
    assert not cell.flushed and cell.steps == cell.drafted == 7 * 16
    [row] = [line.split() for line in out.splitlines() if line.startswith("c4") and "vllm" in line]
    # Without token ids the texts are compared; every step accepted one draft.
    assert row[-3:] == ["2.00", "14/14", "refused"]


def test_a_load_that_the_server_cannot_take_is_left_out_and_said(bench, capsys):
    limited = server_info(max_running_requests=6, internal_states=[{"effective_max_running_requests_per_dp": 6}])
    _, result = bench({"AR": Behaviour(info=limited)}, load="2 7 9")
    out = capsys.readouterr().out
    assert "LEFT OUT: c7 of AR: the server runs 6 requests at once." in out
    assert {cell.load for cell in result.cells} == {"c2"} and result.complete
    _, result = bench({"AR": Behaviour()}, load="9 2", out="few")
    assert "LEFT OUT: c9 on q: it has 8 prompts, too few to keep it up." in capsys.readouterr().out


def test_an_open_loop_does_not_wait_for_answers(bench):
    one = Behaviour(seconds=0.02)
    _, result = bench({"AR": one}, "--rates", "50", "--concurrency", "--body", '{"temperature": 0.5}')
    assert {cell.load for cell in result.cells} == {"r50"} and one.most_running == PROMPTS
    sent = [request.sent for request in result.cells[0].requests]
    assert sent == sorted(sent) and sent[0] < 0.05 < sent[-1] < 1
    assert one.bodies[-1]["temperature"] == 0.5 and not result.head["greedy"]


def test_compare_flags_ten_percent_and_nothing_else(bench, capsys):
    _, result = bench({"AR": Behaviour()})
    capsys.readouterr()
    old, same, slow = (
        retimed(result, bench.path / f"{name}.json", seconds, seed)
        for seed, (name, seconds) in enumerate((("old", 0.02), ("same", 0.02), ("slow", 0.022)))
    )
    assert cli.main(["compare", old, same]) == 0
    assert capsys.readouterr().out.startswith("No regression beyond the noise.")
    assert cli.main(["compare", old, slow]) == 1
    out = capsys.readouterr().out
    assert out.startswith("REGRESSION: ") and any("tok/s/user" in x and x.endswith("worse") for x in out.splitlines())
    # The other way round it is a gain, and that much may be tolerated.
    assert cli.main(["compare", slow, old]) == 0 and "better" in capsys.readouterr().out
    assert cli.main(["compare", old, slow, "--tolerance", "0.3"]) == 0


def test_compare_flags_answers_and_acceptance(bench, capsys):
    info = server_info(dtype="bfloat16")
    for name, changes in (
        ("old", {}),
        ("wrong", {"wrong": lambda prompt: prompt.endswith("3")}),
        ("less", {"per_step": 2}),
    ):
        _, result = bench({"AR": Behaviour(info=info), "T": tree(info=info, **{"per_step": 4, **changes})}, out=name)
        retimed(result, bench.path / f"{name}.json", 0.02, seed=0)
    capsys.readouterr()
    old, wrong, less = (str(bench.path / f"{name}.json") for name in ("old", "wrong", "less"))
    assert cli.main(["compare", old, wrong]) == 1
    assert "q c4 T: 14/16 answers as the reference's, before 16/16" in capsys.readouterr().out
    assert cli.main(["compare", old, less]) == 1
    [row] = [line for line in capsys.readouterr().out.splitlines()[1:] if line.endswith("worse")]
    assert " accept " in row


def test_a_report_can_be_drawn_again(bench, capsys, tmp_path):
    bench({"AR": Behaviour(), "DDTREE": tree()})
    printed = capsys.readouterr().out
    assert cli.main(["report", str(bench.path / "r.json"), "--html", str(tmp_path / "again.html")]) == 0
    assert capsys.readouterr().out == printed
    assert (tmp_path / "again.html").read_text() == (bench.path / "r.html").read_text()
