"""Entry point ``sglang.srt.platforms: ddtree_cpu``. Must import neither torch nor SGLang at module level."""

from __future__ import annotations

import os

NAME = "ddtree_cpu"
#: SGLang's own name, which this platform gives to a backend that reads tree masks (see ``platform.py``).
ATTENTION_BACKEND = "torch_native"


def is_selected() -> bool:
    """Whether this process runs on the project's CPU platform."""
    return os.environ.get("SGLANG_PLATFORM") == NAME


def activate() -> str | None:
    """The platform class for SGLang, or None unless the user selected it by name.

    SGLang activates every installed platform when ``SGLANG_PLATFORM`` is unset; answering None there keeps SGLang as
    it is on every machine where nobody asked for this platform.
    """
    return "sglang_ddtree.cpu.platform.DDTreeCpuPlatform" if is_selected() else None
