"""A start for the drafter's attention: heads that look a fixed number of tokens back.

Random queries and keys spread attention evenly over the context, and a drafter needs several hundred steps until a
mask has found the last committed token. Here some heads get queries and keys with a large constant part. Rotary
embeddings turn the product of two constants into a function of the distance alone, which peaks where we want it.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from sglang_ddtree.training.corpus import Sequence
from sglang_ddtree.training.model import Drafter, block_embeddings
from sglang_ddtree.training.target import rotary_table, rotate

# Distance at which each query head looks, None: left as it is. Three query heads share one key head.
OFFSETS = (1, 2, 3, 4, 5, 7, None, None, None)
FAST_PAIRS = 12  # rotary pairs that turn fast enough to tell neighbours apart
STRENGTH = 12.0  # length of the constant part; the random part has length 8 (the root of the head size)
SHARPNESS = 1.5  # weight of q_norm


@torch.no_grad()
def start_local_heads(drafter: Drafter, embed: torch.Tensor, sequences: list[Sequence]) -> None:
    """Give every layer local heads, layer by layer, with the inputs that the layers see on some of the text."""
    shape = drafter.shape
    d, group = shape.head_dim, shape.num_attention_heads // shape.num_key_value_heads
    cos, sin = rotary_table(d, shape.rope_theta, 16)
    constant = torch.zeros(d)
    constant[:FAST_PAIRS] = 1.0
    constant = functional.normalize(constant, dim=0) * STRENGTH
    for number, layer in enumerate(drafter.layers):
        x, context = layer_inputs(drafter, embed, sequences, number)
        # The same direction must be constant for both kinds of keys.
        reader = constant_reader(torch.cat([x[: len(context)], context]))
        attention = layer.self_attn
        for head, offset in enumerate(OFFSETS[: shape.num_attention_heads]):
            if offset is None:
                continue
            # Rotating by -offset: cos is even, sin is odd.
            query = rotate(constant, cos[offset], -sin[offset])
            attention.q_proj.weight[head * d : (head + 1) * d] += torch.outer(query, reader)
            if head % group == 0:
                key_head = head // group
                attention.k_proj.weight[key_head * d : (key_head + 1) * d] += torch.outer(constant, reader)
        attention.q_norm.weight.fill_(SHARPNESS)


def layer_inputs(
    drafter: Drafter, embed: torch.Tensor, sequences: list[Sequence], number: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """What layer ``number`` makes queries and keys of: normed block rows [n, h] and context tokens [m, h]."""
    rows, contexts = [], []
    hook = drafter.layers[number].input_layernorm.register_forward_hook(
        lambda module, inputs, output: rows.append(output.flatten(0, -2))
    )
    for q in sequences:
        anchors = torch.arange(q.prompt, len(q.tokens) - 1)[None]
        context = drafter.project(q.taps[None].float())
        drafter(context, anchors, block_embeddings(embed, q.tokens[anchors].long(), drafter.shape))
        contexts.append(context[0, q.prompt : -1])
    hook.remove()
    x = torch.cat(rows)
    return x[torch.randperm(len(x), generator=torch.Generator().manual_seed(0))], torch.cat(contexts)


def constant_reader(x: torch.Tensor, ridge: float = 0.01) -> torch.Tensor:
    """w [h] with w . x close to 1 for the rows of x [n, h], by ridge regression."""
    second = x.T @ x / len(x)
    second.diagonal().add_(ridge * second.diagonal().mean())
    return torch.linalg.solve(second, x.mean(0))
