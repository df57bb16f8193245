"""The flags and environment variables of DDTREE in one table: ``serve --help`` and docs/flags.md are made of it."""

from __future__ import annotations

from dataclasses import dataclass

from sglang_ddtree.config import (
    BUDGET_ENV,
    BUDGET_FLAG,
    DEFAULT_BUDGET,
    DEFAULT_BUDGET_CPU,
    DEFAULT_TOP_K,
    MAX_BUDGET,
    MAX_TOP_K,
)


@dataclass(frozen=True)
class Flag:
    """A flag of ``sglang serve`` or an environment variable; ``value`` is how its value is written in help texts."""

    name: str
    value: str
    meaning: str
    default: str


#: SGLang's except for the budget; ``sglang-ddtree serve`` hands all of them over.
SERVE = (
    Flag("--speculative-algorithm", "DDTREE", "turns DDTREE on; nothing else here has an effect without it", "off"),
    Flag(
        "--speculative-draft-model-path",
        "DIR",
        "the DFlash drafter: a directory or a Hugging Face hub id",
        "none: it is required",
    ),
    Flag(
        BUDGET_FLAG,
        "N",
        f"tree nodes below the root, 1 to {MAX_BUDGET}; SGLang's --speculative-num-draft-tokens N+1 says the same",
        f"{DEFAULT_BUDGET}; {DEFAULT_BUDGET_CPU} on a CPU",
    ),
    Flag(
        "--speculative-eagle-topk", "K", f"candidates kept per drafted position, 2 to {MAX_TOP_K}", str(DEFAULT_TOP_K)
    ),
    Flag(
        "--speculative-dflash-block-size",
        "B",
        "only for a drafter whose config.json does not say it",
        "the drafter's",
    ),
    Flag(
        "--speculative-draft-attention-backend",
        "NAME",
        "the drafter's attention backend",
        "the one that verifies",
    ),
    Flag("--max-running-requests", "N", "requests decoded together", "48 under speculative decoding"),
)

VARIABLES = (
    Flag(BUDGET_ENV, "N", f"the same as {BUDGET_FLAG}, which wins", "unset"),
    Flag(
        "SGLANG_PLATFORM", "ddtree_cpu", "run on the CPU; sglang-ddtree sets it where there is no accelerator", "unset"
    ),
    Flag(
        "SGLANG_DDTREE_CPU_THREADS", "N", "torch threads on the CPU", "as many as cores are free when the server starts"
    ),
    Flag(
        "SGLANG_DDTREE_CPU_LINEAR",
        "packed|torch",
        "how the CPU multiplies weights: half-precision storage with float32 sums, or torch's own",
        "packed where FBGEMM exists",
    ),
    Flag(
        "SGLANG_DDTREE_FLASHINFER",
        "auto|tree|stock",
        "how FlashInfer verifies trees: auto takes the tree's bits where it can, else SGLang's custom_mask; tree "
        "does not start where it cannot; stock always takes custom_mask",
        "auto",
    ),
    Flag(
        "SGLANG_DDTREE_STATES",
        "stored|deltas",
        "what a verify pass keeps of a Gated DeltaNet target's nodes: a recurrent state each, or what the states are "
        "made of, which takes a fraction of the memory",
        "stored",
    ),
    Flag("SGLANG_PLUGINS", "NAMES", "SGLang's list of plugins to load; must contain ddtree if it is set", "unset: all"),
)


def as_text(flags: tuple[Flag, ...]) -> str:
    """One line per flag, for a terminal."""
    width = max(len(f"{flag.name} {flag.value}") for flag in flags)
    return "\n".join(f"  {f'{flag.name} {flag.value}':<{width}}  {flag.meaning} [{flag.default}]" for flag in flags)
