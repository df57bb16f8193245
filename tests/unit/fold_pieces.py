"""What a server captures of a DDTREE step and what it does between its graphs, on static memory, as pieces to capture.

Shared by ``test_fold_replay.py`` (torch operations) and ``tests/interpreter/test_fold_replay_kernels.py`` (kernels).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from types import SimpleNamespace
from typing import Any

import torch
from captured_piece import Captured
from sglang.srt.layers.attention.verify_mask import VerifyMask, tree_mask_numel
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.speculative.draft_worker_common import make_draft_sampler_capture_hook
from sglang.srt.speculative.eagle_utils import TreeMaskMode

from sglang_ddtree.config import DDTreeConfig
from sglang_ddtree.drafting import draft_tree
from sglang_ddtree.folding import TreeSampler
from sglang_ddtree.tree.draft_tree import DraftTree
from sglang_ddtree.tree.walk import walk_greedy
from sglang_ddtree.verify import make_verify_input

CONFIG = DDTreeConfig(budget=12, block_size=6, top_k=4)
HIDDEN, VOCAB, MAX_BS, MAX_CONTEXT = 8, 40, 6, 50
SIZES = (6, 4, 2, 1)


@dataclass
class Memory:
    """What the graphs read: the draft blocks as the drafter embeds them, and what a verify pass is laid out from."""

    embeds: torch.Tensor = field(default_factory=lambda: torch.zeros(MAX_BS * CONFIG.block_size, HIDDEN))
    input_ids: torch.Tensor = field(default_factory=lambda: torch.zeros(MAX_BS * CONFIG.block_size, dtype=torch.int64))
    prefix_lens: torch.Tensor = field(default_factory=lambda: torch.ones(MAX_BS, dtype=torch.int64))
    slots: torch.Tensor = field(default_factory=lambda: torch.zeros(MAX_BS * CONFIG.verify_width, dtype=torch.int64))
    logits: torch.Tensor = field(default_factory=lambda: torch.zeros(MAX_BS, CONFIG.verify_width, VOCAB))

    def write(self, bs: int, seed: int) -> None:
        """A step of ``bs`` requests, in place; the rows behind them stay as an earlier step left them."""
        rng = torch.Generator().manual_seed(seed)
        rows = bs * CONFIG.block_size
        spread = torch.rand(bs, 1, 1, generator=rng).expand(-1, CONFIG.block_size, HIDDEN).reshape(rows, HIDDEN) * 3
        self.embeds[:rows] = torch.randn(rows, HIDDEN, generator=rng) * spread
        self.input_ids[:rows] = torch.randint(VOCAB, (rows,), generator=rng)
        self.prefix_lens[:bs] = torch.randint(MAX_CONTEXT + 1, (bs,), generator=rng)
        self.slots[: bs * CONFIG.verify_width] = torch.randperm(bs * CONFIG.verify_width, generator=rng)
        self.logits[:bs] = torch.randn(bs, CONFIG.verify_width, VOCAB, generator=rng)

    def copy(self) -> Memory:
        return Memory(**{each.name: getattr(self, each.name).clone() for each in fields(self)})


def head() -> Any:
    weight = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(7))
    return SimpleNamespace(weight=weight, org_vocab_size=VOCAB, shard_indices=None)


DRAFTER = torch.randn(HIDDEN, HIDDEN, generator=torch.Generator().manual_seed(8))


def draft_pass(memory: Memory, bs: int) -> torch.Tensor:
    """Stands for the draft model: hidden states ``[bs * B, hidden]``, memory of the graph."""
    return torch.tanh(memory.embeds[: bs * CONFIG.block_size] @ DRAFTER)


def draft_graph(memory: Memory, sampler: Callable[..., Any], bs: int) -> Callable[[], None]:
    """The tail of the draft graph, through SGLang's own capture hook."""
    hook = make_draft_sampler_capture_hook(sampler)

    def run() -> None:
        out = LogitsProcessorOutput(next_token_logits=None, hidden_states=draft_pass(memory, bs))
        batch = SimpleNamespace(input_ids=memory.input_ids[: bs * CONFIG.block_size])
        hook(None, out, batch, bs * CONFIG.block_size)

    return run


