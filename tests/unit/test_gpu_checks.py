"""``scripts/gpu_check.py``, as far as it goes without a GPU. Its kernel parts run in ``tests/interpreter``."""

from __future__ import annotations

import contextlib
import json
import math
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from sglang_ddtree.bench.lossless import Output
from sglang_ddtree.gpu import checks, replay, report, serve
from sglang_ddtree.gpu.cases import Size
from sglang_ddtree.gpu.equality import Mismatch

SCRIPT = Path(__file__).parents[2] / "scripts" / "gpu_check.py"
CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--parts", "everything"], "invalid choice"),
        (["--trees", "0"], "at least 1"),
        (["--budgets", "257"], "between 1 and 256"),
        (["--serve-budget", "0"], "between 1 and 256"),
        (["--minutes", "0"], "--minutes must be above 0"),
        (["--model", "/nowhere"], "--model /nowhere is no model directory"),
        (["--drafter", "/nowhere"], "--drafter /nowhere is no drafter directory"),
    ],
)
def test_bad_arguments(arguments, reason, capsys):
    with pytest.raises(SystemExit) as stopped:
        checks.main(arguments)
    assert stopped.value.code == 2 and reason in capsys.readouterr().err.splitlines()[-1]


def test_help_and_a_host_without_a_gpu(monkeypatch):
    done = subprocess.run([sys.executable, str(SCRIPT), "--help"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "replay:" in done.stdout
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    done = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.splitlines()[-1].startswith("gpu_check.py: torch finds no CUDA device")


def test_parts_that_run_on_a_cpu(tmp_path):
    """One part passes, two are named as not run; the page does not pass for a GPU's."""
    arguments = ["--device", "cpu", "--parts", "kernels", "replay", "timing", "--replays", "2"]
    arguments += ["--batch-sizes", "1", "5", "--budgets", "8", "100", "--out", str(tmp_path), "--name", "tried"]
    assert checks.main(arguments) == 0
    found = json.loads((tmp_path / "tried.json").read_text())
    parts = found["parts"]
    assert parts["replay"]["status"] == "passed" and parts["replay"]["replays"] == 16
    for part in ("kernels", "timing"):
        assert parts[part]["status"] == "not run" and "TRITON_INTERPRET" in parts[part]["reason"]
    page = (tmp_path / "tried.md").read_text()
    assert "no GPU result" in page and "| replay | passed |" in page


def test_the_fold_part_tries_itself_out_on_a_cpu(tmp_path):
    arguments = ["--device", "cpu", "--parts", "fold", "--replays", "3", "--repeats", "1", "--name", "tried"]
    arguments += ["--batch-sizes", "1", "5", "--budgets", "8", "100", "--out", str(tmp_path)]
    assert checks.main(arguments) == 0
    part = json.loads((tmp_path / "tried.json").read_text())["parts"]["fold"]
    assert part["folded"] == 2 * 2 * 3 and not part["graphs"]
    assert [(row["bs"], row["budget"]) for row in part["rows"]] == [(5, 8), (1, 8), (5, 100), (1, 100)]
    assert "12 calls, no graphs, the trees those of a step" in (tmp_path / "tried.md").read_text()


@pytest.mark.parametrize("field", ["tokens", "log_weights", "next_sibling"])
def test_a_fold_that_differs_is_found(monkeypatch, field):
    from sglang_ddtree import folding
    from sglang_ddtree.gpu import fold

    class Wrong(folding.TreeSampler):
        def __call__(self, hidden, ids):
            super().__call__(hidden, ids)
            if len(ids) == 2 * 16:
                getattr(self.trees, field)[1, 3] += 1

    monkeypatch.setattr(folding, "TreeSampler", Wrong)
    with pytest.raises(Mismatch, match=rf"budget 8, 2 requests, replay 1: {field} differs in 1 places"):
        fold.check_folds(CPU, [1, 2], [8], 1, 1)


def test_the_attention_part_tries_itself_out_on_a_cpu(tmp_path):
    """FlashInfer's wrappers over torch in place of the kernels; the page says so."""
    arguments = ["--device", "cpu", "--parts", "attention", "--replays", "6", "--out", str(tmp_path), "--name", "tried"]
    assert checks.main(arguments) == 0
    part = json.loads((tmp_path / "tried.json").read_text())["parts"]["attention"]
    assert part["replayed"] == 6 and [row["cases"] > 10 for row in part["rows"]] == [True, True]
    assert "torch in place of the kernels" in (tmp_path / "tried.md").read_text()


def test_a_wrong_attention_fails_the_part(tmp_path, monkeypatch):
    from sglang_ddtree.gpu import flashinfer_stand_in

    right = flashinfer_stand_in.read_tree_bits

    def no_window(bits, rows, request, kv_len, window):
        return right(bits, rows, request, kv_len, None)

    monkeypatch.setattr(flashinfer_stand_in, "read_tree_bits", no_window)
    arguments = ["--device", "cpu", "--parts", "attention", "--replays", "1", "--out", str(tmp_path), "--name", "bad"]
    assert checks.main(arguments) == 1
    reason = json.loads((tmp_path / "bad.json").read_text())["parts"]["attention"]["reason"]
    assert "WrongAttention" in reason and "window=" in reason


def test_attention_is_timed_beside_the_two_other_masks(monkeypatch):
    """The loop, with what a CPU lacks left out: FlashInfer's own kernels do nothing here."""
    import flashinfer

    from sglang_ddtree.attention.flashinfer_tree import tree_wrapper_class
    from sglang_ddtree.gpu import attention, flashinfer_stand_in

    masks = []

    class Stock:
        def __init__(self, *args, **options):
            pass

        def begin_forward(self, *args, custom_mask=None, **options):
            masks.append(None if custom_mask is None else custom_mask.numel())

        def forward(self, *args, **options):
            pass

    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    with flashinfer_stand_in.flashinfer_on_cpu():
        tree_wrapper_class()
        monkeypatch.setattr(flashinfer, "BatchPrefillWithPagedKVCacheWrapper", Stock)
        rows = attention.measure(CPU, [2], [8], [20, 10**6], 1)
    (row,) = rows
    assert (row["context"], row["bs"], row["budget"]) == (20, 2, 8) and row["tree"] > 0
    assert set(masks) == {None, 2 * 9 * (20 + 9)}
    page = "\n".join(report._attention(rows))
    assert page.splitlines()[-1].startswith("| 20 | 2 | 8 | ")


def test_nothing_checked_is_no_success(tmp_path):
    assert checks.main(["--device", "cpu", "--parts", "kernels", "--out", str(tmp_path)]) == 2


def test_a_failing_part_fails_the_script_and_not_the_others(tmp_path, monkeypatch):
    def wrong(options):
        raise Mismatch("tokens differs in 1 places\nfirst at [0, 1]")

    monkeypatch.setattr(checks, "check_kernels", wrong)
    arguments = ["--device", "cpu", "--parts", "kernels", "replay", "--replays", "1", "--batch-sizes", "2"]
    assert checks.main([*arguments, "--budgets", "8", "--out", str(tmp_path), "--name", "failing"]) == 1
    parts = json.loads((tmp_path / "failing.json").read_text())["parts"]
    assert parts["kernels"]["reason"] == "Mismatch: tokens differs in 1 places first at [0, 1]"
    assert parts["replay"]["status"] == "passed"


def test_what_is_done_is_written_before_the_next_part(tmp_path, monkeypatch):
    """A session that is cut off in its second part leaves the first."""

    def cut_off(options):
        raise KeyboardInterrupt

    monkeypatch.setattr(checks, "take_times", cut_off)
    arguments = ["--device", "cpu", "--parts", "replay", "timing", "--replays", "1", "--batch-sizes", "2"]
    with pytest.raises(KeyboardInterrupt):
        checks.main([*arguments, "--budgets", "8", "--out", str(tmp_path), "--name", "cut"])
    parts = json.loads((tmp_path / "cut.json").read_text())["parts"]
    assert parts["replay"]["status"] == "passed" and "timing" not in parts


def test_no_part_starts_when_the_minutes_are_over(tmp_path):
    arguments = ["--device", "cpu", "--parts", "replay", "serve", "--minutes", "1e-9", "--out", str(tmp_path)]
    assert checks.main([*arguments, "--name", "late"]) == 2
    parts = json.loads((tmp_path / "late.json").read_text())["parts"]
    assert all(part["status"] == "not run" and "minutes were over" in part["reason"] for part in parts.values())


@pytest.mark.parametrize("end", ["time", "fault", "none"])
@pytest.mark.parametrize("passed", [True, False])
def test_the_settings_before_the_end_of_serving_are_kept(tmp_path, monkeypatch, end, passed):
    row = {"setting": "s", "passed": passed, "identical": 8, "answers": 8, "acceptance": 2.0, "differences": []}
    row |= {"speed": 9.0, "over_plain": 1.5}

    def served(*args, until, **kwargs):
        yield row
        if end != "none":
            raise serve.OutOfTime if end == "time" else RuntimeError("server\ngone")

    monkeypatch.setattr(serve, "check_served", served)
    arguments = ["--device", "cpu", "--parts", "serve", "--model", str(checks.DRAFTER), "--minutes", "5"]
    code = checks.main([*arguments, "--out", str(tmp_path), "--name", "served"])
    part = json.loads((tmp_path / "served.json").read_text())["parts"]["serve"]
    kept = {"time": "not finished", "fault": "failed", "none": "passed"}[end] if passed else "failed"
    assert part["status"] == kept and part["rows"] == [row]
    assert code == {"failed": 1, "not finished": 2, "passed": 0}[kept]
    assert ("reason" in part) == (end != "none")
    assert "| s | yes |" in (tmp_path / "served.md").read_text() or not passed


def test_no_server_starts_when_the_time_is_over(tmp_path, monkeypatch):
    """The clock passes the end while the third server runs: it is let end, the fourth does not start."""
    clock, started = [0.0], []

    @contextlib.contextmanager
    def running(arguments, **kwargs):
        started.append("DDTREE" in arguments)
        clock[0] += 10.0
        yield SimpleNamespace(start_seconds=10.0)

    monkeypatch.setattr(serve, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(serve, "running", running)
    monkeypatch.setattr(serve, "ask", lambda *args: answer([1, 2, 3]))
    monkeypatch.setattr(serve, "measure", lambda *args: 1.0)
    monkeypatch.setattr(serve.lossless, "load_tokenizer", lambda model: None)
    monkeypatch.setattr(serve.lossless, "questions", lambda tokenizer, count: ["?"] * count)
    options = {"device": "cuda", "budget": 8, "prompts": 2, "tokens": 3, "logs": tmp_path, "say": lambda text: None}
    rows = serve.check_served(Path("m"), Path("d"), **options, until=25.0)
    assert [next(rows)["setting"], next(rows)["setting"]] == ["float32, triton, eager", "float32, triton, CUDA graphs"]
    assert started == [False, True, True]
    with pytest.raises(serve.OutOfTime):
        next(rows)
    assert len(started) == 3


@pytest.mark.parametrize("parts_at", [None, 2])
def test_the_variant_is_compared_with_the_stock_mask(tmp_path, monkeypatch, parts_at):
    """Every server with the mask that it is told to use; where the variant's answers part from the stock mask's without
    a near-tie, it fails, though each may be near plain decoding's."""
    started, gpu = [], serve.settings("cuda")

    @contextlib.contextmanager
    def running(arguments, *, env, **kwargs):
        started.append(("DDTREE" in arguments, env.get("SGLANG_DDTREE_FLASHINFER")))
        yield SimpleNamespace(start_seconds=1.0, which=started[-1])

    def ask(server, question, tokens):
        ids = [1, 2, 3, 4]
        is_tree = server.which == (True, "tree")
        if is_tree and parts_at is not None:
            ids[parts_at] = 9
        return answer(ids, gap=0.1 if server.which == (False, None) else 2.0)

    monkeypatch.setattr(serve, "running", running)
    monkeypatch.setattr(serve, "ask", ask)
    monkeypatch.setattr(
        serve, "measure", lambda server, *args: {"tree": 30.0, "stock": 20.0}.get(server.which[1], 10.0)
    )
    monkeypatch.setattr(serve.lossless, "load_tokenizer", lambda model: None)
    monkeypatch.setattr(serve.lossless, "questions", lambda tokenizer, count: ["?"] * count)
    monkeypatch.setattr(serve, "settings", lambda device: gpu[-3:])
    options = {"device": "cuda", "budget": 8, "prompts": 2, "tokens": 3, "logs": tmp_path, "say": lambda text: None}
    rows = list(serve.check_served(Path("m"), Path("d"), **options, until=math.inf))
    assert started == [(False, None), (True, "stock"), (True, "tree"), (True, "tree")]
    assert [row["over_plain"] for row in rows] == [2.0, 3.0, 3.0]
    assert ["beside_stock" in row for row in rows] == [False, False, True]  # eager has no stock beside it
    assert rows[2]["beside_stock"]["speed"] == 1.5
    assert [row["passed"] for row in rows] == ([True] * 3 if parts_at is None else [True, True, False])
    assert rows[2]["beside_stock"]["identical"] == (2 if parts_at is None else 0)


def test_the_speed_of_a_server(monkeypatch):
    outputs = [Output([1] * 30, {}, 0, 9), Output([1] * 10, {}, 0, 9)]
    monkeypatch.setattr(serve.lossless, "generate_all", lambda server, asked, tokens, concurrency: outputs)
    times = iter([5.0, 9.0])
    monkeypatch.setattr(serve, "time", SimpleNamespace(perf_counter=lambda: next(times)))
    assert serve.measure(None, [], 30) == 10.0


@pytest.mark.parametrize("name", ["tokens", "mask", "full mask", "bit rows", "accepted", "bonus"])
def test_a_wrong_replay_is_found(monkeypatch, name):
    right = replay.tree_step

    def wrong(*args):
        outputs = right(*args)
        outputs[name] = outputs[name].clone()
        flat = outputs[name].view(-1)
        flat[3] = ~flat[3]
        return outputs

    monkeypatch.setattr(replay, "tree_step", wrong)
    with pytest.raises(Mismatch, match=f"replay 1: {name} differs"):
        replay.check_replays(Size(6, 12, 7, 8), CPU, 1)


def answer(ids: list[int], gap: float = 1.0, steps: int = 2) -> serve.Answer:
    return serve.Answer(Output(ids, {"type": "length"}, 0, steps), [gap] * len(ids))


@pytest.mark.parametrize(
    ("got", "allowed_gap", "passed"),
    [
        ([1, 2, 3, 4, 5, 6], 0.0, True),
        ([1, 2, 9, 4, 5, 6], 0.0, False),
        ([1, 2, 9, 4, 5, 6], 0.4, True),
        ([1, 2, 9, 4, 5, 6], 0.2, False),
        ([1, 2, 3, 4, 5], 9.0, False),
        ([1, 2, 3, 4, 5, 6, 7], 9.0, False),
    ],
)
def test_judging_served_answers(got, allowed_gap, passed):
    verdict = serve.judge([answer([1, 2, 3, 4, 5, 6], gap=0.3)], [answer(got)], allowed_gap)
    assert verdict["passed"] is passed and verdict["answers"] == 1
    assert verdict["identical"] == int(got == [1, 2, 3, 4, 5, 6])


def test_a_server_that_accepts_no_draft_fails():
    same = [answer([1, 2, 3], steps=2)]
    assert serve.judge(same, same, 0.0)["acceptance"] == 1.0
    assert not serve.judge(same, same, 0.0)["passed"]
    assert not serve.judge(same, [answer([1, 2, 3], steps=0)], 0.0)["passed"]


def test_served_settings():
    gpu = serve.settings("cuda")
    assert {(setting.backend, setting.graphs) for setting in gpu} == {
        (backend, graphs) for backend in ("triton", "flashinfer") for graphs in (False, True)
    }
    assert not any(setting.backend == "flashinfer" and setting.dtype == "float32" for setting in gpu)
    masks = [(setting.mask, setting.graphs) for setting in gpu if setting.backend == "flashinfer"]
    assert masks == [("stock", True), ("tree", False), ("tree", True)]
    assert len(gpu) + len({(setting.dtype, setting.backend) for setting in gpu}) == 10  # servers, as the help says
    assert not any(setting.mask for setting in gpu if setting.backend != "flashinfer")
    eager = serve.Setting("bfloat16", "triton", False)
    assert "--disable-cuda-graph" in serve.flags(eager, Path("m"), None, 8)
    assert "DDTREE" not in serve.flags(eager, Path("m"), None, 8)
    assert "DDTREE" in serve.flags(serve.Setting("bfloat16", "triton", True), Path("m"), Path("d"), 8)


def test_the_page_of_a_gpu(tmp_path):
    """Every table of the page, from made-up figures."""
    machine = {"gpu": "Some GPU", "gpu_memory_gb": 24.0, "compute_capability": "8.6", "cuda": "13.0", "cpu": "a CPU"}
    machine |= {"date": "2026-12-02 10:00 UTC", "commit": "abc", "versions": {"torch": "2"}}
    times = {"kernel_eager": 20.0, "kernel_graph": 9.0, "torch_eager": 900.0, "torch_graph": 100.0}
    served = {"setting": "s", "passed": True, "identical": 7, "answers": 8, "acceptance": 2.5}
    served |= {"speed": 812.34, "over_plain": 1.514, "differences": [{"at": 3, "gap": 0.01}]}
    beside = {**served, "setting": "t", "beside_stock": {"identical": 8, "differences": [], "speed": 1.25}}
    uno = {"bs": 8, "budget": 64, "ours": 30.0, "uno": 90.0, "uno_over_ours": 3.0}
    found = {
        "command": "c",
        "machine": machine,
        "parts": {
            "fold": {
                "status": "passed",
                "seconds": 1,
                "folded": 40,
                "graphs": True,
                "rows": [{"bs": 4, "budget": 16, "replays": 40, "graph": 55.0, "eager": 140.0}],
            },
            "timing": {
                "status": "passed",
                "seconds": 1,
                "rows": [{"bs": 1, "budget": 16, "what": "build", **times}],
                "uno": [uno],
            },
            "serve": {"status": "passed", "seconds": 1, "rows": [served, beside]},
        },
    }
    path = report.write(found, tmp_path, None)
    assert path.name == "gpu-some-gpu-2026-12-02.json" and json.loads(path.read_text()) == found
    page = path.with_suffix(".md").read_text()
    assert "| 1 | 16 | build | 20 | 9 | 900 | 100 |" in page
    assert "| s | yes | 7 of 8 | 0.010 | 2.50 | 812.3 | 1.51 | - |" in page
    assert "| t | yes | 7 of 8 | 0.010 | 2.50 | 812.3 | 1.51 | 1.25 (8 of 8 identical) |" in page
    assert "40 replays, the trees those of a step, bit for bit" in page and "| 4 | 16 | 55 | 140 |" in page
    assert "| 8 | 64 | 30 | 90 | 3.00 |" in page
