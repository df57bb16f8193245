"""Targets whose attention would run a tree wrongly, or has not been shown to run it right."""

from __future__ import annotations

import logging
from typing import Any

from sglang_ddtree.errors import DDTreeError

logger = logging.getLogger(__name__)

#: Model types whose ``sliding_window`` SGLang applies without a list of layer types.
_ALWAYS_SLIDING = ("cohere2", "gemma2", "gemma3", "gpt_oss")


def check_target(config: dict[str, Any], cpu: bool) -> None:
    """Refuse a target that DDTREE cannot verify; ``config`` is its ``config.json``.

    Raises:
        DDTreeError: MLA attention (SGLang's MLA backends ignore tree masks), or sliding-window layers on a GPU (there
            SGLang cuts the window by row instead of by depth; the CPU backend cuts it by depth).
    """
    text = {**config, **(config.get("text_config") or {})}
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
    if is_hybrid(text):
        logger.warning("DDTREE on a hybrid (linear-attention) target is not verified yet; compare its answers.")


def has_sliding_window(text: dict[str, Any]) -> bool:
    if not text.get("sliding_window") or text.get("use_sliding_window") is False:
        return False
    if "layer_types" in text:
        return "sliding_attention" in (text["layer_types"] or ())
    return str(text.get("model_type", "")).startswith(_ALWAYS_SLIDING)


def is_hybrid(text: dict[str, Any]) -> bool:
    return "linear_attention" in (text.get("layer_types") or ()) or "full_attention_interval" in text
