"""Files with the headers of published drafters: true names, shapes and offsets, sparse data, a few kB on disk."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Published:
    """``expected`` are the fields of the published config.json, nested ones flattened."""

    hidden: int
    inner: int
    heads: int
    kv_heads: int
    norms: str
    target: dict[str, Any]
    expected: dict[str, Any]


def _expected(published_fields: dict[str, Any]) -> dict[str, Any]:
    common = {"architectures": ["DFlashDraftModel"], "model_type": "qwen3", "num_hidden_layers": 5}
    return {**common, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, **published_fields}


PUBLISHED = {
    "Qwen3-8B-DFlash-b16": Published(
        4096,
        12288,
        32,
        8,
        "BF16",
        {"model_type": "qwen3", "hidden_size": 4096, "num_hidden_layers": 36, "vocab_size": 151936}
        | {"max_position_embeddings": 40960},
        _expected(
            {"hidden_size": 4096, "intermediate_size": 12288, "vocab_size": 151936, "num_target_layers": 36}
            | {"block_size": 16, "mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]}
            | {"rms_norm_eps": 1e-6, "rope_theta": 1e6, "layer_types": ["full_attention"] * 5}
            | {"sliding_window": None, "is_causal": None}
        ),
    ),
    "Qwen3.6-27B-DFlash": Published(
        5120,
        17408,
        32,
        8,
        "F32",
        {
            "model_type": "qwen3_5",
            "text_config": {"hidden_size": 5120, "num_hidden_layers": 64, "vocab_size": 248320, "head_dim": 256}
            | {"num_attention_heads": 24, "num_key_value_heads": 4, "max_position_embeddings": 262144},
        },
        _expected(
            {"hidden_size": 5120, "intermediate_size": 17408, "vocab_size": 248320, "num_target_layers": 64}
            | {"block_size": 16, "mask_token_id": 248070, "target_layer_ids": [1, 16, 31, 46, 61]}
            | {"rms_norm_eps": 1e-6, "rope_theta": 1e7, "sliding_window": 2048, "is_causal": None}
            | {"layer_types": ["sliding_attention"] * 4 + ["full_attention"], "use_sliding_window": True}
        ),
    ),
}


def published_shapes(published: Published) -> dict[str, tuple[int, ...]]:
    hidden, inner = published.hidden, published.inner
    query, key = 128 * published.heads, 128 * published.kv_heads
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, 5 * hidden),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    for i in range(5):
        shapes |= {
            f"layers.{i}.input_layernorm.weight": (hidden,),
            f"layers.{i}.post_attention_layernorm.weight": (hidden,),
            f"layers.{i}.self_attn.q_proj.weight": (query, hidden),
            f"layers.{i}.self_attn.k_proj.weight": (key, hidden),
            f"layers.{i}.self_attn.v_proj.weight": (key, hidden),
            f"layers.{i}.self_attn.o_proj.weight": (hidden, query),
            f"layers.{i}.self_attn.q_norm.weight": (128,),
            f"layers.{i}.self_attn.k_norm.weight": (128,),
            f"layers.{i}.mlp.gate_proj.weight": (inner, hidden),
            f"layers.{i}.mlp.up_proj.weight": (inner, hidden),
            f"layers.{i}.mlp.down_proj.weight": (hidden, inner),
        }
    return shapes


def sparse_drafter(path: Path, published: Published) -> Path:
    """Write the file; its size is the true one, its data a hole."""
    header: dict[str, Any] = {}
    end = 0
    for name, shape in published_shapes(published).items():
        dtype = published.norms if len(shape) == 1 else "BF16"
        begin, end = end, end + math.prod(shape) * (4 if dtype == "F32" else 2)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    return path
