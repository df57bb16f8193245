"""Our masks, read as FlashInfer's kernels read them: the prefix is visible, and in the tree ancestors and the node."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_ddtree.attention import flashinfer_layout as layout
from sglang_ddtree.gpu.cases import Size, random_candidates
from sglang_ddtree.tree.bits import ancestor_bits
from sglang_ddtree.tree.build import build_tree_reference
from sglang_ddtree.tree.draft_tree import DraftTree
from sglang_ddtree.tree.mask import full_mask

SIZES = st.builds(
    lambda budget, depth, top_k, seed: (Size(1, budget, depth, top_k), seed),
    st.sampled_from([1, 2, 5, 16, 31, 32, 33, 64, 100]),
    st.integers(1, 15),
    st.integers(1, 8),
    st.integers(0, 2**16),
)
PREFIXES = st.lists(st.one_of(st.integers(0, 40), st.just(257)), min_size=1, max_size=5)
EVERYTHING = settings(max_examples=60, deadline=None)


def trees(size: Size, seed: int, bs: int) -> DraftTree:
    made = random_candidates(Size(bs, size.budget, size.depth, size.top_k), seed)
    return build_tree_reference(*made.on(torch.device("cpu")))


def expected(tree: DraftTree, request: int, prefix: int, window: int | None = None) -> torch.Tensor:
    """From the parents alone, one node and one key at a time."""
    width = tree.width
    parents, depths = tree.parents[request].tolist(), tree.depths[request].tolist()
    visible = torch.zeros(width, prefix + width, dtype=torch.bool)
    for node in range(width):
        for key in range(prefix):
            visible[node, key] = window is None or prefix + depths[node] - key <= window
        ancestor = node
        while ancestor >= 0:
            visible[node, prefix + ancestor] = window is None or depths[node] - depths[ancestor] <= window
            ancestor = parents[ancestor]
    return visible


def real_rows(tree: DraftTree, request: int) -> int:
    return int(tree.num_nodes[request])


@EVERYTHING
@given(SIZES, PREFIXES, st.sampled_from([1, 16]), st.integers(0, 200))
def test_packed_full_masks(sized, prefixes, page_size, over):
    tree = trees(*sized, len(prefixes))
    width = tree.width
    lens = torch.tensor(prefixes)
    # The cache holds pages; FlashInfer's kernel sees the keys that they hold, whatever their size.
    kv_lens = [
        layout.kv_len(-(-keys // page_size), page_size, (keys - 1) % page_size + 1)
        for keys in (prefix + width for prefix in prefixes)
    ]
    assert kv_lens == [prefix + width for prefix in prefixes]
    q_lens = [width] * len(prefixes)
    # SGLang's rule is an upper bound where the host's lengths are one; the rest is True and belongs to nobody.
    mask = full_mask(tree, lens, total=width * sum(kv_lens) + over)
    assert bool(mask[width * sum(kv_lens) :].all())
    packed, starts = layout.pack(mask, q_lens, kv_lens), layout.byte_starts(q_lens, kv_lens)
    assert packed.numel() == starts[-1]
    for request, prefix in enumerate(prefixes):
        seen = layout.read_packed(packed, starts, request, width, kv_lens[request])
        rows = real_rows(tree, request)
        assert torch.equal(seen[:rows], expected(tree, request, prefix)[:rows])
        assert bool(seen[:, prefix:].diagonal().all()), "every row sees itself, padding too"
        assert not bool(seen[:rows, prefix + rows :].any()), "no node sees padding"


@EVERYTHING
@given(SIZES, PREFIXES, st.one_of(st.none(), st.integers(0, 300)))
def test_tree_bits(sized, prefixes, window):
    tree = trees(*sized, len(prefixes))
    width = tree.width
    bits = ancestor_bits(tree)
    assert bits.shape == (len(prefixes) * width, -(-width // 32))
    q_indptr = [row * width for row in range(len(prefixes) + 1)]
    for request, prefix in enumerate(prefixes):
        seen = layout.read_tree_bits(bits, q_indptr, request, prefix + width, window)
        rows = real_rows(tree, request)
        assert torch.equal(seen[:rows], expected(tree, request, prefix, window)[:rows])
        assert bool(seen[:, prefix:].diagonal().all())


def test_both_ways_see_the_same():
    tree = trees(Size(1, 64, 7, 8), 3, 4)
    prefixes = [0, 1, 37, 100]
    kv_lens = [prefix + 65 for prefix in prefixes]
    packed = layout.pack(full_mask(tree, torch.tensor(prefixes)), [65] * 4, kv_lens)
    starts = layout.byte_starts([65] * 4, kv_lens)
    assert any(65 * length % 8 for length in kv_lens), "no request ends within a byte"
    for request, length in enumerate(kv_lens):
        one = layout.read_packed(packed, starts, request, 65, length)
        other = layout.read_tree_bits(ancestor_bits(tree), [0, 65, 130, 195, 260], request, length)
        assert torch.equal(one, other)


def test_padding_requests_of_a_graph_leave_the_real_ones_alone():
    """SGLang's own code pads the mask with True when a CUDA graph is wider than the batch."""
    from sglang_ddtree.verify import make_verify_input

    tree = trees(Size(1, 16, 4, 4), 5, 3)
    prefixes, width, padded = [5, 0, 19], 17, 2
    verify = make_verify_input(
        tree,
        prefix_lens=torch.tensor(prefixes),
        attn_backend=SimpleNamespace(verify_mask=None, max_context_len=64),
        prefix_lens_sum=sum(prefixes),
        depth=4,
        top_k=4,
        out_cache_loc=torch.zeros(3 * width, dtype=torch.int64),
        kv_loc_plan=None,
        sampler=None,
        penalties=None,
    )
    lens = torch.tensor([*prefixes, *[1] * padded], dtype=torch.int32)
    _, kv_indptr, qo_indptr, mask = verify.generate_attn_arg_prefill(
        req_pool_indices=torch.arange(5),
        paged_kernel_lens=lens,
        paged_kernel_lens_sum=int(lens.sum()),
        translator=SimpleNamespace(pack_read_stream=lambda plan, **kwargs: None),
        plan=None,
    )
    q_lens, kv_lens = qo_indptr.diff().tolist(), kv_indptr.diff().tolist()
    assert q_lens == [width] * 5 and kv_lens == [*(prefix + width for prefix in prefixes), 18, 18]
    packed, starts = layout.pack(mask, q_lens, kv_lens), layout.byte_starts(q_lens, kv_lens)
    for request, prefix in enumerate(prefixes):
        rows = real_rows(tree, request)
        seen = layout.read_packed(packed, starts, request, width, kv_lens[request])
        assert torch.equal(seen[:rows], expected(tree, request, prefix)[:rows])
    for request in (3, 4):
        assert bool(layout.read_packed(packed, starts, request, width, 18).all()), "no row may be fully masked"


