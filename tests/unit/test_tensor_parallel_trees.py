"""Two ranks with half of the vocabulary each: SGLang's top-K per shard and its gather, over gloo, under our functions.

Among tokens of exactly the same score SGLang's top-k may keep any, and does so per shard; so with ties a tree may carry
another of the equal tokens than without tensor parallelism. Both ranks always carry the same.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.multiprocessing
from sglang.srt.models import dflash

from sglang_ddtree.config import DDTreeConfig
from sglang_ddtree.drafting import draft_candidates, draft_tree
from sglang_ddtree.folding import TreeSampler
from sglang_ddtree.tree.build import build_tree_reference
from sglang_ddtree.tree.draft_tree import DraftTree, check_invariants

VOCAB, HIDDEN, BS = 100, 16, 5  # padded to 128: the second rank has 36 tokens and 28 rows of padding
CONFIG = DDTreeConfig(budget=24, block_size=8, top_k=8)
CASES = ("distinct", "ties", "one half")
FIELDS = tuple(DraftTree.__dataclass_fields__)


def inputs(case: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states ``[bs, B, hidden]``, block ids ``[bs, B]`` and the head's rows ``[vocab, hidden]``."""
    rng = torch.Generator().manual_seed(CASES.index(case))
    hidden = torch.randn(BS, CONFIG.block_size, HIDDEN, generator=rng)
    rows = torch.randn(VOCAB, HIDDEN, generator=rng)
    if case == "ties":  # whole numbers: few different scores, and the same bits for any split of the product
        hidden, rows = hidden.round(), rows.round()
        rows[64:] = rows[: VOCAB - 64]
    if case == "one half":  # all candidates from the second rank's shard
        hidden[..., 0], rows[:, 0] = 1.0, torch.where(torch.arange(VOCAB) >= 64, 30.0, 0.0)
    blocks = torch.randint(0, VOCAB, (BS, CONFIG.block_size), generator=rng)
    return hidden, blocks, rows


def run_rank(rank: int, directory: str) -> None:
    """One tensor-parallel rank: a sharded LM head of SGLang's, and what it makes of every case."""
    from sglang.srt.distributed import parallel_state
    from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead
    from sglang.srt.runtime_context import get_parallel

    parallel_state.init_distributed_environment(
        world_size=2, rank=rank, local_rank=rank, distributed_init_method=f"file://{directory}/store", backend="gloo"
    )
    group = parallel_state.init_model_parallel_group(
        [[0, 1]], rank, "gloo", use_pynccl=False, use_custom_allreduce=False, group_name="tp"
    )
    found: dict[str, Any] = {}
    with get_parallel().override(tp_size=2, tp_rank=rank, tp_group=group):
        for case in CASES:
            hidden, blocks, rows = inputs(case)
            head = ParallelLMHead(VOCAB, HIDDEN, params_dtype=torch.float32)
            shard = head.shard_indices
            start, count = shard.org_vocab_start_index, shard.num_org_elements
            assert (start, count, len(head.weight)) == ((0, 64, 64), (64, 36, 64))[rank]
            with torch.no_grad():
                head.weight.fill_(100.0)  # padding would win every top-k
                head.weight[:count] = rows[start : start + count]
                sampler = TreeSampler(head, CONFIG, BS + 2, "cpu")
                sampler(hidden.view(-1, HIDDEN), blocks.flatten())
                found[case] = {
                    "candidates": draft_candidates(hidden, head, CONFIG.depth, CONFIG.top_k),
                    "eager": as_dict(draft_tree(hidden, blocks[:, 0], head, CONFIG)),
                    "folded": as_dict(sampler.first(BS)),
                }
    torch.save(found, f"{directory}/rank{rank}.pt")


def as_dict(tree: DraftTree) -> dict[str, torch.Tensor]:
    return {name: getattr(tree, name).clone() for name in FIELDS}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    directory: Path = tmp_path_factory.mktemp("ranks")
    torch.multiprocessing.spawn(run_rank, (str(directory),), nprocs=2)
    return [torch.load(directory / f"rank{rank}.pt") for rank in range(2)]


@pytest.mark.parametrize("case", CASES)
def test_both_ranks_have_the_same_trees(ranks: list[dict[str, Any]], case: str) -> None:
    first = ranks[0][case]["eager"]
    for rank in ranks:
        for way in ("eager", "folded"):
            for name in FIELDS:
                assert torch.equal(rank[case][way][name], first[name]), (way, name)
    check_invariants(DraftTree(**first))
    _, blocks, _ = inputs(case)
    expected = build_tree_reference(*ranks[1][case]["candidates"], blocks[:, 0], CONFIG.budget)
    assert all(torch.equal(getattr(expected, name), first[name]) for name in FIELDS)


def unsharded(case: str, monkeypatch: pytest.MonkeyPatch) -> tuple[torch.Tensor, torch.Tensor, DraftTree]:
    monkeypatch.setattr(dflash, "get_parallel", lambda: SimpleNamespace(tp_size=1))
    hidden, blocks, rows = inputs(case)
    padding = torch.full((28, HIDDEN), 100.0)
    head: Any = SimpleNamespace(weight=torch.cat((rows, padding)), org_vocab_size=VOCAB)
    log_probs, ids = draft_candidates(hidden, head, CONFIG.depth, CONFIG.top_k)
    return log_probs, ids, draft_tree(hidden, blocks[:, 0], head, CONFIG)


@pytest.mark.parametrize("case", ["distinct", "one half"])
def test_the_trees_are_those_of_one_rank(
    ranks: list[dict[str, Any]], case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, ids, tree = unsharded(case, monkeypatch)
    sharded = ranks[0][case]
    assert torch.equal(sharded["candidates"][1], ids)
    for name in FIELDS:
        if name == "log_weights":  # the partition is summed in another order
            torch.testing.assert_close(sharded["eager"][name], tree.log_weights)
        else:
            assert torch.equal(sharded["eager"][name], getattr(tree, name)), name
    if case == "one half":
        assert int(ids.min()) >= 64
    else:
        assert int((ids < 64).sum()) > 50 and int((ids >= 64).sum()) > 50


def test_ties_change_no_score(ranks: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    """With ties, also across shards and at the K-th place: the same scores, on different tokens that have them."""
    log_probs, ids, _ = unsharded("ties", monkeypatch)
    got, got_ids = ranks[0]["ties"]["candidates"]
    torch.testing.assert_close(got, log_probs)
    hidden, _, rows = inputs("ties")
    scores = (hidden[:, 1:] @ rows.T).log_softmax(-1)
    torch.testing.assert_close(got, scores.gather(-1, got_ids))
    assert all(len(set(row)) == CONFIG.top_k for row in got_ids.flatten(0, 1).tolist())
    tied = got.diff() == 0
    assert int(tied.sum()) > 50 and int((got_ids != ids).sum()) > 0
