"""scripts/bench_cpu.py and the demo from start to end, with servers that only pretend."""

from __future__ import annotations

import json
import os
import types

import pytest
from test_bench import FakeServer, fake  # noqa: F401

from sglang_ddtree.bench import cpu, machine, server
from sglang_ddtree.bench.prompts import Prompt
from sglang_ddtree.demo import run as demo


@pytest.fixture
def fleet(fake, monkeypatch, tmp_path):  # noqa: F811
    """Servers that are started and stopped in name only; returns what happened to them, in order."""
    handler, url = fake
    events: list[str] = []

    class Pretender(server.Server):
        def stop(self, grace: float = 10) -> None:
            events.append(f"stop {self.log.stem}")

    def start(flags, *, log, env, port, progress):
        assert env == {"SGLANG_DDTREE_CPU_THREADS": "1"}
        events.append(f"start {log.stem}")
        return Pretender(url, types.SimpleNamespace(pid=os.getpid()), log, 1.0)

    def prompts(name, split, limit=None):
        return [Prompt(f"{name}/{i}", "code", [{"role": "user", "content": "?"}]) for i in range(limit or 2)]

    monkeypatch.setenv("SGLANG_DDTREE_CPU_THREADS", "1")
    monkeypatch.setenv("SGLANG_DDTREE_CACHE", str(tmp_path))
    monkeypatch.setattr(server, "start", start)
    for module in (cpu, demo):
        monkeypatch.setattr(module, "prepare_target", lambda say: tmp_path)
        monkeypatch.setattr(module, "load_prompts", prompts)
    monkeypatch.setattr("sglang_ddtree.bench.compare.stop_on_signals", lambda say: None)
    return types.SimpleNamespace(handler=handler, events=events)


def test_bench_writes_page_and_json(fleet, tmp_path, capsys):
    sizes = ["--budgets", "4", "8", "--dtypes", "float32", "--prompts", "1", "--rounds", "2", "--servers", "3"]
    assert cpu.main([*sizes, "--out", str(tmp_path), "--name", "r"]) == 0
    assert fleet.events[:6] == [
        "start AR",
        "start DFLASH",
        "start DDTREE-4",
        "stop DDTREE-4",
        "stop DFLASH",
        "stop AR",
    ]
    page = (tmp_path / "r.md").read_text()
    assert "## float32" in page and "| DDTREE 8 |" in page and "scripts/bench_cpu.py --budgets 4 8" in page
    saved = json.loads((tmp_path / "r.json").read_text())
    assert len(saved["load"]["float32"]) == 2
    # AR and DFLASH run in both groups: 3 prompts x 2 rounds x (2 + 1 + 2 + 1 arms).
    assert len(saved["requests"]["float32"]) == 36
    assert capsys.readouterr().out.startswith("# AR, DFLASH and DDTREE on a CPU")


def test_demo_with_three_servers_at_once(fleet, monkeypatch, capsys):
    monkeypatch.setattr(machine, "servers_that_fit", lambda: 3)
    assert demo.main(["--prompts", "3", "--tokens", "8"]) == 0
    starts = ["start DDTREE-4", "start AR", "start DFLASH"]
    assert fleet.events == [*starts, "stop DFLASH", "stop AR", "stop DDTREE-4"]
    out = capsys.readouterr().out
    assert "DDTREE: Hello" in out and "yes (3/3)" in out and "Stop it with" not in out


def test_demo_one_at_a_time_keeps_the_tree_server(fleet, capsys, monkeypatch):
    monkeypatch.setattr(os, "getpgid", lambda pid: 4711)
    assert demo.main(["--one-at-a-time", "--keep", "--prompts", "2", "--tokens", "8"]) == 0
    assert fleet.events == ["start AR", "stop AR", "start DFLASH", "stop DFLASH", "start DDTREE-4"]
    out = capsys.readouterr().out
    assert "curl -s http://127.0.0.1:" in out and "kill -TERM -- -4711" in out and "minutes apart" in out


@pytest.mark.parametrize(("dtype", "status"), [("float32", 1), ("bfloat16", 0)])
def test_demo_fails_on_a_difference_in_float32_only(fleet, monkeypatch, capsys, dtype, status):
    monkeypatch.setattr(machine, "servers_that_fit", lambda: 3)
    count = iter(range(1000))
    whole = FakeServer.send

    def send(self, kind: str, text: str) -> None:
        # Other tokens in every answer.
        whole(self, kind, text.replace('"output_ids": [[7', f'"output_ids": [[{100 + next(count)}'))

    monkeypatch.setattr(fleet.handler, "send", send)
    assert demo.main(["--prompts", "1", "--tokens", "8", "--dtype", dtype]) == status
    captured = capsys.readouterr()
    assert "DDTREE 4 differs from AR on humaneval/0 at token 0" in captured.err and "NO (0/1)" in captured.out


def test_demo_stops_what_runs_when_a_server_does_not_start(fleet, monkeypatch, capsys):
    monkeypatch.setattr(machine, "servers_that_fit", lambda: 3)
    pretend = server.start

    def start(flags, **options):
        if options["log"].stem == "AR":
            raise server.ServerError("the server stopped with status 1 while starting")
        return pretend(flags, **options)

    monkeypatch.setattr(server, "start", start)
    assert demo.main(["--prompts", "1"]) == 1
    assert fleet.events == ["start DDTREE-4", "stop DDTREE-4"]
    assert "status 1" in capsys.readouterr().err


@pytest.mark.parametrize("port", ["0", "99999"])
def test_the_demo_starts_nothing_on_a_port_that_is_none(fleet, capsys, port):
    with pytest.raises(SystemExit) as stopped:
        demo.main(["--port", port])
    assert stopped.value.code == 2 and f"--port {port} is no port" in capsys.readouterr().err
    assert fleet.events == []


def test_the_demo_with_wrong_threads(fleet, capsys, monkeypatch):
    monkeypatch.setenv("SGLANG_DDTREE_CPU_THREADS", "abc")
    assert demo.main([]) == 1
    assert "demo: SGLANG_DDTREE_CPU_THREADS must be a positive whole number" in capsys.readouterr().err
    assert fleet.events == []
