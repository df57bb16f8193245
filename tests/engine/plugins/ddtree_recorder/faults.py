"""Faults that others have made with trees on hybrid models; a test that would not see them proves nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ddtree_recorder import directory

COMMIT_LENGTH, FLAT_CONVOLUTION, SHORT_FOLD = "commit length", "flat convolution", "short fold"


def register() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for target, function in (
        ("sglang.srt.speculative.spec_utils._verify_commit_step_indices", commit_length),
        ("sglang.kernels.ops.mamba.causal_conv1d_triton.causal_conv1d_update", flat_convolution),
        ("sglang_ddtree.state_deltas.fold_triton", short_fold),
    ):
        HookRegistry.register(target, function, HookType.AROUND)


def in_force() -> str:
    file = directory() / "fault"
    return file.read_text() if file.exists() else ""


def commit_length(original: Callable[..., Any], **kwargs: Any) -> Any:
    """The state of the node numbered ``accept_lens - 1``, which is right for a chain alone."""
    last, track = original(**kwargs)
    if in_force() == COMMIT_LENGTH:
        last = kwargs["accept_lens"].to(last.dtype) - 1
    return last, track


def flat_convolution(original: Callable[..., Any], x: torch.Tensor, states: torch.Tensor, *args: Any, **kwargs: Any):
    """A node's convolution sees the nodes before it in flat order, not its ancestors."""
    if kwargs.get("retrieve_next_token") is None or in_force() != FLAT_CONVOLUTION:
        return original(x, states, *args, **kwargs)
    # The kernel also finds the parents that the recurrence needs; those stay right.
    original(x, states.clone(), *args, **kwargs)
    links = ("retrieve_next_token", "retrieve_next_sibling", "retrieve_parent_token")
    return original(x, states, *args, **{name: value for name, value in kwargs.items() if name not in links})


def short_fold(original: Callable[..., None], states: Any, slots: Any, last: torch.Tensor, *rest: Any) -> None:
    """The state of the accepted node's parent."""
    if in_force() == SHORT_FOLD:
        parents = rest[-1].parents
        last = parents[torch.arange(len(last)), last]
    original(states, slots, last, *rest)
