"""Which mask FlashInfer verifies trees with: bit rows that the project's variant reads, or SGLang's ``custom_mask``.

Both give the same answers. The variant's mask does not grow with the context; the stock mask is what has been there
before. ``SGLANG_DDTREE_FLASHINFER`` decides where a person wants to.
"""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Iterable
from typing import Any

import torch

from sglang_ddtree.attention import flashinfer_tree
from sglang_ddtree.attention.flashinfer_layout import MAX_ELEMENTS
from sglang_ddtree.config import BUDGET_FLAG
from sglang_ddtree.errors import DDTreeError

ENV = "SGLANG_DDTREE_FLASHINFER"
CHOICES = ("auto", "tree", "stock")

#: The release whose kernels, wrapper and JIT the variant is written against.
FLASHINFER = "0.7.2"


def wanted() -> str:
    """``SGLANG_DDTREE_FLASHINFER``: ``auto`` (the variant unless something is against it), ``tree`` (the variant, or no
    start) or ``stock``.

    Raises:
        DDTreeError: it is something else.
    """
    choice = os.environ.get(ENV, "").strip().lower() or "auto"
    if choice not in CHOICES:
        raise DDTreeError(f"{ENV} must be {', '.join(CHOICES[:-1])} or {CHOICES[-1]}, got {choice!r}.")
    return choice


def against_host() -> str | None:
    """Why the variant cannot run with this FlashInfer on this device, or None."""
    try:
        version = importlib.metadata.version("flashinfer-python")
    except importlib.metadata.PackageNotFoundError:
        return "FlashInfer is not installed"
    if version.split("+")[0] != FLASHINFER:
        return f"FlashInfer is {version}, it is written for {FLASHINFER}"
    if not torch.cuda.is_available() or torch.version.hip:
        return "there is no CUDA device"
    capability = torch.cuda.get_device_capability()
    if capability < (8, 0):
        return f"the GPU's compute capability is {capability[0]}.{capability[1]}, FlashInfer's FA2 kernels need 8.0"
    return None


def against_layers(layers: Iterable[Any], head_dim: int) -> str | None:
    """Why the variant would not compute what these ``RadixAttention`` layers do elsewhere in SGLang, or None.

    ``head_dim`` is what SGLang plans with. A soft cap is among the reasons though the variant knows them: SGLang plans
    FlashInfer's kernels without one, so that prefill and decode ignore it, and verification has to give what they do.
    """
    found = list(layers)
    if not found:
        return "the target's attention layers are not SGLang's"
    for layer in found:
        if (layer.qk_head_dim, layer.v_head_dim) != (head_dim, head_dim):
            return f"a layer has heads of {layer.qk_head_dim} and {layer.v_head_dim}, not {head_dim}"
        if layer.sliding_window_size != -1:
            return "a layer has a sliding window"
        if layer.logit_cap:
            return "a layer caps its logits, which SGLang's FlashInfer kernels do not do in prefill and decode"
        if layer.is_cross_attention or layer.attn_type.value != "decoder":
            return "a layer is not causal self-attention"
    return None


def against_server(
    *, two_batches: bool, pdmux: bool, multi_item: bool, context_parallel: int, encoder: bool
) -> str | None:
    """Why the variant does not go with how this server runs, or None. Two batches at a time, and more than one decode
    backend, have other rows than those that the bits are written for."""
    for found, what in (
        (two_batches, "two-batch overlap"),
        (pdmux, "PD multiplexing"),
        (multi_item, "multi-item scoring"),
        (context_parallel != 1, "decode context parallelism"),
        (encoder, "an encoder-decoder target"),
    ):
        if found:
            return f"{what} is on"
    return None


def against_dtypes(query: torch.dtype, kv: torch.dtype, head_dim: int) -> str | None:
    return flashinfer_tree.why_not(query, kv, head_dim)


def require_stock_mask_fits(requests: int, width: int, context: int) -> None:
    """Refuse a server whose stock mask could pass 2^31 elements: FlashInfer counts them in int32, without a check.

    Args:
        requests: as many as a batch can hold.
        width: verify width ``Q``.
        context: longest prefix. Prefixes may share their slots, so the size of the KV pool is no bound.

    Raises:
        DDTreeError: with the settings that fit.
    """
    if requests * width * (context + width) <= MAX_ELEMENTS:
        return
    ways = []
    fitting = max((q for q in range(2, width) if requests * q * (context + q) <= MAX_ELEMENTS), default=None)
    if fitting is not None:
        ways.append(f"{BUDGET_FLAG} {fitting - 1}")
    if fewer := MAX_ELEMENTS // (width * (context + width)):
        ways.append(f"--max-running-requests {fewer}")
    ways.append("--attention-backend triton")
    raise DDTreeError(
        f"{requests} requests with {width} verify tokens at a context of {context} need a mask of "
        f"{requests * width * (context + width)} elements, and FlashInfer's custom_mask counts in int32 (at most "
        f"{MAX_ELEMENTS}): use {', or '.join(ways)}."
    )
