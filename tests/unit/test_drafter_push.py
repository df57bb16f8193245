"""Copying a drafter through a real sshd and rsync."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from sshd import running_sshd
from tiny_models import write_drafter, write_target

from sglang_ddtree.drafter.cli import main
from sglang_ddtree.drafter.push import Destination, files_of, parse_destination
from sglang_ddtree.errors import DDTreeError


@pytest.fixture(scope="module")
def remote(tmp_path_factory):
    with running_sshd(tmp_path_factory.mktemp("ssh") / "d") as found:
        yield found


@pytest.fixture
def there(remote):
    """Programs put first in the PATH of the other machine, removed after the test."""

    def put(name: str, script: str) -> None:
        path = remote.bin / name
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)

    yield put
    for path in remote.bin.iterdir():
        path.unlink()


@pytest.fixture
def drafter(tmp_path):
    return write_drafter(tmp_path / "drafter")


@pytest.fixture(autouse=True)
def handlers():
    """push installs its own; pytest's come back."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


def push(remote, source, path, *flags):
    return main(["push", str(source), f"there:{path}", "--ssh", remote.ssh, *flags])


def same(one: Path, other: Path) -> bool:
    return {p.name: p.read_bytes() for p in one.iterdir()} == {p.name: p.read_bytes() for p in other.iterdir()}


@pytest.mark.parametrize("name", ["plain", "a space", "it's", 'double "quote"', "$HOME; `id` *", "-rf", "ünï:x"])
def test_a_directory_arrives_under_its_name(remote, drafter, tmp_path, capfd, name):
    final = tmp_path / "far" / name
    assert push(remote, drafter, final) == 0
    assert same(drafter, final)
    assert [path.name for path in final.parent.iterdir()] == [name]
    assert "100%" in capfd.readouterr().out, "rsync's progress bar"


def test_a_single_file_and_a_linked_one(remote, drafter, tmp_path):
    link = tmp_path / "link it's.safetensors"
    link.symlink_to(drafter / "model.safetensors")
    assert push(remote, link, f"{tmp_path}/far/") == 0
    final = tmp_path / "far" / "model.safetensors"
    assert not final.is_symlink() and final.read_bytes() == link.read_bytes()
    assert len(list(final.parent.iterdir())) == 1


def test_an_existing_path_is_left_alone(remote, drafter, tmp_path, capsys):
    (tmp_path / "far").mkdir()
    assert push(remote, drafter, tmp_path / "far") == 2
    assert "exists already" in capsys.readouterr().err and not list((tmp_path / "far").iterdir())


