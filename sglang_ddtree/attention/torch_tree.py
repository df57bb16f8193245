"""SGLang attention backend in plain torch that reads tree masks: the CPU runtime's, and a reference for others.

SGLang's own ``torch_native`` backend has no target-verify pass, loops over requests and recomputes the whole prefix in
every extend. This one batches requests of similar length, prepares gather indices and masks once per forward instead
of once per layer, and folds grouped-query heads into the query rows, so that keys and values are never expanded.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.attention.verify_mask import VerifyMask
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.runtime_context import get_exec, get_spec
from sglang.srt.speculative.eagle_utils import TreeMaskMode
from torch.nn.functional import scaled_dot_product_attention

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner

#: Requests are padded to the longest of their group; a group is closed when padding would exceed this factor.
_MAX_PADDING = 1.5


@dataclass
class _Group:
    """Requests that run as one padded batch: ``n`` requests, ``q`` query rows each, ``kv`` columns.

    Attributes:
        rows: int64 ``[n * q]``, rows of the flat token dimension, or None when they are all of them in order.
        slots: int64 ``[n, kv]``, KV slots by position; padding is slot 0, SGLang's sink, and masked.
        q_pos: int64 ``[n, q]``, position of each query.
        k_pos: int64 ``[n, kv]``, position of each column (tree columns share positions by depth).
        causal: bool ``[n, q, kv]`` for decoder layers, None when every column is visible.
        full: bool ``[n, q, kv]`` for bidirectional layers, None when every column is visible.
    """

    rows: torch.Tensor | None
    slots: torch.Tensor
    q_pos: torch.Tensor
    k_pos: torch.Tensor
    causal: torch.Tensor | None
    full: torch.Tensor | None
    masks: dict[tuple[bool, int, int], torch.Tensor | None] = field(default_factory=dict)

    def mask(self, bidirectional: bool, window: int, heads_per_kv: int) -> torch.Tensor | None:
        """Bool mask ``[n, 1, heads_per_kv * q, kv]``, or None; made once per forward and kind of layer."""
        key = (bidirectional, window, heads_per_kv)
        if key not in self.masks:
            self.masks[key] = self._make_mask(*key)
        return self.masks[key]

    def _make_mask(self, bidirectional: bool, window: int, heads_per_kv: int) -> torch.Tensor | None:
        visible = self.full if bidirectional else self.causal
        if window >= 0:
            # SGLang's convention: a query sees `window` tokens before itself.
            near = self.k_pos.unsqueeze(1) >= self.q_pos.unsqueeze(2) - window
            visible = near if visible is None else visible & near
        if visible is None:
            return None
        return visible.unsqueeze(1).repeat(1, 1, heads_per_kv, 1)


class TorchTreeAttnBackend(TorchNativeAttnBackend):
    """Registered under the name ``torch_native`` on the project's CPU platform (see ``cpu/platform.py``)."""

    def __init__(self, model_runner: ModelRunner):
        super().__init__(model_runner)
        self.max_context_len = model_runner.model_config.context_len
        self._groups: list[_Group] = []
        self._verify_mask: VerifyMask | None = None
        # Sums in another order, as in a batch of another shape, differ in float64 by less than float32 shows.
        deterministic = get_exec().deterministic.enable_deterministic_inference
        self._dtype = torch.float64 if deterministic else torch.float32
        width = get_spec().speculative_num_draft_tokens
        if width and not model_runner.is_draft_worker:
            max_bs = int(self.req_to_token_pool.size)
            self._verify_mask = VerifyMask(
                buffer=torch.zeros(max_bs * width * width, dtype=torch.bool, device=self.device),
                mode=TreeMaskMode.QLEN_ONLY,
                max_bs=max_bs,
            )

    @property
    def verify_mask(self) -> VerifyMask | None:
        return self._verify_mask

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        super().init_forward_metadata(forward_batch)
        mode = forward_batch.forward_mode
        if mode.is_idle():
            self._groups = []
        elif mode.is_decode():
            self._groups = self._decode_groups(forward_batch)
        elif mode.is_target_verify():
            self._groups = self._verify_groups(forward_batch)
        else:
            self._groups = self._extend_groups(forward_batch)

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
    ) -> torch.Tensor:
        return self._forward(q, k, v, layer, forward_batch, save_kv_cache)

    def forward_decode(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
    ) -> torch.Tensor:
        return self._forward(q, k, v, layer, forward_batch, save_kv_cache)

    def _forward(self, q, k, v, layer, forward_batch, save_kv_cache) -> torch.Tensor:  # type: ignore[no-untyped-def]
        if layer.is_cross_attention:
            raise NotImplementedError("the CPU runtime of sglang-ddtree does not serve encoder-decoder models")
        if save_kv_cache and k is not None and v is not None:
            self.token_to_kv_pool.set_kv_buffer(
                layer, KVWriteLoc(forward_batch.out_cache_loc, self.swa_out_cache_loc), k, v
            )
        queries = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
        keys = self.token_to_kv_pool.get_key_buffer(layer.layer_id)
        values = self.token_to_kv_pool.get_value_buffer(layer.layer_id)
        bidirectional = layer.attn_type == AttentionType.ENCODER_ONLY
        window = -1 if layer.sliding_window_size is None else int(layer.sliding_window_size)
        if len(self._groups) == 1 and self._groups[0].rows is None:
            out = _attend(queries, keys, values, self._groups[0], bidirectional, window, layer, self._dtype)
        else:
            out = queries.new_empty((queries.shape[0], layer.tp_q_head_num, layer.v_head_dim))
            for group in self._groups:
                rows = queries[group.rows]
                out[group.rows] = _attend(rows, keys, values, group, bidirectional, window, layer, self._dtype)
        return out.reshape(-1, layer.tp_q_head_num * layer.v_head_dim)

    def _slots(self, forward_batch: ForwardBatch, requests: torch.Tensor, lens: torch.Tensor, kv: int) -> torch.Tensor:
        """KV slots of each request's first ``kv`` positions; beyond ``lens`` the sink, whose values are finite."""
        rows = forward_batch.req_pool_indices[requests].to(torch.int64)
        slots = self.req_to_token_pool.req_to_token[rows, :kv].to(torch.int64)
        return slots.masked_fill_(torch.arange(kv) >= lens.unsqueeze(1), 0)

    def _decode_groups(self, forward_batch: ForwardBatch) -> list[_Group]:
        lens = forward_batch.seq_lens.to(torch.int64)
        groups = []
        for requests in _by_length(lens):
            kv_lens = lens[requests]
            kv = int(kv_lens.max())
            k_pos = torch.arange(kv).expand(len(requests), kv)
            visible = None if bool((kv_lens == kv).all()) else (k_pos < kv_lens.unsqueeze(1)).unsqueeze(1)
            groups.append(
                _Group(
                    rows=None if len(requests) == len(lens) and _is_identity(requests) else requests,
                    slots=self._slots(forward_batch, requests, kv_lens, kv),
                    q_pos=(kv_lens - 1).unsqueeze(1),
                    k_pos=k_pos,
                    causal=visible,
                    full=visible,
                )
            )
        return groups

    def _verify_groups(self, forward_batch: ForwardBatch) -> list[_Group]:
        """Every request brings ``q`` tokens on top of its cached prefix (``seq_lens`` excludes them)."""
        spec_info: Any = forward_batch.spec_info
        q = int(spec_info.draft_token_num)
        prefix = forward_batch.seq_lens.to(torch.int64)
        bs = int(prefix.numel())
        positions = forward_batch.positions.view(bs, q)
        if spec_info.custom_mask is None:
            block = torch.ones(q, q, dtype=torch.bool).tril().expand(bs, q, q)
        else:
            block = spec_info.custom_mask[: bs * q * q].view(bs, q, q)
        everything = torch.ones(1, q, q, dtype=torch.bool)
        groups = []
        for requests in _by_length(prefix):
            n = len(requests)
            lens = prefix[requests]
            kv = int(lens.max()) + q
            columns = lens.unsqueeze(1) + torch.arange(q)  # [n, q]: where the block's own columns lie
            k_pos = torch.arange(kv).repeat(n, 1).scatter_(1, columns, positions[requests])
            before = (torch.arange(kv) < lens.unsqueeze(1)).unsqueeze(1).expand(n, q, kv)
            at = columns.unsqueeze(1).expand(n, q, q)
            causal = before.clone().scatter_(2, at, block[requests])
            padded = bool((lens + q != kv).any())
            groups.append(
                _Group(
                    rows=None
                    if n == bs and _is_identity(requests)
                    else (requests.unsqueeze(1) * q + torch.arange(q)).reshape(-1),
                    slots=self._slots(forward_batch, requests, lens + q, kv),
                    q_pos=positions[requests],
                    k_pos=k_pos,
                    causal=causal,
                    full=before.clone().scatter_(2, at, everything.expand(n, q, q)) if padded else None,
                )
            )
        return groups

    def _extend_groups(self, forward_batch: ForwardBatch) -> list[_Group]:
        """Prefill: requests differ in both lengths, so each runs alone."""
        prefix_lens = forward_batch.extend_prefix_lens.tolist()
        extend_lens = forward_batch.extend_seq_lens.tolist()
        groups, start = [], 0
        for request, (prefix, new) in enumerate(zip(prefix_lens, extend_lens, strict=True)):
            kv = prefix + new
            q_pos = torch.arange(prefix, kv).unsqueeze(0)
            k_pos = torch.arange(kv).unsqueeze(0)
            groups.append(
                _Group(
                    rows=torch.arange(start, start + new) if len(prefix_lens) > 1 else None,
                    slots=self._slots(forward_batch, torch.tensor([request]), torch.tensor([kv]), kv),
                    q_pos=q_pos,
                    k_pos=k_pos,
                    causal=k_pos.unsqueeze(1) <= q_pos.unsqueeze(2) if new > 1 else None,
                    full=None,
                )
            )
            start += new
        return groups


