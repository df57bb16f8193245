"""The patches that ship with this package, and the hashes of the files they are for."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

from sglang_ddtree import compat
from sglang_ddtree.errors import DDTreeError
from sglang_ddtree.patching.diff import FilePatch, parse

DIRECTORY = Path(__file__).parents[1] / "patches" / f"sglang-{compat.SUPPORTED}"
#: Where SGLang's package lies in its repository, and therefore in the patches.
PREFIX = "python/sglang/"


@dataclass(frozen=True)
class Patch:
    """One patch. ``name`` is its file without ``.patch``; the paths of ``files`` start inside SGLang's package."""

    name: str
    subject: str
    files: tuple[FilePatch, ...]


@functools.cache
def load(directory: Path = DIRECTORY) -> tuple[Patch, ...]:
    """The patches in the order of the ``series`` file."""
    names = (directory / "series").read_text(encoding="utf-8").split()
    return tuple(_read(directory / name) for name in names)


def _read(path: Path) -> Patch:
    text = path.read_text(encoding="utf-8")
    header = text.partition("\n\n")[0].replace("\n ", " ")
    subject = next(line for line in header.splitlines() if line.startswith("Subject: "))
    files = tuple(FilePatch(file.path.removeprefix(PREFIX), file.hunks) for file in parse(text))
    return Patch(path.stem, subject.removeprefix("Subject: [PATCH] "), files)


@functools.cache
def pristine_hashes(directory: Path = DIRECTORY) -> dict[str, str]:
    """SHA-256 of every file that a patch changes, as the release has it; paths start inside SGLang's package."""
    lines = (directory / "SHA256SUMS").read_text(encoding="utf-8").splitlines()
    return {path.removeprefix(PREFIX): digest for digest, path in (line.split() for line in lines)}


def select(patches: tuple[Patch, ...], wanted: list[str]) -> frozenset[str]:
    """Full names from what a user typed: ``1``, ``0001`` or the name; nothing typed means all.

    Raises:
        DDTreeError: no such patch.
    """
    if not wanted:
        return frozenset(patch.name for patch in patches)
    chosen = set()
    for word in wanted:
        word = word.removesuffix(".patch")
        found = [
            p.name for p in patches if word == p.name or (word.isdecimal() and p.name.startswith(f"{int(word):04}-"))
        ]
        if not found:
            raise DDTreeError(f"there is no patch {word}: choose from {', '.join(p.name for p in patches)}")
        chosen.add(found[0])
    return frozenset(chosen)
