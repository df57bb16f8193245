"""Tree construction: exact, deterministic, and the same on every path through the code."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_ddtree.tree import build
from sglang_ddtree.tree.build import build_tree, build_tree_batched, build_tree_reference
from sglang_ddtree.tree.draft_tree import DraftTree, check_invariants

#: No deadline: CI machines are shared.
quick = settings(deadline=None, derandomize=True, database=None, max_examples=100)

INF = math.inf
NAN = math.nan
Builder = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, int], DraftTree]
both = pytest.mark.parametrize("builder", [build_tree_reference, build_tree_batched])

#: Few distinct values, so that ties within a list, across depths and along a path (0.0) are the rule, and sums that
#: tie only after float32 rounding; -inf, a sum that overflows to it, and a log-softmax's rounding above 0.
VALUES = [0.0, -0.0, -0.25, -0.5, -0.5, -1.0, -0.1, -0.2, -0.3, -1e-9, -1e9, -3e38, 1e-7, -INF]


def candidates(bs: int, depth: int, top_k: int, seed: int, log_probs: np.ndarray | None = None, vocab: int = 40):
    """Random distinct token ids (a vocabulary larger than K), and log-probabilities where none are given."""
    rng = np.random.default_rng(seed)
    ids = np.argsort(rng.random((bs, depth, vocab)), axis=-1)[..., :top_k]
    if log_probs is None:
        logits = torch.from_numpy(rng.normal(size=(bs, depth, vocab)).astype(np.float32) * 3)
        log_probs = logits.log_softmax(-1).topk(top_k, -1).values.numpy()
    return (
        torch.from_numpy(np.ascontiguousarray(log_probs, dtype=np.float32)),
        torch.from_numpy(np.ascontiguousarray(ids)),
        torch.from_numpy(rng.integers(0, vocab, bs)),
    )


@st.composite
def inputs(draw, max_bs: int = 3, max_depth: int = 4, max_k: int = 4):
    """Candidates with many ties and holes, and a budget from 1 to more than is reachable."""
    bs, depth, top_k = draw(st.integers(1, max_bs)), draw(st.integers(1, max_depth)), draw(st.integers(1, max_k))
    values = draw(st.lists(st.sampled_from(VALUES), min_size=bs * depth * top_k, max_size=bs * depth * top_k))
    log_probs = -np.sort(-np.array(values, dtype=np.float32).reshape(bs, depth, top_k), axis=-1)
    budget = draw(st.one_of(st.integers(1, 12), st.integers(1, sum(top_k**d for d in range(1, depth + 1)) + 3)))
    return (*candidates(bs, depth, top_k, draw(st.integers(0, 2**16)), log_probs), budget)


def assert_same(left: DraftTree, right: DraftTree) -> None:
    """Equal bit for bit, shapes and dtypes included."""
    for field in dataclasses.fields(DraftTree):
        a, b = getattr(left, field.name), getattr(right, field.name)
        assert a.dtype == b.dtype and a.shape == b.shape, field.name
        if a.dtype == torch.float32:
            a, b = a.view(torch.int32), b.view(torch.int32)
        assert torch.equal(a, b), f"{field.name}: {a.tolist()} != {b.tolist()}"


def row_of(tree: DraftTree, row: int) -> DraftTree:
    fields = (f.name for f in dataclasses.fields(DraftTree))
    return DraftTree(**{name: getattr(tree, name)[row : row + 1].contiguous() for name in fields})


def ranks_of(tree: DraftTree, row: int) -> list[int]:
    """Rank of each real node, from its place in its parent's child list."""
    rank = [0] * int(tree.num_nodes[row])
    for node, _ in enumerate(rank):
        child, place = int(tree.next_child[row, node]), 0
        while child != -1:
            rank[child] = place
            child, place = int(tree.next_sibling[row, child]), place + 1
    return rank


