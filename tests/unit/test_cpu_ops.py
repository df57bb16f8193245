"""The torch stand-ins for SGLang's kernels, against plain loops."""

import os
import subprocess
import sys

import pytest
import torch

from sglang_ddtree.cpu import ops
from sglang_ddtree.tree.build import build_tree
from sglang_ddtree.tree.walk import walk_reference


def random_tree(generator, bs, depth=5, top_k=4, budget=12, vocab=9):
    log_probs = torch.randn(bs, depth, vocab, generator=generator).log_softmax(-1)
    values, ids = log_probs.topk(top_k, -1)
    roots = torch.randint(0, vocab, (bs,), generator=generator)
    return build_tree(values, ids, roots, budget)


def test_greedy_verification_fills_what_sglang_reads():
    generator = torch.Generator().manual_seed(0)
    depth = 5
    accepted_any = 0
    for _ in range(50):
        bs = int(torch.randint(1, 5, (1,), generator=generator))
        tree = random_tree(generator, bs, depth)
        width = tree.width
        targets = torch.randint(0, 9, (bs, width), generator=generator)
        want = walk_reference(tree, targets, depth)
        predict = torch.zeros(bs * width, dtype=torch.int32)
        index = torch.full((bs, depth + 1), -1, dtype=torch.int32)
        counts = torch.empty(bs, dtype=torch.int32)
        got = ops.verify_tree_greedy_func(
            predict,
            index,
            counts,
            tree.tokens,
            torch.arange(bs * width).view(bs, width),
            tree.next_child,
            tree.next_sibling,
            targets,
        )
        first = torch.arange(bs).view(-1, 1) * width
        assert got[1].tolist() == torch.where(want.accepted >= 0, want.accepted + first, -1).tolist()
        assert got[2].tolist() == want.num_accepted.tolist()
        last = got[1].gather(1, got[2].view(-1, 1).long()).view(-1)
        assert got[0][last.long()].tolist() == want.bonus.tolist()
        accepted_any += int(want.num_accepted.sum())
    assert accepted_any > 20


def test_slots_of_the_window_and_of_the_accepted_nodes():
    window = torch.arange(100, 112)  # two requests, six slots each
    front = torch.zeros(8, dtype=torch.int64)
    ops.fill_front_out_cache_loc_func(torch.tensor([2, 3]), window, front)
    assert front.tolist() == [100, 101, 106, 107, 108, 0, 0, 0]

    accepted = torch.zeros(8, dtype=torch.int64)
    index = torch.tensor([[0, 4, -1, -1], [6, 8, 11, -1]], dtype=torch.int32)
    ops.fill_accept_out_cache_loc_func(index, window, accepted, 8)
    assert accepted.tolist() == [100, 104, 106, 108, 111, 0, 0, 0]


def test_bonus_is_the_last_accepted_token():
    tokens = torch.tensor([[5, 6, 7, 0], [8, 0, 0, 0]], dtype=torch.int32)
    bonus = torch.empty(2, dtype=torch.int32)
    ops.fill_bonus_tokens_func(tokens, torch.tensor([3, 1], dtype=torch.int32), bonus, 4, 2)
    assert bonus.tolist() == [7, 8]


def test_window_slots_come_from_each_requests_own_row():
    table = torch.arange(40, dtype=torch.int32).view(4, 10)
    got = ops.assign_extend_cache_locs(
        req_pool_indices=torch.tensor([2, 0]),
        req_to_token=table,
        start_offset=torch.tensor([3, 5]),
        end_offset=torch.tensor([6, 8]),
        batch_size=2,
        draft_token_num=3,
        device="cpu",
    )
    assert got.tolist() == [23, 24, 25, 5, 6, 7]


def test_slots_are_written_to_each_requests_own_row():
    table = torch.zeros(3, 6, dtype=torch.int32)
    ops.assign_req_to_token_pool_func(
        torch.tensor([2, 0]), table, torch.tensor([1, 4]), torch.tensor([3, 6]), torch.tensor([7, 8, 9, 10]), 2
    )
    assert table.tolist() == [[0, 0, 0, 0, 9, 10], [0] * 6, [0, 7, 8, 0, 0, 0]]


def test_slots_past_the_end_of_a_row_are_an_error_not_the_next_row():
    table = torch.zeros(2, 4, dtype=torch.int32)
    with pytest.raises(IndexError, match="4 columns"):
        ops.assign_req_to_token_pool_func(
            torch.tensor([0]), table, torch.tensor([2]), torch.tensor([5]), torch.tensor([1, 2, 3]), 1
        )
    assert table.sum() == 0


INTERPRETED = """
import torch
from sglang.kernels.ops.sampling.murmur_hash import murmur_hash32_kernel
from sglang_ddtree.cpu.ops import murmur_hash32

seed = torch.tensor([0, 42, 2**63 - 1, 123456789012345]).to(torch.uint64)
positions = torch.tensor([0, 7, 131071, 99])
columns = torch.arange(2500)
wanted = torch.empty((4, 2500), dtype=torch.uint32)
murmur_hash32_kernel[(4, 3)](seed, positions, columns, wanted, 4, 2500, BLOCK_SIZE=1024)
found = murmur_hash32(seed, positions, columns)
assert found.dtype == torch.uint32
assert torch.equal(found.to(torch.int64), wanted.to(torch.int64))
assert len(set(found.to(torch.int64).flatten().tolist())) > 9900
"""


def test_the_hash_of_seeded_draws_is_the_kernels():
    done = subprocess.run(
        [sys.executable, "-c", INTERPRETED],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
