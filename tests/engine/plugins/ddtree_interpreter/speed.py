"""Triton's interpreter, faster: it replaces the language's functions at every launch and every device function call,
which takes a third of the time of small kernels. Here nothing is compiled, so once is enough."""

from __future__ import annotations

import types
from typing import Any


def patch_language_once() -> None:
    from triton.runtime import interpreter

    patch = interpreter._patch_lang
    seen: dict[int, Any] = {}
    kept = types.SimpleNamespace(restore=lambda: None)

    def once(function: Any) -> Any:
        # A function's language is that of its module; the module is kept, so that its number is not given again.
        module = function.__globals__
        if id(module) not in seen:
            seen[id(module)] = module
            patch(function)
        return kept

    interpreter._patch_lang = once
