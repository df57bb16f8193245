"""The folded tree sampler, captured as SGLang captures it, against the same functions called in a step; and its time.

A stand-in for the drafter makes the hidden states; head projection, top-K and tree are the server's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from types import SimpleNamespace
from typing import Any

import torch

from sglang_ddtree.config import DDTreeConfig
from sglang_ddtree.gpu.equality import same
from sglang_ddtree.gpu.replay import captured
from sglang_ddtree.gpu.timing import median_us
from sglang_ddtree.tree.draft_tree import DraftTree


@dataclass(frozen=True)
class Model:
    """What the head is: on a GPU of the size of a small target's, on a CPU a tiny one."""

    hidden: int
    vocab: int
    dtype: torch.dtype

    @classmethod
    def on(cls, device: torch.device) -> Model:
        if device.type == "cuda":
            return cls(2048, 151_936, torch.bfloat16)
        return cls(16, 500, torch.float32)


class Step:
    """The memory that graphs of all ``sizes`` read, the sampler, and the head."""

    def __init__(self, config: DDTreeConfig, sizes: Sequence[int], device: torch.device) -> None:
        from sglang_ddtree.folding import TreeSampler

        model, rng = Model.on(device), torch.Generator().manual_seed(config.budget)
        weight = torch.randn(model.vocab, model.hidden, generator=rng) * model.hidden**-0.5
        self.config, self.device, self.dtype = config, device, model.dtype
        self.lm_head: Any = SimpleNamespace(weight=weight.to(model.dtype).to(device), org_vocab_size=model.vocab)
        rows = max(sizes) * config.block_size
        self.hidden = torch.zeros(rows, model.hidden, dtype=model.dtype, device=device)
        self.ids = torch.zeros(rows, dtype=torch.int64, device=device)
        self.sampler = TreeSampler(self.lm_head, config, max(sizes), device)

    def write(self, bs: int, seed: int) -> None:
        """Other hidden states and roots, in place; some requests' drafter is sure and some one's is not."""
        rng = torch.Generator().manual_seed(seed)
        rows = bs * self.config.block_size
        spread = (torch.rand(bs, 1, 1, generator=rng) * 4).expand(-1, self.config.block_size, -1).reshape(rows, 1)
        hidden = torch.randn(rows, self.hidden.shape[1], generator=rng) * spread
        self.hidden[:rows] = hidden.to(self.dtype).to(self.device)
        self.ids[:rows] = torch.randint(0, len(self.lm_head.weight), (rows,), generator=rng).to(self.device)

    def fold(self, bs: int) -> None:
        """What the draft graph has in it."""
        rows = bs * self.config.block_size
        self.sampler(self.hidden[:rows], self.ids[:rows])

    def unfolded(self, bs: int) -> DraftTree:
        """What a step does whose draft pass had no graph, in new memory."""
        from sglang_ddtree.drafting import draft_tree

        rows = bs * self.config.block_size
        hidden = self.hidden[:rows].clone().view(bs, self.config.block_size, -1)
        roots = self.ids[:rows].view(bs, -1)[:, 0].clone()
        return draft_tree(hidden, roots, self.lm_head, self.config)


def check_folds(
    device: torch.device, batch_sizes: Sequence[int], budgets: Sequence[int], replays: int, repeats: int
) -> list[dict[str, Any]]:
    """Graphs of all batch sizes over one sampler, each replayed ``replays`` times in turns on other inputs.

    One row per budget and batch size: ``replays``, and median microseconds of the fold, ``graph`` and ``eager``.

    Raises:
        Mismatch: a replay's trees are not those of the same functions called in a step.
    """
    from sglang.srt.runtime_context import get_parallel

    rows = []
    with get_parallel().override(tp_size=1), torch.inference_mode():
        for budget in budgets:
            config = DDTreeConfig(budget=budget, block_size=16, top_k=8)
            step = Step(config, batch_sizes, device)
            # The largest first: SGLang's captures share one pool.
            graphs = {bs: _graph(step, bs) for bs in sorted(batch_sizes, reverse=True)}
            for seed in range(1, replays + 1):
                for bs, replay in graphs.items():
                    step.write(bs, 1000 * seed + bs)
                    replay()
                    want = step.unfolded(bs)
                    for each in fields(DraftTree):
                        name = f"budget {budget}, {bs} requests, replay {seed}: {each.name}"
                        same(name, getattr(want, each.name).cpu(), getattr(step.sampler.first(bs), each.name))
            for bs, replay in graphs.items():
                row: dict[str, Any] = {"bs": bs, "budget": budget, "replays": replays}
                row["graph"] = median_us(replay, device, repeats)
                row["eager"] = median_us(lambda step=step, bs=bs: step.unfolded(bs), device, repeats)  # type: ignore[misc]
                rows.append(row)
    return rows


def _graph(step: Step, bs: int) -> Any:
    step.write(bs, 0)
    return captured(lambda: step.fold(bs), step.device)[0]
