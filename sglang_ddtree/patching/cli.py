"""``sglang-ddtree patch``: see, apply, revert and export the patches for SGLang."""

from __future__ import annotations

import argparse
import json
import pwd
import shutil
import sys
from pathlib import Path

from sglang_ddtree.errors import DDTreeError
from sglang_ddtree.patching import series, tree


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """The ``patch`` command and its actions."""
    parser = commands.add_parser("patch", help="optional patches of SGLang itself: status, apply, revert, export")
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    root = argparse.ArgumentParser(add_help=False)
    root.add_argument(
        "--root", type=Path, metavar="DIR", help="an SGLang checkout or site-packages (default: installed)"
    )
    change = argparse.ArgumentParser(add_help=False)
    change.add_argument("patches", nargs="*", metavar="PATCH", help="numbers or names (default: all)")
    change.add_argument("--dry-run", action="store_true", help="say what would change, and change nothing")
    status = actions.add_parser("status", parents=[root], help="which patches are in")
    status.add_argument("--json", action="store_true", help="print it as JSON")
    actions.add_parser("apply", parents=[root, change], help="put patches in: all of them or none")
    actions.add_parser("revert", parents=[root, change], help="take patches out again")
    export = actions.add_parser("export", help="write the patches for git am")
    export.add_argument("directory", type=Path, metavar="DIR", help="created if it is not there")


def run(options: argparse.Namespace) -> int:
    """One action; returns the exit code (status: 1 for a modified SGLang).

    Raises:
        DDTreeError: it cannot be done, with the reason.
    """
    if options.action == "export":
        return _export(options.directory)
    package = tree.find_package(options.root)
    tree.check_version(package)
    if options.action == "status":
        return _status(package, options.json)
    return _change(package, options)


def _status(package: Path, as_json: bool) -> int:
    patches, files = _read(package)
    states, modified = tree.patch_states(patches, files), tree.modified(files)
    if as_json:
        print(json.dumps({"sglang": str(package), "patches": states, "modified": modified}, indent=2))
    else:
        print(f"SGLang {tree.installed_version(package) or '(no version recorded)'} in {package}")
        for patch in patches:
            print(f"  {states[patch.name]:<14} {patch.name}  {patch.subject}")
        for path in modified:
            print(f"  neither the release's nor ours: {path}")
    return 1 if modified else 0


def _change(package: Path, options: argparse.Namespace) -> int:
    patches, files = _read(package)
    chosen = series.select(patches, options.patches)
    states = tree.patch_states(patches, files)
    present = frozenset(name for name, state in states.items() if state == "applied")
    wanted = present | chosen if options.action == "apply" else present - chosen
    changes = tree.plan(patches, files, wanted)
    if not changes:
        print(f"nothing to do: {', '.join(sorted(chosen))} already {'in' if options.action == 'apply' else 'out'}")
        return 0
    if options.dry_run:
        print("\n".join(f"would change {package / path}" for path in changes))
        return 0
    if locked := tree.unwritable(package, changes):
        raise DDTreeError(_what_to_do_without_access(locked, options))
    try:
        tree.write(package, files, changes)
    except OSError as error:
        raise DDTreeError(f"nothing was changed, writing failed: {error}") from error
    print("\n".join(f"changed {package / path}" for path in changes))
    print("Servers that are running keep the old code; start them again.")
    return 0


def _read(package: Path) -> tuple[tuple[series.Patch, ...], list[tree.File]]:
    patches = series.load()
    return patches, tree.read_files(package, patches, series.pristine_hashes())


def _what_to_do_without_access(locked: list[Path], options: argparse.Namespace) -> str:
    owner = _owner(locked[0])
    words = [sys.executable, "-m", "sglang_ddtree.cli", "patch", options.action, *options.patches]
    if options.root is not None:
        words += ["--root", str(options.root)]
    return (
        f"no write access to {', '.join(map(str, locked))} (owner: {owner}): run as {owner} `{' '.join(words)}`, "
        "or give that user the files of `sglang-ddtree patch export DIR`, for `patch -p2` beside the sglang directory"
    )


def _owner(path: Path) -> str:
    uid = path.stat().st_uid
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"


def _export(directory: Path) -> int:
    names = ["series", *(f"{patch.name}.patch" for patch in series.load())]
    other = [name for name in names if _differs(directory / name, series.DIRECTORY / name)]
    if other:
        raise DDTreeError(f"{directory} has other files of these names: {', '.join(other)}: choose another directory")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name in names:
            shutil.copyfile(series.DIRECTORY / name, directory / name)
    except OSError as error:
        raise DDTreeError(f"cannot write the patches: {error}") from error
    print(f"{len(names) - 1} patches in {directory}")
    print(f"in a checkout of SGLang: git am {directory.resolve()}/*.patch")
    print(f"beside an installed sglang directory: cat {directory.resolve()}/*.patch | patch -p2")
    return 0


def _differs(existing: Path, ours: Path) -> bool:
    return existing.exists() and (not existing.is_file() or existing.read_bytes() != ours.read_bytes())