def test_interrupted_and_resumed(remote, there, tmp_path):
    """TERM in the middle of a slow transfer: nothing under the final name, and the rest is sent afterwards."""
    source = tmp_path / "big.safetensors"
    save_file({"noise": torch.frombuffer(bytearray(os.urandom(24_000_000)), dtype=torch.uint8)}, source)
    final, staged = tmp_path / "far.safetensors", tmp_path / "far.safetensors.incoming"
    # 3 MB/s, so that there is a middle.
    real = shutil.which("rsync")
    slow = tmp_path / "bin"
    slow.mkdir()
    (slow / "rsync").write_text(f'#!/bin/sh\nexec {real} --bwlimit=3000 "$@"\n')
    (slow / "rsync").chmod(0o755)
    command = [sys.executable, "-m", "sglang_ddtree.cli", "drafter", "push", str(source), f"there:{final}"]
    child = subprocess.Popen(
        [*command, "--ssh", remote.ssh],
        env={**os.environ, "PATH": f"{slow}:{os.environ['PATH']}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    end = time.monotonic() + 60
    while not any(path.stat().st_size > 4_000_000 for path in staged.glob(".*")) and time.monotonic() < end:
        assert child.poll() is None, child.stdout.read()
        time.sleep(0.05)
    child.terminate()
    out, _ = child.communicate(timeout=30)
    assert child.returncode == 128 + signal.SIGTERM, out
    assert not final.exists()
    for _ in range(100):  # The receiver notices a moment later, and keeps what it has.
        if (staged / source.name).exists():
            break
        time.sleep(0.1)
    kept = (staged / source.name).stat().st_size
    assert 2_000_000 < kept < source.stat().st_size

    # What is sent the second time, in bytes, from rsync's own count.
    (slow / "rsync").write_text(f'#!/bin/sh\nexec {real} --stats "$@"\n')
    done = subprocess.run(
        [*command, "--ssh", remote.ssh],
        env={**os.environ, "PATH": f"{slow}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert final.read_bytes() == source.read_bytes() and not staged.exists()
    literal = next(line for line in done.stdout.splitlines() if line.startswith("Literal data"))
    sent = int("".join(c for c in literal if c.isdigit()))
    assert sent < source.stat().st_size - kept / 2


def test_a_wrong_checksum_is_detected(remote, there, drafter, tmp_path, capsys):
    """A disk that flips a bit: rsync reports success, the comparison does not."""
    real = shutil.which("rsync")
    flip = 'printf X | dd of="$file" bs=1 seek=200 conv=notrunc 2> /dev/null'
    find = f'for file in "{tmp_path}"/far.incoming/model.safetensors; do [ -f "$file" ] && {flip}; done'
    there("rsync", f'{real} "$@"; status=$?; {find}; exit $status')
    assert push(remote, drafter, tmp_path / "far") == 2
    error = capsys.readouterr().err
    assert "wrong checksum after the transfer: model.safetensors" in error
    assert not (tmp_path / "far").exists()
    assert not (tmp_path / "far.incoming" / "model.safetensors").exists()
    (remote.bin / "rsync").unlink()
    assert push(remote, drafter, tmp_path / "far") == 0
    assert same(drafter, tmp_path / "far")


def test_too_little_space_is_seen_before_copying(remote, there, drafter, tmp_path, capsys):
    there("df", "echo Filesystem 1024-blocks Used Available Capacity Mounted; echo /dev/x 100 90 10 90% /")
    assert push(remote, drafter, tmp_path / "far") == 2
    assert "there has 0.0 MB free at" in capsys.readouterr().err
    assert not (tmp_path / "far.incoming").exists()


def test_a_disk_that_fills_up_on_the_way(remote, there, drafter, tmp_path, capsys):
    """What rsync says then, from a receiver whose writes fail: a file size limit stands for the full disk."""
    real = shutil.which("rsync")
    there(
        "rsync", f'echo "rsync: write failed: No space left on device (28)" >&2; {real} --version > /dev/null; exit 11'
    )
    assert push(remote, drafter, tmp_path / "far") == 2
    assert "the disk of there is full" in capsys.readouterr().err
    assert not (tmp_path / "far").exists()


def test_missing_rsync_there(remote, there, drafter, tmp_path, capsys):
    there("sh", 'export PATH=/nonexistent:"$(dirname "$0")"; exec /bin/sh "$@"')
    for tool in ("wc", "df", "awk", "dirname", "sha256sum"):
        there(tool, f'exec {shutil.which(tool)} "$@"')
    assert push(remote, drafter, tmp_path / "far") == 2
    assert "there lacks rsync: install it there" in capsys.readouterr().err


def test_no_connection(drafter, tmp_path, capsys):
    assert main(["push", str(drafter), "127.0.0.1:far", "--ssh", "ssh -o BatchMode=yes -p 1"]) == 2
    error = capsys.readouterr().err
    assert "cannot look at 127.0.0.1" in error and error.count("\n") == 1


def test_check_runs_there(remote, there, drafter, tmp_path, capsys):
    """With the package installed there; it is this one."""
    there("sglang-ddtree", f'exec {shlex.quote(sys.executable)} -m sglang_ddtree.cli "$@"')
    target = write_target(tmp_path / "target")
    assert push(remote, drafter, tmp_path / "far one", "--target", str(target)) == 0
    assert f"there: check: {tmp_path / 'far one'} fits {target}" in capsys.readouterr().out
    other = write_target(tmp_path / "other", hidden_size=128)
    assert push(remote, drafter, tmp_path / "far two", "--target", str(other)) == 1
    assert "there: error:" in capsys.readouterr().out


def test_without_the_package_there(remote, drafter, tmp_path, capsys):
    assert push(remote, drafter, tmp_path / "far") == 0
    assert "not installed on there: not checked there" in capsys.readouterr().out


def test_dry_run_prints_and_does_nothing(drafter, tmp_path, capsys):
    assert main(["push", str(drafter), "nowhere.invalid:a b", "--dry-run"]) == 0
    lines = capsys.readouterr().out
    assert "rsync --copy-links" in lines and "'nowhere.invalid:a b.incoming/'" in lines and "sha256sum" in lines


@pytest.mark.parametrize(
    ("text", "host", "path"),
    [
        ("h:p", "h", "p"),
        ("u@h:/a b/c", "u@h", "/a b/c"),
        ("h:~/m", "h", "m"),
        ("h:dir/", "h", "dir/name"),
        ("h:~/", "h", "name"),
        ("[::1]:p", "::1", "p"),
        ("h:-x", "h", "./-x"),
    ],
)
def test_destinations(text, host, path):
    assert parse_destination(text, "name") == Destination(host, path)


@pytest.mark.parametrize("text", ["", "h", "h:", ":p", "-oProxyCommand=x:p", "h:a\nb", "h:..", "h:.", "h:~"])
def test_bad_destinations(text):
    with pytest.raises(DDTreeError):
        parse_destination(text, "name")


def test_an_ssh_command_that_is_none(drafter, capsys):
    assert main(["push", str(drafter), "nowhere.invalid:x", "--ssh", "ssh '", "--dry-run"]) == 2
    captured = capsys.readouterr()
    assert "is no command" in captured.err and captured.err.count("\n") == 1 and not captured.out


def test_damaged_weights_are_not_sent(drafter, tmp_path, capsys):
    weights = drafter / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    for source in (drafter, weights):
        assert main(["push", str(source), "nowhere.invalid:x", "--dry-run"]) == 2
        captured = capsys.readouterr()
        assert "not a complete safetensors file" in captured.err and not captured.out


def test_bad_sources(tmp_path):
    (tmp_path / "sub").mkdir()
    with pytest.raises(DDTreeError, match="does not exist"):
        files_of(tmp_path / "none")
    with pytest.raises(DDTreeError, match="not a plain file"):
        files_of(tmp_path)
    with pytest.raises(DDTreeError, match=r"no \.safetensors"):
        files_of(tmp_path / "sub")
