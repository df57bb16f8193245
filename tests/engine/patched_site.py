"""A directory for PYTHONPATH whose ``sglang`` is the installed one with all patches, made of links where it can be."""

from __future__ import annotations

import shutil
from pathlib import Path

from sglang_ddtree import cli
from sglang_ddtree.patching import series, tree


def make(site: Path) -> Path:
    _mirror(tree.find_package(None), site / "sglang", [Path(path) for path in series.pristine_hashes()])
    assert cli.main(["patch", "apply", "--root", str(site)]) == 0
    return site


def _mirror(source: Path, target: Path, copied: list[Path]) -> None:
    """Directories that hold files to be copied are made; everything else in them is linked."""
    target.mkdir(parents=True)
    for entry in source.iterdir():
        inside = [Path(*path.parts[1:]) for path in copied if path.parts[:1] == (entry.name,)]
        if entry.name == "__pycache__" or entry.name == tree.ORIGINALS:
            continue
        if Path() in inside:
            shutil.copy(entry, target)
        elif inside:
            _mirror(entry, target / entry.name, inside)
        else:
            (target / entry.name).symlink_to(entry)
