"""Targets that would run a tree wrongly, or have not been shown to run it right."""

from __future__ import annotations

import logging
from typing import Any

from sglang_ddtree.errors import DDTreeError

logger = logging.getLogger(__name__)

#: Model types whose ``sliding_window`` SGLang applies without a list of layer types.
_ALWAYS_SLIDING = ("cohere2", "gemma2", "gemma3", "gpt_oss")
#: Model types whose convolution over the last tokens SGLang verifies in flat order, as a chain.
_SHORT_CONVOLUTION = ("inkling", "lfm2", "zaya")
#: Hybrids whose answers the engine tests compare with plain decoding: Gated DeltaNet, dense or mixture of experts.
_VERIFIED_HYBRIDS = ("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text")


def check_target(config: dict[str, Any], cpu: bool) -> None:
    """Refuse a target that DDTREE cannot verify; ``config`` is its ``config.json``.

    Raises:
        DDTreeError: MLA attention (SGLang's MLA backends ignore tree masks), sliding-window layers on a GPU (there
            SGLang cuts the window by row instead of by depth; the CPU backend cuts it by depth), short convolutions
            (a node would see the nodes before it in flat order, not its ancestors), or layers that SGLang verifies as a
            chain only (lightning attention, Qwen's compressed sparse attention).
    """
    text = text_config(config)
    if text.get("kv_lora_rank"):
        raise DDTreeError(
            "DDTREE does not support targets with MLA attention (SGLang's MLA backends ignore tree masks): "
            "use --speculative-algorithm DFLASH."
        )
    if has_sliding_window(text) and not cpu:
        raise DDTreeError(
            "DDTREE does not support targets with sliding-window attention on a GPU yet: "
            "use --speculative-algorithm DFLASH."
        )
    if has_short_convolution(text):
        raise DDTreeError(
            "DDTREE does not support targets with short convolutions (SGLang verifies those as a chain): "
            "use --speculative-algorithm DFLASH."
        )
    if chain_only := _chain_only(text):
        raise DDTreeError(
            f"DDTREE does not support targets with {chain_only} (SGLang verifies those as a chain): "
            "use --speculative-algorithm DFLASH."
        )
    if is_hybrid(text) and _model_type(text) not in _VERIFIED_HYBRIDS:
        logger.warning("DDTREE on this hybrid (linear-attention) target is not verified yet; compare its answers.")


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """A ``config.json`` with its text part on top, which holds what is asked here.

    Raises:
        DDTreeError: that part is no JSON object.
    """
    text = config.get("text_config") or {}
    if not isinstance(text, dict):
        raise DDTreeError(f"text_config in the target's config.json must be a JSON object, got {type(text).__name__}.")
    return {**config, **text}


def has_sliding_window(text: dict[str, Any]) -> bool:
    if not text.get("sliding_window") or text.get("use_sliding_window") is False:
        return False
    if "layer_types" in text:
        return "sliding_attention" in (text["layer_types"] or ())
    return _model_type(text).startswith(_ALWAYS_SLIDING)


def has_short_convolution(text: dict[str, Any]) -> bool:
    kinds = text.get("layer_types") or ()
    return "conv" in kinds or "short_conv" in kinds or _model_type(text).startswith(_SHORT_CONVOLUTION)


def _chain_only(text: dict[str, Any]) -> str | None:
    """Layers whose backends refuse a tree, but only after the weights are loaded and without naming a way out."""
    if any("lightning" in str(kind) for kind in text.get("mixer_types") or ()):
        return "lightning attention"
    if text.get("indexer_n_heads") and text.get("indexer_compress_ratio"):
        return "compressed sparse attention"
    return None


def is_hybrid(text: dict[str, Any]) -> bool:
    """Whether some layers keep a state instead of keys and values: linear attention or a state space model."""
    kinds = text.get("layer_types") or text.get("layers_block_type") or ()
    named = ("full_attention_interval", "linear_attn_config", "hybrid_override_pattern", "mamba_d_state")
    return "linear_attention" in kinds or "mamba" in kinds or any(text.get(name) for name in named)


def _model_type(text: dict[str, Any]) -> str:
    return str(text.get("model_type", ""))
