"""Sizes of a plain DFlash drafter, read off the shapes of its tensors."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from sglang_ddtree.drafter.header import TensorInfo
from sglang_ddtree.errors import DDTreeError

_DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}


@dataclass(frozen=True)
class Sizes:
    """What the shapes say. ``tap_width`` is the number of inputs of ``fc``: taps times the target's hidden size.

    ``dtype`` is torch's name of the matrices' type (norms may be stored in another one), or the header's word where
    torch has none.
    """

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    attention_bias: bool
    tap_width: int
    dtype: str

    def taps(self, target_hidden: int) -> int:
        """Number of target layers the drafter reads.

        Raises:
            DDTreeError: the widths do not divide.
        """
        if self.tap_width % target_hidden:
            raise DDTreeError(
                f"fc.weight has {self.tap_width} inputs, not a multiple of the target's hidden size {target_hidden}: "
                "give the target this drafter was trained for."
            )
        return self.tap_width // target_hidden

    def as_config(self) -> dict[str, Any]:
        """The config.json fields that follow from the shapes."""
        fields = vars(self).copy()
        del fields["tap_width"]
        return fields


def read_sizes(tensors: dict[str, TensorInfo], where: str) -> Sizes:
    """Sizes from tensors by plain name (``families.plain_name``).

    Raises:
        DDTreeError: a tensor that is needed is missing or has an impossible shape.
    """

    def shape(name: str, dimensions: int) -> tuple[int, ...]:
        info = tensors.get(name)
        if info is None:
            raise DDTreeError(f"{where} has no tensor {name}: it is not a complete DFlash drafter.")
        if len(info.shape) != dimensions or 0 in info.shape:
            raise DDTreeError(f"{where}: {name} has shape {list(info.shape)}, which no DFlash drafter has.")
        return info.shape

    hidden, tap_width = shape("fc.weight", 2)
    (head_dim,) = shape("layers.0.self_attn.q_norm.weight", 1)
    query = shape("layers.0.self_attn.o_proj.weight", 2)[1]
    if "layers.0.self_attn.qkv_proj.weight" in tensors:
        key = (shape("layers.0.self_attn.qkv_proj.weight", 2)[0] - query) // 2
    else:
        key = shape("layers.0.self_attn.k_proj.weight", 2)[0]
    if query % head_dim or key % head_dim or key < head_dim:
        raise DDTreeError(f"{where}: {query} query and {key} key rows are not whole heads of {head_dim}.")
    layers = {int(match[1]) for name in tensors if (match := re.match(r"layers\.(\d{1,4})\.", name))}
    return Sizes(
        hidden_size=hidden,
        intermediate_size=shape("layers.0.mlp.down_proj.weight", 2)[1],
        num_hidden_layers=1 + max(layers),
        num_attention_heads=query // head_dim,
        num_key_value_heads=key // head_dim,
        head_dim=head_dim,
        attention_bias="layers.0.self_attn.o_proj.bias" in tensors,
        tap_width=tap_width,
        dtype=_DTYPES.get(tensors["fc.weight"].dtype, tensors["fc.weight"].dtype),
    )
