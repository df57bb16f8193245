"""The benchmark's own servers, its end by a signal, and bad input; SGLang is replaced by a fake package."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sglang_ddtree.bench.ab import cli, store
from sglang_ddtree.bench.ab.config import Arm, Settings
from sglang_ddtree.bench.ab.run import head

HERE = Path(__file__).parent

#: What ``sglang-ddtree serve`` imports. The server writes down its process, and takes its speed from a flag.
FAKE_SGLANG = {
    "__init__.py": "",
    "srt/__init__.py": "",
    "srt/plugins.py": "def load_plugins(): pass\n",
    "srt/server_args.py": "def prepare_server_args(argv): return argv\n",
    "srt/utils.py": "def kill_process_tree(pid, include_parent): pass\n",
    "launch_server.py": """
import os, pathlib, fake_openai
def run_server(argv):
    flag = {name: value for name, value in zip(argv, argv[1:]) if name.startswith("--")}
    pathlib.Path(os.environ["PIDS"]).open("a").write(f"{os.getpid()}\\n")
    own = fake_openai.Behaviour(seconds=float(flag["--seconds"]))
    fake_openai.listen(own, int(flag["--port"])).serve_forever()
""",
}


@pytest.fixture
def fake_sglang(tmp_path):
    """Environment of a process that finds the fake package first; ``PIDS`` collects the servers' process ids."""
    for name, text in FAKE_SGLANG.items():
        path = tmp_path / "site" / "sglang" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    pids = tmp_path / "pids"
    pids.touch()
    path = os.pathsep.join([str(tmp_path / "site"), str(HERE), str(HERE.parents[1])])
    cache = {"SGLANG_DDTREE_CACHE": str(tmp_path / "cache"), "SGLANG_PLATFORM": "ddtree_cpu"}
    return {**os.environ, **cache, "PYTHONPATH": path, "PIDS": str(pids)}


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


CONFIG = """
common = "--x 1"
concurrency = [2]
sets = []
files = ["q.jsonl"]
tokens = 8
repeats = {repeats}
[[arm]]
name = "AR"
flags = "--seconds 0.01"
[[arm]]
name = "DDTREE 8"
flags = ["--seconds", "0.01"]
"""


def command(tmp_path: Path, repeats: int) -> list[str]:
    (tmp_path / "q.jsonl").write_text("".join(json.dumps({"prompt": f"q {i}"}) + "\n" for i in range(4)))
    (tmp_path / "ab.toml").write_text(CONFIG.format(repeats=repeats))
    bench = [sys.executable, "-m", "sglang_ddtree.cli", "bench", "run", str(tmp_path / "ab.toml")]
    return [*bench, "--out", str(tmp_path / "r")]


