"""The mask that FlashInfer's kernels read: a tree's full mask, packed and read back through their addresses."""

from __future__ import annotations

import importlib
from types import SimpleNamespace

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_ddtree.attention.flashinfer_layout import (
    MAX_ELEMENTS,
    MaskTooLarge,
    byte_indptr,
    element_indptr,
    pack_mask,
    read_mask,
    read_request,
)
from sglang_ddtree.tree.build import build_tree_reference
from sglang_ddtree.tree.draft_tree import DraftTree
from sglang_ddtree.tree.mask import full_mask

quick = settings(deadline=None, derandomize=True, database=None, max_examples=100)


def random_trees(bs: int, budget: int, seed: int) -> DraftTree:
    rng = torch.Generator().manual_seed(seed)
    spread = torch.rand(bs, 1, 1, generator=rng) * 5
    log_probs = (torch.randn(bs, 7, 16, generator=rng) * spread).log_softmax(-1).topk(5, -1).values
    # Some requests run out of candidates, so that there is padding.
    log_probs[:, 2:] = torch.where(torch.rand(bs, 1, 1, generator=rng) < 0.3, -torch.inf, log_probs[:, 2:])
    token_ids = torch.arange(5).expand(bs, 7, 5).contiguous()
    return build_tree_reference(log_probs, token_ids, torch.zeros(bs, dtype=torch.int64), budget)


def visible(tree: DraftTree, request: int, prefix: int) -> torch.Tensor:
    """By the definition: the whole prefix, and in the tree the ancestors and the node itself (padding: the root)."""
    found = torch.zeros(tree.width, prefix + tree.width, dtype=torch.bool)
    found[:, :prefix] = True
    parents = tree.parents[request].tolist()
    for node in range(tree.width):
        seen = node
        while seen > 0:
            found[node, prefix + seen] = True
            seen = max(parents[seen], 0)
        found[node, prefix] = True
    return found


@st.composite
def batches(draw, min_size: int = 1) -> tuple[DraftTree, list[int]]:
    prefixes = draw(st.lists(st.integers(0, 70), min_size=min_size, max_size=5))
    return random_trees(len(prefixes), draw(st.integers(1, 40)), draw(st.integers(0, 2**16))), prefixes


@quick
@given(batches(), st.one_of(st.just(0), st.integers(1, 5000)))
def test_kernels_see_prefix_ancestors_and_self(batch: tuple[DraftTree, list[int]], over: int) -> None:
    """Also in a buffer that is too long, as SGLang's is when it over-counts the prefixes."""
    tree, prefixes = batch
    width, columns = tree.width, [prefix + tree.width for prefix in prefixes]
    total = width * sum(columns) + over
    mask = full_mask(tree, torch.tensor(prefixes), total=total)
    packed, indptr = pack_mask(mask, [width] * len(prefixes), columns)
    assert packed.dtype == torch.uint8 and indptr.dtype == torch.int32 and indptr.shape == (len(prefixes) + 1,)
    for request, prefix in enumerate(prefixes):
        expected = visible(tree, request, prefix)
        assert torch.equal(read_request(packed, indptr, request, width, prefix + width), expected)
        q, kv = torch.arange(width + 3).unsqueeze(1), torch.arange(prefix + width + 9)
        beyond = read_mask(packed, indptr, request, q, kv, width, prefix + width)
        assert not beyond[width:].any() and not beyond[:, prefix + width :].any()
        assert torch.equal(beyond[:width, : prefix + width], expected)


def reads_wrong(packed: torch.Tensor, indptr: torch.Tensor, tree: DraftTree, prefixes: list[int]) -> list[bool]:
    """Per request, whether its mask read through ``indptr`` differs from the definition or lies outside."""
    found = []
    for request, prefix in enumerate(prefixes):
        try:
            read = read_request(packed, indptr, request, tree.width, prefix + tree.width)
        except IndexError:
            found.append(True)
        else:
            found.append(not torch.equal(read, visible(tree, request, prefix)))
    return found


@quick
@given(batches(min_size=2))
def test_an_index_pointer_of_elements_is_caught(batch: tuple[DraftTree, list[int]]) -> None:
    """FlashInfer PR #2201: right for the first request, which is why nobody notices at batch size 1."""
    tree, prefixes = batch
    lens = [tree.width] * len(prefixes), [prefix + tree.width for prefix in prefixes]
    packed, indptr = pack_mask(full_mask(tree, torch.tensor(prefixes)), *lens)
    assert not any(reads_wrong(packed, indptr, tree, prefixes))
    wrong = reads_wrong(packed, element_indptr(*lens), tree, prefixes)
    assert not wrong[0] and any(wrong[1:])


