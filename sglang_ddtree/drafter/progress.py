"""How far a long measurement is and how long it may still take, a line at a time."""

from __future__ import annotations

import time
from collections.abc import Callable

Say = Callable[[str], None]
#: Seconds between two lines about the same work.
EVERY = 10.0


class Progress:
    """Adds up the parts of one piece of work. ``what`` names it, ``total`` is its size in any unit.

    The time left assumes that what remains costs as much per unit as what is done.
    """

    def __init__(self, say: Say, what: str, total: float, clock: Callable[[], float] = time.monotonic):
        self._say, self._what, self._total, self._clock = say, what, total, clock
        self._done, self._ended = 0.0, False
        self._began = self._said = clock()
        say(what)

    def add(self, size: float = 1) -> None:
        """So much more is done; says so when the last line is EVERY seconds old, and at the end."""
        self._done += size
        now = self._clock()
        spent = now - self._began
        if self._done > self._total - 1e-6:  # sums of fractions are not exact
            self.end()
        elif now - self._said >= EVERY:
            self._said = now
            left = spent * (self._total / self._done - 1)
            self._say(f"{self._what}: {self._done / self._total:.0%}, about {duration(left)} left")

    def end(self) -> None:
        """All is done, or what is left turned out not to be needed."""
        if not self._ended:
            self._ended = True
            self._say(f"{self._what}: done in {duration(self._clock() - self._began)}")


def duration(seconds: float) -> str:
    """Seconds as a person says them: ``42 s``, ``3 min 20 s``."""
    whole = round(seconds)
    return f"{whole} s" if whole < 60 else f"{whole // 60} min {whole % 60} s"
