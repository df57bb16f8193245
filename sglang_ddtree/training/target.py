"""A lean fp32 forward pass of a Llama-type target for batched greedy generation on a CPU.

transformers does the same, but its cache and mask handling cost as much as the model itself at this size. Shapes:
``b`` sequences, ``t`` new tokens, ``s`` tokens in the cache, ``h`` hidden, ``g`` query heads per KV head.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch.nn import functional


@dataclass
class Target:
    """Weights of the target in fp32, prepared for the forward pass."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    theta: float
    embed: torch.Tensor  # [vocab, h]; also the LM head
    norm: torch.Tensor  # [h]
    blocks: list[dict[str, torch.Tensor]] = field(repr=False)
    cos: torch.Tensor = field(repr=False)  # [max positions, head_dim]
    sin: torch.Tensor = field(repr=False)


def load_target(directory: Path, max_positions: int = 2048, dtype: torch.dtype = torch.float32) -> Target:
    """Read a Llama directory with tied embeddings."""
    config = json.loads((directory / "config.json").read_text())
    weights = {name: tensor.to(dtype) for name, tensor in load_file(directory / "model.safetensors").items()}
    blocks = []
    for i in range(config["num_hidden_layers"]):
        part = {name.split(f"layers.{i}.")[1]: w for name, w in weights.items() if f".layers.{i}." in name}
        blocks.append(
            {
                "norm1": part["input_layernorm.weight"],
                "norm2": part["post_attention_layernorm.weight"],
                "qkv": torch.cat([part[f"self_attn.{n}_proj.weight"] for n in "qkv"]).contiguous(),
                "out": part["self_attn.o_proj.weight"],
                "gate_up": torch.cat([part["mlp.gate_proj.weight"], part["mlp.up_proj.weight"]]).contiguous(),
                "down": part["mlp.down_proj.weight"],
            }
        )
    theta = (config.get("rope_parameters") or config)["rope_theta"]
    cos, sin = rotary_table(config["head_dim"], theta, max_positions)
    return Target(
        layers=config["num_hidden_layers"],
        hidden=config["hidden_size"],
        heads=config["num_attention_heads"],
        kv_heads=config["num_key_value_heads"],
        head_dim=config["head_dim"],
        eps=config["rms_norm_eps"],
        theta=theta,
        embed=weights["model.embed_tokens.weight"],
        norm=weights["model.norm.weight"],
        blocks=blocks,
        cos=cos.to(dtype),
        sin=sin.to(dtype),
    )


def rotary_table(head_dim: int, theta: float, positions: int) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin [positions, head_dim] of rotary embeddings with half-split pairs."""
    frequencies = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    angles = torch.arange(positions, dtype=torch.float32)[:, None] * frequencies
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of x [..., head_dim] with cos and sin that broadcast to it."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


class Cache:
    """Keys [layers, b, kv, s, d] and values of the same shape, written in place."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor):
        self.keys, self.values = keys, values

    @classmethod
    def empty(cls, target: Target, batch: int, length: int) -> Cache:
        """A cache for ``batch`` sequences of up to ``length`` tokens."""
        shape = (target.layers, batch, target.kv_heads, length, target.head_dim)
        return cls(torch.zeros(shape, dtype=target.embed.dtype), torch.zeros(shape, dtype=target.embed.dtype))

    def part(self, rows: slice) -> Cache:
        """The same memory, seen as a cache of some of the sequences."""
        return Cache(self.keys[:, rows], self.values[:, rows])

    def keep(self, rows: torch.Tensor) -> None:
        """Drop all sequences but ``rows`` (ascending): rows are moved to the front, memory stays."""
        count = len(rows)
        for layer in range(self.keys.shape[0]):
            self.keys[layer, :count] = self.keys[layer, rows]
            self.values[layer, :count] = self.values[layer, rows]


def forward(
    target: Target,
    tokens: torch.Tensor,
    positions: torch.Tensor,
    cache: Cache,
    start: int,
    mask: torch.Tensor,
    taps: tuple[int, ...] = (),
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run tokens [b, t] that are stored at cache columns start .. start+t.

    positions [b, t]; mask [b, t, start+t], added to the scores. Returns the final normed hidden states [b, t, h] and
    the hidden states after the layers ``taps``, concatenated [b, t, len(taps) * h].
    """
    b, t = tokens.shape
    d, kv = target.head_dim, target.kv_heads
    group = target.heads // kv
    end = start + t
    x = functional.embedding(tokens, target.embed)
    cos, sin = target.cos[positions][:, :, None], target.sin[positions][:, :, None]
    tapped = []
    # Query heads of one KV head are rows of one matrix product, so K and V need not be repeated.
    rows_mask = mask[:, None].repeat(1, 1, group, 1) if t > 1 else mask[:, None]
    for i, block in enumerate(target.blocks):
        y = functional.rms_norm(x, (target.hidden,), block["norm1"], target.eps)
        qkv = functional.linear(y, block["qkv"]).view(b, t, target.heads + 2 * kv, d)
        rotated = rotate(qkv[:, :, : target.heads + kv], cos, sin)
        cache.keys[i, :b, :, start:end] = rotated[:, :, target.heads :].transpose(1, 2)
        cache.values[i, :b, :, start:end] = qkv[:, :, target.heads + kv :].transpose(1, 2)
        q = rotated[:, :, : target.heads].view(b, t, kv, group, d).permute(0, 2, 3, 1, 4).reshape(b, kv, group * t, d)
        scores = torch.matmul(q, cache.keys[i, :b, :, :end].transpose(2, 3)).mul_(d**-0.5).add_(rows_mask)
        attended = torch.matmul(scores.softmax(-1), cache.values[i, :b, :, :end])
        attended = attended.view(b, kv, group, t, d).permute(0, 3, 1, 2, 4).reshape(b, t, target.heads * d)
        x = x + functional.linear(attended, block["out"])
        y = functional.rms_norm(x, (target.hidden,), block["norm2"], target.eps)
        # Features first: W @ y.T runs up to a third faster than y @ W.T at these sizes.
        gate, up = torch.mm(block["gate_up"], y.view(b * t, -1).T).chunk(2, dim=0)
        x = x + torch.mm(block["down"], functional.silu(gate).mul_(up)).T.reshape(x.shape)
        if i in taps:
            tapped.append(x)
    final = functional.rms_norm(x, (target.hidden,), target.norm, target.eps)
    return final, torch.cat(tapped, dim=-1) if tapped else final[..., :0]
