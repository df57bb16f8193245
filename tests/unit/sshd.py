"""A real sshd of our own on 127.0.0.1: keys, config and log in a temporary directory, no privileges, no fixed port."""

from __future__ import annotations

import contextlib
import getpass
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from sglang_ddtree.bench.server import free_port


@dataclass(frozen=True)
class Remote:
    """``ssh`` is the command for ``--ssh``; ``bin`` comes first in the PATH of what runs there."""

    ssh: str
    bin: Path


@contextlib.contextmanager
def running_sshd(directory: Path) -> Iterator[Remote]:
    """Start it, wait until it answers, stop it at the end by its own process."""
    program = shutil.which("sshd", path="/usr/sbin:/usr/local/sbin:/sbin:/usr/bin")
    assert program and shutil.which("rsync"), "these tests need sshd and rsync: apt-get install openssh-server rsync"
    directory.mkdir(mode=0o700)
    for name in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", directory / name], check=True)
    (directory / "authorized").write_bytes((directory / "user.pub").read_bytes())
    binaries = directory / "bin"
    binaries.mkdir()
    port = free_port()
    config = directory / "sshd_config"
    config.write_text(
        f"ListenAddress 127.0.0.1\nPort {port}\nHostKey {directory}/host\nPidFile none\n"
        f"AuthorizedKeysFile {directory}/authorized\nStrictModes no\nUsePAM no\nPasswordAuthentication no\n"
        f"SetEnv PATH={binaries}:/usr/local/bin:/usr/bin:/bin\n"
    )
    client = directory / "ssh_config"
    client.write_text(
        f"Host there\n  HostName 127.0.0.1\n  Port {port}\n  User {getpass.getuser()}\n"
        f"  IdentityFile {directory}/user\n  IdentitiesOnly yes\n  BatchMode yes\n"
        f"  StrictHostKeyChecking no\n  UserKnownHostsFile /dev/null\n  LogLevel ERROR\n"
    )
    # Root's sshd wants this directory; it holds nothing.
    with contextlib.suppress(PermissionError):
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
    with (directory / "log").open("wb") as log:
        server = subprocess.Popen([program, "-D", "-e", "-f", config], stdout=log, stderr=log)
    try:
        for _ in range(100):
            assert server.poll() is None, (directory / "log").read_text()
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            time.sleep(0.1)
        yield Remote(f"ssh -F {client}", binaries)
    finally:
        server.terminate()
        server.wait(10)
