"""Copy a drafter to another machine over ssh with rsync: resumable, checked on arrival, never half there.

Everything arrives in ``PATH.incoming`` and is renamed to ``PATH`` only once its checksums are right, so that an
interrupted copy goes on where it stopped and a server never sees half a model. Credentials are ssh's own business.
"""

from __future__ import annotations

import contextlib
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from sglang_ddtree.drafter.files import read_header
from sglang_ddtree.drafter.header import sha256
from sglang_ddtree.errors import DDTreeError
from sglang_ddtree.signals import stop_on_signals

Say = Callable[[str], None]

#: Left free on the other machine, beyond the files themselves.
MARGIN = 64 << 20

# $1 final path, $2 staging directory. Prints: exists or new, bytes already staged, kB free, missing tools.
_PROBE = """
[ -e "$1" ] && echo exists || echo new
staged=0; for f in "$2"/*; do [ -f "$f" ] && staged=$((staged + $(wc -c < "$f"))); done; echo $staged
p=$1; while [ ! -d "$p" ]; do p=$(dirname -- "$p"); done; df -Pk -- "$p" | awk 'NR == 2 { print $4 }'
for tool in rsync sha256sum; do command -v $tool > /dev/null || echo $tool; done
"""
# $1 staging directory; the names and digests come on stdin. A wrong file is removed, so that it is sent again.
_COMPARE = """
cd -- "$1" || exit 3
bad=0
while read -r want name; do
  got=$(sha256sum < "$name" | cut -d' ' -f1)
  [ "$got" = "$want" ] || { bad=1; echo "$name"; rm -f -- "$name"; }
done
exit $bad
"""
# $1 staged directory or file, $2 final path, $3 staging directory.
_RENAME = """
[ ! -e "$2" ] || exit 4
mv -- "$1" "$2" || exit 5
[ "$1" = "$3" ] || rmdir -- "$3"
"""
_CHECK = """
command -v sglang-ddtree > /dev/null || exit 126
if [ -n "$2" ]; then exec sglang-ddtree drafter check "$1" --target "$2"; fi
exec sglang-ddtree drafter inspect "$1"
"""


@dataclass(frozen=True)
class Destination:
    """``path`` is the final name on ``host``, relative paths are relative to the home directory there."""

    host: str
    path: str

    @property
    def staging(self) -> str:
        return f"{self.path}.incoming"


def parse_destination(text: str, name: str) -> Destination:
    """``HOST:PATH`` or ``[IPv6]:PATH``; a PATH that ends in / gets the source's ``name``.

    Raises:
        DDTreeError: not of that form.
    """
    bracket = text.startswith("[") and "]:" in text
    host, colon, path = text[1:].partition("]:") if bracket else text.partition(":")
    if not colon or not host or not path or host.startswith("-") or any(c in text for c in "\n\r\0"):
        raise DDTreeError(f"the destination must be HOST:PATH, got {text!r}.")
    path = path + name if path.endswith("/") else path
    # A quoted ~ is not expanded; the home directory is where relative paths begin anyway.
    path = path.removeprefix("~/")
    if path in ("", "~", ".", "..") or path.endswith("/.."):
        raise DDTreeError(f"the destination must name the directory or file to make, got {text!r}.")
    # A leading - would be read as an option by the tools there.
    return Destination(host, f"./{path}" if path.startswith("-") else path)


def files_of(source: Path) -> list[Path]:
    """The files to send: the source itself, or what a model directory holds (hidden ones left out).

    Raises:
        DDTreeError: nothing there, or something that is not a plain file.
    """
    if source.is_file():
        found = [source]
    elif source.is_dir():
        found = sorted(path for path in source.iterdir() if not path.name.startswith("."))
    else:
        raise DDTreeError(f"{source} does not exist: give a drafter's directory or file.")
    for path in found:
        if not path.is_file() or any(c in path.name for c in "\n\r\\"):
            raise DDTreeError(f"{path} is not a plain file: a drafter's directory holds files only.")
    if not any(path.suffix == ".safetensors" for path in found):
        raise DDTreeError(f"{source} holds no .safetensors file: give a drafter's directory or file.")
    return found