def _attend(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    group: _Group,
    bidirectional: bool,
    window: int,
    layer: RadixAttention,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Attention of one group in ``dtype``; ``queries`` ``[n * q, heads, dim]`` -> ``[n * q, heads, v_dim]``."""
    n, kv = group.slots.shape
    q = queries.shape[0] // n
    kv_heads = layer.tp_k_head_num
    per_kv = layer.tp_q_head_num // kv_heads
    # [n, kv_heads, per_kv * q, dim]: the query heads that share a key head become rows of one product.
    folded = queries.view(n, q, kv_heads, per_kv, -1).permute(0, 2, 3, 1, 4).reshape(n, kv_heads, per_kv * q, -1)
    # Never in bf16: most CPUs have no bf16 product, and torch's stand-in is many times slower.
    folded = folded.to(dtype)
    cols = group.slots.reshape(-1)
    k = keys.index_select(0, cols).view(n, kv, kv_heads, -1).transpose(1, 2).to(dtype)
    v = values.index_select(0, cols).view(n, kv, kv_heads, -1).transpose(1, 2).to(dtype)
    if layer.logit_cap and layer.logit_cap > 0:
        out = _soft_capped(folded, k, v, group.mask(bidirectional, window, per_kv), layer)
    else:
        out = scaled_dot_product_attention(
            folded, k, v, attn_mask=group.mask(bidirectional, window, per_kv), scale=layer.scaling
        )
    out = out.view(n, kv_heads, per_kv, q, -1).permute(0, 3, 1, 2, 4).reshape(n * q, layer.tp_q_head_num, -1)
    return out.to(queries.dtype)


def _soft_capped(q, k, v, mask, layer) -> torch.Tensor:  # type: ignore[no-untyped-def]
    scores = torch.matmul(q, k.transpose(-1, -2)) * layer.scaling
    scores = torch.tanh(scores / layer.logit_cap) * layer.logit_cap
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    return torch.matmul(torch.softmax(scores, dim=-1), v)


def _is_identity(index: torch.Tensor) -> bool:
    return bool((index == torch.arange(index.numel())).all())


def _by_length(lens: torch.Tensor) -> list[torch.Tensor]:
    """Indices of ``lens`` split into groups whose longest member is at most ``_MAX_PADDING`` times the shortest."""
    if lens.numel() == 1:
        return [torch.zeros(1, dtype=torch.int64)]
    low, high = int(lens.min()), int(lens.max())
    if high <= _MAX_PADDING * low + 32:
        return [torch.arange(lens.numel())]
    order = lens.argsort(stable=True).tolist()
    groups: list[list[int]] = []
    shortest = -1
    for index in order:
        length = int(lens[index])
        if not groups or length > _MAX_PADDING * shortest + 32:
            groups.append([])
            shortest = length
        groups[-1].append(index)
    return [torch.tensor(group) for group in groups]
