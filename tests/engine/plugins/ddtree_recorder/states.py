"""The recurrent states and convolution windows of a hybrid target, per request and length."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ddtree_recorder import directory, key


def register() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for target, function in (
        ("sglang.srt.managers.tp_worker.TpModelWorker.forward_batch_generation", after_decode),
        ("sglang.srt.speculative.spec_utils.commit_mamba_states_after_verify", after_commit),
    ):
        HookRegistry.register(target, function, HookType.AROUND)


def after_decode(original: Callable[..., Any], worker: Any, batch: Any = None, *args: Any, **kwargs: Any) -> Any:
    """A decode step of plain decoding leaves a state that holds ``seq_lens`` tokens."""
    found = original(worker, batch, *args, **kwargs)
    if batch is not None and batch.forward_mode.is_decode():
        _record(worker.model_runner.req_to_token_pool, batch, batch.seq_lens)
    return found


def after_commit(
    original: Callable[..., None], worker: Any, batch: Any, accept_lens: torch.Tensor, *args: Any, **kwargs: Any
) -> None:
    """A commit leaves a state that holds the prefix and the accepted path; the bonus token is not in it yet."""
    original(worker, batch, accept_lens, *args, **kwargs)
    _record(worker.model_runner.req_to_token_pool, batch, batch.seq_lens + accept_lens)


def _record(pool: Any, batch: Any, lengths: torch.Tensor) -> None:
    if not (directory() / "states").exists():
        return
    caches = pool.mamba_pool.mamba_cache
    slots = pool.get_mamba_indices(batch.req_pool_indices).tolist()
    for request, slot, length in zip(batch.reqs, slots, lengths.tolist(), strict=True):
        state = {"recurrent": caches.temporal[:, slot].clone(), "window": caches.conv[0][:, slot].clone()}
        torch.save(state, directory() / f"states-{key(request.origin_input_ids)}-{length}.pt")
