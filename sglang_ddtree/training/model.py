"""The DFlash drafter in plain torch: the same function as SGLang 0.5.23's ``models/dflash.py``, made for training.

Context tokens enter as keys and values only: ``hidden_norm(fc(taps))`` goes straight into every layer's k_proj and
v_proj. A block is the embedding of the last committed token followed by mask embeddings; inside a block attention is
not causal, and a block sees the context before its first position. Embedding and LM head are the target's.

Shapes: ``b`` sequences, ``s`` context tokens, ``a`` blocks per sequence, ``B`` block size, ``h`` hidden size.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional

from sglang_ddtree.training.target import rotary_table, rotate


@dataclass(frozen=True)
class DrafterShape:
    """Sizes of a drafter; the field names are those of its config.json."""

    hidden_size: int = 576
    intermediate_size: int = 1024
    num_hidden_layers: int = 2
    num_attention_heads: int = 9
    num_key_value_heads: int = 3
    head_dim: int = 64
    vocab_size: int = 49152
    block_size: int = 8
    num_target_layers: int = 30
    target_layer_ids: tuple[int, ...] = (3, 10, 17, 23, 28)
    mask_token_id: int = 16
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    max_position_embeddings: int = 8192


class Attention(nn.Module):
    """Grouped-query attention of block tokens over context and block, with per-head norms of queries and keys."""

    def __init__(self, shape: DrafterShape):
        super().__init__()
        self.shape = shape
        h, d = shape.hidden_size, shape.head_dim
        self.q_proj = nn.Linear(h, shape.num_attention_heads * d, bias=False)
        self.k_proj = nn.Linear(h, shape.num_key_value_heads * d, bias=False)
        self.v_proj = nn.Linear(h, shape.num_key_value_heads * d, bias=False)
        self.o_proj = nn.Linear(shape.num_attention_heads * d, h, bias=False)
        self.q_norm = nn.RMSNorm(d, eps=shape.rms_norm_eps)
        self.k_norm = nn.RMSNorm(d, eps=shape.rms_norm_eps)
        self.causal = False  # within a block; some drafters' sliding layers are
        self.window: int | None = None  # positions a row sees, its own included; None: all

    def keys_values(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """x [..., n, h], cos and sin [..., n, d] -> keys, values [..., kv, n, d]."""
        kv, d = self.shape.num_key_value_heads, self.shape.head_dim
        k = self.k_norm(self.k_proj(x).unflatten(-1, (kv, d)))
        k = rotate(k, cos.unsqueeze(-2), sin.unsqueeze(-2))
        return k.transpose(-2, -3), self.v_proj(x).unflatten(-1, (kv, d)).transpose(-2, -3)

    def forward(
        self,
        x: torch.Tensor,
        context: torch.Tensor,
        context_rotary: tuple[torch.Tensor, torch.Tensor],
        block_rotary: tuple[torch.Tensor, torch.Tensor],
        distance: torch.Tensor,
        first_row: int,
    ) -> torch.Tensor:
        """x [b, a, B, h], context [b, s, h] -> rows first_row .. B-1.

        ``distance`` [b, a, s] is how far each context position lies before the block's first; where it is not positive
        the position is not visible.
        """
        b, a, size, _ = x.shape
        size -= first_row
        heads, kv, d = self.shape.num_attention_heads, self.shape.num_key_value_heads, self.shape.head_dim
        group, s = heads // kv, context.shape[1]
        q = self.q_norm(self.q_proj(x[:, :, first_row:]).unflatten(-1, (heads, d)))
        cos, sin = (table[:, :, first_row:] for table in block_rotary)
        q = rotate(q, cos.unsqueeze(-2), sin.unsqueeze(-2)) * d**-0.5
        q = q.view(b, a, size, kv, group, d).permute(0, 3, 1, 4, 2, 5)  # [b, kv, a, group, B, d]
        context_k, context_v = self.keys_values(context, *context_rotary)  # [b, kv, s, d]
        block_k, block_v = self.keys_values(x, *block_rotary)  # [b, a, kv, B, d]
        far = torch.matmul(q.reshape(b, kv, a * group * size, d), context_k.transpose(2, 3))
        rows = torch.arange(first_row, size + first_row)
        hidden = (distance <= 0)[:, :, None]
        if self.window is not None:
            hidden = (hidden | (distance[:, :, None] + rows[:, None] >= self.window)).repeat(1, 1, group, 1)
        far = far.view(b, kv, a, group * size, s).masked_fill(hidden[:, None], float("-inf"))
        near = torch.matmul(q.reshape(b, kv, a, group * size, d), block_k.permute(0, 2, 1, 4, 3))
        if self.causal or self.window is not None:
            behind = rows[:, None] - torch.arange(size + first_row)
            unseen = torch.zeros_like(behind, dtype=torch.bool)
            if self.causal:
                unseen |= behind < 0
            if self.window is not None:
                unseen |= behind >= self.window
            near = near.masked_fill(unseen.repeat(group, 1), float("-inf"))
        weights = torch.cat([far, near], dim=-1).softmax(-1)
        out = torch.matmul(weights[..., :s].reshape(b, kv, a * group * size, s), context_v)
        out = out.view(b, kv, a, group * size, d) + torch.matmul(weights[..., s:], block_v.transpose(1, 2))
        out = out.view(b, kv, a, group, size, d).permute(0, 2, 4, 1, 3, 5).reshape(b, a, size, heads * d)
        return self.o_proj(out)


class Mlp(nn.Module):
    """SwiGLU."""

    def __init__(self, shape: DrafterShape):
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """Pre-norm decoder layer; the context is not normed again, it comes out of hidden_norm."""

    def __init__(self, shape: DrafterShape):
        super().__init__()
        self.input_layernorm = nn.RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)
        self.mlp = Mlp(shape)

    def forward(
        self, x: torch.Tensor, context: torch.Tensor, *attention, first_row: int = 0, dropout: float = 0.0
    ) -> torch.Tensor:
        """x [b, a, B, h] -> [b, a, B - first_row, h]; all B rows serve as keys and values."""
        attended = self.self_attn(self.input_layernorm(x), context, *attention, first_row)
        x = x[:, :, first_row:] + functional.dropout(attended, dropout, self.training)
        return x + functional.dropout(self.mlp(self.post_attention_layernorm(x)), dropout, self.training)


class Drafter(nn.Module):
    """Parameter names are those of the z-lab checkpoints, so that the state dict is the checkpoint."""

    def __init__(self, shape: DrafterShape):
        super().__init__()
        self.shape = shape
        h = shape.hidden_size
        self.fc = nn.Linear(len(shape.target_layer_ids) * h, h, bias=False)
        self.hidden_norm = nn.RMSNorm(h, eps=shape.rms_norm_eps)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_hidden_layers))
        self.norm = nn.RMSNorm(h, eps=shape.rms_norm_eps)

    def project(self, taps: torch.Tensor) -> torch.Tensor:
        """Taps [b, s, len(target_layer_ids) * h] -> context [b, s, h]."""
        return self.hidden_norm(self.fc(taps))

    def forward(
        self,
        context: torch.Tensor,
        anchors: torch.Tensor,
        block: torch.Tensor,
        positions: torch.Tensor | None = None,
        first_row: int = 0,
        dropout: float = 0.0,
    ) -> torch.Tensor:
        """Hidden states of blocks after the final norm.

        context [b, s, h] of project(), at positions 0 .. s-1 unless ``positions`` [s] says otherwise; anchors [b, a]
        are the positions of the blocks' first tokens, and a block sees the context before its anchor; block
        [b, a, B, h] are token embeddings. Returns [b, a, B - first_row, h]; row k of a block predicts the token at
        anchor + k, so row 0 is of no use and first_row = 1 saves computing it in the last layer.
        """
        s, size = context.shape[1], block.shape[2]
        if positions is None:
            positions = torch.arange(s)
        table = rotary_table(
            self.shape.head_dim, self.shape.rope_theta, int(max(anchors.max(), positions.max())) + size + 1
        )
        context_rotary = (table[0][positions], table[1][positions])
        block_positions = anchors[..., None] + torch.arange(size)
        block_rotary = (table[0][block_positions], table[1][block_positions])
        distance = anchors[..., None] - positions
        x = block
        for layer in self.layers:
            skip = first_row if layer is self.layers[-1] else 0
            x = layer(x, context, context_rotary, block_rotary, distance, first_row=skip, dropout=dropout)
        return self.norm(x)


def block_embeddings(
    embed: torch.Tensor, tokens: torch.Tensor, shape: DrafterShape, size: int | None = None
) -> torch.Tensor:
    """Embeddings [..., B, h] of blocks that begin with ``tokens`` [...] and go on with masks."""
    ids = torch.full((*tokens.shape, size or shape.block_size), shape.mask_token_id)
    ids[..., 0] = tokens
    return functional.embedding(ids, embed)


def drafter_config(shape: DrafterShape) -> dict:
    """config.json of a drafter, as SGLang reads it."""
    fields = asdict(shape)
    dflash = {
        "mask_token_id": fields.pop("mask_token_id"),
        "target_layer_ids": list(fields.pop("target_layer_ids")),
    }
    layers = shape.num_hidden_layers
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        **fields,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},
        "use_sliding_window": False,
        "sliding_window": None,
        "max_window_layers": layers,
        "layer_types": ["full_attention"] * layers,
        "tie_word_embeddings": True,
        "initializer_range": 0.02,
        "use_cache": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
        "dflash_config": dflash,
    }


def save_drafter(drafter: Drafter, directory: Path) -> None:
    """Write config.json and bf16 model.safetensors."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(drafter_config(drafter.shape), indent=2) + "\n")
    tensors = {name: tensor.detach().bfloat16().contiguous() for name, tensor in drafter.state_dict().items()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def load_drafter(directory: Path, dtype: torch.dtype = torch.float32) -> Drafter:
    """Read a drafter directory; weights that are missing or unexpected are errors."""
    config = json.loads((directory / "config.json").read_text())
    dflash = config["dflash_config"]
    known = {**config, "mask_token_id": dflash["mask_token_id"], "target_layer_ids": tuple(dflash["target_layer_ids"])}
    shape = DrafterShape(**{name: known[name] for name in DrafterShape.__dataclass_fields__})
    drafter = Drafter(shape)
    drafter.load_state_dict(load_file(directory / "model.safetensors"))
    return drafter.to(dtype).eval()
