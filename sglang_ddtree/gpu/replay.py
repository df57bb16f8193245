"""The tree part of a decode step as a server runs it: captured once in a CUDA graph, replayed on changing inputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch

from sglang_ddtree.gpu.cases import Size, random_candidates, random_targets
from sglang_ddtree.gpu.equality import same
from sglang_ddtree.tree.bits import ancestor_bits, ancestor_bits_torch
from sglang_ddtree.tree.build import build_tree, build_tree_reference
from sglang_ddtree.tree.draft_tree import DraftTree
from sglang_ddtree.tree.mask import ancestor_mask, ancestor_mask_torch, full_mask
from sglang_ddtree.tree.walk import walk_reference, walk_targets

MAX_PREFIX = 300


@dataclass(frozen=True)
class Inputs:
    """What changes from step to step; on a GPU the buffers that the graph was captured with."""

    log_probs: torch.Tensor
    token_ids: torch.Tensor
    root_tokens: torch.Tensor
    target_tokens: torch.Tensor
    prefix_lens: torch.Tensor

    def to(self, device: torch.device) -> Inputs:
        return Inputs(**{field.name: getattr(self, field.name).to(device, copy=True) for field in fields(self)})

    def copy_(self, other: Inputs) -> None:
        for field in fields(self):
            getattr(self, field.name).copy_(getattr(other, field.name))


def random_step(size: Size, seed: int) -> tuple[Inputs, dict[str, torch.Tensor]]:
    """Inputs on the CPU and what the reference makes of them."""
    made = random_candidates(size, seed)
    tree = build_tree_reference(made.log_probs, made.token_ids, made.root_tokens, size.budget)
    rng = torch.Generator().manual_seed(seed)
    prefix_lens = torch.randint(0, MAX_PREFIX, (size.trees,), generator=rng)
    targets = random_targets(tree, seed)
    limit = min(size.depth, tree.width - 1)
    total = _mask_size(size)
    expected = {
        **_tree_tensors(tree),
        "bit rows": ancestor_bits_torch(tree, limit),
        "mask": ancestor_mask_torch(tree, limit),
        "full mask": full_mask(tree, prefix_lens, total=total),
        **walk_reference(tree, targets, size.depth)._asdict(),
    }
    return Inputs(made.log_probs, made.token_ids, made.root_tokens, targets, prefix_lens), expected


def tree_step(inputs: Inputs, size: Size, mask_buffer: torch.Tensor) -> dict[str, torch.Tensor]:
    """Build, masks and walk through the public functions, which choose kernels on a GPU."""
    tree = build_tree(inputs.log_probs, inputs.token_ids, inputs.root_tokens, size.budget)
    return {
        **_tree_tensors(tree),
        "bit rows": ancestor_bits(tree, size.depth),
        "mask": ancestor_mask(tree, size.depth),
        "full mask": full_mask(tree, inputs.prefix_lens, total=_mask_size(size), out=mask_buffer, max_depth=size.depth),
        **walk_targets(tree, inputs.target_tokens, size.depth)._asdict(),
    }


def check_replays(size: Size, device: torch.device, replays: int) -> int:
    """Capture one step, replay it on ``replays`` other inputs and compare every output each time; how many were done.

    On a GPU the step also runs once with every synchronisation turned into an error. On a CPU, where there are no
    graphs, the step is called again instead.

    Raises:
        Mismatch: an output differs from the reference's.
        RuntimeError: the step waits for the host, or cannot be captured.
    """
    inputs, _ = random_step(size, 0)
    static = inputs.to(device)
    mask_buffer = torch.zeros(_mask_size(size), dtype=torch.bool, device=device)
    run, outputs = captured(lambda: tree_step(static, size, mask_buffer), device)
    for seed in range(1, replays + 1):
        inputs, expected = random_step(size, seed)
        static.copy_(inputs)
        mask_buffer.fill_(seed % 2 == 0)  # what an earlier step may have left
        outputs = run() or outputs
        for name, tensor in expected.items():
            same(f"replay {seed}: {name}", tensor, outputs[name])
    return replays


def captured(call: Callable[[], Any], device: torch.device) -> tuple[Callable[[], Any], Any]:
    """``call`` as something to run again, and its outputs: a CUDA graph's replay, or on a CPU the call itself.

    A replay returns None and leaves its results in the outputs given here.
    """
    if device.type != "cuda":
        return call, call()
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        call()  # compiles the kernels
        torch.cuda.synchronize(device)
        torch.cuda.set_sync_debug_mode("error")
        try:
            call()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    torch.cuda.current_stream(device).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = call()
    return graph.replay, outputs


def _mask_size(size: Size) -> int:
    return size.trees * (size.budget + 1) * (MAX_PREFIX + size.budget + 1)


def _tree_tensors(tree: DraftTree) -> dict[str, torch.Tensor]:
    return {field.name: getattr(tree, field.name) for field in fields(tree)}
