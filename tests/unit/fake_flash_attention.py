"""SGLang's FlashAttention backend (FA3, FA4) on CPU tensors, with torch in place of the kernels.

Constructor, metadata, capture and forward are SGLang's own. What is replaced is what a CPU has not: attention over
pages, which reads the tables and lengths that are handed to it when it runs, and the merge of two attention states.
"""

from __future__ import annotations

import importlib
import sys
from types import SimpleNamespace
from typing import Any

import torch
from captured_piece import kernel
from fake_runner import make_runner
from sglang.srt.configs.model_config import AttentionArch
from sglang.srt.layers.attention import verify_mask
from sglang.srt.speculative.eagle_utils import TreeMaskMode

NAME = "sglang.srt.layers.attention.flashattention_backend"


@kernel
def attend_pages(
    *,
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    cache_seqlens: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    max_seqlen_q: int,
    softmax_scale: float,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
    return_softmax_lse: bool,
    cu_seqlens_k_new: torch.Tensor | None = None,
    num_splits: int = 0,
    out: torch.Tensor | None = None,
    ver: int = 3,
) -> Any:
    """``flash_attn_with_kvcache`` for what a verify pass asks of it: no new keys, no window, not causal.

    Returns:
        ``[rows, heads, dim]`` and the log-sum-exp float32 ``[heads, rows]``; zeros and -inf where nothing is seen.
    """
    if causal or window_size != (-1, -1) or softcap or not return_softmax_lse or out is not None:
        raise ValueError("a verify pass of a full-attention layer has no causality, window, cap or output buffer")
    for table in (page_table, cache_seqlens, cu_seqlens_q):
        if table.dtype != torch.int32:
            raise ValueError(f"tables and lengths must be int32, got {table.dtype}")
    rows, lens, page_size = cu_seqlens_q.tolist(), cache_seqlens.tolist(), k_cache.shape[1]
    if len(rows) != len(lens) + 1 or len(page_table) != len(lens) or rows[-1] != len(q):
        raise ValueError(f"{len(lens)} lengths, {len(page_table)} tables, rows {rows} of {len(q)}")
    made, lse = torch.zeros_like(q), torch.full((q.shape[1], len(q)), -torch.inf)
    group = q.shape[1] // k_cache.shape[2]
    for request, length in enumerate(lens):
        begin, end = rows[request], rows[request + 1]
        if end - begin > max_seqlen_q:
            raise ValueError(f"{end - begin} rows, max_seqlen_q is {max_seqlen_q}")
        if length == 0:
            continue
        pages = page_table[request, : -(-length // page_size)].long()
        keys, values = (
            cache[pages].flatten(0, 1)[:length].float().repeat_interleave(group, 1) for cache in (k_cache, v_cache)
        )
        logits = torch.einsum("qhd,khd->hqk", q[begin:end].float(), keys) * softmax_scale
        lse[:, begin:end] = logits.logsumexp(-1)
        made[begin:end] = torch.einsum("hqk,khd->qhd", logits.softmax(-1), values).to(q.dtype)
    return made, lse


def merge_states(one: torch.Tensor, lse_one: torch.Tensor, other: torch.Tensor, lse_other: torch.Tensor) -> Any:
    """``merge_state_v2``: states ``[rows, heads, dim]`` with log-sum-exps ``[rows, heads]``."""
    lse = torch.logaddexp(lse_one, lse_other)
    weights = (lse_one - lse).exp(), (lse_other - lse).exp()
    return one * weights[0].unsqueeze(-1) + other * weights[1].unsqueeze(-1), lse


def install(monkeypatch: Any, *, width: int, top_k: int) -> Any:
    """SGLang's backend module with the kernels replaced; ``.spec`` is what it takes for SGLang's speculative fields."""
    functions = SimpleNamespace(
        flash_attn_varlen_func=None, flash_attn_with_kvcache=attend_pages, get_scheduler_metadata=lambda **_: None
    )
    monkeypatch.setitem(sys.modules, "sgl_kernel", SimpleNamespace(merge_state_v2=merge_states))
    monkeypatch.setitem(sys.modules, "sgl_kernel.flash_attn", functions)
    monkeypatch.setitem(sys.modules, "sglang.kernels.ops.attention.flash_attention_v4", functions)
    monkeypatch.delitem(sys.modules, NAME, raising=False)
    module = importlib.import_module(NAME)
    # Taken out again, so that nobody else gets this one.
    monkeypatch.setitem(sys.modules, NAME, module)
    parallel = SimpleNamespace(
        attn_cp_size=1, attn_tp_size=1, tp_rank=0, enable_prefill_cp=False, attn_dp_enabled=False
    )
    spec = SimpleNamespace(
        speculative_num_draft_tokens=width,
        speculative_dflash_block_size=8,
        speculative_eagle_topk=top_k,
        speculative_num_steps=7,
        speculative_algorithm="DDTREE",
    )
    exec_ = SimpleNamespace(deterministic=SimpleNamespace(enable_deterministic_inference=False))
    for name, value in {
        "get_parallel": parallel,
        "get_spec": spec,
        "get_exec": exec_,
        "get_memory": SimpleNamespace(disable_radix_cache=False),
        "get_model": SimpleNamespace(is_embedding=False),
        "get_schedule": SimpleNamespace(chunked_prefill_size=-1),
    }.items():
        monkeypatch.setattr(module, name, lambda value=value: value)
    monkeypatch.setattr(module, "flash_attn_with_kvcache", attend_pages)
    monkeypatch.setattr(module, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(verify_mask, "default_tree_mask_mode", lambda: TreeMaskMode.FULL_MASK)  # as on a GPU
    module.spec = spec
    return module


def paged_runner(*, requests: int, context: int, width: int, page_size: int) -> Any:
    """A model runner in float32 whose requests own whole pages, in a shuffled order; row 0 and page 0 are padding's."""
    made = make_runner(requests=requests, context=context, width=width, dtype=torch.float32, kv_dtype=torch.float32)
    columns = -(-(context + 2 * width) // page_size) * page_size
    pages = columns // page_size
    order = 1 + torch.randperm(requests * pages, generator=torch.Generator().manual_seed(3))
    slots = (order.view(-1, 1) * page_size + torch.arange(page_size)).view(requests, columns)
    table = torch.cat((torch.zeros(1, columns), slots)).to(torch.int32)
    made.req_to_token_pool.req_to_token = table
    made.token_to_kv_pool = type(made.token_to_kv_pool)((requests * pages + 1) * page_size, 2, 64, torch.float32)
    made.kv_index_translator = SimpleNamespace(
        is_translating=False, reads_are_translated=False, write_ids=lambda *_: None
    )
    made.page_size = page_size
    made.kv_cache_dtype_str = "auto"
    config = made.model_config
    config.attention_arch, config.is_local_attention_model = AttentionArch.MHA, False
    config.hf_text_config = SimpleNamespace(num_attention_heads=config.num_attention_heads)
    config.get_num_kv_heads = lambda *_: 2
    return made
