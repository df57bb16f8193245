"""SGLang's small layers with fewer torch calls.

A decode step on a CPU makes thousands of torch calls on tensors of a few kilobytes, and each costs microseconds
whatever its size: SGLang's reference forms of these layers took a third of the step. The results are the same up to
rounding in the last place, and all of plain decoding, DFLASH and DDTREE run them.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from sglang.kernels.fused_op import BaseFusedOp
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding

PLATFORM_KEY = "native"


def register() -> None:
    BaseFusedOp.register_oot_forward(RMSNorm, rms_norm, PLATFORM_KEY)
    BaseFusedOp.register_oot_forward(RotaryEmbedding, rotary_embedding, PLATFORM_KEY)


def rms_norm(
    self: RMSNorm,
    x: torch.Tensor,
    residual: torch.Tensor | None = None,
    post_residual_addition: torch.Tensor | None = None,
    quant_linear: Any = None,
) -> Any:
    """``RMSNorm.forward_native`` in one fused call; norms with special options go to SGLang's own."""
    if (
        post_residual_addition is not None
        or self.variance_size_override is not None
        or self.override_orig_dtype is not None
        or self.fp32_residual
        or self.cast_x_before_out_mul
    ):
        return self.forward_native(x, residual, post_residual_addition, quant_linear)
    dtype = x.dtype
    total = x.float() if residual is None else x.float() + residual.float()
    out = F.rms_norm(total, (self.hidden_size,), self.weight.float(), self.variance_epsilon).to(dtype)
    return out if residual is None else (out, total.to(dtype))


def rotary_embedding(
    self: RotaryEmbedding,
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    offsets: torch.Tensor | None = None,
    fused_set_kv_buffer_arg: Any = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``RotaryEmbedding.forward_native`` with query and key heads rotated in one pass."""
    if (
        offsets is not None
        or fused_set_kv_buffer_arg is not None
        or not self.is_neox_style
        or self.rotary_dim != self.head_size
        or hasattr(self, "sin_cos_cache")
    ):
        return self.forward_native(positions, query, key, offsets, fused_set_kv_buffer_arg)
    tokens = positions.numel()
    heads = torch.cat((query.view(tokens, -1, self.head_size), key.view(tokens, -1, self.head_size)), 1)
    cos_sin = self.cos_sin_cache.index_select(0, positions.flatten()).unsqueeze(1).to(heads.dtype)
    cos, sin = cos_sin.chunk(2, -1)
    first, second = heads.chunk(2, -1)
    rotated = torch.empty_like(heads)
    half = self.head_size // 2
    torch.addcmul(first * cos, second, sin, value=-1, out=rotated[..., :half])
    torch.addcmul(second * cos, first, sin, out=rotated[..., half:])
    split = query.shape[-1] // self.head_size if query.dim() == 2 else query.shape[1]
    return rotated[:, :split].reshape(query.shape), rotated[:, split:].reshape(key.shape)
