"""Kernel or torch: one rule for everything in ``tree/``. Triton is imported only when a kernel is to run."""

from __future__ import annotations

import importlib.util
from functools import lru_cache

import torch

#: What the kernels' keys and registers are made for.
MAX_BUDGET, MAX_TOP_K, MAX_DEPTH = 256, 32, 31


def use_kernels(device: torch.device, width: int, *, max_depth: int = 1, top_k: int = 1) -> bool:
    """Whether a tree of verify width ``width`` on ``device`` is a case for the Triton kernels.

    False leaves the work to torch, which has no such limits: on other devices than CUDA (and ROCm, which goes by that
    name), without Triton, or beyond the kernels' limits.
    """
    return (
        device.type == "cuda"
        and width - 1 <= MAX_BUDGET
        and top_k <= MAX_TOP_K
        and max_depth <= MAX_DEPTH
        and has_triton()
    )


def on_host(device: torch.device) -> bool:
    """Whether the values of a tensor on ``device`` can be read without waiting for anything."""
    return device.type == "cpu"


@lru_cache(maxsize=1)
def has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None
