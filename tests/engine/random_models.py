"""A random Llama and a random DFlash drafter of block size 16, and a plugin that makes the drafter right on purpose.

A random drafter is never right, so accepted paths would be empty. The plugin replaces the worker's candidates by plain
decoding's own answer, scattered over ranks and depths: at some depths the right token is first, at others it is a
sibling further down, and at some it is missing. What the tree, the verify pass and the commit make of it is untouched.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file

from sglang_ddtree.bench.lossless import Question

HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM, VOCAB, LAYERS, TAPS = 64, 128, 4, 2, 16, 256, 4, (0, 1, 2)
COMMON = {
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "vocab_size": VOCAB,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def questions(seed: int, lengths: tuple[int, ...]) -> list[Question]:
    """Random prompts of some lengths, named by their number."""
    rng = random.Random(seed)
    return [Question(str(n), [rng.randrange(3, 250) for _ in range(length)]) for n, length in enumerate(lengths)]


HEAD = """
import functools, json, os, random, sys
import torch

def register():
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    HookRegistry.register("sglang_ddtree.drafting.draft_candidates", candidates, HookType.REPLACE)

@functools.cache
def data():
    return json.load(open(os.environ["DDTREE_PLUGIN_DATA"]))

def candidates(draft_hidden, lm_head, depth, top_k):
    frame = sys._getframe(1)
    while "positions" not in frame.f_locals or "batch" not in frame.f_locals:
        frame = frame.f_back
    batch, positions = frame.f_locals["batch"], frame.f_locals["positions"]
    rows = []
    for req, position in zip(batch.reqs, positions[:, 0].tolist()):
        rows += choose(list(req.origin_input_ids), position, depth, top_k)
    ids = torch.tensor(rows).view(len(batch.reqs), depth, top_k)
    log_probs = torch.log_softmax(-0.4 * torch.arange(top_k, dtype=torch.float32), 0).expand(ids.shape).contiguous()
    return log_probs, ids
"""

ORACLE = """
@functools.cache
def answers():
    return {tuple(prompt): (answer, right) for prompt, answer, right in data()}

def choose(prompt, position, depth, top_k):
    answer, right = answers().get(tuple(prompt), ([], 0))
    answer = answer[position - len(prompt) + 1:]
    rng = random.Random(position)
    rows = []
    for d in range(depth):
        row = rng.sample(range(3, 250), top_k)
        if d < len(answer) and rng.random() < right:
            row = [token for token in row if token != answer[d]][: top_k - 1]
            row += [0] * (top_k - 1 - len(row))
            row.insert(rng.choice((0, 0, 0, 1, 2)), answer[d])
        rows.append(row[:top_k])
    return rows
"""

LIKELY = """
def choose(prompt, position, depth, top_k):
    place = position - len(prompt) + 1
    return [data()[min(place + d, len(data()) - 1)][:top_k] for d in range(depth)]
