"""A test-only SGLang plugin that writes a server's inner states to files, and can break them on purpose.

It does nothing unless ``DDTREE_RECORD`` names a directory. A test switches it while the server runs, through files in
there:

- ``states``: while it exists, each request's committed states of a hybrid target are saved as
  ``states-PROMPT-LENGTH.pt``;
- ``drafts``: while it exists, the drafter's hidden states are saved as ``drafts-PROMPT-LENGTH.pt``;
- ``fault``: holds the name of a fault (see ``faults.py``), which is then in force.

PROMPT is a hash of the prompt's tokens, LENGTH the tokens in the cache.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path


def register() -> None:
    if "DDTREE_RECORD" in os.environ:
        from ddtree_recorder import drafts, faults, states

        states.register()
        drafts.register()
        faults.register()


def directory() -> Path:
    return Path(os.environ["DDTREE_RECORD"])


def key(prompt: Sequence[int]) -> str:
    return hashlib.sha256(repr(list(prompt)).encode()).hexdigest()[:12]
