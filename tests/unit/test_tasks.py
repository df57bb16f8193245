"""Grading: right answers pass, wrong ones do not, and a model's program cannot hang, fill or outlive its run."""

import os
import time
from decimal import Decimal
from pathlib import Path

import pytest

from sglang_ddtree.bench import tasks
from sglang_ddtree.bench.limited import run_limited

CASE = {
    "task_id": "T/0",
    "prompt": 'from typing import List\n\n\ndef double(values: List[int]) -> List[int]:\n    """ Twice each. """\n',
    "entry_point": "double",
    "test": "def check(candidate):\n    assert candidate([1, 2]) == [2, 4]\n    assert candidate([]) == []\n",
}


@pytest.mark.parametrize(
    ("answer", "number"),
    [
        ("3 + 4 = 7, so #### 7", "7"),
        ("The answer is $1,234.50, because 2 are left.", "1234.50"),
        (r"Thus \boxed{-5} in 3 steps", "-5"),
        ("First 10, then 12, which makes 22.", "22"),
        ("**Answer:** 18 eggs of 20", "18"),
        ("No idea.", None),
    ],
)
def test_final_number(answer, number):
    assert tasks.final_number(answer) == (None if number is None else Decimal(number))


def test_gsm8k_is_graded_by_value(monkeypatch):
    monkeypatch.setattr(tasks, "gsm8k_cases", lambda: [{"id": "a", "expected": "1,200"}, {"id": "b", "expected": "5"}])
    found = tasks.accuracy(
        [("a", "It is 1200.00"), ("b", "#### 6"), ("b", "#### 5"), ("unknown", "1")], tasks.graders("gsm8k")
    )
    assert (found.correct, found.graded) == (2, 3)
    assert found.rate == pytest.approx(2 / 3)


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        ("Here:\n```python\ndef double(values: List[int]):\n    return [2 * v for v in values]\n```\nDone.", True),
        ("```\ndef double(values):\n    return [2 * v for v in values]\n", True),  # cut off before the fence closes
        ("    return [v + v for v in values]", True),
        ("```python\ndef double(values):\n    return values\n```", False),
        ("```python\nimport sys\nsys.exit(0)\n```", False),
        ("```python\nimport os\nos._exit(0)\n```", False),
        ("I cannot do that.", False),
        ("", False),
    ],
)
def test_humaneval_runs_the_tests(monkeypatch, answer, right):
    monkeypatch.setattr(tasks, "humaneval_cases", lambda: [CASE])
    assert tasks.accuracy([("T/0", answer)], tasks.graders("humaneval")) == tasks.Accuracy(int(right), 1)


def test_published_answers_are_right():
    """All of GSM8K's worked answers, and three of HumanEval's solutions."""
    numbers = tasks.graders("gsm8k")
    worked = [(case["id"], case["upstream_answer"]) for case in tasks.gsm8k_cases()]
    assert tasks.accuracy(worked, numbers) == tasks.Accuracy(100, 100)
    code = tasks.graders("humaneval")
    solved = [(case["task_id"], case["canonical_solution"]) for case in tasks.humaneval_cases()[:3]]
    assert tasks.accuracy(solved, code) == tasks.Accuracy(3, 3)


def test_sets_without_answers():
    assert tasks.graders("mtbench") == {}
    assert tasks.accuracy([("x", "y")], {}).rate is None


def test_an_endless_program_is_stopped_with_what_it_started(tmp_path):
    mark = tmp_path / "pid"
    program = f"""
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "while True: pass"])
open({str(mark)!r}, "w").write(str(child.pid))
while True: pass
"""
    begin = time.monotonic()
    assert not run_limited(program, seconds=5)
    assert time.monotonic() - begin < 60
    child = int(mark.read_text())
    while running(child):  # killed, but perhaps not gone yet
        assert time.monotonic() - begin < 60
        time.sleep(0.05)


def test_memory_and_files_are_limited():
    assert not run_limited("hoard = bytearray(2 << 30)")
    assert not run_limited("open('big', 'wb').write(bytes(4 << 20))")
    assert run_limited("small = bytearray(1 << 20)")


def test_the_environment_is_not_handed_on(monkeypatch):
    monkeypatch.setenv("SECRET_FOR_TEST", "x")
    assert run_limited("import os\nassert 'SECRET_FOR_TEST' not in os.environ")


def running(pid: int) -> bool:
    """Whether ``pid`` still runs; a zombie does not."""
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False
