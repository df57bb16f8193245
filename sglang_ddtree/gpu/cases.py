"""Random candidates for trees: ties, holes, flat and peaked distributions, more budget than can be reached."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sglang_ddtree.tree.draft_tree import DraftTree

VOCAB = 48


@dataclass(frozen=True)
class Size:
    """One batch of trees: ``trees`` requests with ``depth`` x ``top_k`` candidates each."""

    trees: int
    budget: int
    depth: int
    top_k: int


#: (budget, depth, K). Some cannot fill their budget: depth 1 with K below it, K 1, short lists.
SMALL = [
    *((1, 1, 1), (1, 7, 8), (2, 1, 2), (3, 2, 4), (4, 31, 1), (5, 4, 3), (6, 3, 32), (7, 7, 2), (8, 7, 8)),
    *((10, 15, 4), (12, 1, 5), (13, 2, 3), (15, 15, 4), (16, 7, 8), (16, 31, 16)),
]
LARGE = [
    *((31, 31, 32), (33, 1, 32), (48, 2, 5), (64, 7, 8), (65, 15, 16), (100, 6, 5), (129, 7, 8)),
    *((256, 31, 32), (256, 2, 16)),
]


def sizes(small: int, large: int, max_budget: int = 256) -> list[Size]:
    """The sweep over budgets from 1: ``small`` trees for every size of budget up to 16, ``large`` for those above."""
    every = [Size(small, *size) for size in SMALL] + [Size(large, *size) for size in LARGE]
    return [size for size in every if size.budget <= max_budget]


@dataclass(frozen=True)
class Candidates:
    """The arguments of :func:`sglang_ddtree.tree.build.build_tree`, on the CPU."""

    log_probs: torch.Tensor
    token_ids: torch.Tensor
    root_tokens: torch.Tensor
    budget: int

    @property
    def depth(self) -> int:
        return int(self.log_probs.shape[1])

    def on(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
        """The arguments in order, the tensors copied to ``device``."""
        return self.log_probs.to(device), self.token_ids.to(device), self.root_tokens.to(device), self.budget


def random_candidates(size: Size, seed: int) -> Candidates:
    """Candidates of ``size``, the same for the same seed.

    Every request has a spread of its own, from flat to nearly certain. A quarter of them have log-probabilities rounded
    to halves, so that whole paths tie; a quarter have lists that end early, with -inf or NaN; some entries are a little
    above 0, as a log-softmax rounds them.
    """
    rng = torch.Generator().manual_seed(seed)
    shape = size.trees, size.depth, size.top_k
    spread = torch.rand(size.trees, 1, 1, generator=rng) * 8
    logits = torch.randn(size.trees, size.depth, VOCAB, generator=rng) * spread
    log_probs, token_ids = logits.log_softmax(-1).topk(size.top_k, -1)
    kind = torch.randint(0, 4, (size.trees, 1, 1), generator=rng)
    log_probs = torch.where(kind == 0, (log_probs * 2).round() / 2, log_probs)
    ends = torch.randint(0, size.top_k + 1, (size.trees, size.depth, 1), generator=rng)
    missing = torch.where(torch.rand(shape, generator=rng) < 0.5, -torch.inf, torch.nan)
    log_probs = torch.where((kind == 1) & (torch.arange(size.top_k) >= ends), missing, log_probs)
    log_probs = torch.where(log_probs == 0, 1e-7, log_probs)
    roots = torch.randint(0, VOCAB, (size.trees,), generator=rng)
    return Candidates(log_probs.contiguous(), token_ids.contiguous(), roots, size.budget)


def random_targets(tree: DraftTree, seed: int) -> torch.Tensor:
    """int64 ``[bs, Q]``: after most nodes the token of one of its children, after the others any token."""
    rng = torch.Generator().manual_seed(seed)
    bs, width = tree.tokens.shape
    # One child per node: the one with the highest draw. The column Q takes what has no parent.
    draws = torch.randint(0, 1 << 20, (bs, width), generator=rng) * width + torch.arange(width)
    place = torch.where(tree.parents >= 0, tree.parents, width)
    best = torch.full((bs, width + 1), -1).scatter_reduce_(1, place, draws, "amax")[:, :width]
    child = torch.where(best >= 0, best % width, 0)
    other = torch.randint(0, VOCAB, (bs, width), generator=rng)
    follow = (best >= 0) & (torch.rand(bs, width, generator=rng) < 0.85)
    return torch.where(follow, tree.tokens.gather(1, child), other)
