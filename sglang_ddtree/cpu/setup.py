"""What the CPU platform sets up in a process: accepted flag values, the attention backend, threads."""

from __future__ import annotations

import logging
import os
from typing import Any

import torch

from sglang_ddtree.cpu.plugin import ATTENTION_BACKEND
from sglang_ddtree.patching.installed import WITHOUT_TRITON, is_applied

logger = logging.getLogger(__name__)


def extend_choices() -> None:
    """Let the drafter and ``--enable-deterministic-inference``, which seeded draws need, use this platform's attention
    backend; SGLang's lists know GPU backends only."""
    from sglang.srt.arg_groups.choices import (
        DETERMINISTIC_ATTENTION_BACKEND_CHOICES,
        DRAFT_ATTENTION_BACKEND_CHOICES,
        add_deterministic_attention_backend_choices,
        add_draft_attention_backend_choices,
    )

    if ATTENTION_BACKEND not in DRAFT_ATTENTION_BACKEND_CHOICES:
        add_draft_attention_backend_choices([ATTENTION_BACKEND])
    if ATTENTION_BACKEND not in DETERMINISTIC_ATTENTION_BACKEND_CHOICES:
        add_deterministic_attention_backend_choices([ATTENTION_BACKEND])


def init_worker() -> None:
    """Once per worker process: choices, attention backend, streams and threads."""
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    extend_choices()

    @register_attention_backend(ATTENTION_BACKEND)
    def create(runner: Any) -> Any:
        from sglang_ddtree.attention.torch_tree import TorchTreeAttnBackend

        return TorchTreeAttnBackend(runner)

    if not is_applied(WITHOUT_TRITON):
        _ignore_streams_of_cpu_tensors()


def init_layers() -> None:
    """Shorter forms of SGLang's small layers; before the first forward, since each layer keeps what it resolves."""
    from sglang_ddtree.cpu import layers

    layers.register()


def check_linear() -> None:
    """A wrong ``SGLANG_DDTREE_CPU_LINEAR`` is told now, not by a worker that has loaded the model."""
    from sglang_ddtree.cpu.linear_choice import packed_is_wanted

    packed_is_wanted()


def fix_threads() -> None:
    """Choose the workers' thread count in the launching process, before SGLang's own processes keep the cores busy."""
    from sglang_ddtree.cpu.threads import ENV, choose

    plan = choose()
    os.environ[ENV] = str(plan.count)
    logger.info("CPU threads: %d (%s)", plan.count, plan.reason)


def use_threads() -> None:
    """Apply the chosen count in a worker."""
    from sglang_ddtree.cpu.threads import choose

    torch.set_num_threads(choose().count)


def _ignore_streams_of_cpu_tensors() -> None:
    """``Tensor.record_stream`` raises for a CPU tensor, and stock ``DFlashWorkerV2`` calls it on every decode step.

    There is nothing to record: CPU tensors are freed by reference count alone.
    """
    original = torch.Tensor.record_stream
    if getattr(original, "_skips_cpu", False):
        return

    def record_stream(self: torch.Tensor, stream: Any) -> None:
        if self.device.type != "cpu":
            original(self, stream)

    record_stream._skips_cpu = True  # type: ignore[attr-defined]
    torch.Tensor.record_stream = record_stream  # type: ignore[method-assign]
