"""Which of our patches the SGLang of this process has; asked in every worker, so cheap."""

from __future__ import annotations

import functools

from sglang_ddtree.errors import DDTreeError
from sglang_ddtree.patching import diff, series, tree

ROW_WIDTH = "0001-req-to-token-rows"
FLASHINFER_VERIFY = "0004-flashinfer-tree-verify"
WITHOUT_TRITON = "0006-dflash-without-triton"


@functools.cache
def is_applied(name: str) -> bool:
    """Whether all of a patch's changes are in the installed SGLang's files, whatever else was changed in them."""
    try:
        package = tree.find_package(None)
        (patch,) = (patch for patch in series.load() if patch.name == name)
        texts = [((package / file.path).read_text(encoding="utf-8"), file.hunks) for file in patch.files]
    except (DDTreeError, OSError):
        return False
    return all(diff.apply(text, hunks, reverse=True) is not None for text, hunks in texts)
