"""The target's greedy answers to some prompts, with the hidden states a drafter reads; through transformers."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from inspect import signature
from pathlib import Path
from typing import Any

import torch

from sglang_ddtree.drafter.progress import Progress
from sglang_ddtree.errors import DDTreeError

#: Prompts answered in one batch.
_TOGETHER = 8


@dataclass
class Answer:
    """``tokens`` [n] with the prompt first; ``states`` maps a target layer to its output [n, hidden]."""

    tokens: torch.Tensor
    prompt: int
    states: dict[int, torch.Tensor]


@dataclass
class Heads:
    """The target's embedding and LM head [vocab, hidden], in float32.

    ``blocks`` is the embedding that the drafter's blocks are made with: the target's, or a copy in which the mask
    token's row is the drafter's own vector.
    """

    embed: torch.Tensor
    head: torch.Tensor
    blocks: torch.Tensor = field(default_factory=lambda: torch.empty(0))

    def __post_init__(self) -> None:
        if not self.blocks.numel():
            self.blocks = self.embed


def read_prompts(path: Path, limit: int = 256) -> list[str]:
    """The first ``limit`` prompts: non-empty lines, or in a ``.jsonl`` file what each line's JSON says, which is a text
    or an object with a text in ``prompt``.

    Raises:
        DDTreeError: not readable, a line that is no prompt, or no prompt in it.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DDTreeError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}.") from None
    prompts = [line.strip() for line in lines if line.strip()][:limit]
    if path.suffix == ".jsonl":
        prompts = [_json_prompt(line, path) for line in prompts]
    if not prompts:
        raise DDTreeError(f"{path} holds no prompt: write one a line, 60 or more.")
    return prompts


def _json_prompt(line: str, path: Path) -> str:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        value = None
    value = value.get("prompt") if isinstance(value, dict) else value
    if not isinstance(value, str) or not value.strip():
        raise DDTreeError(f'{path}: {line[:60]!r} is neither a JSON text nor {{"prompt": "..."}}.')
    return value


@torch.inference_mode()
def answer(
    target_dir: Path,
    prompts: list[str],
    layers: Collection[int],
    *,
    max_tokens: int,
    device: str,
    dtype: torch.dtype,
    progress: Callable[[str], None],
) -> tuple[list[Answer], Heads]:
    """Answers of at most ``max_tokens`` tokens, without those that end at once.

    Raises:
        DDTreeError: transformers cannot load the target.
    """
    progress("loading the target")
    tokenizer, model = load_target(target_dir, device, dtype)
    # Of similar length together, so that little is padding; the longest first, so that memory runs out at once or not.
    encoded = sorted((encode(tokenizer, prompt) for prompt in prompts), key=len, reverse=True)
    what = f"the target answers {len(encoded)} prompts with up to {max_tokens} tokens each on {device}"
    count = Progress(progress, what, len(encoded))
    answers = []
    for low in range(0, len(encoded), _TOGETHER):
        some = encoded[low : low + _TOGETHER]
        answers += _answer_some(tokenizer, model, some, layers, max_tokens, device)
        count.add(len(some))
    if not answers:
        raise DDTreeError("the target ends every answer at once: give other prompts.")
    return answers, heads_of(model)


def heads_of(model: Any) -> Heads:
    """Embedding and LM head of a transformers model."""
    embed = model.get_input_embeddings().weight.detach().float()
    head = model.get_output_embeddings().weight.detach()
    return Heads(embed, embed if head is model.get_input_embeddings().weight else head.float())


def _answer_some(
    tokenizer: Any, model: Any, encoded: list[list[int]], layers: Collection[int], max_tokens: int, device: str
) -> list[Answer]:
    width = max(map(len, encoded))
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0
    ids = torch.tensor([[pad] * (width - len(row)) + row for row in encoded], device=device)
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in encoded], device=device)
    out = model.generate(
        input_ids=ids, attention_mask=mask, max_new_tokens=max_tokens, do_sample=False, pad_token_id=pad
    )
    ends = model.generation_config.eos_token_id
    stops = set(ends if isinstance(ends, list) else [ends])
    answers = []
    for row, prompt in zip(out[:, width:].tolist(), encoded, strict=True):
        end = next((i + 1 for i, token in enumerate(row) if token in stops), len(row))
        if end >= 2:  # Else nothing was drafted.
            answers.append(with_states(model, prompt + row[:end], len(prompt), layers))
    return answers


def with_states(model: Any, tokens: list[int], prompt: int, layers: Collection[int]) -> Answer:
    """An answer that is known, ``prompt`` tokens of ``tokens`` being the prompt's, with the states of one pass."""
    ids = torch.tensor(tokens, device=model.device)
    # Nearly every model can be told to leave out the logits, a fifth of the work here.
    fewer = {"logits_to_keep": 1} if "logits_to_keep" in signature(model.forward).parameters else {}
    states = model(input_ids=ids[None], output_hidden_states=True, use_cache=False, **fewer).hidden_states
    # hidden_states[0] is the embedding; a layer's output comes one later.
    return Answer(ids, prompt, {layer: states[layer + 1][0].clone() for layer in layers})


def load_target(target_dir: Path, device: str, dtype: torch.dtype) -> tuple[Any, Any]:
    """Tokenizer and model.

    Raises:
        DDTreeError: transformers cannot load them.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    part = "tokenizer"
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(target_dir))
        part = "model"
        model = AutoModelForCausalLM.from_pretrained(str(target_dir), dtype=dtype).to(device).eval()
    except Exception as error:  # Dozens of types: unknown model types, missing files, no memory...
        first = " ".join(str(error).split())[:200]
        raise DDTreeError(
            f"transformers cannot load the {part} of the target {target_dir} ({type(error).__name__}: {first}): give a "
            "complete model directory."
        ) from None
    return tokenizer, model


def encode(tokenizer: Any, prompt: str) -> list[int]:
    """Token ids of a prompt, in the chat template where the tokenizer has one."""
    if tokenizer.chat_template:
        messages = [{"role": "user", "content": prompt}]
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        return [int(token) for token in ids]
    return [int(token) for token in tokenizer.encode(prompt)]
