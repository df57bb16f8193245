"""A drafter directory as the plain torch model of ``training/model.py``, with the settings that SGLang would use."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from sglang_ddtree.drafter import mask_embedding
from sglang_ddtree.drafter.check import check_pair
from sglang_ddtree.drafter.families import HARMLESS, plain_name
from sglang_ddtree.drafter.files import read_config, weight_files
from sglang_ddtree.drafter.settings import rope_of
from sglang_ddtree.errors import DDTreeError
from sglang_ddtree.training.model import Drafter, DrafterShape

#: transformers' default for Qwen3, which SGLang gets when the config has no RoPE base.
_DEFAULT_THETA = 10000.0


@dataclass
class Replica:
    """``causal`` says for each layer whether a block's positions see only earlier ones, ``windows`` how many positions
    each layer sees, a position's own included (None: all); ``mask_embedding`` [hidden] is its own mask vector."""

    drafter: Drafter
    causal: tuple[bool, ...]
    windows: tuple[int | None, ...]
    mask_embedding: torch.Tensor | None = None

    def set_attention(self, causal: tuple[bool, ...], windows: tuple[int | None, ...]) -> None:
        for layer, is_causal, window in zip(self.drafter.layers, causal, windows, strict=True):
            layer.self_attn.causal, layer.self_attn.window = is_causal, window


def load_replica(draft_dir: Path, target_dir: Path) -> Replica:
    """Read config and weights, in float32.

    Raises:
        DDTreeError: the pair does not fit, or the drafter has something this model lacks.
    """
    info = check_pair(draft_dir, target_dir)
    config = read_config(draft_dir)
    text = config.get("text_config") or config
    rope = rope_of(text)
    problem = None
    if set(rope) - {"rope_theta"}:
        problem = f"scaled RoPE ({rope})"
    elif text.get("attention_bias"):
        problem = "attention biases"
    elif config.get("quantization_config"):
        problem = "quantised weights"
    elif info.block_size is None:
        problem = "a config without block_size"
    elif info.mask_token_id is None:
        problem = "a config without mask_token_id"
    elif not weight_files(draft_dir):
        problem = "pickled weights, which it does not open"
    if problem:
        raise DDTreeError(
            f"{draft_dir}: verify cannot measure a drafter with {problem}; serve it and look at acceptance."
        )
    heads = text["num_attention_heads"]
    assert info.target_layer_ids is not None
    shape = DrafterShape(
        hidden_size=info.hidden_size,
        intermediate_size=text["intermediate_size"],
        num_hidden_layers=info.num_layers,
        num_attention_heads=heads,
        num_key_value_heads=text.get("num_key_value_heads") or heads,
        head_dim=text.get("head_dim") or info.hidden_size // heads,
        vocab_size=info.vocab_size or 0,
        block_size=info.block_size or 0,
        num_target_layers=info.num_target_layers or 0,
        target_layer_ids=info.target_layer_ids,
        mask_token_id=info.mask_token_id or 0,
        rms_norm_eps=float(text.get("rms_norm_eps", 1e-6)),
        rope_theta=float(rope.get("rope_theta", _DEFAULT_THETA)),
    )
    drafter = Drafter(shape)
    # check_pair has seen that all are there; what SGLang ignores is ignored here too.
    drafter.load_state_dict(_weights(draft_dir, shape), strict=False)
    kinds = text.get("layer_types") or ["full_attention"] * info.num_layers
    kinds = kinds[: info.num_layers]
    replica = Replica(
        drafter.float().eval(), _causal(text, kinds), _windows(text, kinds), mask_embedding.read(draft_dir)
    )
    replica.set_attention(replica.causal, replica.windows)
    return replica


def _causal(text: dict[str, Any], kinds: list[str]) -> tuple[bool, ...]:
    """SGLang's rule (models/dflash.py): is_causal where it is given, else sliding layers are causal, full ones not."""
    given = text.get("is_causal")
    return tuple(kind == "sliding_attention" if given is None else bool(given) for kind in kinds)


def _windows(text: dict[str, Any], kinds: list[str]) -> tuple[int | None, ...]:
    return tuple(int(text["sliding_window"]) if kind == "sliding_attention" else None for kind in kinds)


def _weights(draft_dir: Path, shape: DrafterShape) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for path in weight_files(draft_dir):
        found.update({plain_name(name): weight for name, weight in load_file(path).items()})
    query, key = shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
    weights: dict[str, torch.Tensor] = {}
    for name, weight in found.items():
        if HARMLESS.search(name):
            continue
        if fused := re.fullmatch(r"(.*)\.(qkv|gate_up)_proj\.weight", name):
            parts = ("q", "k", "v") if fused[2] == "qkv" else ("gate", "up")
            sizes = [query, key, key] if fused[2] == "qkv" else [shape.intermediate_size] * 2
            weights |= {f"{fused[1]}.{p}_proj.weight": part for p, part in zip(parts, weight.split(sizes), strict=True)}
        else:
            weights[name] = weight
    return weights
