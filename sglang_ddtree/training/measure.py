"""Offline acceptance length of a drafter under greedy decoding, for the chain and for trees of several budgets.

Verification is lossless, so the text is known beforehand: the target's greedy answer is generated once, the drafter
proposes at every position of it, and the verify steps are then replayed along the text. That gives the same numbers as
serving (up to rounding in bf16) at a fraction of the cost.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from sglang_ddtree.bench.prompts import load_prompts
from sglang_ddtree.training.corpus import Sequence, load_sequences
from sglang_ddtree.training.data import encode_prompts
from sglang_ddtree.training.generate import generate_shards
from sglang_ddtree.training.model import Drafter, block_embeddings
from sglang_ddtree.training.target import Target
from sglang_ddtree.tree.build import build_tree

BUDGETS = (4, 8, 16, 32, 64)
TOP_K = 8


@dataclass
class Tally:
    """Verify steps and committed tokens of one set, per way of drafting ("chain" or a budget)."""

    steps: dict[str, int]
    committed: dict[str, int]

    def lengths(self) -> dict[str, float]:
        """Committed tokens per verify step, bonus included."""
        return {way: self.committed[way] / self.steps[way] for way in self.steps}


def reference_text(
    target: Target, tokenizer, name: str, split: str, directory: Path, eos: int, taps: tuple[int, ...], max_new: int,
    progress=print,
) -> list[Sequence]:  # fmt: skip
    """The target's greedy answers to one split of a prompt set, generated once and kept in ``directory``."""
    prompts = encode_prompts(tokenizer, load_prompts(name, split), limit=1024)
    place = directory / f"{split}-{name}"
    generate_shards(target, prompts, place, taps, eos, max_new, group=20, progress=progress)
    return load_sequences(place, minimum=2)


@torch.inference_mode()
def proposals(
    drafter: Drafter, embed: torch.Tensor, q: Sequence, head: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities and token ids [answer - 1, B - 1, TOP_K] of the drafter at every token of an answer.

    ``head`` [vocab, h] is the target's LM head, its embedding where not given.
    """
    head = embed if head is None else head
    n = len(q.tokens)
    anchors = torch.arange(q.prompt, n - 1)
    context = drafter.project(q.taps[None].float())
    log_probs, ids = [], []
    for low in range(0, len(anchors), 32):
        part = anchors[None, low : low + 32]
        block = block_embeddings(embed, q.tokens[part].long(), drafter.shape)
        hidden = drafter(context, part, block, first_row=1)[0]
        logits = hidden @ head.T
        top = logits.topk(TOP_K, dim=-1)
        log_probs.append(top.values - logits.logsumexp(-1, keepdim=True))
        ids.append(top.indices)
    return torch.cat(log_probs), torch.cat(ids)


def accepted_drafts(log_probs: torch.Tensor, ids: torch.Tensor, q: Sequence) -> dict[str, torch.Tensor]:
    """Accepted drafts [answer - 1] of a verify step that begins at each token of the answer, per way of drafting."""
    answer = q.tokens[q.prompt :].long()
    count, depth, _ = ids.shape
    result = {way: torch.zeros(count, dtype=torch.long) for way in ("chain", *map(str, BUDGETS))}
    # A smaller tree is the beginning of a larger one, so the largest is walked and each node's index is compared.
    trees = build_tree(log_probs.contiguous(), ids.contiguous(), answer[:-1], max(BUDGETS))
    tokens, child, sibling = trees.tokens.tolist(), trees.next_child.tolist(), trees.next_sibling.tolist()
    for row in range(count):
        node, chain = 0, True
        for step in range(depth):
            if row + step + 1 >= len(answer):
                break
            wanted = int(answer[row + step + 1])
            if chain and int(ids[row, step, 0]) == wanted:
                result["chain"][row] += 1
            else:
                chain = False
            if node >= 0:
                node = child[row][node]
                while node >= 0 and tokens[row][node] != wanted:
                    node = sibling[row][node]
                for budget in BUDGETS:
                    if 0 <= node <= budget:
                        result[str(budget)][row] += 1
    return result


def replay(accepted: torch.Tensor) -> tuple[int, int]:
    """Verify steps and committed tokens of an answer whose first token came from the prefill."""
    position, steps, last = 0, 0, len(accepted)
    while position < last:
        steps += 1
        # The bonus token may lie past the recorded end: then it is not counted.
        position = min(last, position + int(accepted[position]) + 1)
    return steps, last


def measure(drafter: Drafter, embed: torch.Tensor, sequences: list[Sequence]) -> Tally:
    """Tally over the answers of one prompt set."""
    tally = Tally({}, {})
    for q in sequences:
        log_probs, ids = proposals(drafter, embed, q)
        for way, accepted in accepted_drafts(log_probs, ids, q).items():
            steps, committed = replay(accepted)
            tally.steps[way] = tally.steps.get(way, 0) + steps
            tally.committed[way] = tally.committed.get(way, 0) + committed
    return tally


def table(tallies: dict[str, Tally]) -> str:
    """A Markdown table of acceptance lengths: a row per set and their plain average."""
    ways = ["chain", *map(str, BUDGETS)]
    lengths = {name: tally.lengths() for name, tally in tallies.items()}
    lengths["average"] = {way: sum(row[way] for row in lengths.values()) / len(lengths) for way in ways}
    lines = ["| set | chain | " + " | ".join(f"budget {b}" for b in BUDGETS) + " |", "|---" * (len(ways) + 1) + "|"]
    lines += [f"| {name} | " + " | ".join(f"{row[way]:.2f}" for way in ways) + " |" for name, row in lengths.items()]
    return "\n".join(lines)
