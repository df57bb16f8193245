"""SGLang's files for the tests of the patches: copies of the installed ones, and modules made of patched text."""

from __future__ import annotations

import importlib
import importlib.util
import shutil
import sys
import types
from pathlib import Path

from sglang_ddtree.patching import diff, series, tree

ALL = tuple(patch.name for patch in series.load())


def copy_tree(package: Path) -> Path:
    """The files that patches change, and the one that makes a directory an SGLang, unpatched, in a new ``package``."""
    installed = tree.find_package(None)
    for path, file in zip(series.pristine_hashes(), read(installed), strict=True):
        assert file.pristine is not None, f"the installed SGLang's {path} is not the release's"
        (package / path).parent.mkdir(parents=True, exist_ok=True)
        (package / path).write_bytes(file.pristine.encode())
    shutil.copy(installed / "srt" / "server_args.py", package / "srt")
    return package


def read(package: Path) -> list[tree.File]:
    return tree.read_files(package, series.load(), series.pristine_hashes())


def texts(module: str, patch: str) -> tuple[str, str]:
    """A module's source in the release, and with one patch alone."""
    path = module.replace(".", "/").removeprefix("sglang/")
    path += ".py" if f"{path}.py" in series.pristine_hashes() else "/__init__.py"
    (file,) = (file for file in read(tree.find_package(None)) if file.path == path)
    assert file.pristine is not None
    (hunks,) = (
        part.hunks for each in series.load() if each.name.startswith(patch) for part in each.files if part.path == path
    )
    patched = diff.apply(file.pristine, hunks)
    assert patched is not None
    return file.pristine, patched


def modules(name: str, patch: str) -> tuple[types.ModuleType, types.ModuleType]:
    """The module without and with one patch; neither is the one that other code imports."""
    importlib.import_module(name)
    return tuple(_execute(name, text) for text in texts(name, patch))  # type: ignore[return-value]


def _execute(name: str, text: str) -> types.ModuleType:
    real = sys.modules[name]
    module = types.ModuleType(name)
    module.__file__, module.__package__ = real.__file__, real.__package__
    exec(compile(text, f"{name} (test copy)", "exec"), vars(module))
    return module