@pytest.mark.parametrize("mistake", ["big bit order", "rows on bytes", "no bytes between requests"])
def test_other_mistakes_are_caught(mistake: str) -> None:
    tree, prefixes = random_trees(3, 10, seed=7), [5, 0, 12]
    widths, columns = [11] * 3, [prefix + 11 for prefix in prefixes]
    mask = full_mask(tree, torch.tensor(prefixes))
    packed, indptr = pack_mask(mask, widths, columns)
    if mistake == "big bit order":
        bits = numpy.unpackbits(packed.numpy(), bitorder="little")
        packed = torch.from_numpy(numpy.packbits(bits, bitorder="big"))
    elif mistake == "rows on bytes":
        rows = mask.split([n for n in columns for _ in range(11)])
        packed = torch.cat([torch.from_numpy(numpy.packbits(row.numpy(), bitorder="little")) for row in rows])
        sizes = torch.tensor([0, *(11 * -(-n // 8) for n in columns)])
        indptr = sizes.cumsum(0).to(torch.int32)
    else:
        packed = torch.from_numpy(numpy.packbits(mask.numpy(), bitorder="little"))
        packed = torch.cat((packed, packed.new_zeros(8)))
    assert any(reads_wrong(packed, indptr, tree, prefixes))


@quick
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 30)), max_size=6), st.integers(0, 2**16))
def test_packing_is_numpys(lens: list[tuple[int, int]], seed: int) -> None:
    """And its sizes are those of FlashInfer's ``segment_packbits`` around its kernel, which needs a GPU."""
    packbits = importlib.import_module("flashinfer.quantization.packbits")
    rows, columns = [a for a, _ in lens], [b for _, b in lens]
    sizes = [a * b for a, b in lens]
    mask = torch.rand(sum(sizes), generator=torch.Generator().manual_seed(seed)) < 0.5
    packed, indptr = pack_mask(mask, rows, columns)
    parts = [numpy.packbits(part.numpy(), bitorder="little") for part in mask.split(sizes)] if sizes else []
    expected = numpy.concatenate([numpy.zeros(0, numpy.uint8), *parts])
    assert numpy.array_equal(packed.numpy(), expected) and packed.dtype == torch.uint8
    assert torch.equal(pack_mask(mask.to(torch.uint8) * 2, rows, columns)[0], packed)

    def kernel(x, from_indptr, to_indptr, bitorder, out):
        assert bitorder == "little" and to_indptr.dtype == torch.int32
        for first, last, start, end in zip(from_indptr, from_indptr[1:], to_indptr, to_indptr[1:]):
            out[start:end] = torch.from_numpy(numpy.packbits(x[first:last].numpy(), bitorder="little"))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packbits, "get_quantization_module", lambda: SimpleNamespace(segment_packbits=kernel))
        theirs, their_indptr = packbits.segment_packbits(mask, element_indptr(rows, columns), "little")
    assert torch.equal(theirs, packed) and torch.equal(their_indptr, indptr)


def their_indptr(width: int, columns: list[int]) -> torch.Tensor:
    """FlashInfer's own index pointer of elements, for pages of one token, as SGLang plans."""
    from flashinfer.prefill import _compute_page_mask_indptr

    qo = torch.arange(len(columns) + 1, dtype=torch.int32) * width
    kv = torch.tensor([0, *columns], dtype=torch.int32).cumsum(0).to(torch.int32)
    return _compute_page_mask_indptr(qo, kv, torch.ones(len(columns), dtype=torch.int32), 1)


def test_elements_are_counted_as_flashinfer_does() -> None:
    columns = [12, 7, 107]
    ours = element_indptr([7] * 3, columns)
    assert ours.dtype == torch.int32 and torch.equal(ours, their_indptr(7, columns))
    assert byte_indptr([7] * 3, columns).tolist() == [0, 11, 18, 112]


def test_the_int32_limit() -> None:
    """64 requests of 256 rows over 131072 columns are one element too many, and FlashInfer's sum wraps."""
    rows, columns = [256] * 64, [131072] * 64
    assert int(their_indptr(256, columns)[-1]) < 0
    for call in (element_indptr, byte_indptr):
        with pytest.raises(MaskTooLarge, match=f"2147483648 elements.*ends at {MAX_ELEMENTS}"):
            call(rows, columns)
    with pytest.raises(MaskTooLarge):
        pack_mask(torch.zeros(1, dtype=torch.bool), rows, columns)
    columns[0] -= 1
    assert element_indptr(rows, columns)[-1] == 2**31 - 256 == int(their_indptr(256, columns)[-1])
    assert byte_indptr(rows, columns)[-1] == 2**28 - 32
    assert element_indptr([1], [MAX_ELEMENTS]).tolist() == [0, MAX_ELEMENTS]


def test_bad_arguments() -> None:
    mask = torch.ones(20, dtype=torch.bool)
    with pytest.raises(ValueError, match="mask has 20 elements, these lengths need 21"):
        pack_mask(mask, [3], [7])
    for bad in (mask.view(4, 5), mask.float()):
        with pytest.raises(ValueError, match="mask must be bool or uint8 and flat"):
            pack_mask(bad, [2], [5])
    for rows, columns in (([1, 2], [3]), ([-1], [3]), ([1], [-3])):
        with pytest.raises(ValueError, match="must be as many lengths"):
            element_indptr(rows, columns)
    packed, indptr = pack_mask(mask, [4], [5])
    with pytest.raises(IndexError, match="request 0 reads byte 2 of 2"):
        read_request(packed[:2], indptr, 0, 4, 5)
