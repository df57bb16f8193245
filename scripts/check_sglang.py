#!/usr/bin/env python3
"""Say what another SGLang release would break here: scripts/check_sglang.py VERSION [--output FILE]

Downloads that release's wheel without its dependencies and compares its source with what this package relies on
(sglang_ddtree/compat.py) and with the patches. The report is Markdown. Exit code 0: nothing breaks; 1: something does.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from sglang_ddtree import compat
from sglang_ddtree.contract_sources import Sources, body, problem, undecided
from sglang_ddtree.errors import DDTreeError
from sglang_ddtree.patching import diff, series, tree


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("version", help="an SGLang release, for instance 0.5.24, or the path of its wheel")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the report there (default: stdout)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        try:
            text, breaks = report(unpack(options.version, Path(directory)))
        except DDTreeError as error:
            print(f"check_sglang.py: error: {error}", file=sys.stderr)
            return 2
    if options.output is None:
        print(text, end="")
    else:
        options.output.write_text(text, encoding="utf-8")
    return 1 if breaks else 0


def unpack(version: str, directory: Path) -> Path:
    """The directory that holds the unpacked ``sglang/``.

    Raises:
        DDTreeError: there is no such release or file.
    """
    wheel = Path(version)
    if wheel.suffix != ".whl":
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--no-deps",
            "--only-binary",
            ":all:",
            "-q",
            "-d",
            directory,
        ]
        done = subprocess.run([*map(str, command), f"sglang=={version}"], capture_output=True, text=True)
        if done.returncode != 0:
            reason = (done.stderr.strip().splitlines() or ["pip failed"])[-1]
            raise DDTreeError(f"cannot download sglang=={version}: {reason}")
        (wheel,) = directory.glob("sglang-*.whl")
    try:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(directory / "unpacked")
    except (OSError, zipfile.BadZipFile) as error:
        raise DDTreeError(f"{wheel} is not a wheel: {error}") from error
    return directory / "unpacked"


def report(root: Path) -> tuple[str, bool]:
    """The report, and whether anything breaks."""
    package = tree.find_package(root)
    version = tree.installed_version(package)
    sources = Sources(root)
    broken = [(name, found) for name in compat.CONTRACT if (found := problem(sources, name))]
    open_names = [name for name in compat.CONTRACT if undecided(sources, name)]
    patches = [(patch, state) for patch in series.load() if (state := patch_problem(package, patch))]
    lines = [
        f"# SGLang {version} for sglang-ddtree (written for {compat.SUPPORTED})",
        "",
        "`scripts/check_sglang.py VERSION` wrote this from the wheel's source; nothing was run.",
        "",
        f"## Names: {len(broken)} of {len(compat.CONTRACT)} break",
        "",
        *(f"- `{name.path}` {found}; used by {name.used_by.replace(' ', ', ')}" for name, found in broken),
        *([""] if broken else []),
        f"## Parameters that only running SGLang can tell: {len(open_names)}",
        "",
        *(f"- `{name.path}`; used by {name.used_by.replace(' ', ', ')}" for name in open_names),
        *([""] if open_names else []),
        f"## Patches: {len(patches)} of {len(series.load())} do not apply",
        "",
        *(f"- `{patch.name}`: {state}" for patch, state in patches),
        *([""] if patches else []),
    ]
    changed = changed_bodies(sources, {name.path for name, _ in broken})
    if changed is not None:
        lines += [
            f"## Same interface, other code than {compat.SUPPORTED}: {len(changed)}",
            "",
            "Read the differences; what this package assumes of them is in the comments of the files that use them.",
            "",
            *(f"- `{name.path}`; used by {name.used_by.replace(' ', ', ')}" for name in changed),
        ]
    return "\n".join(lines).rstrip("\n") + "\n", bool(broken or patches)


def patch_problem(package: Path, patch: series.Patch) -> str | None:
    """Why a patch does not apply there, or None."""
    for file in patch.files:
        path = package / file.path
        if not path.is_file():
            return f"{file.path} is missing"
        text = path.read_text(encoding="utf-8")
        if diff.apply(text, file.hunks) is None:
            there = diff.apply(text, file.hunks, reverse=True) is not None
            return f"{file.path} {'has it already' if there else 'is different'}"
    return None


def changed_bodies(sources: Sources, broken: set[str]) -> list[compat.Name] | None:
    """Names whose definition differs from the installed SGLang's; None when that is not the supported release."""
    try:
        installed = tree.find_package(None)
        tree.check_version(installed)
    except DDTreeError as error:
        print(f"check_sglang.py: no comparison of code: {error}", file=sys.stderr)
        return None
    ours = Sources(installed.parent)
    return [name for name in compat.CONTRACT if name.path not in broken and body(sources, name) != body(ours, name)]


if __name__ == "__main__":
    sys.exit(main())
