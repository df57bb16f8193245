"""The program behind ``schedulers.py``: imports SGLang once and forks a scheduler for every job that it is sent.

A job is one line of JSON on standard input (``schedulers.Schedulers.run`` documents it); the answer is one on standard
output. What is printed meanwhile goes to standard error.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import traceback
from array import array
from pathlib import Path
from typing import Any


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    # As a DDTREE server's launcher does it: with this the hooks are there, and they pass through for other algorithms.
    os.environ["SGLANG_DDTREE_ACTIVE"] = "1"
    from sglang.srt.plugins import load_plugins

    load_plugins()
    # So that no child has to: the scheduler imports every model when it looks for the first one.
    from sglang.srt.models.registry import ModelRegistry

    for name in ("sglang.srt.managers.scheduler", "sglang_ddtree.worker"):
        importlib.import_module(name)
    assert ModelRegistry.get_supported_archs()
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            _run_job(json.loads(line))
        _, status = os.waitpid(child, 0)
        answers.write(json.dumps({"status": status}) + "\n")
        answers.flush()


def _run_job(job: dict[str, Any]) -> None:
    status = 1
    try:
        log = os.open(job["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.environ.update(job["env"])
        Path(job["out"]).write_text(json.dumps(_serve(job)))
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        # Nothing of the parent's may run at the exit of its copy; threads of SGLang's do not hold it up.
        os._exit(status)


def _serve(job: dict[str, Any]) -> list[list[dict[str, Any]]]:
    """Start the scheduler, go through the steps in its own event loop, and return the answers of every ``ask``."""
    from sglang.srt.managers import scheduler as module
    from sglang.srt.server_args import PortArgs, prepare_server_args

    # An invariant that fails ends SGLang's own process with its parent; here it ends the job.
    signal.signal(signal.SIGQUIT, lambda *_: os._exit(2))
    args = prepare_server_args(job["flags"])
    module.publish(args, role="scheduler", ranks=module.SpawnRanks(world_rank=0, dp_rank=None, gpu_id=0))
    scheduler = module.Scheduler(args, PortArgs.init_new(args))
    passes = _record_draft_passes(scheduler) if job["draft_passes"] else None
    script = Script(scheduler, job["steps"])
    scheduler.ingest_requests = script.ingest
    scheduler.run_event_loop()
    if passes is not None:
        import torch

        torch.save(passes, job["draft_passes"])
    return script.answers


class Script:
    """Takes the place of what a scheduler receives: the next step, whenever nothing is left to do."""

    def __init__(self, scheduler: Any, steps: list[list[Any]]):
        self.answers: list[list[dict[str, Any]]] = []
        self._scheduler, self._steps = scheduler, list(steps)
        self._running: list[tuple[Any, int | None]] = []
        self._idle = 0

    def ingest(self, *_: Any) -> list[Any]:
        self._abort()
        if self._running and all(req.finished() for req, _ in self._running):
            self.answers.append([_answer(req) for req, _ in self._running])
            self._running = []
        if not self._running:
            # Some rounds with nothing to do: SGLang then frees what is left and looks for leaks.
            self._idle += 1
            if self._idle > 3 and self._scheduler.is_fully_idle():
                self._idle = 0
                self._next()
        return []

    def _next(self) -> None:
        if not self._steps:
            self._scheduler.gracefully_exit = True
            return
        kind, *arguments = self._steps.pop(0)
        getattr(self, f"_{kind}")(*arguments)

    def _ask(self, requests: list[dict[str, Any]]) -> None:
        created: list[Any] = []
        add = self._scheduler._add_request_to_queue
        self._scheduler._add_request_to_queue = lambda req, *a, **k: (created.append(req), add(req, *a, **k))[1]
        for number, one in enumerate(requests):
            self._scheduler.handle_generate_request(_tokenized(f"{len(self.answers)}-{number}", one))
        self._scheduler._add_request_to_queue = add
        assert len(created) == len(requests)
        self._running = [(req, one.get("abort_at")) for req, one in zip(created, requests, strict=True)]

    def _abort(self) -> None:
        from sglang.srt.managers.io_struct import AbortReq

        for req, limit in self._running:
            if limit is not None and not req.finished() and len(req.output_ids) >= limit:
                self._scheduler.abort_request(AbortReq(rid=req.rid))

    def _retract(self, every: int) -> None:
        # What SGLANG_TEST_RETRACT and SGLANG_TEST_RETRACT_INTERVAL set.
        module = sys.modules["sglang.srt.managers.scheduler"]
        module.TEST_RETRACT, module.TEST_RETRACT_INTERVAL = every > 0, max(1, every)

    def _flush(self) -> None:
        assert self._scheduler.flush_cache()

    def _write(self, path: str, text: str) -> None:
        Path(path).write_text(text)

    def _remove(self, path: str) -> None:
        Path(path).unlink()


def _tokenized(rid: str, one: dict[str, Any]) -> Any:
    from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
    from sglang.srt.sampling.sampling_params import SamplingParams

    sampling = SamplingParams(temperature=0, max_new_tokens=one["tokens"], ignore_eos=True)
    sampling.normalize(None)
    nothing = dict.fromkeys(("input_text", "input_embeds", "mm_inputs", "token_type_ids", "token_ids_logprob"))
    return TokenizedGenerateReqInput(
        rid=rid,
        input_ids=array("q", one["ids"]),
        sampling_params=sampling,
        return_logprob=False,
        logprob_start_len=-1,
        top_logprobs_num=0,
        stream=False,
        **nothing,
    )


def _answer(req: Any) -> dict[str, Any]:
    return {
        "ids": list(req.output_ids)[: req.sampling_params.max_new_tokens],
        "finish": req.finished_reason.to_json(),
        "cached_tokens": req.cached_tokens,
        "verify_steps": req.spec_verify_ct,
        "retractions": req.retraction_count,
    }


def _record_draft_passes(scheduler: Any) -> list[dict[str, Any]]:
    """What the draft model is given in decode steps, and its hidden states; for each request of a batch."""
    found: list[dict[str, Any]] = []
    worker, runner = scheduler.draft_worker, scheduler.draft_worker.draft_model_runner
    step, forward = worker.forward_batch_generation, runner.forward
    names: list[str] = []

    def recorded_step(batch: Any, *args: Any, **kwargs: Any) -> Any:
        names[:] = [req.rid for req in batch.reqs]
        return step(batch, *args, **kwargs)

    def recorded_forward(batch: Any, *args: Any, **kwargs: Any) -> Any:
        out = forward(batch, *args, **kwargs)
        if batch.forward_mode.is_target_verify():
            blocks = [x.view(len(names), -1) for x in (batch.positions, batch.input_ids)]
            hidden = out.logits_output.hidden_states.view(*blocks[0].shape, -1)
            for name, positions, ids, states in zip(names, *blocks, hidden, strict=True):
                turn, number = map(int, name.split("-"))
                found.append(
                    {
                        "turn": turn,
                        "request": number,
                        "positions": positions.clone(),
                        "root": int(ids[0]),
                        "hidden": states.clone(),
                    }
                )
        return out

    worker.forward_batch_generation, runner.forward = recorded_step, recorded_forward
    return found


if __name__ == "__main__":
    main()