def test_the_element_pointer_is_not_the_byte_pointer():
    assert layout.element_starts([3, 2], [5, 9]) == [0, 15, 33]
    assert layout.byte_starts([3, 2], [5, 9]) == [0, 2, 5]


@pytest.mark.parametrize(
    ("bs", "width", "context", "fits"),
    [(48, 65, 262_144, True), (48, 257, 262_144, False), (64, 256, 131_072, False), (63, 256, 131_072, True)],
)
def test_int32(bs, width, context, fits):
    lens = [width] * bs, [context] * bs
    if fits:
        assert layout.byte_starts(*lens)[-1] <= layout.INT32_MAX
    else:
        with pytest.raises(ValueError, match="counts up to 2147483647"):
            layout.byte_starts(*lens)


def test_a_short_mask_is_refused():
    with pytest.raises(ValueError, match="these requests need 6"):
        layout.pack(torch.ones(5, dtype=torch.bool), [2], [3])


def test_against_flashinfers_own_lengths():
    from flashinfer.page import get_seq_lens

    pages, last = torch.tensor([0, 1, 4, 9]), torch.tensor([1, 16, 3])
    got = get_seq_lens(pages, last, 16).tolist()
    assert got == [layout.kv_len(int(n), 16, int(part)) for n, part in zip(pages.diff(), last, strict=True)]
