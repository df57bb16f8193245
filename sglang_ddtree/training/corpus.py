"""Generated text as training examples: memory-mapped shards, batches of sequences of similar length."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open


@dataclass(frozen=True)
class Sequence:
    """A prompt with the target's answer. taps [n, taps * h] and final [n, h] are views of a mapped file (bf16)."""

    tokens: torch.Tensor  # [n] int32
    prompt: int  # tokens of the prompt; the answer is tokens[prompt:]
    taps: torch.Tensor
    final: torch.Tensor


def load_sequences(directory: Path, minimum: int = 6) -> list[Sequence]:
    """All sequences of all shards whose answer has at least ``minimum`` tokens."""
    sequences = []
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, "pt") as shard:
            tokens, lengths, taps, final = (shard.get_tensor(n) for n in ("tokens", "lengths", "taps", "final"))
        low = 0
        for prompt, total in lengths.tolist():
            rows = slice(low, low + total)
            low += total
            if total - prompt >= minimum:
                sequences.append(Sequence(tokens[rows], prompt, taps[rows], final[rows]))
    return sequences


def batches(load: Callable[[], list[Sequence]], size: int, generator: torch.Generator) -> Iterator[list[Sequence]]:
    """Batches without end: loaded and shuffled anew every epoch, lengths within a batch are similar."""
    while True:
        sequences = load()
        order = torch.randperm(len(sequences), generator=generator).tolist()
        window = 16 * size
        cut = []
        for low in range(0, len(order), window):
            near = sorted(order[low : low + window], key=lambda i: len(sequences[i].tokens))
            cut += [near[i : i + size] for i in range(0, len(near) - size + 1, size)]
        for index in torch.randperm(len(cut), generator=generator).tolist():
            yield [sequences[i] for i in cut[index]]


@dataclass
class Batch:
    """b sequences padded to s tokens, with ``a`` blocks of ``B`` positions drawn in each."""

    taps: torch.Tensor  # [b, s, taps * h] fp32
    anchors: torch.Tensor  # [b, a] position of each block's first token
    first: torch.Tensor  # [b, a] that token
    labels: torch.Tensor  # [b, a, B - 1] the tokens that follow it
    final: torch.Tensor  # [b, a, B - 1, h] fp32, the target's final hidden states that predicted the labels
    valid: torch.Tensor  # [b, a, B - 1] False past the end of the text


def make_batch(sequences: list[Sequence], blocks: int, size: int, generator: torch.Generator) -> Batch:
    """Draw ``blocks`` anchors of each answer, without repetition where it is long enough."""
    b, s = len(sequences), max(len(q.tokens) for q in sequences)
    taps = torch.zeros(b, s, sequences[0].taps.shape[1])
    final = torch.zeros(b, s + size, sequences[0].final.shape[1])
    tokens = torch.zeros(b, s + size, dtype=torch.long)
    anchors = torch.zeros(b, blocks, dtype=torch.long)
    total = torch.tensor([len(q.tokens) for q in sequences])
    for row, q in enumerate(sequences):
        n = len(q.tokens)
        taps[row, :n], final[row, :n], tokens[row, :n] = q.taps, q.final, q.tokens
        choices = torch.randperm(n - 1 - q.prompt, generator=generator)
        choices = choices.repeat(-(-blocks // len(choices)))[:blocks]
        anchors[row] = q.prompt + choices
    rows = torch.arange(b)[:, None, None]
    steps = torch.arange(1, size)
    where = anchors[..., None] + steps
    return Batch(
        taps=taps,
        anchors=anchors,
        first=tokens[rows[..., 0], anchors],
        labels=tokens[rows, where],
        final=final[rows, where - 1],
        valid=where < total[:, None, None],
    )
