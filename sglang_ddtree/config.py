"""DDTREE's settings: what the user gives, what is inferred, and how SGLang's own fields carry them.

The four numbers travel in SGLang's server arguments, which every SGLang process can read:

=====================  ==================================  =========================================
setting                SGLang field                        value
=====================  ==================================  =========================================
verify width ``Q``     ``speculative_num_draft_tokens``    budget + 1
block size ``B``       ``speculative_dflash_block_size``   the drafter's
candidates ``K``       ``speculative_eagle_topk``          per position
tree depth             ``speculative_num_steps``           min(B - 1, budget)
=====================  ==================================  =========================================
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from sglang_ddtree.errors import DDTreeError

BUDGET_ENV = "SGLANG_DDTREE_BUDGET"
BUDGET_FLAG = "--speculative-ddtree-budget"

DEFAULT_BUDGET = 16
DEFAULT_BUDGET_CPU = 4
DEFAULT_TOP_K = 8
MAX_BUDGET = 256
MAX_TOP_K = 32
MIN_BLOCK_SIZE, MAX_BLOCK_SIZE = 2, 64


@dataclass(frozen=True)
class DDTreeConfig:
    """One server's tree settings.

    Attributes:
        budget: tree nodes below the root.
        block_size: positions the drafter fills in one pass, the last committed token included.
        top_k: candidates kept per drafted position.
    """

    budget: int
    block_size: int
    top_k: int

    @property
    def verify_width(self) -> int:
        """Tokens per request in one target verify pass, the root included."""
        return self.budget + 1

    @property
    def depth(self) -> int:
        """Deepest node the tree can have (the root has depth 0)."""
        return min(self.block_size - 1, self.budget)

    @property
    def window(self) -> int:
        """KV slots a request needs for one step: the draft block and the verify tree share them."""
        return max(self.block_size, self.verify_width)

    @classmethod
    def from_spec(cls, spec: Any) -> DDTreeConfig:
        """Read the settings back from SGLang's published speculative fields (``runtime_context.get_spec()``)."""
        return cls(
            budget=int(spec.speculative_num_draft_tokens) - 1,
            block_size=int(spec.speculative_dflash_block_size),
            top_k=int(spec.speculative_eagle_topk),
        )

    def as_server_fields(self) -> dict[str, int]:
        """The SGLang fields that carry these settings."""
        return {
            "speculative_num_draft_tokens": self.verify_width,
            "speculative_dflash_block_size": self.block_size,
            "speculative_eagle_topk": self.top_k,
            "speculative_num_steps": self.depth,
        }


def parse_budget(text: str, source: str) -> int:
    """A budget given as text; ``source`` names the flag or variable in the error."""
    try:
        budget = int(text)
    except ValueError:
        raise DDTreeError(
            f"{source} must be a whole number of tree nodes between 1 and {MAX_BUDGET}, got {text!r}."
        ) from None
    return check_budget(budget, source)


def check_budget(budget: int, source: str) -> int:
    if not 1 <= budget <= MAX_BUDGET:
        raise DDTreeError(f"{source} must be between 1 and {MAX_BUDGET} (tree nodes below the root), got {budget}.")
    return budget


def resolve_budget(num_draft_tokens: int | None, default: int) -> int:
    """The budget from the flag or ``SGLANG_DDTREE_BUDGET`` (the flag writes it), or from SGLang's
    ``--speculative-num-draft-tokens`` (budget + 1), or the default.

    Raises:
        DDTreeError: not a number, out of range, or both given and different.
    """
    text = os.environ.get(BUDGET_ENV, "").strip()
    if text:
        budget = parse_budget(text, f"{BUDGET_FLAG} (or {BUDGET_ENV})")
        if num_draft_tokens is not None and num_draft_tokens != budget + 1:
            raise DDTreeError(
                f"{BUDGET_FLAG} {budget} means {budget + 1} verify tokens, but --speculative-num-draft-tokens is "
                f"{num_draft_tokens}; give only one of them."
            )
        return budget
    if num_draft_tokens is not None:
        return check_budget(num_draft_tokens - 1, "--speculative-num-draft-tokens minus 1 (the tree budget)")
    return default


def resolve_top_k(top_k: int | None) -> int:
    """``--speculative-eagle-topk``: candidates per drafted position.

    Raises:
        DDTreeError: 1 (a chain, which is what DFLASH is for) or out of range.
    """
    if top_k is None:
        return DEFAULT_TOP_K
    if not 2 <= top_k <= MAX_TOP_K:
        raise DDTreeError(
            f"--speculative-eagle-topk (candidates per position) must be between 2 and {MAX_TOP_K} for DDTREE, "
            f"got {top_k}; for a chain use --speculative-algorithm DFLASH."
        )
    return top_k


def resolve_block_size(flag: int | None, drafter: int | None) -> int:
    """The drafter's block size; the flag may only fill in what its config does not say.

    Raises:
        DDTreeError: neither says it, they disagree, or it is too small to draft anything.
    """
    if drafter is None and flag is None:
        raise DDTreeError(
            "the drafter's config.json has no block_size; give the one it was trained with: "
            "--speculative-dflash-block-size B."
        )
    if drafter is not None and flag is not None and drafter != flag:
        raise DDTreeError(
            f"--speculative-dflash-block-size {flag} differs from the drafter's block_size {drafter}; drop the flag."
        )
    block_size = drafter if drafter is not None else flag
    assert block_size is not None
    if not MIN_BLOCK_SIZE <= block_size <= MAX_BLOCK_SIZE:
        raise DDTreeError(f"block size must be between {MIN_BLOCK_SIZE} and {MAX_BLOCK_SIZE}, got {block_size}.")
    return block_size
