"""Which trees a step verifies: the replayed draft graph's or built ones; and where custom processors cut them."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.sampling.custom_logit_processor import DisallowedTokensLogitsProcessor
from sglang.srt.sampling.sampling_batch_info import ProcessorEntry

from sglang_ddtree import worker
from sglang_ddtree.config import DDTreeConfig
from sglang_ddtree.sampling import _first_children

BS = 3


class Sampler:
    def first(self, bs: int) -> tuple[str, int]:
        return "replayed", bs


@pytest.mark.parametrize(
    ("replay", "sampler", "grammar", "bitmask", "expected"),
    [
        (True, True, False, None, ("replayed", BS)),
        (True, True, True, None, ("replayed", BS)),  # no grammar takes a token at this root
        (True, True, True, "bits", ("built", "allowed")),
        (False, True, False, None, ("built", "all")),
        (True, False, False, None, ("built", "all")),
    ],
)
def test_the_trees_of_a_step(
    monkeypatch: pytest.MonkeyPatch, replay: bool, sampler: bool, grammar: bool, bitmask: Any, expected: tuple[Any, ...]
) -> None:
    monkeypatch.setattr(worker, "draft_tp_context", lambda layout: nullcontext())
    monkeypatch.setattr(worker, "root_bitmask", lambda *args: bitmask)
    monkeypatch.setattr(worker, "draft_candidates", lambda *args: ("all", None))
    monkeypatch.setattr(worker, "keep_allowed", lambda *args: ("allowed", None))
    monkeypatch.setattr(worker, "build_tree", lambda log_probs, *args: ("built", log_probs))
    marks: list[str] = []
    server = SimpleNamespace(
        tree_config=DDTreeConfig(budget=4, block_size=4, top_k=2),
        draft_parallel_layout=None,
        _draft_sampler=Sampler() if sampler else None,
        _metrics=SimpleNamespace(mark=marks.append),
        _lm_head=lambda: None,
    )
    batch = SimpleNamespace(has_grammar=grammar, reqs=[], sampling_info=SimpleNamespace(vocab_size=8))
    block_ids = torch.zeros(BS, 4, dtype=torch.int64)
    tree = worker.DDTreeWorker._draft_tree(server, batch, torch.zeros(BS, 4, 2), block_ids, replay, None)  # type: ignore[arg-type]
    assert tree == expected
    assert marks == ["draft"]


class LooksBack:
    """A processor that may read the answer so far."""


def entry(processor: Any, rows: list[int]) -> Any:
    made = object.__new__(ProcessorEntry)
    for name, value in (("processor", processor), ("indices", torch.tensor(rows)), ("rows", rows)):
        object.__setattr__(made, name, value)
    return made


def test_drafts_are_cut_where_a_processor_may_look_back() -> None:
    next_child = torch.tensor([[1, 2, -1]] * 5)
    before = next_child.clone()
    processors = {
        1: entry(LooksBack(), [0, 3]),
        2: entry(object.__new__(DisallowedTokensLogitsProcessor), [1]),
        3: entry(LooksBack(), [4]),
    }
    info: Any = SimpleNamespace(has_custom_logit_processor=True, custom_logit_processor=processors)
    cut = _first_children(next_child, info)
    assert cut[:, 0].tolist() == [-1, 1, 1, -1, -1]
    assert torch.equal(cut[:, 1:], before[:, 1:])
    assert torch.equal(next_child, before)


def test_without_processors_nothing_is_cut() -> None:
    next_child = torch.tensor([[1, 2, -1]])
    assert _first_children(next_child, SimpleNamespace(has_custom_logit_processor=False)) is next_child  # type: ignore[arg-type]
