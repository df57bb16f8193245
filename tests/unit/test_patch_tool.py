"""``sglang-ddtree patch`` on copies of the installed SGLang's files."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from stock_sglang import ALL, copy_tree, read

from sglang_ddtree import cli
from sglang_ddtree.patching import diff, installed, series, tree

ROOT = Path(__file__).parents[2]


@pytest.fixture
def site(tmp_path):
    """A directory that holds an unpatched ``sglang``."""
    copy_tree(tmp_path / "site" / "sglang")
    return tmp_path / "site"


def hashes(directory: Path) -> dict[str, str]:
    return {
        str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


def patch(action: str, site: Path, *more: str) -> int:
    return cli.main(["patch", action, *more, "--root", str(site)])


def applied(site: Path) -> set[str]:
    states = tree.patch_states(series.load(), read(site / "sglang"))
    assert set(states.values()) <= {"applied", "not applied"}
    return {name for name, state in states.items() if state == "applied"}


def refusal(capsys) -> str:
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    return captured.err


def test_apply_and_revert_leave_the_same_bytes(site, capsys):
    before = hashes(site)
    mode = (site / "sglang/srt/mem_cache/allocation.py").stat().st_mode
    assert patch("apply", site) == 0
    assert applied(site) == set(ALL)
    assert (site / "sglang/srt/mem_cache/allocation.py").stat().st_mode == mode
    changed = [path for path, digest in hashes(site).items() if before.get(path, digest) != digest]
    assert len(changed) == len(series.pristine_hashes())
    originals = site / "sglang" / tree.ORIGINALS
    assert {path: digest for path, digest in hashes(originals).items() if path != ".gitignore"} == {
        path: series.pristine_hashes()[path] for path in hashes(originals) if path != ".gitignore"
    }
    assert len(hashes(originals)) == len(changed) + 1

    capsys.readouterr()
    assert patch("apply", site) == 0
    assert "nothing to do" in capsys.readouterr().out
    assert patch("revert", site) == 0
    assert hashes(site) == before
    assert patch("revert", site) == 0
    assert hashes(site) == before


@pytest.mark.parametrize("count", range(1, len(ALL) + 1))
def test_any_set_of_patches_applies_and_is_recognised(site, count):
    """Each patch alone, and every combination: no patch needs another or stands in its way."""
    patches, hashes = series.load(), series.pristine_hashes()
    files = {file.path: file for file in read(site / "sglang")}
    for wanted in map(frozenset, itertools.combinations(ALL, count)):
        changes = tree.plan(patches, list(files.values()), wanted)
        after = [tree.decode(path, changes.get(path, files[path].pristine), patches, hashes[path]) for path in files]
        assert [file.pristine for file in after] == [file.pristine for file in files.values()]
        states = tree.patch_states(patches, after)
        assert {name for name, state in states.items() if state == "applied"} == wanted
        assert "partly applied" not in states.values()


@pytest.mark.parametrize("name", ALL)
def test_the_same_as_git_apply(site, tmp_path, name):
    checkout = tmp_path / "checkout"
    shutil.copytree(site, checkout / "python")
    subprocess.run(["git", "apply", str(series.DIRECTORY / f"{name}.patch")], cwd=checkout, check=True)
    assert patch("apply", site, name) == 0
    shutil.rmtree(site / "sglang" / tree.ORIGINALS)
    assert hashes(site) == hashes(checkout / "python")


def test_a_checkout_patched_by_git_am_is_recognised(site, tmp_path, capsys):
    checkout, out = tmp_path / "checkout", tmp_path / "out"
    shutil.copytree(site, checkout / "python")
    assert cli.main(["patch", "export", str(out)]) == 0
    assert cli.main(["patch", "export", str(out)]) == 0  # the same files again
    assert "git am" in capsys.readouterr().out
    git = ["git", "-C", str(checkout), "-c", "user.name=t", "-c", "user.email=t@t.invalid"]
    for command in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "release"]):
        subprocess.run([*git, *command], check=True)
    subprocess.run([*git, "am", "-q", *sorted(map(str, out.glob("*.patch")))], check=True)
    log = subprocess.run([*git, "log", "--format=%s"], check=True, capture_output=True, text=True).stdout
    assert log.splitlines()[:-1] == [each.subject for each in reversed(series.load())]
    assert applied(checkout / "python") == set(ALL)
    assert patch("revert", checkout) == 0
    assert hashes(checkout / "python") == hashes(site)


def test_numbers_names_and_dry_run(site, capsys):
    before = hashes(site)
    assert patch("apply", site, "1", "0003", ALL[4], "--dry-run") == 0
    assert "would change" in capsys.readouterr().out and hashes(site) == before
    assert patch("apply", site, "1", "0003", ALL[4]) == 0
    assert applied(site) == {ALL[0], ALL[2], ALL[4]}
    assert patch("revert", site, "3") == 0
    assert applied(site) == {ALL[0], ALL[4]}
    capsys.readouterr()
    for word in ("7", "", "²"):
        assert patch("apply", site, word) == 2
        assert f"there is no patch {word}" in refusal(capsys)


def test_status(site, capsys):
    patch("apply", site, "2")
    capsys.readouterr()
    assert patch("status", site) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:]] == ["not", "applied", "not", "not", "not", "not"]
    assert patch("status", site, "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["patches"][ALL[1]] == "applied" and report["modified"] == []


@pytest.mark.parametrize("patched", [False, True])
def test_a_modified_tree_is_refused_with_the_files(site, capsys, patched):
    if patched:
        patch("apply", site)
    file = site / "sglang/srt/mem_cache/allocation.py"
    file.write_text(file.read_text() + "# mine\n")
    before = hashes(site)
    capsys.readouterr()
    for action in ("apply", "revert"):
        assert patch(action, site) == 2
        error = refusal(capsys)
        assert "srt/mem_cache/allocation.py" in error and "spec_registry" not in error and "pip install" in error
        assert hashes(site) == before
    assert patch("status", site) == 1
    assert "srt/mem_cache/allocation.py" in capsys.readouterr().out


def test_a_missing_file_is_refused(site, capsys):
    (site / "sglang/srt/models/dflash.py").unlink()
    assert patch("apply", site) == 2
    assert "srt/models/dflash.py" in refusal(capsys)


def test_another_release_is_refused(site, capsys):
    (site / "sglang-0.5.22.dist-info").mkdir()
    assert patch("apply", site) == 2
    assert "0.5.22" in refusal(capsys)


def test_no_sglang_there(tmp_path, capsys):
    assert patch("status", tmp_path) == 2
    assert "no SGLang" in refusal(capsys)
    assert patch("status", tmp_path / ("x" * 300)) == 2
    assert "File name too long" in refusal(capsys)


def test_no_write_access(site, capsys, monkeypatch):
    """By os.access, since the tests may run as root."""
    locked = site / "sglang" / "srt" / "plugins"
    real = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != locked and real(path, mode))
    before = hashes(site)
    assert patch("apply", site, "3") == 2
    error = refusal(capsys)
    assert (
        str(locked) in error and f"{sys.executable} -m sglang_ddtree.cli patch apply 3" in error and "export" in error
    )
    assert hashes(site) == before


@pytest.mark.parametrize("failing", [0, 4, 9])
def test_a_failure_in_the_middle_leaves_everything_as_it_was(site, capsys, monkeypatch, failing):
    before = hashes(site)
    real, calls = os.replace, itertools.count()

    def replace(source, target):
        if next(calls) == failing:
            raise OSError(28, "No space left on device")
        real(source, target)

    monkeypatch.setattr(os, "replace", replace)
    assert patch("apply", site) == 2
    assert "nothing was changed" in refusal(capsys)
    assert hashes(site) == before


def test_an_interrupted_run_is_seen_and_repaired(site, capsys):
    """Killed between two files: the next apply or revert completes it."""
    before = hashes(site)
    package, patches = site / "sglang", series.load()
    files = read(package)
    changes = tree.plan(patches, files, frozenset(ALL))
    half = dict(itertools.islice(changes.items(), 7))
    tree.write(package, files, half)
    states = tree.patch_states(patches, read(package))
    assert "partly applied" in states.values()
    assert patch("status", site) == 0
    assert "partly applied" in capsys.readouterr().out
    assert patch("apply", site) == 0
    assert applied(site) == set(ALL)
    tree.write(package, read(package), {path: file.pristine for path, file in zip(half, files)})
    assert patch("revert", site) == 0
    assert hashes(site) == before


def test_files_shared_by_hard_links_stay(site, tmp_path):
    """uv installs by hard links to its cache."""
    file = site / "sglang/srt/mem_cache/allocation.py"
    cached = tmp_path / "cache.py"
    os.link(file, cached)
    before = cached.read_bytes()
    assert patch("apply", site) == 0
    assert cached.read_bytes() == before != file.read_bytes()


def test_export_refuses_other_files(tmp_path, capsys):
    (tmp_path / "series").write_text("mine\n")
    assert cli.main(["patch", "export", str(tmp_path)]) == 2
    assert "series" in refusal(capsys)
    assert [path.name for path in tmp_path.iterdir()] == ["series"]


def test_the_tool_needs_neither_torch_nor_sglang(site):
    code = (
        "import sys; from sglang_ddtree import cli; assert cli.main(sys.argv[1:]) == 0; "
        "assert not {'torch', 'sglang'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, "patch", "status", "--root", str(site)], check=True)


def test_the_installed_patches_are_found(site, monkeypatch):
    monkeypatch.setattr(tree, "find_package", lambda root: site / "sglang")
    for count in range(len(ALL) + 1):
        installed.is_applied.cache_clear()
        assert [installed.is_applied(name) for name in ALL] == [number < count for number in range(len(ALL))]
        if count < len(ALL):
            files = read(site / "sglang")
            tree.write(site / "sglang", files, tree.plan(series.load(), files, frozenset(ALL[: count + 1])))
    installed.is_applied.cache_clear()


# The files themselves


@pytest.mark.parametrize("name", ALL)
def test_a_patch_explains_itself(name):
    text = (series.DIRECTORY / f"{name}.patch").read_text()
    message = text.partition("\n---\n")[0]
    assert "To see " in message and re.search(r"^Subject: \[PATCH\] \w+: .{10,60}$", message, re.M)
    assert max(map(len, message.splitlines())) <= 80


def test_series_lists_all_patches():
    assert sorted(path.stem for path in series.DIRECTORY.glob("*.patch")) == list(ALL)
    assert {installed.ROW_WIDTH, installed.WITHOUT_TRITON} <= set(ALL)


def test_what_is_no_patch():
    with pytest.raises(ValueError, match="no file changes"):
        diff.parse("hello\n")
    with pytest.raises(ValueError, match="existing files"):
        diff.parse("--- /dev/null\n+++ b/x\n@@ -0,0 +1 @@\n+a\n")
    with pytest.raises(ValueError, match="ends early"):
        diff.parse("--- a/x\n+++ b/x\n@@ -1,2 +1,2 @@\n a\n")


def test_the_wheel_carries_the_patches(tmp_path):
    source = tmp_path / "source"
    for name in ("sglang_ddtree", "patches"):
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-q", "-w", str(tmp_path)]
    subprocess.run([*command, str(source)], check=True, capture_output=True, timeout=120)
    (wheel,) = tmp_path.glob("*.whl")
    shutil.unpack_archive(wheel, tmp_path / "unpacked", "zip")
    carried = tmp_path / "unpacked" / "sglang_ddtree" / "patches" / series.DIRECTORY.name
    assert hashes(carried) == hashes(series.DIRECTORY)