def all_prefixes(log_probs: torch.Tensor) -> dict[tuple[int, ...], float]:
    """Every prefix of one request as a tuple of ranks, with its float32 weight; impossible ones left out."""
    table = np.minimum(log_probs.numpy(), np.float32(0))
    depth, top_k = table.shape
    weights = {}
    with np.errstate(over="ignore"):
        for length in range(1, depth + 1):
            for ranks in itertools.product(range(top_k), repeat=length):
                weight = np.float32(0)
                for d, rank in enumerate(ranks):
                    weight = np.float32(weight + table[d, rank])
                if weight > -INF:
                    weights[ranks] = float(weight)
    return weights


def node_paths(tree: DraftTree, row: int) -> list[tuple[int, ...]]:
    ranks, paths = ranks_of(tree, row), [()]
    for node in range(1, int(tree.num_nodes[row])):
        paths.append((*paths[int(tree.parents[row, node])], ranks[node]))
    return paths[1:]


@both
@quick
@given(inputs())
def test_invariants(builder: Builder, args) -> None:
    tree = builder(*args)
    assert tree.width == args[-1] + 1 and tree.batch_size == args[0].shape[0] and tree.budget == args[-1]
    check_invariants(tree)
    assert torch.equal(tree.tokens[:, 0], args[2])


@both
@quick
@given(inputs(max_bs=2, max_depth=4, max_k=3))
def test_exact_against_every_prefix(builder: Builder, args) -> None:
    log_probs, token_ids, _, budget = args
    tree = builder(*args)
    for row in range(tree.batch_size):
        weights = all_prefixes(log_probs[row])
        count = int(tree.num_nodes[row]) - 1
        assert count == min(budget, len(weights))
        paths = node_paths(tree, row)
        assert len(set(paths)) == count
        got = tree.log_weights[row, 1 : count + 1].tolist()
        assert got == [weights[path] for path in paths]
        assert got == sorted(weights.values(), reverse=True)[:count]
        tokens = [int(token_ids[row, len(path) - 1, path[-1]]) for path in paths]
        assert tree.tokens[row, 1 : count + 1].tolist() == tokens


@both
@quick
@given(inputs())
def test_order_is_weight_depth_parent_rank(builder: Builder, args) -> None:
    tree = builder(*args)
    for row in range(tree.batch_size):
        ranks, count = ranks_of(tree, row), int(tree.num_nodes[row])
        keys = [
            (-float(tree.log_weights[row, i]), int(tree.depths[row, i]), int(tree.parents[row, i]), ranks[i])
            for i in range(1, count)
        ]
        assert all(a < b for a, b in itertools.pairwise(keys))


@quick
@given(inputs())
def test_batched_equals_reference(args) -> None:
    assert_same(build_tree_batched(*args), build_tree_reference(*args))


@settings(quick, max_examples=40)
@given(
    bs=st.integers(1, 6), depth=st.integers(1, 15), top_k=st.integers(1, 16), budget=st.integers(1, 80),
    seed=st.integers(0, 2**16), coarse=st.booleans(),
)  # fmt: skip
def test_batched_equals_reference_at_real_sizes(
    bs: int, depth: int, top_k: int, budget: int, seed: int, coarse: bool
) -> None:
    log_probs, token_ids, roots = candidates(bs, depth, top_k, seed)
    if coarse:  # ties between many paths
        log_probs = (log_probs * 2).round() / 2
    tree = build_tree_batched(log_probs, token_ids, roots, budget)
    assert_same(tree, build_tree_reference(log_probs, token_ids, roots, budget))
    check_invariants(tree)


@both
@quick
@given(inputs(), st.data())
def test_a_smaller_budget_is_a_prefix(builder: Builder, args, data) -> None:
    *rest, budget = args
    smaller = data.draw(st.integers(1, budget))
    large, small = builder(*args), builder(*rest, smaller)
    for name in ("tokens", "parents", "depths", "log_weights"):
        assert torch.equal(getattr(large, name)[:, : smaller + 1], getattr(small, name)), name
    for name in ("next_child", "next_sibling"):  # links beyond the smaller tree are cut
        links = getattr(large, name)[:, : smaller + 1]
        assert torch.equal(torch.where(links <= smaller, links, -1), getattr(small, name)), name
    assert torch.equal(large.num_nodes.clamp(max=smaller + 1), small.num_nodes)


