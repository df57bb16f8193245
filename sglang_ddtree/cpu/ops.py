"""Torch versions of SGLang's small Triton and CUDA operators, for the CPU platform.

Each has the name and meaning of the SGLang function it stands in for; see ``hooks.py``.
"""

from __future__ import annotations

import torch


def assign_extend_cache_locs(
    *,
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    batch_size: int,
    draft_token_num: int,
    device: object,
) -> torch.Tensor:
    """``kernels/ops/speculative/cache_locs.py: assign_extend_cache_locs_func``; int64 ``[bs * draft_token_num]``."""
    columns = start_offset.to(torch.int64).view(-1, 1) + torch.arange(draft_token_num)
    rows = req_pool_indices.to(torch.int64).view(-1, 1)
    return req_to_token[rows, columns].reshape(-1).to(torch.int64)


def assign_req_to_token_pool_func(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    batch_size: int,
) -> None:
    """``mem_cache/allocation.py: assign_req_to_token_pool_func``.

    Raises:
        IndexError: a request's slots do not fit its row (SGLang's kernel would write into the next row).
    """
    taken = 0
    width = req_to_token.shape[1]
    for row, start, end in zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True):
        if end > width:
            raise IndexError(f"request row {row} has {width} columns, slots up to {end} were allocated")
        req_to_token[row, start:end] = out_cache_loc[taken : taken + end - start].to(req_to_token.dtype)
        taken += end - start


def fill_front_out_cache_loc_func(
    num_front: torch.Tensor, out_cache_loc: torch.Tensor, front_out_cache_loc: torch.Tensor
) -> None:
    """``kernels/ops/speculative/cache_locs.py: fill_front_out_cache_loc_func``: the front slots of each window."""
    window = out_cache_loc.view(num_front.numel(), -1)
    front = window[torch.arange(window.shape[1]) < num_front.view(-1, 1)]
    front_out_cache_loc[: front.numel()] = front.to(front_out_cache_loc.dtype)


def fill_accept_out_cache_loc_func(
    accept_index: torch.Tensor, out_cache_loc: torch.Tensor, accept_out_cache_loc: torch.Tensor, size: int
) -> None:
    """``kernels/ops/speculative/eagle.py: fill_accept_out_cache_loc_func``: slots of the accepted nodes, packed."""
    flat = accept_index.reshape(-1)
    accepted = out_cache_loc[flat[flat >= 0].to(torch.int64)]
    accept_out_cache_loc[: accepted.numel()] = accepted.to(accept_out_cache_loc.dtype)


def fill_bonus_tokens_func(
    accept_tokens: torch.Tensor,
    accept_lens: torch.Tensor,
    bonus_tokens: torch.Tensor,
    accept_stride: int,
    batch_size: int,
) -> None:
    """``kernels/ops/speculative/eagle.py: fill_bonus_tokens_func``: the last accepted token of each request."""
    rows = accept_tokens.view(batch_size, accept_stride)
    last = (accept_lens.to(torch.int64) - 1).view(-1, 1)
    bonus_tokens.copy_(rows.gather(1, last).view(-1).to(bonus_tokens.dtype))


def verify_tree_greedy_func(
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrieve_index: torch.Tensor,
    retrieve_next_token: torch.Tensor,
    retrieve_next_sibling: torch.Tensor,
    target_predict: torch.Tensor,
    topk: int = -1,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``kernels/ops/speculative/spec_tree.py: verify_tree_greedy_func``; fills its first three arguments.

    ``predicts`` gets every node's target token, of which the caller reads the accepted nodes only.
    """
    bs, width = candidates.shape
    # Host lists: these are CPU tensors of a few hundred numbers, and a path is a few steps long.
    tokens, child, sibling = candidates.tolist(), retrieve_next_token.tolist(), retrieve_next_sibling.tolist()
    targets = target_predict.tolist()
    predicts.copy_(target_predict.reshape(-1))
    rows = []
    for b in range(bs):
        node, path = 0, [b * width]
        while len(path) < accept_index.shape[1]:
            step = child[b][node]
            while step >= 0 and tokens[b][step] != targets[b][node]:
                step = sibling[b][step]
            if step < 0:
                break
            node = step
            path.append(b * width + node)
        rows.append(path + [-1] * (accept_index.shape[1] - len(path)))
    accept_index.copy_(torch.tensor(rows, dtype=accept_index.dtype))
    accept_token_num.copy_((accept_index >= 0).sum(1) - 1)
    return predicts, accept_index, accept_token_num


def murmur_hash32(seed: torch.Tensor, positions: torch.Tensor, col_indices: torch.Tensor) -> torch.Tensor:
    """``kernels/ops/sampling/murmur_hash.py: murmur_hash32``; seed and positions ``[n]``, col_indices ``[m]`` -> uint32
    ``[n, m]``, the hash of (seed, position, column) as four 32-bit blocks (MurmurHash3, x86, 32 bits)."""
    low = 0xFFFFFFFF
    seed = seed.to(torch.int64)
    rows = torch.zeros_like(seed)
    for block in (seed & low, (seed >> 32) & low, positions.to(torch.int64) & low):
        rows = _murmur_mix(rows, _murmur_key(block))
    # Products overflow 64 bits and wrap, which leaves their low 32 bits right.
    h = _murmur_mix(rows.unsqueeze(1), _murmur_key(col_indices.to(torch.int64) & low))
    h ^= 16
    h ^= h >> 16
    h.mul_(0x85EBCA6B).bitwise_and_(low)
    h ^= h >> 13
    h.mul_(0xC2B2AE35).bitwise_and_(low)
    h ^= h >> 16
    return h.to(torch.uint32)


def _rotate_left(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Of 32-bit numbers in int64."""
    return ((x << bits) | (x >> (32 - bits))) & 0xFFFFFFFF


def _murmur_key(block: torch.Tensor) -> torch.Tensor:
    return (_rotate_left((block * 0xCC9E2D51) & 0xFFFFFFFF, 15) * 0x1B873593) & 0xFFFFFFFF


def _murmur_mix(h: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    return (_rotate_left(h ^ key, 13) * 5 + 0xE6546B64) & 0xFFFFFFFF
