"""Time of the kernels and of the torch functions they replace, on the same inputs."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from sglang_ddtree.gpu.cases import Size, random_candidates, random_targets
from sglang_ddtree.gpu.replay import captured
from sglang_ddtree.tree.bits import ancestor_bits_torch
from sglang_ddtree.tree.build import build_tree_batched, build_tree_reference
from sglang_ddtree.tree.draft_tree import DraftTree
from sglang_ddtree.tree.kernels.build import build_tree_triton
from sglang_ddtree.tree.kernels.mask import ancestor_bits_triton, write_ancestor_mask
from sglang_ddtree.tree.kernels.walk import walk_targets_triton
from sglang_ddtree.tree.mask import ancestor_mask_torch
from sglang_ddtree.tree.walk import walk_targets_torch

Call = Callable[[], Any]


def measure(
    device: torch.device,
    batch_sizes: Sequence[int],
    budgets: Sequence[int],
    *,
    depth: int = 15,
    top_k: int = 8,
    repeats: int = 50,
) -> list[dict[str, Any]]:
    """Median microseconds of every function, batch size and budget, called eagerly and replayed from a CUDA graph.

    One row per function: ``bs``, ``budget``, ``what``, and ``kernel_eager``, ``kernel_graph``, ``torch_eager``,
    ``torch_graph``. On a CPU (in Triton's interpreter) there are no graphs, and the figures only show that this runs.
    """
    rows = []
    for bs in batch_sizes:
        for budget in budgets:
            for what, (kernel, torch_call) in calls(Size(bs, budget, depth, top_k), device).items():
                row: dict[str, Any] = {"bs": bs, "budget": budget, "what": what}
                for name, call in (("kernel", kernel), ("torch", torch_call)):
                    row[f"{name}_eager"] = median_us(call, device, repeats)
                    replay, _ = captured(call, device)
                    row[f"{name}_graph"] = median_us(replay, device, repeats)
                rows.append(row)
    return rows


def calls(size: Size, device: torch.device) -> dict[str, tuple[Call, Call]]:
    """By name: the kernel's call and the torch function's."""
    made = random_candidates(size, seed=0)
    host = build_tree_reference(*made.on(torch.device("cpu")))
    targets = random_targets(host, seed=0).to(device)
    inputs = made.on(device)
    tree = build_tree_triton(*inputs)
    width, depth = tree.width, min(size.depth, tree.width - 1)
    mask = torch.empty(size.trees, width, width, dtype=torch.bool, device=device)

    def kernels() -> None:
        built: DraftTree = build_tree_triton(*inputs)
        write_ancestor_mask(built, depth, mask)
        walk_targets_triton(built, targets, size.depth)

    def in_torch() -> None:
        built = build_tree_batched(*inputs)
        mask.copy_(ancestor_mask_torch(built, depth))
        walk_targets_torch(built, targets, size.depth)

    return {
        "build": (
            lambda: build_tree_triton(*inputs),
            lambda: build_tree_batched(*inputs),
        ),
        "mask": (
            lambda: write_ancestor_mask(tree, depth, mask),
            lambda: mask.copy_(ancestor_mask_torch(tree, depth)),
        ),
        "bit rows": (lambda: ancestor_bits_triton(tree, depth), lambda: ancestor_bits_torch(tree, depth)),
        "walk": (
            lambda: walk_targets_triton(tree, targets, size.depth),
            lambda: walk_targets_torch(tree, targets, size.depth),
        ),
        "build + mask + walk": (kernels, in_torch),
    }


def median_us(call: Call, device: torch.device, repeats: int) -> float:
    """Median time of one call in microseconds: between CUDA events on a GPU, by the clock on a CPU."""
    for _ in range(min(5, repeats)):
        call()
    if device.type != "cuda":
        times = []
        for _ in range(repeats):
            begin = time.perf_counter()
            call()
            times.append((time.perf_counter() - begin) * 1e6)
        return statistics.median(times)
    marks = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    for begin_event, end_event in marks:
        begin_event.record()
        call()
        end_event.record()
    torch.cuda.synchronize(device)
    return statistics.median(begin_event.elapsed_time(end_event) * 1e3 for begin_event, end_event in marks)