@both
@quick
@given(inputs(max_bs=4))
def test_requests_are_independent(builder: Builder, args) -> None:
    log_probs, token_ids, roots, budget = args
    tree = builder(*args)
    for row in range(tree.batch_size):
        alone = builder(log_probs[row : row + 1], token_ids[row : row + 1], roots[row : row + 1], budget)
        assert_same(row_of(tree, row), alone)


@both
def test_ties_break_by_depth_then_parent_then_rank(builder: Builder) -> None:
    # Depth 1: two candidates of probability 1/2 each; depth 2: certain. Weights: a b at -0.5, aa ba at -0.5 too.
    log_probs = torch.tensor([[[-0.5, -0.5], [0.0, -0.5]]])
    token_ids = torch.tensor([[[5, 6], [7, 8]]])
    tree = builder(log_probs, token_ids, torch.tensor([9]), 8)
    assert tree.tokens.tolist() == [[9, 5, 6, 7, 7, 8, 8, 0, 0]]
    assert tree.parents.tolist() == [[-1, 0, 0, 1, 2, 1, 2, -1, -1]]
    assert tree.depths.tolist() == [[0, 1, 1, 2, 2, 2, 2, 0, 0]]
    assert tree.log_weights.tolist() == [[0.0, -0.5, -0.5, -0.5, -0.5, -1.0, -1.0, -INF, -INF]]
    assert tree.next_child.tolist() == [[1, 3, 4, -1, -1, -1, -1, -1, -1]]
    assert tree.next_sibling.tolist() == [[-1, 2, -1, 5, 6, -1, -1, -1, -1]]
    assert tree.num_nodes.tolist() == [7]


@both
def test_certain_candidates_go_by_depth(builder: Builder) -> None:
    # Everything weighs 0: shallow nodes first, and within a depth by parent, then rank.
    tree = builder(torch.zeros(1, 2, 3), torch.tensor([[[1, 2, 3], [4, 5, 6]]]), torch.tensor([0]), 12)
    assert tree.parents.tolist() == [[-1, 0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]]
    assert tree.tokens.tolist() == [[0, 1, 2, 3, 4, 5, 6, 4, 5, 6, 4, 5, 6]]


@both
def test_top_k_one_is_a_chain(builder: Builder) -> None:
    log_probs, token_ids, roots = candidates(2, 7, 1, seed=1)
    tree = builder(log_probs, token_ids, roots, 7)
    assert tree.parents.tolist() == [[-1, 0, 1, 2, 3, 4, 5, 6]] * 2
    assert torch.equal(tree.tokens[:, 1:], token_ids[:, :, 0])
    assert torch.equal(tree.depths, torch.arange(8).expand(2, 8))
    assert builder(log_probs, token_ids, roots, 20).num_nodes.tolist() == [8, 8]


@both
def test_depth_one_is_a_star(builder: Builder) -> None:
    log_probs, token_ids, roots = candidates(2, 1, 5, seed=2)
    tree = builder(log_probs, token_ids, roots, 9)
    assert tree.num_nodes.tolist() == [6, 6]
    assert tree.parents[:, 1:6].eq(0).all() and tree.parents[:, 6:].eq(-1).all()
    assert torch.equal(tree.log_weights[:, 1:6], log_probs[:, 0])


@both
@pytest.mark.parametrize("missing", [-INF, NAN])
def test_missing_candidates_end_their_list(builder: Builder, missing: float) -> None:
    log_probs = torch.tensor([[[-0.1, missing, -0.2], [missing, -0.1, -0.1], [0.0, 0.0, 0.0]]])
    token_ids = torch.tensor([[[3, 0, 4], [0, 5, 6], [7, 8, 9]]])
    tree = builder(log_probs, token_ids, torch.tensor([2]), 5)
    assert tree.num_nodes.tolist() == [2]
    assert tree.tokens.tolist() == [[2, 3, 0, 0, 0, 0]]
    check_invariants(tree)