def push(source: Path, to: str, *, ssh: str, remote_target: str | None, dry_run: bool, say: Say) -> int:
    """Copy ``source`` to ``to`` (HOST:PATH) and check it there; returns 0, or the remote check's exit status.

    Args:
        ssh: the ssh command, with options, as rsync's ``-e`` takes it.
        remote_target: the target model's directory on that machine; without it only the header is looked at there.
        dry_run: print the commands instead.

    Raises:
        DDTreeError: one line: bad arguments, damaged weights, no connection, no space, an interrupted transfer.
    """
    files = files_of(source)
    read_header(source)  # A damaged file or a missing shard is told before hours of copying.
    size = sum(path.stat().st_size for path in files)
    destination = parse_destination(to, source.resolve().name)
    try:
        shell = shlex.split(ssh) or ["ssh"]
    except ValueError as error:
        raise DDTreeError(f"--ssh {ssh!r} is not a command line: {error}.") from None
    staged = destination.staging + (f"/{source.name}" if source.is_file() else "")

    def remote(script: str, *args: str) -> list[str]:
        return [*shell, destination.host, shlex.join(["sh", "-c", script, "sh", *args])]

    probe = remote(_PROBE, destination.path, destination.staging)
    make = remote('mkdir -p -- "$1"', destination.staging)
    copy = [
        *("rsync", "--copy-links", "--times", "--partial", "--protect-args", "--info=progress2", "-e", ssh, "--"),
        *(str(path.absolute()) for path in files),
        f"{_rsync_host(destination.host)}:{destination.staging}/",
    ]
    compare = remote(_COMPARE, destination.staging)
    rename = remote(_RENAME, staged, destination.path, destination.staging)
    check = remote(_CHECK, destination.path, remote_target or "")
    if dry_run:
        for command in (probe, make, copy, compare, rename, check):
            say(shlex.join(command))
        return 0
    for tool in (shell[0], "rsync"):
        if shutil.which(tool) is None:
            raise DDTreeError(f"there is no {tool} on this machine: install it.")

    stop_on_signals(say)
    _probe(probe, destination, size)
    say(f"{len(files)} files, {_size(size)}: computing checksums")
    manifest = "".join(f"{sha256(path)} {path.name}\n" for path in files)
    _quiet(make, f"cannot make {destination.staging} on {destination.host}")
    say(f"copying to {destination.host}:{destination.staging}")
    _copy(copy, destination)
    say("comparing checksums there")
    done = _quiet(compare, "the checksums could not be compared", stdin=manifest, accept=(0, 1))
    if done.returncode == 1:
        wrong = ", ".join(done.stdout.split("\n")[:-1])
        raise DDTreeError(f"wrong checksum after the transfer: {wrong} (removed there); run the same command again.")
    _quiet(rename, f"{destination.path} could not be made from {destination.staging} on {destination.host}")
    say(f"{destination.host}:{destination.path} is complete")
    return _check(check, destination, say)


def _probe(command: list[str], destination: Destination, size: int) -> None:
    lines = _quiet(command, f"cannot look at {destination.host}").stdout.split("\n")[:-1]
    if len(lines) < 3 or not lines[1].isdigit() or not lines[2].isdigit():
        raise DDTreeError(f"{destination.host} gave no usable answer about its disk: {' '.join(lines)[:200]!r}.")
    if lines[3:]:
        raise DDTreeError(f"{destination.host} lacks {' and '.join(lines[3:])}: install it there.")
    if lines[0] == "exists":
        raise DDTreeError(f"{destination.path} exists already on {destination.host}: give another path or remove it.")
    needed, free = size - int(lines[1]) + MARGIN, 1024 * int(lines[2])
    if free < needed:
        raise DDTreeError(f"{destination.host} has {_size(free)} free at {destination.path}, {_size(needed)} needed.")


def _copy(command: list[str], destination: Destination) -> None:
    """rsync with its progress bar on our stdout; its errors are repeated and looked at."""
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True, errors="replace")
    errors: list[str] = []
    try:
        assert process.stderr is not None
        for line in process.stderr:
            errors.append(line)
            sys.stderr.write(line)
        status = process.wait()
    finally:
        if process.poll() is None:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(5)
            process.kill()
    if status == 0:
        return
    if any("No space left on device" in line for line in errors):
        raise DDTreeError(f"the disk of {destination.host} is full: free some space there and run the command again.")
    last = " ".join(errors[-1].split()) if errors else "no message"
    raise DDTreeError(
        f"the copy stopped (rsync status {status}: {last}); what has arrived stays in {destination.staging} on "
        f"{destination.host}: run the same command again to go on."
    )


def _check(command: list[str], destination: Destination, say: Say) -> int:
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", stdin=subprocess.DEVNULL)
    if done.returncode == 126:
        say(f"sglang-ddtree is not installed on {destination.host}: not checked there")
        return 0
    for line in (done.stdout + done.stderr).splitlines():
        say(f"{destination.host}: {line}")
    return done.returncode


def _quiet(
    command: Sequence[str], what: str, *, stdin: str = "", accept: tuple[int, ...] = (0,)
) -> subprocess.CompletedProcess[str]:
    """Run a remote command and return its output; DDTreeError with its last word when it fails."""
    done = subprocess.run(command, input=stdin, capture_output=True, text=True, errors="replace")
    if done.returncode not in accept:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        raise DDTreeError(f"{what}: {lines[-1] if lines else f'exit status {done.returncode}'}.")
    return done


def _rsync_host(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _size(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e8 else f"{count / 1e6:.1f} MB"