def test_servers_are_started_and_stopped_one_after_the_other(tmp_path, fake_sglang):
    done = subprocess.run(command(tmp_path, 1), env=fake_sglang, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0].startswith("Arms differ in the algorithm only; 4 of 4")
    assert "One server at a time" in done.stdout
    pids = [int(pid) for pid in Path(fake_sglang["PIDS"]).read_text().split()]
    assert len(pids) == 2 and not any(alive(pid) for pid in pids)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_leaves_the_finished_part_and_no_server(tmp_path, fake_sglang, number):
    out = tmp_path / "r.json"
    started = subprocess.Popen(
        [*command(tmp_path, 2000), "--together"], env=fake_sglang, stderr=subprocess.PIPE, text=True
    )
    try:
        until = time.monotonic() + 120
        while not (out.exists() and len(store.read(out).cells) >= 3):
            assert started.poll() is None and time.monotonic() < until
            time.sleep(0.2)
        started.send_signal(number)
        _, err = started.communicate(timeout=60)
    finally:
        started.kill()
    assert started.returncode == 128 + number and "Traceback" not in err, err
    pids = [int(pid) for pid in Path(fake_sglang["PIDS"]).read_text().split()]
    assert len(pids) == 2 and not any(alive(pid) for pid in pids)
    result = store.read(out)
    assert len(result.cells) >= 3 and not result.complete
    assert "UNFINISHED" in out.with_suffix(".html").read_text()
    assert cli.main(["report", str(out)]) == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nonsense = 1", "unknown key 'nonsense'"),
        ("tokens = '8'", "tokens must be of type int"),
        ("repeats = true", "repeats must be of type int"),
        ("concurrency = [1, 'x']", "concurrency must be a list of int"),
        ("a = [", "Invalid value"),
        ("[[arm]]\nurl = 'http://x'", "needs a name"),
        ("[[arm]]\nname = 'a'\nport = 1", "unknown key 'port'"),
        ("[[arm]]\nname = 'a'\nurl = 'x:1'", "no http address"),
        ("[[arm]]\nname = 'a'\nurl = 'http://'", "no http address"),
        ("[[arm]]\nname = 'a'\nurl = 'http://x:port'", "no http address"),
        ("[[arm]]\nname = 'a'\nurl = 'http://[::1'", "no http address"),
        ("[[arm]]\nname = 'a'\nurl = 'http://a b'", "no http address"),
        ("rates = [nan]\n[[arm]]\nname = 'a'", "must be positive"),
        ("rates = [inf]\n[[arm]]\nname = 'a'", "must be positive"),
        ("[[arm]]\nname = 'a'\n[[arm]]\nname = 'a'", "same name"),
        ("reference = 'b'\n[[arm]]\nname = 'a'", "none of the arms"),
        ("concurrency = [0]\n[[arm]]\nname = 'a'", "must be positive"),
        ("sets = ['nope']\n[[arm]]\nname = 'a'", "unknown prompt set"),
        ("sets = []\nfiles = ['gone.jsonl']\n[[arm]]\nname = 'a'", "No such file"),
        ("sets = []\n[[arm]]\nname = 'a'", "no prompts"),
    ],
)
def test_bad_settings_are_one_line(tmp_path, monkeypatch, capsys, text, message):
    monkeypatch.setattr(cli, "stop_on_signals", lambda say: None)
    (tmp_path / "ab.toml").write_text(text)
    assert cli.main(["run", str(tmp_path / "ab.toml"), "--out", str(tmp_path / "r")]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and message in err and err.startswith("sglang-ddtree bench: error: ")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--common", "'"], "--common: No closing quotation"),
        (["--out", ""], "--out needs a name"),
        (["--target", "/nowhere/gone"], "/nowhere/gone does not exist"),
        (["--drafter", "/nowhere/gone"], "/nowhere/gone does not exist"),
        (["--budgets", "8", "0"], "must be between 1 and 256"),
        (["--budgets", "many"], "must be a whole number of tree nodes"),
    ],
)
def test_bad_flags_are_one_line(tmp_path, monkeypatch, capsys, flags, message):
    monkeypatch.setattr(cli, "stop_on_signals", lambda say: None)
    try:
        code = cli.main(["run", "--out", str(tmp_path / "r"), *flags])
    except SystemExit as exit_:
        code = exit_.code
    line = capsys.readouterr().err.splitlines()[-1]
    assert code == 2 and message in line and line.startswith("sglang-ddtree bench")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("where", "value", "message"),
    [
        (("head", "settings"), None, "settings in head"),
        (("head", "settings", "tokens"), "many", "tokens in settings"),
        (("head", "reference"), 3, "reference in head"),
        (("head",), [1], "head of a Result"),
        (("arms",), [], "arms of a Result"),
        (("cells", 0, "arm"), "b", "'b', which is none of the arms"),
        (("notes",), None, "notes of a Result"),
        (("cells", 0, "seconds"), "long", "seconds of a Cell"),
        (("cells", 0, "seconds"), 0, "took 0 seconds"),
        (("cells", 0, "requests", 0, "tokens"), "7", "tokens of a Request"),
        (("cells", 0, "requests", 0, "gaps"), None, "gaps of a Request"),
        (("cells", 0, "requests", 0, "unknown"), 1, "unexpected keyword"),
    ],
)
def test_a_result_with_another_value_is_one_line(tmp_path, capsys, where, value, message):
    path = tmp_path / "r.json"
    arm = Settings(arms=(Arm("a"),))
    cell = store.Cell("a", "q", "c1", 0, 1.0, True, [store.Request("q/1", 0.0, 1.0)])
    about = {"a": {"flags": [], "url": "", "model": "default", "info": None}}
    store.write(path, store.Result(head(arm, "bench run", {}), about, cells=[cell], complete=True))
    assert cli.main(["report", str(path)]) == 0
    data = json.loads(path.read_text())
    inner = data
    for key in where[:-1]:
        inner = inner[key]
    inner[where[-1]] = value
    path.write_text(json.dumps(data))
    capsys.readouterr()
    assert cli.main(["compare", str(path), str(path)]) == cli.main(["report", str(path)]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 2 and message in captured.err


@pytest.mark.parametrize("text", ["", "[]", '{"schema": "other/1"}', '{"schema": "sglang-ddtree-bench/1"}', "\xff"])
def test_what_is_no_result_is_one_line(tmp_path, capsys, text):
    path = tmp_path / "r.json"
    path.write_bytes(text.encode("latin-1"))
    for argv in (["report", str(path)], ["compare", str(path), str(path)], ["report", str(tmp_path / "none.json")]):
        assert cli.main(argv) == 2
        assert capsys.readouterr().err.count("\n") == 1


def test_a_result_is_not_overwritten_by_accident(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(cli, "stop_on_signals", lambda say: None)
    (tmp_path / "r.json").write_text("mine")
    assert cli.main(["run", "--arm", "a=http://127.0.0.1:9", "--out", str(tmp_path / "r")]) == 2
    assert "--overwrite" in capsys.readouterr().err and (tmp_path / "r.json").read_text() == "mine"


def test_a_server_that_is_not_there(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(cli, "stop_on_signals", lambda say: None)
    (tmp_path / "q.jsonl").write_text('{"prompt": "q"}\n')
    argv = ["run", "--arm", "a=http://127.0.0.1:9", "--sets", "--files", str(tmp_path / "q.jsonl")]
    assert cli.main([*argv, "--out", str(tmp_path / "r")]) == 1
    captured = capsys.readouterr()
    assert "the warm-up failed at http://127.0.0.1:9: " in captured.err and captured.out.startswith("UNFINISHED")
    # Nothing was measured, so nothing is in the way of the next try.
    assert not (tmp_path / "r.json").exists()
    assert cli.main([*argv, "--out", str(tmp_path / "r")]) == 1
