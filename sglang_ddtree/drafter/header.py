"""The header of one safetensors file: which tensors it holds, without reading any of them.

The bytes come from strangers, so the parser is the safetensors library's own (it refuses overlapping, out-of-range and
inconsistent offsets); what it would let through is refused here.
"""

from __future__ import annotations

import re
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from sglang_ddtree.errors import DDTreeError

#: A drafter has about a hundred tensors, 10 kB of header. The format would allow 100 MB, which is only there to hurt.
MAX_HEADER = 4_000_000
_NAME = re.compile(r"[\w.:-]{1,256}", re.ASCII)


@dataclass(frozen=True)
class TensorInfo:
    """One tensor as a safetensors header describes it; ``dtype`` is the header's word, such as ``BF16``."""

    shape: tuple[int, ...]
    dtype: str


def read_file_header(path: Path) -> dict[str, TensorInfo]:
    """The tensors of one ``.safetensors`` file.

    Raises:
        DDTreeError: not a regular file, unreadable, damaged, truncated, or with names no model has.
    """
    from safetensors import SafetensorError, safe_open

    damaged = DDTreeError(f"{path} is not a complete safetensors file: download or export it again.")
    with open_regular(path) as file:
        length = int.from_bytes(file.read(8), "little")
        if length > MAX_HEADER:
            raise DDTreeError(
                f"{path} announces a header of {length} bytes, a drafter's has some thousand: it is not a safetensors "
                "file, or a damaged one."
            )
    try:
        with safe_open(path, framework="numpy") as opened:
            parts = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118 (not a dict)
            tensors = {name: TensorInfo(tuple(part.get_shape()), part.get_dtype()) for name, part in parts.items()}
    except (SafetensorError, OSError, ValueError, OverflowError):
        raise damaged from None
    for name in tensors:
        if not _NAME.fullmatch(name) or ".." in name:
            raise DDTreeError(f"{path} has a tensor named {name[:60]!r}, which no model has: do not use this file.")
    return tensors


def open_regular(path: Path) -> IO[bytes]:
    """Open a regular file for reading. A pipe or a device would block or never end.

    Raises:
        DDTreeError: not there, not readable, not a regular file.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise DDTreeError(f"{path} is not a regular file.")
        return path.open("rb")
    except (OSError, ValueError) as error:
        if isinstance(error, DDTreeError):
            raise
        raise DDTreeError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}.") from None


def sha256(path: Path, progress: Callable[[int], None] = lambda done: None) -> str:
    """SHA-256 of a whole file in hex; ``progress`` gets the bytes done so far, every 64 MB."""
    import hashlib

    digest, done = hashlib.sha256(), 0
    with open_regular(path) as file:
        while piece := file.read(1 << 26):
            digest.update(piece)
            done += len(piece)
            progress(done)
    return digest.hexdigest()
