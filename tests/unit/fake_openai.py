"""A streaming OpenAI-compatible server that decodes at a chosen speed, for the benchmark to measure.

Its answers are a function of the prompt. As SGLang it also has ``/server_info``, token ids and verify steps.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Behaviour:
    """``seconds`` per step, ``per_step`` tokens in each; ``wrong`` and ``refuses`` say which prompts go wrong.

    ``logprob_gap``: between the best two tokens, everywhere; None refuses log-probabilities.
    """

    seconds: float = 0.006
    per_step: int = 1
    info: dict[str, Any] | None = field(default_factory=lambda: server_info())
    wrong: Any = lambda prompt: False
    refuses: Any = lambda prompt: False
    metrics: str = ""
    logprob_gap: float | None = None
    running: int = 0
    most_running: int = 0
    bodies: list[dict[str, Any]] = field(default_factory=list)
    flushes: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)


def server_info(**changes: Any) -> dict[str, Any]:
    """A few of the fields that SGLang 0.5.23 sends."""
    return {
        "version": "0.5.23",
        "dtype": "float32",
        "attention_backend": "torch_native",
        "disable_overlap_schedule": False,
        "max_running_requests": 48,
        "speculative_algorithm": None,
        "port": 1,
        "api_key": "hidden",
        "internal_states": [{"effective_max_running_requests_per_dp": 48}],
        **changes,
    }


def answer_ids(prompt: str, count: int) -> list[int]:
    return [zlib.crc32(f"{prompt}/{i}".encode()) % 1000 for i in range(count)]


class Handler(BaseHTTPRequestHandler):
    behaviour: Behaviour

    def do_GET(self) -> None:
        if self.path == "/server_info" and self.behaviour.info is not None:
            self.reply(200, json.dumps(self.behaviour.info))
        elif self.path == "/health":
            self.reply(200, "")
        elif self.path == "/metrics" and self.behaviour.metrics:
            steps = sum(body["max_tokens"] for body in self.behaviour.bodies)
            self.reply(200, self.behaviour.metrics.replace("{steps}", str(steps)))
        else:
            self.reply(404, "{}")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/flush_cache" and self.behaviour.info is not None:
            self.behaviour.flushes += 1
            self.reply(200, "Cache flushed.\n")
        elif self.path != "/v1/chat/completions":
            self.reply(404, "{}")
        elif self.behaviour.refuses(body["messages"][-1]["content"]):
            self.reply(400, json.dumps({"error": {"message": "not this one"}}))
        elif body.get("logprobs"):
            self.log_probabilities(body)
        else:
            with self.counted(body):
                self.stream(body)

    def log_probabilities(self, body: dict[str, Any]) -> None:
        gap = self.behaviour.logprob_gap
        if gap is None:
            self.reply(400, json.dumps({"error": {"message": "no log-probabilities here"}}))
            return
        best = {"token": "a", "logprob": -0.5, "bytes": None}
        second = {"token": "b", "logprob": -0.5 - gap, "bytes": None}
        content = [{**best, "top_logprobs": [best, second]}] * body["max_tokens"]
        message = {"role": "assistant", "content": "a"}
        choice = {"index": 0, "message": message, "finish_reason": "length", "logprobs": {"content": content}}
        head = {"id": "1", "created": 1, "model": "default", "object": "chat.completion"}
        self.reply(200, json.dumps({**head, "choices": [choice]}))

    @contextlib.contextmanager
    def counted(self, body: dict[str, Any]) -> Iterator[None]:
        own = self.behaviour
        with own.lock:
            own.bodies.append(body)
            own.running += 1
            own.most_running = max(own.most_running, own.running)
        try:
            yield
        finally:
            with own.lock:
                own.running -= 1

    def stream(self, body: dict[str, Any]) -> None:
        own, prompt = self.behaviour, body["messages"][-1]["content"]
        ids = answer_ids(prompt, body["max_tokens"])
        if own.wrong(prompt):
            ids[1] += 1
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        begin, steps = time.monotonic(), 0
        for at in range(0, len(ids), own.per_step):
            steps += 1
            # Against the clock, so that a busy machine's delays do not add up.
            time.sleep(max(0.0, begin + steps * own.seconds - time.monotonic()))
            text = "".join(f" {token}" for token in ids[at : at + own.per_step])
            self.chunk(choices=[{"index": 0, "delta": {"content": text}, "finish_reason": None}])
        self.chunk(choices=[{"index": 0, "delta": {}, "finish_reason": "length"}])
        if body.get("return_output_ids_in_sglext"):
            spec = None
            if own.per_step > 1:
                spec = {"spec_verify_ct": steps - 1, "spec_num_correct_drafts": len(ids) - steps}
                spec["spec_correct_drafts_histogram"] = [0] * (own.per_step - 1) + [steps - 1]
            self.chunk(choices=[], sglext={"output_ids": [ids], "spec_tokens_details": spec})
        usage = {"prompt_tokens": 1, "completion_tokens": len(ids), "total_tokens": 1 + len(ids)}
        self.chunk(choices=[], usage=usage)
        self.wfile.write(b"data: [DONE]\n\n")

    def chunk(self, **fields: Any) -> None:
        head = {"id": "1", "created": 1, "model": "default", "object": "chat.completion.chunk"}
        self.wfile.write(f"data: {json.dumps({**head, **fields})}\n\n".encode())

    def reply(self, status: int, text: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, format: str, *args: object) -> None:
        pass


class Http(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64


def listen(behaviour: Behaviour, port: int = 0) -> Http:
    """A server on 127.0.0.1 that is bound, but not yet served."""
    return Http(("127.0.0.1", port), type("Own", (Handler,), {"behaviour": behaviour}))


@contextlib.contextmanager
def serving(behaviour: Behaviour) -> Iterator[str]:
    """Serve in a thread; gives the URL."""
    http = listen(behaviour)
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{http.server_port}"
    finally:
        http.shutdown()
        http.server_close()
        thread.join()
