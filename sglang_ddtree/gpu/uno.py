"""SGLang's own best-first tree builder, UNO's, on the candidates that ours takes: the same trees, and which is faster.

UNO's kernel (``kernels/ops/speculative/uno_tree.py``) gives tokens, parents and weights; SGLang makes links and mask of
them with another. Ours writes the links too. Ties are ordered differently: by rank and token there, by parent here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import triton

from sglang_ddtree.gpu.cases import Size
from sglang_ddtree.gpu.equality import same
from sglang_ddtree.gpu.replay import captured
from sglang_ddtree.gpu.timing import median_us
from sglang_ddtree.tree.build import build_tree_reference
from sglang_ddtree.tree.kernels.build import build_tree_triton


class UnoTree(NamedTuple):
    """Nodes in the order they were taken, without the root in ``tokens`` and ``edges``.

    Attributes:
        tokens: int64 ``[bs, Q - 1]``.
        edges: int64 ``[bs, Q - 1]``, parent * K + rank.
        parent_list: int64, EAGLE's; not looked at here.
        depths: int32 ``[bs, Q]``.
        log_weights: float32 ``[bs, Q]``.
    """

    tokens: torch.Tensor
    edges: torch.Tensor
    parent_list: torch.Tensor
    depths: torch.Tensor
    log_weights: torch.Tensor


def why_not(size: Size) -> str | None:
    """Why UNO builds no tree of ``size``, or None; ``build_uno_tree_proposal``'s limits."""
    width = size.budget + 1
    if width > 128 or width * size.top_k > 2048:
        return "it takes at most 128 nodes, and 2048 candidates of all nodes"
    if width <= size.depth:
        return "it takes no budget below the depth"
    if size.budget > size.top_k * (size.depth - 1) + 1:
        return "EAGLE's list of parents is too short for the budget"
    if width > sum(min(size.top_k**depth, width) for depth in range(size.depth + 1)):
        return "the candidates make no tree of that budget"
    return None


def tieless_candidates(size: Size, seed: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-probabilities, tokens and roots as for ``build_tree``; no two paths weigh the same but by a rare chance."""
    rng = torch.Generator().manual_seed(seed)
    spread = 0.5 + 4 * torch.rand(size.trees, 1, 1, generator=rng)
    logits = torch.randn(size.trees, size.depth, 1000, generator=rng) * spread
    log_probs, token_ids = logits.log_softmax(-1).topk(size.top_k, -1)
    roots = torch.randint(0, 1000, (size.trees,), generator=rng)
    return log_probs.contiguous().to(device), token_ids.contiguous().to(device), roots.to(device)


def uno_call(log_probs: torch.Tensor, token_ids: torch.Tensor, budget: int) -> tuple[Callable[[], Any], UnoTree]:
    """A launch of UNO's kernel, as ``build_uno_tree_proposal`` makes it after its own top-K, and where it writes."""
    from sglang.kernels.ops.speculative.uno_tree import _build_tree_kernel

    bs, depth, top_k = log_probs.shape
    width = budget + 1

    def empty(columns: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(bs, columns, dtype=dtype, device=log_probs.device)

    out = UnoTree(
        empty(budget, torch.int64),
        empty(budget, torch.int64),
        empty(top_k * (depth - 1) + 1, torch.int64),
        empty(width, torch.int32),
        empty(width, torch.float32),
    )

    def run() -> None:
        _build_tree_kernel[(bs,)](
            token_ids,
            log_probs,
            *out,
            TOKEN_BATCH_STRIDE=token_ids.stride(0),
            TOKEN_DEPTH_STRIDE=token_ids.stride(1),
            TOKEN_RANK_STRIDE=token_ids.stride(2),
            PROB_BATCH_STRIDE=log_probs.stride(0),
            PROB_DEPTH_STRIDE=log_probs.stride(1),
            PROB_RANK_STRIDE=log_probs.stride(2),
            PARENT_BATCH_STRIDE=out.parent_list.stride(0),
            NUM_DEPTHS=depth,
            K=top_k,
            Q=width,
            BLOCK_CANDIDATES=triton.next_power_of_2(width * top_k),
            num_warps=8,
            num_stages=1,
        )

    return run, out


def check(size: Size, device: torch.device, seed: int) -> None:
    """Both builders on the same candidates without ties, node for node.

    Raises:
        Mismatch: the trees differ.
    """
    log_probs, token_ids, roots = tieless_candidates(size, seed, device)
    ours = build_tree_triton(log_probs, token_ids, roots, size.budget)
    run, uno = uno_call(log_probs, token_ids, size.budget)
    run()
    same("UNO's tokens", ours.tokens[:, 1:].cpu(), uno.tokens)
    same("UNO's parents", ours.parents[:, 1:].cpu(), uno.edges // size.top_k)
    same("UNO's depths", ours.depths.to(torch.int32).cpu(), uno.depths)
    same("UNO's log-weights", ours.log_weights.cpu(), uno.log_weights)


def check_ties(size: Size, log_probs: torch.Tensor, token_ids: torch.Tensor) -> None:
    """Both builders where paths tie: other trees, whose nodes weigh the same, one by one.

    Raises:
        Mismatch: the weights differ.
    """
    roots = torch.zeros(size.trees, dtype=torch.int64)
    ours = build_tree_reference(log_probs.cpu(), token_ids.cpu(), roots, size.budget)
    run, uno = uno_call(log_probs, token_ids, size.budget)
    run()
    same("UNO's log-weights", ours.log_weights, uno.log_weights)


def measure(
    device: torch.device, batch_sizes: Sequence[int], budgets: Sequence[int], *, repeats: int, depth: int = 15
) -> list[dict[str, Any]]:
    """Median microseconds of both builders from a CUDA graph, once they agree, where UNO's limits allow it.

    One row per size: ``bs``, ``budget``, ``ours``, ``uno``, ``uno_over_ours``.
    """
    rows = []
    for bs in batch_sizes:
        for budget in budgets:
            size = Size(bs, budget, depth, 8)
            if why_not(size):
                continue
            check(size, device, seed=budget)
            row: dict[str, Any] = {"bs": bs, "budget": budget}
            inputs = tieless_candidates(size, budget, device)
            calls: dict[str, Callable[[], Any]]
            calls = {"ours": partial(build_tree_triton, *inputs, budget), "uno": uno_call(*inputs[:2], budget)[0]}
            for name, call in calls.items():
                row[name] = median_us(captured(call, device)[0], device, repeats)
            row["uno_over_ours"] = row["uno"] / row["ours"]
            rows.append(row)
    return rows
