"""Settings of a drafter that no tensor shape shows: attention windows, causality, RoPE, dtype, the mask token.

A wrong one costs acceptance without any error, so what can be seen from the files alone is said here; what cannot is
measured by ``sglang-ddtree drafter verify``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LAYER_TYPES = ("full_attention", "sliding_attention")
_DTYPES = ("bfloat16", "float16", "float32")


@dataclass(frozen=True)
class Finding:
    """``level`` is "error" (DDTREE refuses to start) or "warning"."""

    level: str
    text: str


def rope_of(config: dict[str, Any]) -> dict[str, Any]:
    """RoPE settings of a text config, of either spelling: ``rope_theta`` and, where scaled, the rest. May be empty."""
    found: dict[str, Any] = {}
    if isinstance(config.get("rope_theta"), int | float):
        found["rope_theta"] = config["rope_theta"]
    for key in ("rope_scaling", "rope_parameters"):
        if isinstance(config.get(key), dict):
            found.update(config[key])
    if found.get("rope_type") in ("default", None) and found.get("type") in ("default", None):
        return {key: float(found[key]) for key in ("rope_theta",) if isinstance(found.get(key), int | float)}
    return found


def setting_findings(config: dict[str, Any], target: dict[str, Any], num_layers: int, where: str) -> Iterator[Finding]:
    """What is wrong or suspicious in a drafter's config; ``target`` is the target's."""
    text = config.get("text_config") or config
    where = f"{where}/config.json"
    kinds = text.get("layer_types")
    if kinds is not None:
        if not isinstance(kinds, list) or len(kinds) < num_layers or any(kind not in LAYER_TYPES for kind in kinds):
            yield Finding(
                "error",
                f"{where}: layer_types must be a list of {num_layers} names out of {', '.join(LAYER_TYPES)}, "
                f"got {kinds!r}.",
            )
            return
        window = text.get("sliding_window")
        if LAYER_TYPES[1] in kinds and not (type(window) is int and window > 0):
            yield Finding("error", f"{where}: layers with sliding_attention need a sliding_window, got {window!r}.")
        elif LAYER_TYPES[1] in kinds and config.get("model_type") == "qwen3" and not text.get("use_sliding_window"):
            yield Finding(
                "error",
                f'{where} has sliding layers without "use_sliding_window": true, so transformers drops sliding_window '
                "and SGLang cannot start: add it.",
            )
    elif text.get("sliding_window") and text.get("use_sliding_window") is not False:
        yield Finding(
            "warning",
            f"{where} has sliding_window {text['sliding_window']} but no layer_types, so SGLang gives every layer full "
            "attention.",
        )
    causal = text.get("is_causal")
    if causal is not None and not isinstance(causal, bool):
        yield Finding("error", f"{where}: is_causal must be true or false, got {causal!r}.")
    elif causal:
        yield Finding(
            "warning", f"{where}: is_causal is true; DFlash blocks are not causal unless they were trained that way."
        )
    eps = text.get("rms_norm_eps")
    if eps is not None and not _positive_number(eps):
        yield Finding("error", f"{where}: rms_norm_eps must be a positive number, got {eps!r}.")
    yield from _rope_findings(text, target.get("text_config") or target, where)
    dtype = text.get("dtype") or text.get("torch_dtype")
    if dtype is not None and dtype not in _DTYPES:
        yield Finding("warning", f"{where}: dtype {dtype} is none of {', '.join(_DTYPES)}.")


def _positive_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < float("inf")


def _rope_findings(text: dict[str, Any], target: dict[str, Any], where: str) -> Iterator[Finding]:
    spelled = (text, *(text[key] for key in ("rope_scaling", "rope_parameters") if isinstance(text.get(key), dict)))
    wrong = [one["rope_theta"] for one in spelled if one.get("rope_theta") is not None]
    wrong = [value for value in wrong if not _positive_number(value)]
    if wrong:
        yield Finding("error", f"{where}: rope_theta must be a positive number, got {wrong[0]!r}.")
    elif "rope_theta" not in rope_of(text):
        yield Finding(
            "warning",
            f"{where} has no rope_theta, so SGLang falls back to a default; acceptance is poor if the drafter was "
            "trained with another one.",
        )
    longest, served = text.get("max_position_embeddings"), target.get("max_position_embeddings")
    if isinstance(longest, int) and isinstance(served, int) and longest < served:
        yield Finding(
            "warning",
            f"{where}: max_position_embeddings is {longest}, the target's {served}: drafts are poor beyond {longest}.",
        )


def mask_token_findings(mask_token_id: int | None, target_dir: Path, where: str) -> Iterator[Finding]:
    """A mask token that is an ordinary token of the target's vocabulary, as far as its ``tokenizer.json`` is there."""
    if mask_token_id is None:
        return
    tokens = read_tokens(target_dir)
    if tokens is None:
        return
    ordinary, added = tokens
    if mask_token_id in ordinary and mask_token_id not in added:
        yield Finding(
            "warning",
            f"{where}: mask_token_id {mask_token_id} is the ordinary token {ordinary[mask_token_id]!r} of the target; "
            "drafters use a special or an unused one.",
        )


def read_tokens(target_dir: Path) -> tuple[dict[int, str], dict[int, str]] | None:
    """Ordinary and added tokens by id from ``tokenizer.json``; None where it is missing or of another layout."""
    try:
        data = json.loads((target_dir / "tokenizer.json").read_text(encoding="utf-8"))
        added = {int(token["id"]): str(token["content"]) for token in data.get("added_tokens") or []}
        vocab = data["model"]["vocab"]
        # Unigram models list [token, score] pairs, the others map tokens to ids.
        pairs = (
            enumerate(entry[0] for entry in vocab) if isinstance(vocab, list) else ((i, t) for t, i in vocab.items())
        )
        return {int(number): str(token) for number, token in pairs}, added
    except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError):
        return None