def fresh_trees(memory: Memory, bs: int, lm_head: Any) -> DraftTree:
    """The trees of what the memory holds now, in new memory."""
    now = memory.copy()
    hidden = draft_pass(now, bs).view(bs, CONFIG.block_size, HIDDEN)
    return draft_tree(hidden, now.input_ids.view(-1, CONFIG.block_size)[:bs, 0], lm_head, CONFIG)


def replay_changing_batches(memory: Memory, make: Callable[[Any], Any], steps: int, **options: Any) -> list[Captured]:
    """Capture the draft graphs of all sizes, the largest first, and replay them on ``steps`` other batches.

    Args:
        make: the sampler to capture, for a head.

    Returns:
        The captured graphs.

    Raises:
        AssertionError: the trees of a replay are not those of a fresh run.
    """
    lm_head = head()
    sampler = make(lm_head)
    graphs = {bs: Captured(draft_graph(memory, sampler, bs), **options) for bs in SIZES}
    for seed in range(1, steps + 1):
        bs = seed * 5 % MAX_BS + 1
        memory.write(bs, seed)
        graphs[min(size for size in SIZES if size >= bs)].replay()
        want = fresh_trees(memory, bs, lm_head)
        for each in fields(DraftTree):
            got = getattr(sampler.first(bs), each.name)
            assert torch.equal(got, getattr(want, each.name)), f"step {seed}, {bs} requests: {each.name}"
    return list(graphs.values())


def attention_backend(mode: TreeMaskMode | None) -> Any:
    """What ``verify.py`` asks of an attention backend: the memory of its mask."""
    rows = MAX_BS * CONFIG.verify_width
    verify_mask = None
    if mode == TreeMaskMode.QLEN_ONLY_BITPACKING:
        bits = torch.full((rows, -(-CONFIG.verify_width // 32)), -1, dtype=torch.int32)
        verify_mask = VerifyMask(buffer=bits, mode=mode, max_bs=MAX_BS)
    elif mode is not None:
        cells = tree_mask_numel(mode, MAX_BS, CONFIG.verify_width, MAX_CONTEXT)
        verify_mask = VerifyMask(buffer=torch.zeros(cells, dtype=torch.bool), mode=mode, max_bs=MAX_BS)
    return SimpleNamespace(verify_mask=verify_mask, max_context_len=MAX_CONTEXT)


def whole_step(memory: Memory, sampler: TreeSampler, backend: Any, bs: int) -> Callable[[], dict[str, torch.Tensor]]:
    """Draft tail, verify input (mask, positions, links, slots) and walk as one piece: more than a server captures, so
    that nothing of it depends on a value of the inputs."""
    draft = draft_graph(memory, sampler, bs)

    def run() -> dict[str, torch.Tensor]:
        draft()
        tree = sampler.first(bs)
        verify = make_verify_input(
            tree,
            prefix_lens=memory.prefix_lens[:bs],
            attn_backend=backend,
            prefix_lens_sum=None,
            depth=CONFIG.depth,
            top_k=CONFIG.top_k,
            out_cache_loc=memory.slots[: bs * CONFIG.verify_width],
            kv_loc_plan=None,
            sampler=None,
            penalties=None,
        )
        walk = walk_greedy(tree, memory.logits[:bs].argmax(-1), CONFIG.depth)
        return {
            "tokens": verify.draft_token,
            "mask": verify.custom_mask,
            "positions": verify.positions,
            "rows": verify.retrieve_index,
            "next child": verify.retrieve_next_token,
            "next sibling": verify.retrieve_next_sibling,
            "slots": verify.prepared_out_cache_loc,
            **walk._asdict(),
        }

    return run
