"""Our trees are those of SGLang's own best-first builder, where it builds one."""

from __future__ import annotations

import pytest
import torch

from sglang_ddtree.gpu import uno
from sglang_ddtree.gpu.cases import Size, random_candidates
from sglang_ddtree.gpu.equality import Mismatch

CPU = torch.device("cpu")


@pytest.mark.parametrize("size", [Size(3, 8, 3, 4), Size(4, 16, 7, 8), Size(2, 49, 7, 8), Size(1, 99, 15, 16)], ids=str)
def test_the_same_trees(size: Size):
    assert uno.why_not(size) is None
    uno.check(size, CPU, seed=size.budget)


def test_ties_weigh_the_same():
    """Weights in halves, and everything 0: the builders take other nodes, none of them heavier."""
    size = Size(4, 14, 5, 6)
    made = random_candidates(size, seed=2)
    halves = (made.log_probs.nan_to_num(-50.0).clamp(-50, 0) * 2).round().sort(-1, descending=True).values / 2
    uno.check_ties(size, halves, made.token_ids)
    uno.check_ties(size, torch.zeros_like(halves), made.token_ids)
    run, tree = uno.uno_call(halves, made.token_ids, size.budget)
    run()
    assert int((tree.log_weights.diff() == 0).sum()) > 8


@pytest.mark.parametrize("part", ["tokens", "edges", "depths", "log_weights"])
def test_the_comparison_can_fail(monkeypatch: pytest.MonkeyPatch, part: str):
    right = uno.uno_call

    def wrong(*args):
        run, tree = right(*args)
        return lambda: (run(), getattr(tree, part)[1, 3:4].add_(8)), tree

    monkeypatch.setattr(uno, "uno_call", wrong)
    with pytest.raises(Mismatch, match=r"UNO's .* differs in 1 places, first at \[1, 3\]"):
        uno.check(Size(2, 8, 3, 4), CPU, seed=1)


@pytest.mark.parametrize(
    ("size", "reason"),
    [
        (Size(1, 128, 15, 8), "128 nodes"),
        (Size(1, 100, 15, 32), "2048"),
        (Size(1, 5, 7, 8), "below the depth"),
        (Size(1, 60, 7, 8), "list of parents"),
        (Size(1, 4, 1, 3), "list of parents"),
    ],
    ids=str,
)
def test_what_it_does_not_build(size: Size, reason: str):
    assert reason in str(uno.why_not(size))


def test_the_times():
    rows = uno.measure(CPU, [2], [8, 256], repeats=1, depth=7)
    assert [(row["bs"], row["budget"]) for row in rows] == [(2, 8)]
    assert rows[0]["uno_over_ours"] == rows[0]["uno"] / rows[0]["ours"] > 0
