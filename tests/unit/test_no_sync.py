"""Nothing of the decode step waits for the device: its parts run where every synchronising call is an error.

Here the torch operations, which a GPU runs beyond the kernels' limits; ``tests/interpreter`` does the kernels.
"""

from __future__ import annotations

from types import SimpleNamespace

import decode_step
import pytest
import torch
from no_sync import NoSync, Synchronised
from sglang.srt.models import dflash
from sglang.srt.speculative.eagle_utils import TreeMaskMode

from sglang_ddtree.tree import build, mask
from sglang_ddtree.tree.mask import full_mask
from sglang_ddtree.tree.walk import walk_sampled

STEPS = 20


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """No short cut for values that the host has at hand, and one rank."""
    for module in (build, mask):
        monkeypatch.setattr(module, "on_host", lambda device: False)
    monkeypatch.setattr(dflash, "get_parallel", lambda: SimpleNamespace(tp_size=1))


@pytest.mark.parametrize("sum_is_known", [True, False])
@pytest.mark.parametrize("mode", [TreeMaskMode.FULL_MASK, TreeMaskMode.QLEN_ONLY, None])
def test_twenty_steps(as_on_a_gpu: None, mode: TreeMaskMode | None, sum_is_known: bool) -> None:
    attn_backend = decode_step.backend(mode)
    decode_step.run_step(decode_step.random_inputs(0), attn_backend, None)  # uploads the index tables
    accepted = []
    for seed in range(1, STEPS + 1):
        inputs = decode_step.random_inputs(seed)
        prefix_lens_sum = int(inputs.prefix_lens.sum()) if sum_is_known else None
        with NoSync() as watch:
            outputs = decode_step.run_step(inputs, attn_backend, prefix_lens_sum)
        assert watch.operators > 100
        accepted.append(decode_step.check_outputs(inputs, outputs, mode))
    assert sum(accepted) > STEPS and min(accepted) < 3 < max(accepted)


@pytest.mark.parametrize("part", ["heap", "mask size"])
def test_the_step_fails_where_it_synchronises(as_on_a_gpu: None, monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    """The step's own short cuts for the CPU, taken: each is a synchronisation that must be found."""
    inputs = decode_step.random_inputs(0)
    monkeypatch.setattr(build if part == "heap" else mask, "on_host", lambda device: True)
    with pytest.raises(Synchronised), NoSync():
        decode_step.run_step(inputs, decode_step.backend(None), 10_000)


def test_a_mask_without_a_total_synchronises(as_on_a_gpu: None) -> None:
    inputs = decode_step.random_inputs(1)
    tree = decode_step.run_step(inputs, decode_step.backend(None), None).tree
    with pytest.raises(Synchronised, match="_local_scalar_dense"), NoSync():
        full_mask(tree, inputs.prefix_lens)


def test_a_sampled_walk(as_on_a_gpu: None) -> None:
    inputs = decode_step.random_inputs(4)
    tree = decode_step.run_step(inputs, decode_step.backend(None), None).tree
    probs = inputs.logits.softmax(-1)
    with NoSync():
        walk = walk_sampled(tree, probs, decode_step.DEPTH)
    assert walk.bonus.shape == (5,) and int(walk.bonus.max()) < decode_step.VOCAB


SYNCHRONISING = {
    "item": lambda x: x.sum().item(),
    "int": lambda x: int(x.max()),
    "float": lambda x: float(x.max()),
    "bool": lambda x: bool(x.any()),
    "if": lambda x: 1 if x.max() > 3 else 0,
    "range": lambda x: list(range(x.max())),
    "format": lambda x: f"{x.max()}",
    "contains": lambda x: 3 in x,
    "tolist": lambda x: x.tolist(),
    "numpy": lambda x: x.numpy(),
    "cpu": lambda x: x.cpu(),
    "to": lambda x: x.to("cpu"),
    "to by name": lambda x: x.to(device=torch.device("cpu"), dtype=torch.int32),
    "masked read": lambda x: x[x > 2],
    "masked write": lambda x: x.__setitem__(x > 2, x[:3].clone()),
    "masked_select": lambda x: torch.masked_select(x, x > 2),
    "nonzero": torch.nonzero,
    "where": lambda x: torch.where(x > 2),
    "argwhere": torch.argwhere,
    "unique": torch.unique,
    "unique_consecutive": torch.unique_consecutive,
    "bincount": torch.bincount,
    "equal": lambda x: torch.equal(x, x + 1),
    "allclose": lambda x: torch.allclose(x, x + 1),
    "index by a scalar": lambda x: x[x.max() - 5],
    "index by a list": lambda x: x[[0, 2]],
    "repeat_interleave": lambda x: torch.repeat_interleave(x, x),
    "multinomial": lambda x: torch.multinomial(x.float(), 1),
    "upload": lambda x: x + torch.tensor([1]),
}

STAYING = {
    "arithmetic": lambda x: (x + 1).clamp(min=0).cumsum(0).sum(),
    "where": lambda x: torch.where(x > 2, x, -1),
    "index": lambda x: x[x - x],
    "write": lambda x: x.clone().__setitem__(x - x, 7),
    "fill": lambda x: x.clone().__setitem__(0, 7),
    "slice": lambda x: x.clone()[1:3].fill_(0),
    "topk": lambda x: torch.topk(x, 2),
    "dtype": lambda x: x.to(torch.float32),
    "background copy": lambda x: x.to("cpu", non_blocking=True),
    "repeat_interleave": lambda x: torch.repeat_interleave(x, x, output_size=15),
    "repeats": lambda x: x.repeat_interleave(3, dim=0),
}


@pytest.mark.parametrize("name", SYNCHRONISING)
def test_a_synchronising_call_is_found(name: str) -> None:
    x = torch.arange(6)
    SYNCHRONISING[name](x.clone())  # nothing else is wrong with it
    with pytest.raises(Synchronised), NoSync():
        SYNCHRONISING[name](x)


@pytest.mark.parametrize("name", STAYING)
def test_other_calls_are_not(name: str) -> None:
    x = torch.arange(6)
    with NoSync() as watch:
        STAYING[name](x)
    assert x.tolist() == [0, 1, 2, 3, 4, 5] and watch.operators >= (name != "background copy")


def test_it_ends_with_its_block() -> None:
    x = torch.arange(3)
    with NoSync(), NoSync.paused():
        assert x.tolist() == [0, 1, 2] and int(x.max()) == 2
    assert x.tolist() == [0, 1, 2] and "tolist" not in vars(torch.Tensor) and "to" not in vars(torch.Tensor)
