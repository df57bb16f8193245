"""Drafters whose settings are known: what their weights cannot say, and how to recognise them.

Where the sha256 of the weights is known it decides; otherwise the sizes do, together with those of the target. Sizes
do not tell a retrained drafter from the published one, so a match by sizes is said to be one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sglang_ddtree.drafter.sizes import Sizes


@dataclass(frozen=True)
class KnownDrafter:
    """``key``: hidden, intermediate, layers, heads, KV heads, head_dim, taps; target layers, target vocabulary.

    ``fields`` are config.json fields by the names ``prepare`` uses. ``unsure`` names those that were deduced from
    sibling checkpoints and not read from this one's own config.
    """

    name: str
    key: tuple[int, ...]
    fields: dict[str, Any]
    sha256: str | None = None
    unsure: tuple[str, ...] = ()


# Values from public converters' tests and loader logs that quote the published configs.
KNOWN = (
    KnownDrafter(
        name="z-lab/Qwen3-8B-DFlash-b16",
        key=(4096, 12288, 5, 32, 8, 128, 5, 36, 151936),
        fields={
            "block_size": 16,
            "mask_token_id": 151669,
            "target_layer_ids": [1, 9, 17, 25, 33],
            "rope_theta": 1000000.0,
            "rms_norm_eps": 1e-6,
            "layer_types": ["full_attention"] * 5,
            "sliding_window": None,
            "is_causal": None,
        },
        unsure=("layer_types",),
    ),
    KnownDrafter(
        name="z-lab/Qwen3.6-27B-DFlash",
        key=(5120, 17408, 5, 32, 8, 128, 5, 64, 248320),
        fields={
            "block_size": 16,
            "mask_token_id": 248070,
            "target_layer_ids": [1, 16, 31, 46, 61],
            "rope_theta": 10000000.0,
            "rms_norm_eps": 1e-6,
            "layer_types": ["sliding_attention"] * 4 + ["full_attention"],
            "sliding_window": 2048,
            "is_causal": None,
        },
        unsure=("is_causal",),
    ),
    KnownDrafter(
        name="smollm2-135m-dflash-b8 (shipped with sglang-ddtree)",
        key=(576, 1024, 2, 9, 3, 64, 5, 30, 49152),
        fields={
            "block_size": 8,
            "mask_token_id": 16,
            "target_layer_ids": [3, 10, 17, 23, 28],
            "rope_theta": 100000.0,
            "rms_norm_eps": 1e-6,
            "layer_types": ["full_attention"] * 2,
            "sliding_window": None,
            "is_causal": None,
        },
        sha256="b9a4bf91c163d2b041b6eca55101b7b4504f8c4e070a4f39f0a76e9006f9668f",
    ),
)


def candidate(sizes: Sizes, taps: int, target_layers: int, target_vocab: int | None) -> KnownDrafter | None:
    """The known drafter of these sizes. Its ``sha256``, where given, is still to be compared."""
    s = sizes
    layers = (s.hidden_size, s.intermediate_size, s.num_hidden_layers, s.num_attention_heads, s.num_key_value_heads)
    key = (*layers, s.head_dim, taps, target_layers, target_vocab or 0)
    return next((known for known in KNOWN if known.key == key), None)
