"""The FlashInfer variant that owns a tree's mask, without a GPU: its predicate in torch, and FlashInfer's arguments."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_ddtree.attention import flashinfer_tree
from sglang_ddtree.attention.flashinfer_layout import pack_mask, read_request
from sglang_ddtree.attention.flashinfer_tree import Variant
from sglang_ddtree.attention.tree_bits_reference import read_tree_bits
from sglang_ddtree.gpu.cases import Size, random_candidates
from sglang_ddtree.tree.bits import ancestor_bits
from sglang_ddtree.tree.build import build_tree_reference
from sglang_ddtree.tree.draft_tree import DraftTree
from sglang_ddtree.tree.mask import full_mask

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn


def trees(bs: int, budget: int, depth: int, top_k: int, seed: int) -> DraftTree:
    made = random_candidates(Size(bs, budget, depth, top_k), seed)
    return build_tree_reference(*made.on(torch.device("cpu")))


def expected(tree: DraftTree, request: int, prefix: int, window: int | None = None) -> torch.Tensor:
    """From the parents alone, one node and one key at a time."""
    parents, depths = tree.parents[request].tolist(), tree.depths[request].tolist()
    visible = torch.zeros(tree.width, prefix + tree.width, dtype=torch.bool)
    for node in range(tree.width):
        for key in range(prefix):
            visible[node, key] = window is None or prefix + depths[node] - key <= window
        ancestor = node
        while ancestor >= 0:
            visible[node, prefix + ancestor] = window is None or depths[node] - depths[ancestor] <= window
            ancestor = parents[ancestor]
    return visible


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(
    st.sampled_from([1, 2, 5, 16, 31, 32, 33, 64, 100]),
    st.integers(1, 15),
    st.integers(1, 8),
    st.integers(0, 2**16),
    st.lists(st.one_of(st.integers(0, 40), st.just(257)), min_size=1, max_size=5),
    st.one_of(st.none(), st.integers(0, 300)),
)
def test_the_predicate(budget, depth, top_k, seed, prefixes, window):
    tree = trees(len(prefixes), budget, depth, top_k, seed)
    width, bits = tree.width, ancestor_bits(tree)
    assert bits.shape == (len(prefixes) * width, -(-width // 32))
    q_indptr = [row * width for row in range(len(prefixes) + 1)]
    for request, prefix in enumerate(prefixes):
        seen = read_tree_bits(bits, q_indptr, request, prefix + width, window)
        rows = int(tree.num_nodes[request])
        assert torch.equal(seen[:rows], expected(tree, request, prefix, window)[:rows])
        assert bool(seen[:, prefix:].diagonal().all()), "every row sees itself, padding too"


def test_it_sees_what_a_stock_mask_shows():
    tree, prefixes = trees(4, 64, 7, 8, 3), [0, 1, 37, 100]
    kv_lens = [prefix + 65 for prefix in prefixes]
    packed, indptr = pack_mask(full_mask(tree, torch.tensor(prefixes)), [65] * 4, kv_lens)
    for request, length in enumerate(kv_lens):
        stock = read_request(packed, indptr, request, 65, length)
        assert torch.equal(stock, read_tree_bits(ancestor_bits(tree), [0, 65, 130, 195, 260], request, length))


@pytest.mark.parametrize("window", [0, 3, 40])
def test_the_planned_window_skips_nothing_that_a_node_sees(window):
    """FlashInfer's first key of a query tile: kv_len + first row - (Q + window_left), if positive (prefill.cuh)."""
    tree, prefix = trees(1, 64, 7, 8, 4), 300
    visible = expected(tree, 0, prefix, window)
    width = tree.width
    planned = flashinfer_tree.planned_window(window, width)
    for first_row in range(int(tree.num_nodes[0])):
        start = max(0, prefix + width + first_row - (width + planned))
        assert not bool(visible[first_row:, :start].any())


def test_what_it_takes():
    assert flashinfer_tree.why_not(BF16, BF16, 128) is None
    assert flashinfer_tree.why_not(torch.float16, FP8, 64) is None
    for query, kv, head_dim, reason in (
        (torch.float32, torch.float32, 128, "queries are torch.float32"),
        (FP8, FP8, 128, "queries are"),
        (BF16, torch.uint8, 128, "KV cache is torch.uint8"),
        (BF16, torch.float16, 128, "KV cache is torch.float16"),
        (BF16, BF16, 80, "heads have 80"),
    ):
        found = flashinfer_tree.why_not(query, kv, head_dim)
        assert found is not None and reason in found


