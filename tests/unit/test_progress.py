"""What a long measurement says about its time."""

from __future__ import annotations

from sglang_ddtree.drafter.progress import EVERY, Progress, duration


def test_lines_are_rare_and_estimate_what_is_left():
    now, said = [0.0], []
    progress = Progress(said.append, "work", 4, clock=lambda: now[0])
    for _ in range(4):
        now[0] += EVERY * 0.8
        progress.add()
    assert said == ["work", "work: 50%, about 16 s left", "work: done in 32 s"]


def test_fractions_that_do_not_add_up_exactly_still_end():
    said = []
    progress = Progress(said.append, "work", 0.3, clock=lambda: 0.0)
    for _ in range(3):
        progress.add(0.1)
    assert said == ["work", "work: done in 0 s"]


def test_durations():
    assert [duration(s) for s in (0.4, 59.4, 59.6, 200)] == ["0 s", "59 s", "1 min 0 s", "3 min 20 s"]
