"""Argument types for argparse, and the end of a script whose input is bad."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable

from sglang_ddtree.errors import DDTreeError, of_the_system


def whole_number(low: int, high: int | None = None) -> Callable[[str], int]:
    """An argparse type: ``low`` to ``high``, both included."""
    bounds = f"of at least {low}" if high is None else f"between {low} and {high}"

    def parse(text: str) -> int:
        # More digits than any size has would take Python long, or be refused by it.
        value = int(text) if re.fullmatch(r"-?[0-9]{1,15}", text) else None
        if value is None or value < low or (high is not None and value > high):
            raise argparse.ArgumentTypeError(f"must be a whole number {bounds}, got {text[:20]!r}")
        return value

    return parse


def in_one_line(name: str, run: Callable[[], int], *errors: type[Exception]) -> int:
    """What ``run`` returns; 2 and one line for bad input, for what the system refuses and for ``errors``."""
    known: tuple[type[Exception], ...] = (DDTreeError, *errors)
    try:
        return run()
    except OSError as error:
        text = of_the_system(error)
    except known as error:
        text = str(error)
    print(f"{name}: error: {text}", file=sys.stderr)
    return 2
