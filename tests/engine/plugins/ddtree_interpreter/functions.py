"""Device functions; Triton wants its language as a global of their module."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def exp(x):
    return tl.exp(x)