"""


def write_likely(directory: Path, places: list[list[int]]) -> dict[str, str]:
    """A plugin whose candidates at every place of an answer are ``places[place]``, best first; its variables."""
    return _write_plugin(directory, LIKELY, places)


def write_target(directory: Path) -> Path:
    config = {**COMMON, "architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": LAYERS}
    shapes = {
        "model.embed_tokens.weight": (VOCAB, HIDDEN),
        "model.norm.weight": (HIDDEN,),
        "lm_head.weight": (VOCAB, HIDDEN),
    }
    for layer in range(LAYERS):
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in _block().items()}
    return write(directory, config, shapes, seed=1)


def write_drafter(
    directory: Path,
    windows: tuple[int | None, ...] = (None,),
    is_causal: bool | None = None,
    target_layers: int = LAYERS,
    taps: tuple[int, ...] = TAPS,
) -> Path:
    """A drafter with one layer per entry of ``windows``: a sliding window of so many tokens, or full attention.

    Where ``is_causal`` is None the config does not say it: sliding layers are then causal, full ones are not.
    """
    config = {
        **COMMON,
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "num_hidden_layers": len(windows),
        "block_size": 16,
        "num_target_layers": target_layers,
        "dflash_config": {"mask_token_id": 255, "target_layer_ids": list(taps)},
    }
    if any(windows):
        config |= {
            "layer_types": ["sliding_attention" if window else "full_attention" for window in windows],
            "sliding_window": next(window for window in windows if window),
            "use_sliding_window": True,
            "max_window_layers": 0,
        }
    if is_causal is not None:
        config["is_causal"] = is_causal
    shapes = {"fc.weight": (HIDDEN, len(taps) * HIDDEN), "hidden_norm.weight": (HIDDEN,), "norm.weight": (HIDDEN,)}
    norms = {"self_attn.q_norm.weight": (HEAD_DIM,), "self_attn.k_norm.weight": (HEAD_DIM,)}
    for layer in range(len(windows)):
        shapes |= {f"layers.{layer}.{name}": shape for name, shape in {**_block(), **norms}.items()}
    return write(directory, config, shapes, seed=2)


Known = Sequence[tuple[Sequence[int], Sequence[int]]]


def write_oracle(directory: Path, answers: Known, mostly_wrong: Known = ()) -> dict[str, str]:
    """A plugin that knows the answers to some prompts; the variables that make a server load it.

    At nine in ten depths the right token is among the candidates, for ``mostly_wrong`` at one in four.
    """
    return _write_plugin(directory, ORACLE, _known(answers, mostly_wrong))


def write_answers(file: Path, answers: Known, mostly_wrong: Known = ()) -> dict[str, str]:
    """Other answers for an oracle that is already loaded, and has not been asked yet; the variables that name them."""
    file.write_text(json.dumps(_known(answers, mostly_wrong)))
    return {"DDTREE_PLUGIN_DATA": str(file)}


def _known(answers: Known, mostly_wrong: Known) -> list[tuple[Sequence[int], Sequence[int], float]]:
    return [(*known, 0.9) for known in answers] + [(*known, 0.25) for known in mostly_wrong]


def _write_plugin(directory: Path, choose: str, data: object) -> dict[str, str]:
    """An installed SGLang plugin, as Python sees it. Its candidates are the host's: no graph may capture them."""
    info = directory / "ddtree_oracle-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: ddtree-oracle\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[sglang.srt.plugins]\nddtree_oracle = ddtree_oracle:register\n")
    (directory / "ddtree_oracle.py").write_text(HEAD + choose)
    (directory / "data.json").write_text(json.dumps(data))
    return {
        "PYTHONPATH": str(directory),
        "DDTREE_PLUGIN_DATA": str(directory / "data.json"),
        "SGLANG_DFLASH_EAGER_DRAFT_SAMPLER": "1",
    }


def _block() -> dict[str, tuple[int, ...]]:
    return {
        "input_layernorm.weight": (HIDDEN,),
        "post_attention_layernorm.weight": (HIDDEN,),
        "self_attn.q_proj.weight": (HEADS * HEAD_DIM, HIDDEN),
        "self_attn.k_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
        "self_attn.v_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
        "self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD_DIM),
        "mlp.gate_proj.weight": (INNER, HIDDEN),
        "mlp.up_proj.weight": (INNER, HIDDEN),
        "mlp.down_proj.weight": (HIDDEN, INNER),
    }


def write(directory: Path, config: dict[str, object], shapes: dict[str, tuple[int, ...]], seed: int) -> Path:
    """A checkpoint with random weights of some shapes."""
    generator = torch.Generator().manual_seed(seed)
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(config))
    weights = {}
    for name, shape in shapes.items():
        # Large enough for attention to be sharp: a wrong key or value then changes the answer.
        noise = torch.randn(shape, generator=generator) * (2.5 / shape[-1] ** 0.5)
        weights[name] = 1 + 0.1 * noise if name.endswith("norm.weight") else noise
        if name.endswith("A_log"):
            # Decay slowly: a state that is wrong once then stays wrong.
            weights[name] = noise - 3
    save_file(weights, directory / "model.safetensors")
    return directory
