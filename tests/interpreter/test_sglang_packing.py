"""The kernel with which SGLang packs verify masks for FlashInfer gives the bytes of our reference of the layout."""

from __future__ import annotations

import torch
from sglang.kernels.ops.speculative.pack_verify_mask import pack_verify_mask_into

from sglang_ddtree.attention.flashinfer_layout import byte_indptr, pack_mask
from sglang_ddtree.gpu.cases import Size, random_candidates
from sglang_ddtree.tree.build import build_tree_reference
from sglang_ddtree.tree.mask import full_mask


def test_a_tree_mask_longer_than_needed():
    made = random_candidates(Size(5, 16, 7, 8), seed=1)
    tree = build_tree_reference(made.log_probs, made.token_ids, made.root_tokens, 16)
    prefixes = [0, 3, 300, 41, 8]
    columns = [prefix + 17 for prefix in prefixes]
    mask = full_mask(tree, torch.tensor(prefixes), total=17 * sum(columns) + 999)
    expected, indptr = pack_mask(mask, [17] * 5, columns)

    packed = torch.full((len(expected) + 64,), 0xAA, dtype=torch.uint8)
    kv_indptr = torch.tensor([0, *columns]).cumsum(0).to(torch.int32)
    pack_verify_mask_into(
        mask, kv_indptr, byte_indptr([17] * 5, columns), packed, batch_size=5, query_width=17, max_kv_len=max(columns)
    )
    assert torch.equal(packed[: len(expected)], expected) and packed[len(expected) :].eq(0xAA).all()
    assert torch.equal(indptr, byte_indptr([17] * 5, columns)) and expected.ne(0).sum() > 100
