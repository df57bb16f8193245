"""Positions and masks against brute force."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_ddtree.tree.build import build_tree_reference
from sglang_ddtree.tree.draft_tree import DraftTree
from sglang_ddtree.tree.mask import ancestor_mask, full_mask, positions, unpack_full_mask

#: No deadline: CI machines are shared.
quick = settings(deadline=None, derandomize=True, database=None, max_examples=100)


def random_tree(bs: int, depth: int, top_k: int, budget: int, seed: int) -> DraftTree:
    """A tree with padding in some requests; a low spread gives bushy trees, a high one chains."""
    rng = torch.Generator().manual_seed(seed)
    spread = torch.rand(bs, 1, 1, generator=rng) * 6
    log_probs = (torch.randn(bs, depth, 32, generator=rng) * spread).log_softmax(-1).topk(top_k, -1).values
    ends = torch.randint(1, top_k + 1, (bs, depth, 1), generator=rng)
    log_probs = log_probs.masked_fill(torch.arange(top_k) >= ends, -torch.inf)
    token_ids = torch.arange(top_k).expand(bs, depth, top_k).contiguous()
    return build_tree_reference(log_probs, token_ids, torch.zeros(bs, dtype=torch.int64), budget)


@st.composite
def trees(draw) -> tuple[DraftTree, int]:
    """A tree and its depth bound."""
    depth = draw(st.integers(1, 15))
    tree = random_tree(
        draw(st.integers(1, 4)), depth, draw(st.integers(1, 5)), draw(st.integers(1, 24)), draw(st.integers(0, 2**16))
    )
    return tree, depth


def brute_force(tree: DraftTree) -> torch.Tensor:
    bs, width = tree.tokens.shape
    mask = torch.zeros(bs, width, width, dtype=torch.bool)
    for row in range(bs):
        for node in range(width):
            seen = node
            while seen != -1:
                mask[row, node, seen] = True
                seen = int(tree.parents[row, seen])
            if node >= int(tree.num_nodes[row]):
                mask[row, node, 0] = True  # padding sees the root and itself
    return mask


@quick
@given(trees())
def test_mask_is_ancestors_and_self(case: tuple[DraftTree, int]) -> None:
    tree, depth = case
    expected = brute_force(tree)
    assert torch.equal(ancestor_mask(tree), expected)
    assert torch.equal(ancestor_mask(tree, depth), expected)
    assert torch.equal(ancestor_mask(tree, depth + 40), expected)


@quick
@given(trees())
def test_no_row_is_empty_and_no_node_sees_padding(case: tuple[DraftTree, int]) -> None:
    tree, _ = case
    mask = ancestor_mask(tree)
    assert mask.any(-1).all()
    node = torch.arange(tree.width)
    real = node < tree.num_nodes.unsqueeze(1)
    assert not (mask & real.unsqueeze(2) & ~real.unsqueeze(1)).any()
    # A node of depth d sees exactly d + 1 nodes.
    assert torch.equal(mask.sum(-1)[real], tree.depths[real] + 1)


def test_chain_is_causal() -> None:
    tree = build_tree_reference(torch.zeros(1, 15, 1), torch.zeros(1, 15, 1, dtype=torch.int64), torch.tensor([0]), 15)
    for depth in (None, 15):
        assert torch.equal(ancestor_mask(tree, depth)[0], torch.ones(16, 16, dtype=torch.bool).tril())


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_positions(dtype: torch.dtype) -> None:
    tree = random_tree(3, 4, 3, 9, seed=1)
    prefix_lens = torch.tensor([0, 5, 100], dtype=dtype)
    got = positions(tree, prefix_lens)
    assert got.dtype == torch.int64
    assert got.tolist() == [[p + d for d in row] for p, row in zip([0, 5, 100], tree.depths.tolist(), strict=True)]


@quick
@given(trees(), st.data(), st.sampled_from([torch.int32, torch.int64]))
def test_full_mask_round_trip(case: tuple[DraftTree, int], data, dtype: torch.dtype) -> None:
    tree, depth = case
    lens = data.draw(st.lists(st.integers(0, 9), min_size=tree.batch_size, max_size=tree.batch_size))
    flat = full_mask(tree, torch.tensor(lens, dtype=dtype), max_depth=depth)
    assert flat.dtype == torch.bool and flat.dim() == 1
    assert flat.numel() == sum(tree.width * (n + tree.width) for n in lens)
    # The layout itself, by SGLang's index formula, independent of unpack_full_mask.
    tree_mask, start = brute_force(tree), 0
    parts = unpack_full_mask(flat, torch.tensor(lens), tree.width)
    for row, prefix in enumerate(lens):
        stride = prefix + tree.width
        for i in range(tree.width):
            line = flat[start + i * stride : start + (i + 1) * stride]
            assert line[:prefix].all() and torch.equal(line[prefix:], tree_mask[row, i])
        start += tree.width * stride
        assert parts[row].shape == (tree.width, stride)
        assert parts[row][:, :prefix].all() and torch.equal(parts[row][:, prefix:], tree_mask[row])


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8])
def test_full_mask_into_a_buffer(dtype: torch.dtype) -> None:
    tree = random_tree(3, 4, 3, 9, seed=2)
    prefix_lens = torch.tensor([4, 0, 7])
    expected = full_mask(tree, prefix_lens)
    stale = torch.zeros(expected.numel() + 50, dtype=dtype)
    got = full_mask(tree, prefix_lens, out=stale)
    assert got.data_ptr() == stale.data_ptr() and got.dtype == dtype
    assert torch.equal(got.bool(), expected)
    assert not stale[expected.numel() :].any()  # untouched beyond the result
    total = expected.numel() + 20
    got = full_mask(tree, prefix_lens, out=stale, total=total)
    assert got.numel() == total and torch.equal(got[: expected.numel()].bool(), expected)
    assert got[expected.numel() :].all() and not stale[total:].any()
    assert torch.equal(full_mask(tree, prefix_lens, total=total), got.bool())


def test_a_total_avoids_the_host() -> None:
    host = random_tree(2, 4, 3, 9, seed=3)
    tree = DraftTree(*(getattr(host, name).to("meta") for name in host.__dataclass_fields__))
    prefix_lens = torch.tensor([3, 4]).to("meta")
    flat = full_mask(tree, prefix_lens, total=270, max_depth=4)
    assert flat.device.type == "meta" and flat.shape == (270,)
    assert ancestor_mask(tree).shape == (2, 10, 10) and positions(tree, prefix_lens).shape == (2, 10)
    with pytest.raises(Exception, match="meta"):  # without a total it has to read prefix_lens
        full_mask(tree, prefix_lens)


def test_empty_batch() -> None:
    none = torch.zeros(0, dtype=torch.int64)
    tree = build_tree_reference(torch.zeros(0, 3, 2), torch.zeros(0, 3, 2, dtype=torch.int64), none, 4)
    assert ancestor_mask(tree).shape == (0, 5, 5) and positions(tree, none).shape == (0, 5)
    assert full_mask(tree, none).shape == (0,) and unpack_full_mask(full_mask(tree, none), none, 5) == []


def test_bad_inputs() -> None:
    tree = random_tree(2, 3, 2, 4, seed=4)
    lens = torch.tensor([1, 2])
    needed = full_mask(tree, lens).numel()
    for bad in (torch.tensor([1, 2, 3]), torch.tensor([1.0, 2.0])):
        with pytest.raises(ValueError, match="prefix_lens must be"):
            positions(tree, bad)
        with pytest.raises(ValueError, match="prefix_lens must be"):
            full_mask(tree, bad)
    with pytest.raises(ValueError, match=f"this batch needs {needed}"):
        full_mask(tree, lens, total=needed - 1)
    for out in (torch.zeros(needed - 1, dtype=torch.bool), torch.zeros(needed), torch.zeros(1, needed).bool()):
        with pytest.raises(ValueError, match="out must be"):
            full_mask(tree, lens, out=out)
    with pytest.raises(ValueError, match="these prefixes need"):
        unpack_full_mask(full_mask(tree, lens), torch.tensor([2, 2]), tree.width)
