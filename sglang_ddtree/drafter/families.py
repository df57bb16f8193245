"""Which method a drafter belongs to. Only plain DFlash drafters can be served with DDTREE."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

DFLASH = "DFlash"
NOT_A_DRAFTER = "not a drafter"

#: Drafters that share DFlash's config but are another method; each needs a worker of its own.
_OTHER_TENSORS = (
    ("DFlash2", re.compile(r"\b(attention_conv|mlp_conv|candidate_selector)\.")),
    ("DSpark", re.compile(r"\bmarkov_head\b")),
    ("Domino", re.compile(r"^(prefix_gru|embed_proj)\.")),
    ("LiLiCorr", re.compile(r"^lilicorr\.")),
    ("attention-sink DFlash", re.compile(r"\battention_sink_bias$")),
)
#: Names of SGLang's vendor export (``models/dflash.py: load_weights``).
_ALIASES = {"encoder.fc.weight": "fc.weight", "encoder.output_norm_enc.weight": "hidden_norm.weight"}
#: Buffers that older exporters saved and that carry no weights, and the side file of ``mask_embedding.py``.
HARMLESS = re.compile(r"rotary_emb\.(inv_freq|cos_cached|sin_cached)$|^mask_embedding$")


def plain_name(name: str) -> str:
    """A tensor's name as z-lab's checkpoints spell it."""
    return _ALIASES.get(name, name.removeprefix("model."))


def family_of(names: Collection[str]) -> str:
    """The method by tensor names (plain ones): ``DFLASH``, another method's name, or ``NOT_A_DRAFTER``."""
    if "fc.weight" not in names and "hidden_norm.weight" not in names:
        return NOT_A_DRAFTER
    for family, pattern in _OTHER_TENSORS:
        if any(pattern.search(name) for name in names):
            return family
    return DFLASH


def other_family(config: dict[str, Any], names: Collection[str]) -> str | None:
    """The name of another method that the config or the tensors show, None when neither does."""
    nested = config.get("dflash_config")
    nested = nested if isinstance(nested, dict) else {}
    name = architecture(config) or ""
    by_config = (
        ("DFlash2", "DFlash2" in name or any(nested.get(k) for k in ("conv_kernel_size", "conv_group_size"))),
        ("DFlash2 (selector)", any(nested.get(key) for key in ("selector_rank", "selector_top_k"))),
        ("DSpark", "DSpark" in name or any(bool(c.get("markov_rank")) for c in (nested, config))),
        ("Domino", nested.get("projector_type", config.get("projector_type")) == "domino"),
        ("LiLiCorr", "LiLiCorr" in name or bool(nested.get("lilicorr_enabled"))),
        ("Laguna DFlash", "Laguna" in name),
        ("Muse DFlash", "MuseGlimmer" in name),
        ("attention-sink DFlash", any(bool(c.get("attention_sink_bias")) for c in (nested, config))),
    )
    for family, found in by_config:
        if found:
            return family
    for family, pattern in _OTHER_TENSORS:
        if any(pattern.search(tensor) for tensor in names):
            return family
    return None


def architecture(config: dict[str, Any]) -> str | None:
    """The first of a config's ``architectures``."""
    names = config.get("architectures")
    return names[0] if isinstance(names, list) and names and isinstance(names[0], str) else None