def test_modules_have_names_of_their_own(monkeypatch, tmp_path):
    variants = [
        Variant(BF16, kv, dim, cap, win) for kv in (BF16, FP8) for dim in (64, 128) for cap in (0, 1) for win in (0, 1)
    ]
    assert len({variant.name for variant in variants}) == 16
    before = variants[0].name
    changed = tmp_path / "changed.cuh"
    changed.write_text(flashinfer_tree.SOURCE.read_text() + "\n")
    monkeypatch.setattr(flashinfer_tree, "SOURCE", changed)
    assert variants[0].name != before, "a build of another source must not be taken for this one"


class StockWrapper:
    """FlashInfer's wrapper needs a GPU to exist; this one records what it is given."""

    def __init__(self, workspace, layout, **options):
        self.options, self.calls = options, []
        self._jit_module = object()

    def plan(self, *args, **kwargs):
        self.calls.append(("plan", args, kwargs))

    def run(self, *args, **kwargs):
        self.calls.append(("run", args, kwargs))
        return "out"


@pytest.fixture
def wrapper_class(monkeypatch):
    import flashinfer

    monkeypatch.setattr(flashinfer, "BatchPrefillWithPagedKVCacheWrapper", StockWrapper)
    flashinfer_tree.tree_wrapper_class.cache_clear()
    yield flashinfer_tree.tree_wrapper_class()
    flashinfer_tree.tree_wrapper_class.cache_clear()


def test_the_wrapper_hands_over_bits_and_window(wrapper_class):
    bits = torch.zeros(4, 1, dtype=torch.int32)
    wrapper = wrapper_class(torch.empty(1), bits, Variant(BF16, BF16, 64, soft_cap=True, window=True))
    assert wrapper.options["variant_owns_mask"] and wrapper.options["backend"] == "fa2"
    assert wrapper.options["jit_args"][7:12] == [
        ["tree_bits"],
        ["int32_t"],
        ["tree_window", "logits_soft_cap", "sm_scale"],
        ["double"] * 3,
        "DDTreeAttention<true, true>",
    ]
    wrapper.begin_forward(1, 2, custom_mask=None, non_blocking=True)
    assert wrapper.forward("q", "kv", causal=True, sm_scale=0.5, window_left=9, logits_soft_cap=30.0) == "out"
    assert wrapper.calls[0] == ("plan", (1, 2), {"non_blocking": True})
    name, args, _ = wrapper.calls[1]
    assert (name, args[0], args[1], args[3]) == ("run", "q", "kv", 9.0) and args[2] is bits
    assert (wrapper._sm_scale, wrapper._logits_soft_cap) == (0.5, 30.0)


def test_the_wrapper_refuses_what_would_be_ignored(wrapper_class):
    wrapper = wrapper_class(torch.empty(1), torch.zeros(4, 1, dtype=torch.int32), Variant(BF16, BF16, 64))
    with pytest.raises(ValueError, match="would be ignored"):
        wrapper.begin_forward(custom_mask=torch.ones(1))
    for layer in ({"window_left": 9}, {"logits_soft_cap": 30.0}):
        with pytest.raises(ValueError, match="window or soft cap"):
            wrapper.forward("q", "kv", **layer)
    wrapper.forward("q", "kv", window_left=-1, logits_soft_cap=0.0)
    assert [call[0] for call in wrapper.calls] == ["run"] and len(wrapper.calls[0][1]) == 3


def test_a_plan_waits_for_the_one_before(monkeypatch):
    order = []

    class Event:
        def synchronize(self):
            order.append("wait")

        def record(self):
            order.append("record")

    class Module:
        def plan(self, number):
            order.append(number)
            return number * 10

    monkeypatch.setattr(torch.cuda, "Event", Event)
    module = flashinfer_tree.OnePlanAtATime(Module())
    assert [module.plan(1), module.plan(2)] == [10, 20]
    assert order == [1, "record", "wait", 2, "record"]
