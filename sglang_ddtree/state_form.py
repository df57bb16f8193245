"""What a verify pass keeps of a hybrid target's nodes until the path is known: ``SGLANG_DDTREE_STATES``.

``stored``: a recurrent state for each node, as SGLang does. ``deltas``: what a Gated DeltaNet's states are made of (the
node's key, update and decay, see ``tree/delta_rule.py``), and the state of the accepted node is made after the walk.
"""

from __future__ import annotations

import logging
import os
from typing import Any

import torch

from sglang_ddtree.errors import DDTreeError
from sglang_ddtree.state_memory import DeltaNet
from sglang_ddtree.target import is_hybrid, text_config
from sglang_ddtree.tree.kernels import dispatch

logger = logging.getLogger(__name__)

ENV = "SGLANG_DDTREE_STATES"
STORED, DELTAS = "stored", "deltas"
CHOICES = (STORED, DELTAS)
#: What to do where deltas cannot be had.
INSTEAD = f"leave {ENV} at {STORED}"


def wanted() -> str:
    """``SGLANG_DDTREE_STATES``.

    Raises:
        DDTreeError: it is neither ``stored`` nor ``deltas``.
    """
    choice = os.environ.get(ENV, "").strip().lower() or STORED
    if choice not in CHOICES:
        raise DDTreeError(f"{ENV} must be {' or '.join(CHOICES)}, got {choice!r}.")
    return choice


def is_deltas() -> bool:
    """Whether ``deltas`` was asked for; a wrong value is not, and :func:`wanted` tells it."""
    return os.environ.get(ENV, "").strip().lower() == DELTAS


def check(config: dict[str, Any], *, device: str, width: int, verify_backend: str | None, by_rows: bool) -> None:
    """Refuse ``deltas`` where the answers would not come from them, before any model loads.

    Args:
        config: the target's ``config.json``.
        device: SGLang's ``--device``.
        width: verify width ``Q``.
        verify_backend: ``--linear-attn-verify-backend``; a tree is verified by SGLang's Triton kernel whatever it says.
        by_rows: whether SGLang keeps a request's nodes in a row of its slot instead of its place in the batch
            (``SGLANG_ENABLE_PP_SPEC``).

    Raises:
        DDTreeError: a wrong value, or a target or server that deltas are not made for.
    """
    if wanted() == STORED:
        return
    text = text_config(config)
    if not is_hybrid(text):
        logger.warning("%s=%s has no effect: this target keeps no recurrent states.", ENV, DELTAS)
        return
    refused = (
        (not is_delta_net(text), "made for Gated DeltaNet targets, and this hybrid's states follow another rule"),
        (
            not _has_kernels(device, width),
            f"computed by Triton kernels, which device {device!r} does not run",
        ),
        (
            verify_backend not in (None, "triton"),
            f"not what --linear-attn-verify-backend {verify_backend} knows (triton does)",
        ),
        (by_rows, "kept by place in the batch, which SGLANG_ENABLE_PP_SPEC is not"),
    )
    for found, why in refused:
        if found:
            raise DDTreeError(f"{ENV}={DELTAS}: deltas are {why}: {INSTEAD}.")


def _has_kernels(device: str, width: int) -> bool:
    try:
        return dispatch.use_kernels(torch.device(device), width)
    except RuntimeError:  # a device that this torch has not heard of
        return False


def is_delta_net(text: dict[str, Any]) -> bool:
    """Whether the text part of a ``config.json`` is that of a Gated DeltaNet model."""
    try:
        net = DeltaNet.of_config(text)
    except KeyError:
        return False
    return net.layers > 0 and net.value_heads % net.key_heads == 0
