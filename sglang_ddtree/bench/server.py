"""Start, await and stop one local SGLang server."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
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

import psutil  # comes with SGLang

#: Lines of SGLang's start-up log that mark progress worth showing.
_STAGES = (
    ("server_args=", "SGLang is imported, starting its processes"),
    ("Load weight begin", "loading weights"),
    ("KV Cache is allocated", "allocating the KV cache"),
    ("Uvicorn running", "warming up"),
)

#: Without a new stage for this many seconds, the start says that it goes on.
_HEARTBEAT_SECONDS = 20

#: SGLang itself takes ports from 22000 to 29999 for its process groups (``get_free_port_below_ephemeral``).
_PORTS = range(10000, 22000)

#: Ports that :func:`free_port` gave; two servers that start side by side must not be given the same one.
_given: set[int] = set()

#: Times that a start chooses a port.
_PORT_ATTEMPTS = 3

#: What asyncio and torch print for EADDRINUSE.
_ADDRESS_IN_USE = re.compile(r"address already in use", re.IGNORECASE)

# A server on this machine is never reached through a proxy.
_open = urllib.request.build_opener(urllib.request.ProxyHandler({})).open


class ServerError(RuntimeError):
    """The server did not start, or stopped; the message ends with what its log says."""


class PortTaken(ServerError):
    """A port that the server was to bind is another program's."""


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
        PortTaken: another program had one of its ports; without ``port``, only after several tries with other ones.
        ServerError: it stopped, or did not answer in time.
    """
    for attempt in range(_PORT_ATTEMPTS):
        chosen = port or free_port()
        try:
            return _start_once(
                _command(arguments, chosen), chosen, log=log, env=env, timeout=timeout, progress=progress
            )
        except PortTaken:
            if port is not None or attempt == _PORT_ATTEMPTS - 1:
                raise
            if progress is not None:
                progress(f"port {chosen} was taken meanwhile, trying another")
    raise AssertionError("unreachable")


def _command(arguments: Sequence[str], port: int) -> list[str]:
    program = [sys.executable, "-m", "sglang_ddtree.cli", "serve"]
    return [*program, *arguments, "--host", "127.0.0.1", "--port", str(port)]


def _start_once(
    command: Sequence[str], port: int, *, log: Path, env: Mapping[str, str] | None, timeout: float, progress: Any
) -> Server:
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
            text = log.read_text(errors="replace")
            stopped = process.poll()
            # SGLang's processes outlive a failed bind of its HTTP server, without a word.
            if _ADDRESS_IN_USE.search(text):
                raise PortTaken(f"the server found a port taken while starting on {port}:\n{tail(log)}")
            if stopped is not None:
                raise ServerError(f"the server stopped with status {stopped} while starting:\n{tail(log)}")
            elapsed = time.monotonic() - begin
            if elapsed > timeout:
                raise ServerError(f"the server did not answer within {timeout:.0f} s:\n{tail(log)}")
            if progress is not None:
                for marker, stage in _STAGES:
                    if marker in text and stage not in shown:
                        shown.add(stage)
                        progress(stage)
                        last_word = time.monotonic()
                if time.monotonic() - last_word > _HEARTBEAT_SECONDS:
                    progress(f"still starting after {elapsed:.0f} s")
                    last_word = time.monotonic()
            # Another program on the port may answer /health before ours finds the port taken.
            if _listens(process.pid, port):
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
    """A TCP port free on 127.0.0.1 just now, which no call before it gave, below those that the kernel hands out.

    A server binds its port half a minute after it was chosen. The kernel gives ports of its ephemeral range to every
    connection and every ``bind(0)`` on the machine in that time, so that one of those does not stay free.
    """
    ports = range(_PORTS.start, min(_PORTS.stop, _ephemeral_start()))
    for port in random.SystemRandom().sample(ports, len(ports)):
        if port in _given:
            continue
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            _given.add(port)
            return port
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _ephemeral_start() -> int:
    try:
        return int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return 32768


def _listens(pid: int, port: int) -> bool:
    """Whether the process or one of its children listens on the port; true where the system does not tell."""
    try:
        process = psutil.Process(pid)
        family = [process, *process.children(recursive=True)]
        connections = [connection for member in family for connection in _connections(member)]
    except psutil.AccessDenied:
        return True
    except psutil.NoSuchProcess:
        return False
    return any(c.status == psutil.CONN_LISTEN and c.laddr.port == port for c in connections)


def _connections(process: psutil.Process) -> list[Any]:
    # psutil 6 renamed it.
    ask = getattr(process, "net_connections", None) or process.connections
    try:
        return list(ask(kind="tcp"))
    except psutil.NoSuchProcess:
        return []


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
