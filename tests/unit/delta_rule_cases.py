"""Random layers of Gated DeltaNet over random trees, for the reference's tests and the kernels'."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sglang_ddtree.tree.delta_rule import Tokens, prepare


@dataclass(frozen=True)
class Layer:
    """One layer's inputs for ``bs`` trees of ``Q`` nodes; see :func:`sglang_ddtree.tree.delta_rule.prepare`."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    a: torch.Tensor
    b: torch.Tensor
    a_log: torch.Tensor
    dt_bias: torch.Tensor
    parents: torch.Tensor
    initial: torch.Tensor

    def tokens(self, dtype: torch.dtype = torch.float32) -> Tokens:
        return prepare(self.q, self.k, self.v, self.a, self.b, self.a_log, self.dt_bias, dtype)


def random_layer(
    seed: int,
    bs: int = 3,
    width: int = 17,
    key_heads: int = 1,
    value_heads: int = 2,
    key_dim: int = 16,
    value_dim: int = 16,
    kind: str = "tree",
    strength: float = 1.0,
    dtype: torch.dtype = torch.float32,
) -> Layer:
    """``strength`` multiplies the decays; ``kind`` as in :func:`random_parents`."""
    rng = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=rng).to(dtype)

    return Layer(
        q=normal(bs, width, key_heads, key_dim),
        k=normal(bs, width, key_heads, key_dim),
        v=normal(bs, width, value_heads, value_dim),
        a=normal(bs, width, value_heads) * 2,
        b=normal(bs, width, value_heads) * 2,
        a_log=torch.rand(value_heads, generator=rng).mul(3).sub(3) + torch.tensor(strength).log(),
        dt_bias=torch.randn(value_heads, generator=rng),
        parents=random_parents(rng, bs, width, kind),
        initial=torch.randn(bs, value_heads, value_dim, key_dim, generator=rng),
    )


def random_parents(rng: torch.Generator, bs: int, width: int, kind: str) -> torch.Tensor:
    """int64 ``[bs, width]``, -1 for the root and for padding.

    ``tree``: any earlier node; ``deep``: one of the last three; ``chain``; ``star``: the root; ``padded``: like tree,
    and each tree ends somewhere.
    """
    node = torch.arange(width).expand(bs, width)
    draw = torch.rand(bs, width, generator=rng)
    earlier = (draw * node).to(torch.int64)
    parents = {
        "tree": earlier,
        "padded": earlier,
        "deep": (node - 1 - (draw * 3).to(torch.int64)).clamp(min=0),
        "chain": node - 1,
        "star": torch.zeros_like(node),
    }[kind].clone()
    parents[:, 0] = -1
    if kind == "padded":
        ends = torch.randint(1, width + 1, (bs, 1), generator=rng)
        parents[node >= ends] = -1
    return parents
