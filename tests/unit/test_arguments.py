"""Argument types, and scripts whose mistakes end in one line before anything starts."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import pytest

from sglang_ddtree.arguments import in_one_line, whole_number
from sglang_ddtree.bench import cpu, server
from sglang_ddtree.errors import DDTreeError

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("text", ["", "x", "1.0", "²", "٣", "4", "-1", " 2", "1_0", "9" * 5000])
def test_what_is_no_number_from_1_to_3(text):
    with pytest.raises(argparse.ArgumentTypeError, match="a whole number between 1 and 3"):
        whole_number(1, 3)(text)


def test_numbers():
    assert [whole_number(1, 3)(text) for text in ("1", "3")] == [1, 3]
    assert whole_number(-5)("-5") == -5 and whole_number(0)("1000000") == 1000000


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (DDTreeError("a: b."), "x.py: error: a: b.\n"),
        (FileNotFoundError(2, "No such file or directory", "f"), "x.py: error: f: No such file or directory.\n"),
        (server.ServerError("gone"), "x.py: error: gone\n"),
    ],
)
def test_errors_of_input_are_one_line(capsys, error, line):
    def run() -> int:
        raise error

    assert in_one_line("x.py", run, server.ServerError) == 2
    assert capsys.readouterr().err == line


def test_other_errors_are_faults():
    with pytest.raises(ZeroDivisionError):
        in_one_line("x.py", lambda: 1 // 0)
    assert in_one_line("x.py", lambda: 1) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rounds", "0"], "--rounds: must be a whole number of at least 1"),
        (["--prompts", "-1"], "--prompts: must be"),
        (["--budgets", "4", "999"], "between 1 and 256"),
        (["--dtypes", "int4"], "invalid choice: 'int4'"),
        (["--drafter", "/nowhere/gone"], "/nowhere/gone does not exist"),
        (["--out", "/dev/null/x"], "/dev/null"),
    ],
)
def test_bench_cpu(monkeypatch, capsys, arguments, message):
    monkeypatch.setattr(cpu.compare, "stop_on_signals", lambda say: None)
    monkeypatch.setattr(cpu, "prepare_target", None)
    try:
        code = cpu.main(arguments)
    except SystemExit as exit_:
        code = exit_.code
    line = capsys.readouterr().err.splitlines()[-1]
    assert code == 2 and line.startswith("scripts/bench_cpu.py: error: ") and message in line


@pytest.mark.parametrize(
    ("script", "arguments", "message"),
    [
        ("check_lossless.py", ["--only", "["], "is not a regular expression"),
        ("check_lossless.py", ["--phases", "1,9"], "there are 1, 2, 3, got '9'"),
        ("check_distribution.py", ["--budget", "0"], "between 1 and 256"),
    ],
)
def test_the_checking_scripts(script, arguments, message):
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / script), *arguments], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 2 and message in done.stderr.splitlines()[-1], done.stderr
