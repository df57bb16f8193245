"""The folded sampler and the tree's part of a step, captured and replayed: nothing of the captured inputs stays in.

Here the torch operations; ``tests/interpreter`` does the kernels. ``captured_piece.py`` says what a replay is.
"""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from captured_piece import Captured, FromHost, kernel
from fold_pieces import (
    CONFIG,
    HIDDEN,
    MAX_BS,
    Memory,
    attention_backend,
    head,
    replay_changing_batches,
    whole_step,
)
from no_sync import Synchronised
from sglang.srt.models import dflash
from sglang.srt.speculative.eagle_utils import TreeMaskMode

from sglang_ddtree.drafting import draft_tree
from sglang_ddtree.folding import TreeSampler
from sglang_ddtree.tree import build, mask

STEPS = 18


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (build, mask):
        monkeypatch.setattr(module, "on_host", lambda device: False)
    monkeypatch.setattr(dflash, "get_parallel", lambda: SimpleNamespace(tp_size=1))


def sampler(lm_head: Any, made: type = TreeSampler) -> Any:
    return made(lm_head, CONFIG, MAX_BS, "cpu")


def test_draft_graphs_of_all_sizes_replayed_on_other_batches() -> None:
    graphs = replay_changing_batches(Memory(), sampler, STEPS)
    assert all(graph.operators > 30 for graph in graphs)


@pytest.mark.parametrize("mode", [TreeMaskMode.FULL_MASK, TreeMaskMode.QLEN_ONLY, None, "bits"])
def test_the_whole_step_as_one_graph(mode: Any) -> None:
    mode = TreeMaskMode.QLEN_ONLY_BITPACKING if mode == "bits" else mode
    memory, lm_head = Memory(), head()
    backend = attention_backend(mode)
    memory.write(4, 0)
    graph = Captured(whole_step(memory, sampler(lm_head), backend, 4))
    seen = []
    for seed in range(1, STEPS + 1):
        memory.write(4, seed)
        got = graph.replay()
        want = whole_step(memory.copy(), sampler(lm_head), attention_backend(mode), 4)()
        for name, tensor in want.items():
            assert torch.equal(got[name], tensor), f"step {seed}: {name}"
        seen.append(got["mask"].clone())
    assert all(not torch.equal(one, other) for one, other in pairwise(seen))


class BakedValue(TreeSampler):
    """Takes the first root to the host."""

    def __call__(self, hidden_states: torch.Tensor, input_ids: torch.Tensor) -> None:
        super().__call__(hidden_states, input_ids)
        self.trees.tokens[0, 0].fill_(int(input_ids[0]))


class Upload(TreeSampler):
    """Makes the roots on the host."""

    def __call__(self, hidden_states: torch.Tensor, input_ids: torch.Tensor) -> None:
        roots = torch.tensor(input_ids.view(-1, CONFIG.block_size)[:, 0].tolist())
        blocks = hidden_states.view(-1, CONFIG.block_size, HIDDEN)
        draft_tree(blocks, roots, self._lm_head, CONFIG, out=self.trees.first(len(roots)))


class Branch(TreeSampler):
    """Leaves the trees alone when the last hidden state is small."""

    def __call__(self, hidden_states: torch.Tensor, input_ids: torch.Tensor) -> None:
        if hidden_states[-1].abs().sum() >= 0:
            super().__call__(hidden_states, input_ids)


class CopyAtCapture(TreeSampler):
    """Reads a copy of the ids that it made before the capture."""

    def __call__(self, hidden_states: torch.Tensor, input_ids: torch.Tensor) -> None:
        self.__dict__.setdefault("copies", {}).setdefault(len(input_ids), input_ids.clone())
        super().__call__(hidden_states, self.copies[len(input_ids)])


class TreesOfTheLastCapture(TreeSampler):
    """Keeps new trees instead of writing into its own."""

    def __call__(self, hidden_states: torch.Tensor, input_ids: torch.Tensor) -> None:
        blocks = hidden_states.view(-1, CONFIG.block_size, HIDDEN)
        self.trees = draft_tree(blocks, input_ids.view(-1, CONFIG.block_size)[:, 0], self._lm_head, CONFIG)


@pytest.mark.parametrize("wrong", [BakedValue, Upload, Branch])
def test_a_sampler_that_waits_for_the_device_cannot_be_captured(wrong: type) -> None:
    with pytest.raises(Synchronised):
        replay_changing_batches(Memory(), lambda lm_head: sampler(lm_head, wrong), 1)


@pytest.mark.parametrize(
    ("wrong", "error", "what"),
    [
        (BakedValue, AssertionError, "tokens"),
        (Upload, FromHost, "are not from the device"),
        (CopyAtCapture, AssertionError, "tokens"),
        (TreesOfTheLastCapture, AssertionError, "requests: "),
    ],
)
def test_a_sampler_that_keeps_something_of_the_capture_is_found(wrong: type, error: type, what: str) -> None:
    with pytest.raises(error, match=what):
        replay_changing_batches(Memory(), lambda lm_head: sampler(lm_head, wrong), STEPS, watched=False)


def test_memory_that_nothing_writes_is_garbage() -> None:
    x = torch.ones(3)
    graph = Captured(lambda: torch.empty(3).mul_(0) + x)
    assert graph.replay().isnan().all()


def test_views_in_place_writes_and_numbers() -> None:
    x, out = torch.arange(6.0), torch.zeros(3)

    def call() -> torch.Tensor:
        out.copy_(x.view(2, 3)[1] * 2)
        out[0] = 7
        return torch.where(out > 5, out, -1).sum()

    graph = Captured(call)
    x.copy_(-torch.arange(6.0))
    assert float(graph.replay()) == 7 - 1 - 1 and out.tolist() == [7, -8, -10]


def test_a_function_that_stands_for_a_kernel_runs_again() -> None:
    x, calls = torch.tensor([1, 5]), []

    @kernel
    def largest(values: torch.Tensor) -> torch.Tensor:
        calls.append(int(values.max()))  # a kernel may look at what it likes
        return values.max().reshape(1)

    graph = Captured(lambda: largest(x) + 1)
    x.fill_(9)
    assert graph.replay().tolist() == [10] and calls == [5, 5, 9]
