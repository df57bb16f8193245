"""Run a short Python program that a model wrote, in a process of its own with limits.

The limits keep an endless loop or a memory leak from harming the machine. They are no jail: the program runs as the
user who measures and may read what that user may read. Grade answers of models you do not trust in a container.
"""

from __future__ import annotations

import contextlib
import os
import resource
import secrets
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

#: Bytes of address space, and of any file it writes.
_MEMORY = 1 << 30
_FILE_SIZE = 1 << 20


def run_limited(program: str, seconds: float = 10) -> bool:
    """True when ``program`` runs to its last line within ``seconds``; an exception or an early exit is False."""
    # An answer that calls exit() would end with status 0 before its tests ran.
    token = secrets.token_hex(16)
    with tempfile.TemporaryDirectory() as folder:
        source, result = Path(folder, "program.py"), Path(folder, "result")
        source.write_text(f"{program}\nopen({str(result)!r}, 'w').write({token!r})\n", encoding="utf-8")
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(source)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env={"PATH": os.defpath, "HOME": folder, "LC_ALL": "C.UTF-8"},
            start_new_session=True,
            preexec_fn=lambda: _limit(seconds),
        )
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        finally:
            # Its own group: the program and what it may have started.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        return process.returncode == 0 and result.is_file() and result.read_text(errors="replace") == token


def _limit(seconds: float) -> None:
    cpu = int(seconds) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (cpu, cpu))
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    resource.setrlimit(resource.RLIMIT_FSIZE, (_FILE_SIZE, _FILE_SIZE))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
