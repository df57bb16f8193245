"""Greedy text by the target for the training prompts, with the hidden states that the drafter will read.

One shard per group of prompts, so that an interrupted run goes on where it stopped and several processes can share
the work. A shard ``NNNNN.safetensors`` holds, for its sequences one after the other:
``tokens`` [n] int32, ``lengths`` [sequences, 2] (prompt, total), ``taps`` [n, taps * h] and ``final`` [n, h] in bf16.
The last token of a sequence has no hidden states yet (it was never fed); its rows are zero.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file

from sglang_ddtree.training.target import Cache, Target, forward

NEGATIVE = -1e9


def generate_batch(
    target: Target,
    prompts: list[list[int]],
    max_new: int,
    eos: int,
    taps: tuple[int, ...],
    prefix: int = 0,
    prefill: int = 256,
) -> list[dict[str, torch.Tensor]]:
    """Greedy continuation of prompts (token lists), until ``eos`` or ``max_new`` tokens.

    The first ``prefix`` tokens are the same in all prompts (the system turn) and are run once. After them prompts are
    padded on the left to the longest one, and the padding is masked; best called with prompts of similar length.
    Returns for every prompt tokens [n], taps [n, taps * h] and final [n, h] (bf16), without padding.
    """
    count, width = len(prompts), max(map(len, prompts))
    tokens = torch.full((count, width + max_new), eos, dtype=torch.long)
    pad = torch.tensor([width - len(p) for p in prompts])
    for row, prompt in enumerate(prompts):
        tokens[row, :prefix] = torch.tensor(prompt[:prefix], dtype=torch.long)
        tokens[row, prefix + int(pad[row]) : width] = torch.tensor(prompt[prefix:])
    columns = torch.arange(width + max_new)
    hidden = target.hidden
    all_taps = torch.zeros(count, width + max_new, len(taps) * hidden, dtype=torch.bfloat16)
    all_final = torch.zeros(count, width + max_new, hidden, dtype=torch.bfloat16)
    shown = (columns[None] < prefix) | (columns[None] >= prefix + pad[:, None])
    visible = torch.where(shown, 0.0, NEGATIVE)  # [count, columns]

    cache = Cache.empty(target, count, width + max_new)
    causal = torch.where(columns[None, :width] <= columns[:width, None], 0.0, NEGATIVE)
    if prefix:
        mask = causal[None, :prefix, :prefix]
        final, tapped = forward(target, tokens[:1, :prefix], columns[None, :prefix], cache, 0, mask, taps)
        all_final[:, :prefix], all_taps[:, :prefix] = final.bfloat16(), tapped.bfloat16()
        cache.keys[:, 1:, :, :prefix] = cache.keys[:, :1, :, :prefix]
        cache.values[:, 1:, :, :prefix] = cache.values[:, :1, :, :prefix]
    last = torch.empty(count, hidden)
    # Pieces of about ``prefill`` tokens: larger ones fall out of the processor's caches.
    step = max(1, prefill // (width - prefix))
    for low in range(0, count, step):
        rows, new = slice(low, min(count, low + step)), slice(prefix, width)
        positions = (columns[None, new] - pad[rows, None]).clamp(min=0)
        mask = (visible[rows, None, :width] + causal[None, new]).clamp(min=NEGATIVE)
        final, tapped = forward(target, tokens[rows, new], positions, cache.part(rows), prefix, mask, taps)
        all_final[rows, new], all_taps[rows, new] = final.bfloat16(), tapped.bfloat16()
        last[rows] = final[:, -1]

    alive = torch.arange(count)  # prompt of each cache row; finished rows stay until enough of them can be dropped
    done = torch.zeros(count, dtype=torch.bool)
    end = torch.full((count,), width + max_new)
    for column in range(width, width + max_new):
        following = torch.mm(target.embed, last.T).T.contiguous().argmax(-1)
        tokens[alive, column] = following
        finished = (following == eos) & ~done[alive]
        end[alive[finished]] = column + 1
        done[alive[finished]] = True
        running = (~done[alive]).nonzero().flatten()
        if len(running) == 0 or column + 1 == width + max_new:
            break
        if len(running) <= 0.92 * len(alive):
            cache.keep(running)
            alive = alive[running]
        positions = (column - pad[alive])[:, None]
        mask = visible[alive, None, : column + 1]
        final, tapped = forward(target, tokens[alive, column : column + 1], positions, cache, column, mask, taps)
        all_final[alive, column], all_taps[alive, column] = final[:, 0].bfloat16(), tapped[:, 0].bfloat16()
        last = final[:, 0]
    results = []
    for row in range(count):
        kept = shown[row] & (columns < end[row])
        results.append({"tokens": tokens[row, kept], "taps": all_taps[row, kept], "final": all_final[row, kept]})
        results[-1]["taps"][-1] = 0
        results[-1]["final"][-1] = 0
    return results


def common_prefix(prompts: list[list[int]]) -> int:
    """How many first tokens all prompts share; at least one token of each is left to be run."""
    shared = 0
    for column in zip(*prompts):
        if len(set(column)) > 1:
            break
        shared += 1
    return min(shared, min(map(len, prompts)) - 1)


def write_shard(path: Path, prompts: list[list[int]], results: list[dict[str, torch.Tensor]]) -> None:
    """Save a shard under a temporary name first, so that a file that exists is complete."""
    tensors = {
        "tokens": torch.cat([r["tokens"] for r in results]).int(),
        "lengths": torch.tensor([[len(p), len(r["tokens"])] for p, r in zip(prompts, results)]),
        "taps": torch.cat([r["taps"] for r in results]),
        "final": torch.cat([r["final"] for r in results]),
    }
    temporary = path.with_suffix(f".tmp{os.getpid()}")
    save_file(tensors, temporary)
    os.replace(temporary, path)


def generate_shards(
    target: Target,
    prompts: list[list[int]],
    directory: Path,
    taps: tuple[int, ...],
    eos: int,
    max_new: int,
    group: int,
    worker: int = 0,
    workers: int = 1,
    stop_at: float = float("inf"),
    progress: Callable[[str], None] = print,
) -> None:
    """Generate every missing shard whose number is ``worker`` modulo ``workers``, until the clock reaches stop_at."""
    directory.mkdir(parents=True, exist_ok=True)
    prefix = common_prefix(prompts)
    # Within a run of several groups prompts are sorted by length, so that a group needs little padding.
    window = 8 * group
    order = [i for low in range(0, len(prompts), window)
             for i in sorted(range(low, min(low + window, len(prompts))), key=lambda i: len(prompts[i]))]  # fmt: skip
    shards = [order[low : low + group] for low in range(0, len(order), group)]
    mine = [n for n in range(len(shards)) if n % workers == worker]
    missing = [n for n in mine if not (directory / f"{n:05d}.safetensors").exists()]
    began, made = time.time(), 0
    for position, number in enumerate(missing):
        if time.time() > stop_at:
            progress(f"generation {worker}: time is up, {len(missing) - position} shards are left")
            return
        chosen = [prompts[i] for i in shards[number]]
        with torch.inference_mode():
            results = generate_batch(target, chosen, max_new, eos, taps, prefix)
        write_shard(directory / f"{number:05d}.safetensors", chosen, results)
        made += sum(len(r["tokens"]) - len(p) for p, r in zip(chosen, results))
        spent = time.time() - began
        left = spent / (position + 1) * (len(missing) - position - 1)
        progress(
            f"generation {worker}: shard {position + 1}/{len(missing)}, {made} tokens, {made / spent:.0f} token/s, "
            f"{left / 60:.1f} min left"
        )
