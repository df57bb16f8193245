"""How many trees or rows one program takes."""

from __future__ import annotations

import triton

#: In the interpreter a program is a Python call whose cost hardly depends on how much it handles.
_INTERPRETED_BLOCK = 256


def block_size(on_gpu: int, interpreted: int = _INTERPRETED_BLOCK) -> int:
    """Items per program: ``on_gpu``, or ``interpreted`` under ``TRITON_INTERPRET=1``."""
    return interpreted if triton.knobs.runtime.interpret else on_gpu


def node_block(count: int) -> int:
    """A power of two that holds ``count`` nodes and fills a warp."""
    return max(32, triton.next_power_of_2(count))
