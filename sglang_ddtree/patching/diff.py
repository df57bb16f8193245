"""Unified diffs, forwards and backwards, in memory and with exact context.

Not the ``patch`` program and not ``git apply``: neither is in SGLang's slim containers, both write files before the
last one is known to fit, and their tolerance for other context is not wanted here, where the files are known by hash.
A test compares the results with ``git apply``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

_HUNK = re.compile(r"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")


@dataclass(frozen=True)
class Hunk:
    """Some lines in place of others. ``old_start`` and ``new_start`` count lines from 0."""

    old_start: int
    new_start: int
    old: tuple[str, ...]
    new: tuple[str, ...]


@dataclass(frozen=True)
class FilePatch:
    """The hunks of one file; ``path`` without git's ``a/`` and ``b/``."""

    path: str
    hunks: tuple[Hunk, ...]


def parse(text: str) -> list[FilePatch]:
    """The file changes in a patch as ``git format-patch`` writes it; the message and git's headers are skipped.

    Raises:
        ValueError: not such a patch, or one that adds, deletes or renames files or ends one without a newline.
    """
    files: list[FilePatch] = []
    lines = text.split("\n")
    at = 0
    while at < len(lines):
        line = lines[at]
        if line.startswith("--- ") and at + 1 < len(lines) and lines[at + 1].startswith("+++ "):
            old, new = line[4:], lines[at + 1][4:]
            if not (old.startswith("a/") and new == "b/" + old[2:]):
                raise ValueError(f"only changes of existing files are supported, not {old} -> {new}")
            files.append(FilePatch(old[2:], ()))
            at += 2
        elif files and (found := _HUNK.match(line)):
            hunk, at = _parse_hunk(lines, at + 1, found)
            files[-1] = FilePatch(files[-1].path, (*files[-1].hunks, hunk))
        else:
            at += 1
    if not files or not all(file.hunks for file in files):
        raise ValueError("no file changes found")
    return files


def _parse_hunk(lines: Sequence[str], at: int, header: re.Match[str]) -> tuple[Hunk, int]:
    old_count, new_count = (1 if header[group] is None else int(header[group]) for group in (2, 4))
    old: list[str] = []
    new: list[str] = []
    while len(old) < old_count or len(new) < new_count:
        if at == len(lines) or lines[at][:1] not in (" ", "+", "-"):
            raise ValueError(f"a hunk ends early: {header[0]}")
        mark, content = lines[at][0], lines[at][1:]
        if mark != "+":
            old.append(content)
        if mark != "-":
            new.append(content)
        at += 1
    return Hunk(int(header[1]) - 1, int(header[3]) - 1, tuple(old), tuple(new)), at


def apply(text: str, hunks: Sequence[Hunk], *, reverse: bool = False) -> str | None:
    """``text`` with the hunks applied, or taken out again with ``reverse``; None where one does not fit.

    A hunk may have moved, as it does when other patches are in the file; the nearest place with exactly its lines is
    taken.
    """
    lines = text.split("\n")
    moved = 0
    done = 0
    for hunk in hunks:
        start, before, after = (hunk.new_start, hunk.new, hunk.old) if reverse else (hunk.old_start, hunk.old, hunk.new)
        place = _find(lines, before, start + moved, done)
        if place is None:
            return None
        lines[place : place + len(before)] = after
        done = place + len(after)
        moved = place - start + len(after) - len(before)
    return "\n".join(lines)


def _find(lines: Sequence[str], wanted: tuple[str, ...], near: int, first: int) -> int | None:
    last = len(lines) - len(wanted)
    for place in sorted(range(first, last + 1), key=lambda place: abs(place - near)):
        if lines[place] == wanted[0] and tuple(lines[place : place + len(wanted)]) == wanted:
            return place
    return None
