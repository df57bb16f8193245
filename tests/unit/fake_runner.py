"""A model runner of tensors on the CPU, as far as SGLang's FlashInfer backend looks at one, and SGLang's own backend
module with what a CPU lacks put in. Nothing of SGLang's is replaced that the tests are about: constructor, metadata,
capture, index updater, fast plan and forward are its own."""

from __future__ import annotations

import importlib
import sys
import types
from types import SimpleNamespace

import torch
from sglang.srt.layers.radix_attention import RadixAttention

BF16 = torch.bfloat16


class Stock:
    """FlashInfer's wrappers of passes that are not a tree's: made, planned with, never run."""

    def __init__(self, *args, **options):
        self.options = options
        self.plans = []
        self._custom_mask_buf = options.get("custom_mask_buf")

    @property
    def is_cuda_graph_enabled(self):
        return self.options.get("use_cuda_graph", False)

    def begin_forward(self, *args, **kwargs):
        self.plans.append((args, kwargs))


class Translator:
    """``KVIndexTranslator`` of a static pool, in torch."""

    reads_are_translated = False

    def __init__(self, req_to_token):
        self.req_to_token = req_to_token

    def pack_read_stream(self, plan, *, req_pool_indices, seq_lens, indptr, out, kv_start_idx=None, **_):
        out.fill_(-1)  # what is not written must not be read
        for row, length, start in zip(req_pool_indices.tolist(), seq_lens.tolist(), indptr.tolist()):
            out[start : start + length] = self.req_to_token[row, :length]
        return False


class Pool:
    def __init__(self, slots, heads, dim, dtype, seed=0):
        rng = torch.Generator().manual_seed(seed)
        self.keys, self.values = (torch.randn(slots, heads, dim, generator=rng).to(dtype) for _ in range(2))

    def get_kv_cache_quant_method(self):
        access = SimpleNamespace(kind=None, scale_recipe=None)
        return SimpleNamespace(resolve_attention_access=lambda *_: access, needs_global_scale=lambda: False)

    def get_kv_buffer(self, layer_id):
        return self.keys, self.values


def make_runner(
    *, requests=4, context=64, heads=(4, 2), dim=64, dtype=BF16, kv_dtype=BF16, width=9, layers=2, **options
):
    """``options`` go to the layers."""
    rng = torch.Generator().manual_seed(7)
    columns = context + 2 * width
    # Rows of shuffled slots; row 0 and slot 0 belong to padding.
    slots = 1 + torch.randperm((requests + 1) * columns, generator=rng)[: requests * columns]
    table = torch.cat((torch.zeros(1, columns), slots.view(requests, columns))).to(torch.int32)
    config = SimpleNamespace(
        num_attention_heads=heads[0],
        get_num_kv_heads=lambda *_: heads[1],
        get_max_num_attention_heads=lambda: heads[0],
        head_dim=dim,
        v_head_dim=dim,
        context_len=context,
        is_multimodal=False,
        is_encoder_decoder=False,
        hf_config=SimpleNamespace(architectures=["LlamaForCausalLM"]),
    )
    attention = [RadixAttention(heads[0], dim, dim**-0.5, heads[1], layer_id=i, **options) for i in range(layers)]
    return SimpleNamespace(
        model=torch.nn.ModuleList(attention),
        req_to_token_pool=SimpleNamespace(size=requests, req_to_token=table),
        token_to_kv_pool=Pool((requests + 1) * columns + 1, heads[1], dim, kv_dtype),
        token_to_kv_pool_allocator=SimpleNamespace(get_kvcache=lambda: None),
        kv_index_translator=Translator(table),
        server_args=None,
        model_config=config,
        prefill_attention_backend_str="flashinfer",
        decode_attention_backend_str="flashinfer",
        kv_cache_dtype=kv_dtype,
        dtype=dtype,
        page_size=1,
        device="cpu",
        sliding_window_size=None,
        is_draft_worker=False,
        use_mla_backend=False,
        spec_algorithm=SimpleNamespace(is_frozen_kv_mtp=lambda: False),
    )


def install(monkeypatch, width, stock=None):
    """Our backend's module on a CPU, over SGLang's installed backend module or over ``stock``, a changed copy of it."""
    name = "sglang.srt.layers.attention.flashinfer_backend"
    real = importlib.import_module(name)
    stock = real if stock is None else stock
    parallel = SimpleNamespace(attn_tp_size=1, attn_dcp_size=1, tp_rank=0)
    execution = SimpleNamespace(
        features=SimpleNamespace(enable_mis=False),
        deterministic=SimpleNamespace(enable_deterministic_inference=False),
        overlap=SimpleNamespace(enable_two_batch_overlap=False),
    )
    buffers = {}
    replaced = {
        "BatchDecodeWithPagedKVCacheWrapper": Stock,
        "BatchPrefillWithPagedKVCacheWrapper": Stock,
        "BatchPrefillWithRaggedKVCacheWrapper": Stock,
        "fast_decode_plan": lambda *args, **kwargs: None,
        "get_exec": lambda: execution,
        "get_parallel": lambda: parallel,
        "get_platform": lambda: SimpleNamespace(is_sm100=False),
        "get_buffer": lambda key, make: buffers.setdefault(key, torch.empty(1 << 10, dtype=torch.uint8)),
        "get_cuda_graph_max_batch_size": lambda size: size,
        "should_use_tensor_core": lambda **_: True,
    }
    for attribute, value in replaced.items():
        monkeypatch.setattr(stock, attribute, value, raising=False)
    monkeypatch.setattr(stock.DllmConfig, "from_server_args", staticmethod(lambda args: None))
    if stock is real:
        ours = importlib.import_module("sglang_ddtree.attention.flashinfer_backend")
    else:
        ours = _copy_over(monkeypatch, name, stock)
    spec = SimpleNamespace(
        speculative_num_draft_tokens=width,
        speculative_dflash_block_size=8,
        speculative_eagle_topk=4,
        speculative_num_steps=7,
        speculative_attention_mode="prefill",
        speculative_algorithm="DDTREE",
    )
    monkeypatch.setattr(ours, "get_exec", lambda: execution)
    monkeypatch.setattr(ours, "get_parallel", lambda: parallel)
    monkeypatch.setattr(ours, "get_spec", lambda: spec)
    monkeypatch.setattr(ours, "get_cuda_graph_max_batch_size", lambda size: size)
    monkeypatch.setattr(ours, "get_disagg", lambda: SimpleNamespace(enable_pdmux=False))
    return SimpleNamespace(ours=ours, stock=stock, execution=execution, parallel=parallel, spec=spec)


def _copy_over(monkeypatch, name, stock):
    """Our backend's module made anew, as a subclass of what a changed copy of SGLang's module has."""
    real = importlib.import_module("sglang_ddtree.attention.flashinfer_backend")
    monkeypatch.setitem(sys.modules, name, stock)
    monkeypatch.setattr(importlib.import_module(name.rpartition(".")[0]), "flashinfer_backend", stock)
    module = types.ModuleType(real.__name__)
    module.__file__, module.__package__ = real.__file__, real.__package__
    with open(real.__file__) as source:
        exec(compile(source.read(), f"{real.__file__} (test copy)", "exec"), vars(module))
    return module
