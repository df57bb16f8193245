"""Ending a program from outside without leaving anything running."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from typing import NoReturn


def stop_on_signals(say: Callable[[str], None]) -> None:
    """Let Ctrl-C, TERM and HUP end this program through its ``finally`` clauses, which stop what it started; once
    only."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def stop(number: int, frame: object) -> NoReturn:
        for each in numbers:
            signal.signal(each, signal.SIG_IGN)
        say(f"{signal.Signals(number).name}: stopping whatever runs")
        sys.exit(128 + number)

    for number in numbers:
        signal.signal(number, stop)
