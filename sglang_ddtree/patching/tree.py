"""An SGLang on disk: which patches it has, what other patches would make of it, and writing that down.

What is in a file is read from the file alone: the patches that can be taken out are, and what remains must have the
release's hash. So there is no record that could be wrong, patches that came in through ``git am`` are recognised, and
an interrupted run is seen for what it is.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sglang_ddtree import compat
from sglang_ddtree.errors import DDTreeError
from sglang_ddtree.patching import diff
from sglang_ddtree.patching.series import Patch

#: In SGLang's package: the release's own version of every file that is patched, while it is.
ORIGINALS = ".ddtree-originals"


@dataclass(frozen=True)
class File:
    """One file that patches change.

    Attributes:
        path: inside SGLang's package.
        pristine: its text in the release, None when the file is missing or not made of the release and our patches.
        applied: names of the patches that are in it.
    """

    path: str
    pristine: str | None
    applied: frozenset[str]


def find_package(root: Path | None) -> Path:
    """SGLang's package directory: the installed one, or that of a checkout, a site-packages or itself.

    Raises:
        DDTreeError: there is none.
    """
    if root is None:
        spec = importlib.util.find_spec("sglang")
        if spec is None or spec.origin is None:
            raise DDTreeError(compat.NOT_INSTALLED)
        return Path(spec.origin).parent
    for candidate in (root / "python" / "sglang", root / "sglang", root):
        if (candidate / "srt" / "server_args.py").is_file():
            return candidate.resolve()
    raise DDTreeError(f"there is no SGLang in {root}: give a checkout of it, or the directory that holds sglang/")


def installed_version(package: Path) -> str | None:
    """The version that pip recorded beside the package; None for a checkout."""
    found = sorted(package.parent.glob("sglang-*.dist-info"))
    return found[0].name.removeprefix("sglang-").removesuffix(".dist-info") if found else None


def check_version(package: Path) -> None:
    """Raises DDTreeError when the package is known to be another release."""
    version = installed_version(package)
    if version is not None and version.split("+")[0] != compat.SUPPORTED:
        raise DDTreeError(f"{package} is SGLang {version}, and the patches are for {compat.SUPPORTED}: {compat.ADVICE}")


def read_files(package: Path, patches: Sequence[Patch], hashes: Mapping[str, str]) -> list[File]:
    """The state of every file that a patch of the series changes."""
    return [_read_file(package / path, path, patches, digest) for path, digest in hashes.items()]


def _read_file(file: Path, path: str, patches: Sequence[Patch], digest: str) -> File:
    try:
        # Not read_text, which would make every kind of line end the same.
        text = file.read_bytes().decode("utf-8")
    except (OSError, UnicodeDecodeError):
        return File(path, None, frozenset())
    return decode(path, text, patches, digest)


def decode(path: str, text: str, patches: Sequence[Patch], digest: str) -> File:
    """The state of a file with this text; ``digest`` is the release's."""
    applied = set()
    if _digest(text) != digest:
        for name, hunks in reversed(_parts(patches, path)):
            without = diff.apply(text, hunks, reverse=True)
            if without is not None:
                text = without
                applied.add(name)
        if _digest(text) != digest:
            return File(path, None, frozenset())
    return File(path, text, frozenset(applied))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


def _parts(patches: Sequence[Patch], path: str) -> list[tuple[str, tuple[diff.Hunk, ...]]]:
    return [(patch.name, file.hunks) for patch in patches for file in patch.files if file.path == path]


def patch_states(patches: Sequence[Patch], files: Sequence[File]) -> dict[str, str]:
    """For every patch "applied", "not applied" or, after an interrupted run, "partly applied"."""
    states = {}
    for patch in patches:
        touched = {file.path for file in patch.files}
        present = [patch.name in file.applied for file in files if file.path in touched]
        states[patch.name] = "applied" if all(present) else "partly applied" if any(present) else "not applied"
    return states


def modified(files: Sequence[File]) -> list[str]:
    """Paths of the files that are neither the release's nor the release's with our patches."""
    return [file.path for file in files if file.pristine is None]


def plan(patches: Sequence[Patch], files: Sequence[File], wanted: frozenset[str]) -> dict[str, str]:
    """New texts by path that make ``wanted`` the applied patches; files that stay are left out.

    Raises:
        DDTreeError: a file is modified, or a patch does not fit.
    """
    if found := modified(files):
        raise DDTreeError(
            f"these files are not SGLang {compat.SUPPORTED}'s and not ours: {', '.join(found)}: restore them first, "
            f"for instance with pip install --force-reinstall --no-deps sglang=={compat.SUPPORTED}"
        )
    changes = {}
    for file in files:
        parts = [(name, hunks) for name, hunks in _parts(patches, file.path) if name in wanted]
        if file.applied == {name for name, _ in parts}:
            continue
        assert file.pristine is not None
        changes[file.path] = _patched(file.path, file.pristine, parts)
    return changes


def _patched(path: str, text: str, parts: Sequence[tuple[str, tuple[diff.Hunk, ...]]]) -> str:
    for name, hunks in parts:
        patched = diff.apply(text, hunks)
        if patched is None:
            raise DDTreeError(f"patch {name} does not fit {path} with the patches before it")
        text = patched
    return text


def unwritable(package: Path, changes: Mapping[str, str]) -> list[Path]:
    """The directories that this user cannot write and would have to."""
    directories = {package, *((package / path).parent for path in changes)}
    return sorted(directory for directory in directories if not os.access(directory, os.W_OK | os.X_OK))


def write(package: Path, files: Sequence[File], changes: Mapping[str, str]) -> None:
    """Put new texts in place of files: all of them, or none when one cannot be written.

    The release's own text of each file that differs from it is kept under ``ORIGINALS``, and taken away when nothing
    differs any more. Files are replaced, not overwritten: installers share files between environments by hard links.

    Raises:
        OSError: what went wrong; every file is as it was.
    """
    pristine = {file.path: file.pristine for file in files}
    staged: dict[Path, Path] = {}
    replaced: dict[Path, bytes] = {}
    try:
        for path, text in changes.items():
            target = package / path
            staged[target] = _stage(target, text.encode("utf-8"))
            _keep_original(package / ORIGINALS, path, pristine[path])
        for target, temporary in staged.items():
            before = target.read_bytes()
            os.replace(temporary, target)
            replaced[target] = before
    except BaseException:
        for target, before in replaced.items():
            os.replace(_stage(target, before), target)
        raise
    finally:
        for temporary in staged.values():
            temporary.unlink(missing_ok=True)
        _drop_originals(package, pristine)


def _stage(target: Path, content: bytes) -> Path:
    handle, name = tempfile.mkstemp(prefix=".ddtree-", dir=target.parent)
    with os.fdopen(handle, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    shutil.copymode(target, name)
    return Path(name)


def _keep_original(directory: Path, path: str, text: str | None) -> None:
    assert text is not None
    (directory / path).parent.mkdir(parents=True, exist_ok=True)
    # So that the directory is no change of a git checkout.
    (directory / ".gitignore").write_text("*\n", encoding="utf-8")
    (directory / path).write_bytes(text.encode("utf-8"))


def _drop_originals(package: Path, pristine: Mapping[str, str | None]) -> None:
    """Without the originals of files that are as the release has them; also after a failure."""
    directory = package / ORIGINALS
    kept = False
    for path, text in pristine.items():
        if text is not None and (package / path).read_bytes() == text.encode("utf-8"):
            (directory / path).unlink(missing_ok=True)
        else:
            kept = kept or (directory / path).exists()
    if not kept and directory.exists():
        shutil.rmtree(directory)
