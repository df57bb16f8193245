"""Tiny target and drafter directories on disk: configs and zero weights, a few kilobytes, nothing a model could say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 64, 96, 4, 2, 16, 256
TARGET_LAYERS, DRAFT_LAYERS, TAPS = 6, 2, (1, 2, 4)

SIZES: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "vocab_size": VOCAB,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "torch_dtype": "bfloat16",
}
TARGET: dict[str, Any] = {
    **SIZES,
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": TARGET_LAYERS,
}
#: What makes a target of ``TARGET``'s sizes a Qwen3.5: two layers of linear attention for one of full attention.
HYBRID: dict[str, Any] = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "layer_types": ["linear_attention", "linear_attention", "full_attention"] * (TARGET_LAYERS // 3),
    "full_attention_interval": 3,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": HEAD_DIM,
    "linear_value_head_dim": HEAD_DIM,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "attn_output_gate": True,
    "partial_rotary_factor": 1.0,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
DRAFTER: dict[str, Any] = {
    **SIZES,
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "num_hidden_layers": DRAFT_LAYERS,
    "block_size": 8,
    "num_target_layers": TARGET_LAYERS,
    "dflash_config": {"mask_token_id": 255, "target_layer_ids": list(TAPS)},
}


def drafter_shapes() -> dict[str, tuple[int, ...]]:
    """Tensor names and shapes of ``DRAFTER``, written out by hand: the checks are tested against them."""
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (HIDDEN, len(TAPS) * HIDDEN),
        "hidden_norm.weight": (HIDDEN,),
        "norm.weight": (HIDDEN,),
    }
    for i in range(DRAFT_LAYERS):
        shapes |= {
            f"layers.{i}.input_layernorm.weight": (HIDDEN,),
            f"layers.{i}.post_attention_layernorm.weight": (HIDDEN,),
            f"layers.{i}.self_attn.q_proj.weight": (HEADS * HEAD_DIM, HIDDEN),
            f"layers.{i}.self_attn.k_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
            f"layers.{i}.self_attn.v_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
            f"layers.{i}.self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD_DIM),
            f"layers.{i}.self_attn.q_norm.weight": (HEAD_DIM,),
            f"layers.{i}.self_attn.k_norm.weight": (HEAD_DIM,),
            f"layers.{i}.mlp.gate_proj.weight": (INNER, HIDDEN),
            f"layers.{i}.mlp.up_proj.weight": (INNER, HIDDEN),
            f"layers.{i}.mlp.down_proj.weight": (HIDDEN, INNER),
        }
    return shapes


def write_config(directory: Path, config: dict[str, Any]) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def write_target(directory: Path, **changes: Any) -> Path:
    """A target without weights or tokenizer: enough for everything that happens before a model loads."""
    return write_config(directory, {**TARGET, **changes})


def write_drafter(directory: Path, tensors: dict[str, tuple[int, ...]] | None = None, **changes: Any) -> Path:
    """A drafter; ``tensors`` replaces its tensors, a change to None removes a config key."""
    config = {key: value for key, value in {**DRAFTER, **changes}.items() if value is not None}
    write_config(directory, config)
    shapes = drafter_shapes() if tensors is None else tensors
    save_file(
        {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in shapes.items()},
        directory / "model.safetensors",
    )
    return directory
