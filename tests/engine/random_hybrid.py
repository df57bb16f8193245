"""Random Qwen3.5 text models, dense and mixture of experts: three Gated DeltaNet layers and one of full attention.

With an MTP head, which SGLang runs as ``--speculative-algorithm NEXTN``, if that is asked for.
"""

from __future__ import annotations

from pathlib import Path

import random_models
from random_models import COMMON, HEAD_DIM, HEADS, HIDDEN, INNER, KV_HEADS, LAYERS, VOCAB

KEY_HEADS, VALUE_HEADS, STATE_DIM, WINDOW = 1, 2, 16, 4
EXPERTS, EXPERT_INNER = 4, 32


def write_target(directory: Path, experts: bool = False, mtp: bool = False, layers: int = LAYERS) -> Path:
    kinds = ["linear_attention"] * (layers - 1) + ["full_attention"]
    config = {
        **COMMON,
        "architectures": ["Qwen3_5MoeForCausalLM" if experts else "Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_moe_text" if experts else "qwen3_5_text",
        "num_hidden_layers": layers,
        "layer_types": kinds,
        # SGLang reads this one, transformers the list.
        "full_attention_interval": layers,
        "linear_conv_kernel_dim": WINDOW,
        "linear_key_head_dim": STATE_DIM,
        "linear_value_head_dim": STATE_DIM,
        "linear_num_key_heads": KEY_HEADS,
        "linear_num_value_heads": VALUE_HEADS,
        "attn_output_gate": True,
        "partial_rotary_factor": 1.0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }
    if experts:
        config |= {
            "num_experts": EXPERTS,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": EXPERT_INNER,
            "shared_expert_intermediate_size": EXPERT_INNER,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }
    shapes = {
        "model.embed_tokens.weight": (VOCAB, HIDDEN),
        "model.norm.weight": (HIDDEN,),
        "lm_head.weight": (VOCAB, HIDDEN),
    }
    for layer, kind in enumerate(kinds):
        parts = {"input_layernorm.weight": (HIDDEN,), "post_attention_layernorm.weight": (HIDDEN,)}
        parts |= _full_attention() if kind == "full_attention" else _delta_net()
        parts |= _experts() if experts else _mlp("mlp", INNER)
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in parts.items()}
    if mtp:
        shapes |= _mtp()
    return random_models.write(directory, config, shapes, seed=5)


def _mtp() -> dict[str, tuple[int, ...]]:
    """The names that Qwen's checkpoints give to the layer behind the last one, which predicts one token further."""
    parts = {"input_layernorm.weight": (HIDDEN,), "post_attention_layernorm.weight": (HIDDEN,)}
    parts |= {**_full_attention(), **_mlp("mlp", INNER)}
    return {
        "mtp.fc.weight": (HIDDEN, 2 * HIDDEN),
        "mtp.pre_fc_norm_embedding.weight": (HIDDEN,),
        "mtp.pre_fc_norm_hidden.weight": (HIDDEN,),
        "mtp.norm.weight": (HIDDEN,),
        **{f"mtp.layers.0.{name}": shape for name, shape in parts.items()},
    }


def _full_attention() -> dict[str, tuple[int, ...]]:
    return {
        "self_attn.q_proj.weight": (2 * HEADS * HEAD_DIM, HIDDEN),
        "self_attn.k_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
        "self_attn.v_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
        "self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD_DIM),
        "self_attn.q_norm.weight": (HEAD_DIM,),
        "self_attn.k_norm.weight": (HEAD_DIM,),
    }


def _delta_net() -> dict[str, tuple[int, ...]]:
    keys, values = KEY_HEADS * STATE_DIM, VALUE_HEADS * STATE_DIM
    return {
        "linear_attn.in_proj_qkv.weight": (2 * keys + values, HIDDEN),
        "linear_attn.in_proj_z.weight": (values, HIDDEN),
        "linear_attn.in_proj_b.weight": (VALUE_HEADS, HIDDEN),
        "linear_attn.in_proj_a.weight": (VALUE_HEADS, HIDDEN),
        "linear_attn.conv1d.weight": (2 * keys + values, 1, WINDOW),
        "linear_attn.dt_bias": (VALUE_HEADS,),
        "linear_attn.A_log": (VALUE_HEADS,),
        "linear_attn.norm.weight": (STATE_DIM,),
        "linear_attn.out_proj.weight": (HIDDEN, values),
    }


def _mlp(name: str, inner: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{name}.gate_proj.weight": (inner, HIDDEN),
        f"{name}.up_proj.weight": (inner, HIDDEN),
        f"{name}.down_proj.weight": (HIDDEN, inner),
    }


def _experts() -> dict[str, tuple[int, ...]]:
    shapes = {"mlp.gate.weight": (EXPERTS, HIDDEN), "mlp.shared_expert_gate.weight": (1, HIDDEN)}
    shapes |= _mlp("mlp.shared_expert", EXPERT_INNER)
    for expert in range(EXPERTS):
        shapes |= _mlp(f"mlp.experts.{expert}", EXPERT_INNER)
    return shapes
