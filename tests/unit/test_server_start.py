"""The start of one local server: its port, and what happens when another program has it."""

from __future__ import annotations

import http.server
import socket
import sys
import threading
import time

import pytest

from sglang_ddtree.bench import server

#: A program that behaves as SGLang: it binds late, and where that fails it says so and stays.
PROGRAM = """
import http.server, sys, time
class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers(); self.wfile.write(b"ours")
time.sleep(0.2)
class Server(http.server.HTTPServer):
    allow_reuse_address = False
try:
    listening = Server(("127.0.0.1", int(sys.argv[1])), Answer)
except OSError as error:
    print(f"ERROR: [Errno {error.errno}] error while attempting to bind: address already in use", flush=True)
    time.sleep(600)
listening.serve_forever()
"""


class Foreign(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"another program's")

    def log_message(self, *args):
        pass


@pytest.fixture
def taken():
    """A port on which another program answers every request, ``/health`` too."""
    foreign = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Foreign)
    threading.Thread(target=foreign.serve_forever, daemon=True).start()
    yield foreign.server_address[1]
    foreign.shutdown()
    foreign.server_close()


@pytest.fixture(autouse=True)
def pretend(monkeypatch):
    monkeypatch.setattr(server, "_command", lambda arguments, port: [sys.executable, "-c", PROGRAM, str(port)])


def test_a_port_taken_after_it_was_chosen_is_given_up_for_another(taken, tmp_path, monkeypatch):
    choices = iter([taken, server.free_port()])
    monkeypatch.setattr(server, "free_port", lambda: next(choices))
    told: list[str] = []
    with server.running([], log=tmp_path / "log", timeout=30, progress=told.append) as started:
        assert started.get("/health") == "ours"
    assert any(f"port {taken} was taken" in line for line in told)


def test_another_programs_answer_is_not_taken_for_ours(taken, tmp_path):
    begin = time.monotonic()
    with pytest.raises(server.PortTaken, match=str(taken)):
        server.start([], log=tmp_path / "log", port=taken, timeout=30)
    assert time.monotonic() - begin < 20, (
        "SGLang stays alive without its HTTP server; waiting for it wastes the timeout"
    )


def test_a_port_that_stays_taken_ends_the_start(taken, tmp_path, monkeypatch):
    asked: list[int] = []
    monkeypatch.setattr(server, "free_port", lambda: asked.append(taken) or taken)
    with pytest.raises(server.PortTaken):
        server.start([], log=tmp_path / "log", timeout=30)
    assert len(asked) == server._PORT_ATTEMPTS


def test_the_ports_given_are_free_different_and_not_the_kernels_to_hand_out():
    ports = [server.free_port() for _ in range(50)]
    assert len(set(ports)) == len(ports)
    assert max(ports) < server._ephemeral_start()
    for port in ports:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", port))


def test_without_a_range_below_the_kernels_it_asks_the_kernel(monkeypatch):
    monkeypatch.setattr(server, "_ephemeral_start", lambda: 1024)
    assert 1024 <= server.free_port() < 65536
