"""How many trees or rows one program takes."""

from __future__ import annotations

import triton

#: In the interpreter an operation costs a fifth of a millisecond, and up to about so many elements hardly more.
_INTERPRETED_ELEMENTS = 1 << 17


def block_size(on_gpu: int, count: int, width: int) -> int:
    """Items per program: ``on_gpu``; under ``TRITON_INTERPRET=1`` as many of ``count`` items of ``width`` as pay."""
    if not triton.knobs.runtime.interpret:
        return on_gpu
    return min(triton.next_power_of_2(count), max(1, _INTERPRETED_ELEMENTS // width))


def node_block(count: int) -> int:
    """A power of two that holds ``count`` nodes and fills a warp."""
    return max(32, triton.next_power_of_2(count))
