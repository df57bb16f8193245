"""Which prompts the drafter is trained on."""

from __future__ import annotations

import random

from sglang_ddtree.bench.prompts import SETS, Prompt, code_question, load_prompts
from sglang_ddtree.training.chat_prompts import chat_prompts
from sglang_ddtree.training.code_prompts import code_prompts
from sglang_ddtree.training.maths_prompts import maths_prompts

# Shares of code, maths and chat.
MIX = {"code": 0.36, "maths": 0.26, "chat": 0.38}
# Words in a row that a training prompt may share with a dev or held-out question.
OVERLAP_WORDS = 10
# Said around every function, so it is no overlap.
BOILERPLATE = (
    code_question("").split("```")[0].strip(),
    "```python",
    "```",
    "from typing import List",
    "Examples:",
    ">>>",
)


def training_prompts(count: int, seed: int) -> list[Prompt]:
    """About ``count`` distinct prompts in random order, none of which repeats a dev or held-out question.

    The order is random so that the first part of the list is as good a mix as the whole.
    """
    builders = {"code": code_prompts, "maths": maths_prompts, "chat": chat_prompts}
    prompts = []
    for kind, build in builders.items():
        prompts += build(random.Random(f"{seed}/{kind}"), round(count * MIX[kind]))
    forbidden = set()
    for name in SETS:
        for split in ("dev", "heldout"):
            for prompt in load_prompts(name, split):
                forbidden |= word_runs(prompt.messages[-1]["content"])
    unique = {prompt.messages[-1]["content"]: prompt for prompt in prompts}
    kept = [prompt for text, prompt in unique.items() if not word_runs(text) & forbidden]
    random.Random(seed).shuffle(kept)
    return kept


def encode_prompts(tokenizer, prompts: list[Prompt], limit: int) -> list[list[int]]:
    """Token ids of the prompts with the chat template, without those longer than ``limit``."""
    encoded = [
        tokenizer.apply_chat_template(prompt.messages, add_generation_prompt=True, tokenize=True, return_dict=False)
        for prompt in prompts
    ]
    return [ids for ids in encoded if len(ids) <= limit]


def word_runs(text: str) -> set[tuple[str, ...]]:
    """All runs of OVERLAP_WORDS words of a text."""
    for common in BOILERPLATE:
        text = text.replace(common, " ")
    words = text.lower().split()
    return {tuple(words[i : i + OVERLAP_WORDS]) for i in range(len(words) - OVERLAP_WORDS + 1)}