@both
def test_no_candidate_at_all_leaves_the_root(builder: Builder) -> None:
    log_probs = torch.full((2, 3, 2), -INF)
    log_probs[1, 0, 0] = -1.0
    tree = builder(log_probs, torch.zeros(2, 3, 2, dtype=torch.int64), torch.tensor([7, 8]), 4)
    assert tree.num_nodes.tolist() == [1, 2]
    check_invariants(tree)


@both
def test_empty_batch(builder: Builder) -> None:
    tree = builder(torch.zeros(0, 3, 2), torch.zeros(0, 3, 2, dtype=torch.int64), torch.zeros(0, dtype=torch.int64), 4)
    assert tree.tokens.shape == tree.log_weights.shape == (0, 5) and tree.num_nodes.shape == (0,)
    check_invariants(tree)


@both
def test_inputs_are_left_alone_and_runs_repeat(builder: Builder) -> None:
    args = candidates(4, 7, 8, seed=3)
    before = [tensor.clone() for tensor in args]
    first, second = builder(*args, 16), builder(*args, 16)
    assert_same(first, second)
    assert all(torch.equal(a, b) for a, b in zip(args, before, strict=True))


@both
def test_strided_inputs(builder: Builder) -> None:
    log_probs, token_ids, roots = candidates(3, 5, 8, seed=4)
    strided = torch.empty(3, 5, 16)
    strided[..., ::2] = log_probs
    wide = token_ids.repeat_interleave(2, dim=-1)
    assert_same(builder(strided[..., ::2], wide[..., ::2], roots, 9), builder(log_probs, token_ids, roots, 9))


def test_tables_made_in_inference_mode_serve_everywhere() -> None:
    """SGLang's worker runs in inference mode; the cached index tables must not bind later callers to it."""
    log_probs, token_ids, roots = candidates(2, 3, 5, seed=8)
    with torch.inference_mode():
        first = build_tree_batched(log_probs, token_ids, roots, 13)
    second = build_tree_batched(log_probs.requires_grad_(), token_ids, roots, 13)
    assert_same(first, second)
    assert not second.log_weights.requires_grad


def test_dispatch_uses_both_paths_and_they_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    used = []
    for name in ("build_tree_reference", "build_tree_batched"):
        original = getattr(build, name)
        monkeypatch.setattr(build, name, lambda *args, f=original, name=name: (used.append(name), f(*args))[1])
    args = candidates(16, 7, 8, seed=5)
    small = build_tree(*args, 4)
    large = build_tree(*args, 64)
    assert used == ["build_tree_reference", "build_tree_batched"]
    for name in ("tokens", "parents", "depths", "log_weights"):
        assert torch.equal(getattr(small, name), getattr(large, name)[:, :5])


def test_other_devices_never_wait_for_the_host() -> None:
    """A meta tensor has no values: reading one back, a data-dependent shape or a stray CPU tensor raises."""
    args = [tensor.to("meta") for tensor in candidates(2, 7, 8, seed=6)]
    tree = build_tree(*args, 16)
    host = build_tree(*candidates(2, 7, 8, seed=6), 16)
    for field in dataclasses.fields(DraftTree):
        a, b = getattr(tree, field.name), getattr(host, field.name)
        assert (a.device.type, a.shape, a.dtype) == ("meta", b.shape, b.dtype)
        assert a.is_contiguous() and b.is_contiguous()


def good_inputs() -> list:
    return [*candidates(2, 3, 4, seed=7), 4]


