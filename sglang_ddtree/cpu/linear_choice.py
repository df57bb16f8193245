"""How the CPU platform multiplies weights: ``SGLANG_DDTREE_CPU_LINEAR``."""

from __future__ import annotations

import os

import torch

from sglang_ddtree.errors import DDTreeError

ENV = "SGLANG_DDTREE_CPU_LINEAR"
CHOICES = ("packed", "torch")


def packed_is_available() -> bool:
    engines = torch.backends.quantized.supported_engines
    return "fbgemm" in engines and torch.backends.cpu.get_cpu_capability() != "DEFAULT"


def packed_is_wanted() -> bool:
    """Whether the choice, or its default (``packed`` where FBGEMM exists), is ``packed``.

    Raises:
        DDTreeError: it is neither ``packed`` nor ``torch``.
    """
    choice = os.environ.get(ENV, "").strip().lower() or ("packed" if packed_is_available() else "torch")
    if choice not in CHOICES:
        raise DDTreeError(f"{ENV} must be {' or '.join(CHOICES)}, got {choice!r}.")
    return choice == "packed"
