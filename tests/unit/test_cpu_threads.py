"""Thread counts: the user's word first, then the cores that are free."""

import os

import pytest

from sglang_ddtree.cpu import threads


@pytest.fixture(autouse=True)
def no_settings(monkeypatch):
    monkeypatch.delenv(threads.ENV, raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)


def fake_load(monkeypatch, busy_share_by_core):
    """Two readings of /proc/stat between which core i was busy for the given share of 100 ticks."""
    first = {core: (1000, 5000) for core in range(len(busy_share_by_core))}
    second = {core: (1000 + round(100 * (1 - share)), 5100) for core, share in enumerate(busy_share_by_core)}
    readings = iter([first, second])
    monkeypatch.setattr(threads, "_idle_and_total", lambda cores: next(readings))
    monkeypatch.setattr(threads.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(len(busy_share_by_core))))


@pytest.mark.parametrize(
    ("load", "count"),
    [
        ([0.0, 0.0], 2),
        ([0.1, 0.1], 2),
        ([1.0, 0.0], 1),
        ([0.5, 0.5], 1),  # one program that moves between the cores
        ([1.0, 1.0], 1),  # never none
        ([0.0], 1),
        ([1.0, 0.0, 0.0, 1.0], 2),
    ],
)
def test_a_busy_core_is_left_to_its_program(monkeypatch, load, count):
    fake_load(monkeypatch, load)
    assert threads.choose().count == count


def test_the_users_number_wins(monkeypatch):
    fake_load(monkeypatch, [0.0, 0.0])
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert threads.choose().count == 3
    monkeypatch.setenv(threads.ENV, "5")
    plan = threads.choose()
    assert plan.count == 5
    assert threads.ENV in plan.reason


@pytest.mark.parametrize("text", ["0", "-1", "two", "1.5"])
def test_a_bad_number_is_named(monkeypatch, text):
    monkeypatch.setenv(threads.ENV, text)
    with pytest.raises(ValueError, match=threads.ENV):
        threads.choose()


def test_the_real_machine_gives_a_count():
    assert 1 <= threads.choose().count <= len(os.sched_getaffinity(0))