@both
@pytest.mark.parametrize(
    ("index", "value", "reason"),
    [
        (3, 0, "budget must be at least 1"),
        (0, torch.zeros(2, 12), "log_probs must be"),
        (0, torch.zeros(2, 0, 4), "log_probs must be"),
        (0, torch.zeros(2, 3, 4, dtype=torch.float64), "float64"),
        (1, torch.zeros(2, 3, 3, dtype=torch.int64), "token_ids must be"),
        (1, torch.zeros(2, 3, 4, dtype=torch.int32), "int32"),
        (2, torch.zeros(3, dtype=torch.int64), "root_tokens must be"),
        (2, torch.zeros(2, dtype=torch.int64, device="meta"), "one device"),
    ],
)
def test_bad_inputs(builder: Builder, index: int, value: object, reason: str) -> None:
    args = good_inputs()
    args[index] = value
    with pytest.raises(ValueError, match=reason) as error:
        builder(*args)
    assert "\n" not in str(error.value)


def tampered(**changes: object) -> DraftTree:
    """A small valid tree (root; 1, 2 below it; 3 below 1; one padding slot) with entries of request 0 overwritten."""
    log_probs = torch.tensor([[[-0.1, -0.5], [-0.2, -INF]]])
    tree = build_tree_reference(log_probs, torch.tensor([[[5, 6], [7, 8]]]), torch.tensor([4]), 5)
    assert tree.parents.tolist() == [[-1, 0, 1, 0, 3, -1]]
    fields = {f.name: getattr(tree, f.name).clone() for f in dataclasses.fields(DraftTree)}
    for name, change in changes.items():
        if isinstance(change, torch.Tensor):
            fields[name] = change
        else:
            node, value = change  # type: ignore[misc]
            fields[name].view(1, -1)[0, node] = value
    return DraftTree(**fields)


def test_tampering_starts_from_a_valid_tree() -> None:
    check_invariants(tampered())


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"parents": (2, 3)}, "does not precede"),
        ({"parents": (2, -1)}, "does not precede"),
        ({"parents": (4, 1)}, "whose parent is"),
        ({"parents": (0, 0)}, "must be a root"),
        ({"depths": (2, 1)}, "has depth 1"),
        ({"log_weights": (2, -0.05)}, "log-weight"),
        ({"log_weights": (2, NAN)}, "log-weight"),
        ({"log_weights": (4, -INF)}, "log-weight"),
        ({"log_weights": (2, -0.9)}, "more probable than the node before"),
        ({"tokens": (3, 5)}, "two children of node 0 carry token 5"),
        ({"next_child": (1, -1)}, "in no child list"),
        ({"next_child": (2, 4)}, "whose parent is 3"),
        ({"next_child": (0, 3)}, "in no child list"),
        ({"next_child": (4, 5)}, "is not a node"),
        ({"next_sibling": (3, 5)}, "is not a node"),
        ({"next_sibling": (1, -1)}, "in no child list"),
        ({"next_sibling": (3, 1)}, "not in node order"),
        ({"next_sibling": (0, 1)}, "must be a root"),
        ({"parents": (5, 0)}, "padding slot 5"),
        ({"depths": (5, 1)}, "padding slot 5"),
        ({"log_weights": (5, -1.0)}, "padding slot 5"),
        ({"next_sibling": (5, 1)}, "padding slot 5"),
        ({"num_nodes": (0, 0)}, "num_nodes is 0"),
        ({"num_nodes": (0, 7)}, "num_nodes is 7"),
        ({"num_nodes": (0, 6)}, "does not precede"),
        ({"num_nodes": torch.ones(2, dtype=torch.int64)}, "num_nodes must be"),
        ({"tokens": torch.zeros(6, dtype=torch.int64)}, "tokens must be"),
        ({"parents": torch.zeros(1, 5, dtype=torch.int64)}, "parents must be"),
        ({"depths": torch.zeros(1, 6, dtype=torch.int32)}, "depths must be"),
        ({"depths": torch.zeros(6, 2, dtype=torch.int64).T[:1, :]}, "contiguous"),
    ],
)
def test_check_invariants_catches(changes: dict, reason: str) -> None:
    with pytest.raises(ValueError, match=reason) as error:
        check_invariants(tampered(**changes))
    assert "\n" not in str(error.value)
