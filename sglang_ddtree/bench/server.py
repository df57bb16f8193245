"""Start, await and stop one local SGLang server."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

#: Lines of SGLang's start-up log that mark progress worth showing.
_STAGES = (
    ("server_args=", "SGLang is imported, starting its processes"),
    ("Load weight begin", "loading weights"),
    ("KV Cache is allocated", "allocating the KV cache"),
    ("Uvicorn running", "warming up"),
)

#: Without a new stage for this many seconds, the start says that it goes on.
_HEARTBEAT_SECONDS = 20

# A server on this machine is never reached through a proxy.
_open = urllib.request.build_opener(urllib.request.ProxyHandler({})).open


class ServerError(RuntimeError):
    """The server did not start, or stopped; the message ends with what its log says."""


@dataclass
class Server:
    """A running server on 127.0.0.1.

    Attributes:
        url: ``http://127.0.0.1:PORT``.
        process: the launched process, leader of its own session, so that its children stop with it.
        log: file with everything the server printed.
        start_seconds: from launch until ``/health`` answered.
    """

    url: str
    process: subprocess.Popen[bytes]
    log: Path
    start_seconds: float

    def get(self, path: str, timeout: float = 30) -> Any:
        return fetch(self.url + path, timeout=timeout)

    def post(self, path: str, body: Mapping[str, Any], timeout: float = 600) -> Any:
        return fetch(self.url + path, body, timeout)

    def alive(self) -> bool:
        return self.process.poll() is None

    def stop(self, grace: float = 10) -> None:
        """Stop the launched process and its children by its own process group; never anybody else's."""
        group = self.process.pid
        for sig, wait in ((signal.SIGTERM, grace), (signal.SIGKILL, 5)):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group, sig)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(wait)
            if not _group_alive(group):
                return
            if sig == signal.SIGTERM:
                time.sleep(0.5)


def start(
    arguments: Sequence[str],
    *,
    log: Path,
    env: Mapping[str, str] | None = None,
    timeout: float = 600,
    port: int | None = None,
    progress: Any = None,
) -> Server:
    """Run ``sglang-ddtree serve ARGUMENTS`` on 127.0.0.1 and wait until it answers.

    Args:
        arguments: flags for the server, without host and port.
        log: file that takes the server's output.
        env: variables to add to the environment.
        timeout: seconds to wait.
        port: a free one is chosen when not given.
        progress: called with a short text at each stage of the start.

    Raises:
        ServerError: it stopped, or did not answer in time.
    """
    port = port or free_port()
    command = [
        sys.executable,
        "-m",
        "sglang_ddtree.cli",
        "serve",
        *arguments,
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
    ]
    # A failed start would otherwise wait a minute for CUDA core dumps.
    variables = {**os.environ, "SGLANG_CUDA_COREDUMP_BEFORE_CRASH_WAIT_SECS": "1", **(env or {})}
    begin = time.monotonic()
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "wb") as out:
        process = subprocess.Popen(
            command,
            stdout=out,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=variables,
            start_new_session=True,
        )
    server = Server(f"http://127.0.0.1:{port}", process, log, 0.0)
    shown: set[str] = set()
    last_word = begin
    try:
        while True:
            if process.poll() is not None:
                raise ServerError(f"the server stopped with status {process.returncode} while starting:\n{tail(log)}")
            elapsed = time.monotonic() - begin
            if elapsed > timeout:
                raise ServerError(f"the server did not answer within {timeout:.0f} s:\n{tail(log)}")
            if progress is not None:
                text = log.read_text(errors="replace")
                for marker, stage in _STAGES:
                    if marker in text and stage not in shown:
                        shown.add(stage)
                        progress(stage)
                        last_word = time.monotonic()
                if time.monotonic() - last_word > _HEARTBEAT_SECONDS:
                    progress(f"still starting after {elapsed:.0f} s")
                    last_word = time.monotonic()
            with contextlib.suppress(urllib.error.URLError, ConnectionError, TimeoutError):
                server.get("/health", timeout=5)
                server.start_seconds = time.monotonic() - begin
                return server
            time.sleep(0.5)
    except BaseException:
        server.stop()
        raise


@contextlib.contextmanager
def running(arguments: Sequence[str], **options: Any) -> Iterator[Server]:
    """:func:`start`, and stop at the end whatever happens."""
    server = start(arguments, **options)
    try:
        yield server
    finally:
        server.stop()


def fetch(url: str, body: Mapping[str, Any] | None = None, timeout: float = 30) -> Any:
    """GET ``url``, or POST ``body`` as JSON to it; the answer as JSON where it is that, else as text.

    Raises:
        OSError: no connection, no answer in time, or (``urllib.error.HTTPError``) a status of 400 or more.
    """
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {} if data is None else {"Content-Type": "application/json"})
    with _open(request, timeout=timeout) as response:
        return _body(response.read().decode())


def free_port() -> int:
    """A TCP port free on 127.0.0.1 just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def tail(log: Path, lines: int = 15) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])


def _body(text: str) -> Any:
    """JSON where it is that; ``/flush_cache`` and others answer in plain text."""
    return json.loads(text) if text.startswith(("{", "[")) else text


def _group_alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True
