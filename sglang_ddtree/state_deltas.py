"""``SGLANG_DDTREE_STATES=deltas``: SGLang's pool, verify pass and commit of states with deltas for a state per node.

The pool holds an object that SGLang hands on where it would hand on the nodes' states; the verify kernel fills it and
the commit folds the accepted path of it into the request's state. Convolution windows stay as SGLang keeps them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable
from typing import Any

import torch

from sglang_ddtree.errors import DDTreeError
from sglang_ddtree.state_memory import GIB
from sglang_ddtree.tree.kernels.delta_rule import Deltas, fold_triton, verify_triton

logger = logging.getLogger(__name__)


class PooledDeltas(Deltas):
    """Deltas of all layers, in the place of SGLang's ``intermediate_ssm``: one layer by index, and a size in bytes."""

    dtype = torch.uint8

    @property
    def shape(self) -> tuple[int]:
        return (sum(each.nbytes for each in (self.key, self.update, self.log_decay, self.parents)),)

    def __getitem__(self, layer: int) -> Deltas:
        return Deltas(self.key[layer], self.update[layer], self.log_decay[layer], self.parents)


def allocate(
    layers: int,
    rows: int,
    width: int,
    *,
    key_heads: int,
    value_heads: int,
    key_dim: int,
    value_dim: int,
    device: torch.device | str,
) -> PooledDeltas:
    """Deltas of ``rows`` trees of ``width`` nodes; ``state_memory.delta_bytes`` is its size for one node."""

    def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    return PooledDeltas(
        key=zeros(layers, rows, width, key_heads, key_dim),
        update=zeros(layers, rows, width, value_heads, value_dim),
        log_decay=zeros(layers, rows, width, value_heads),
        parents=zeros(rows, width, dtype=torch.int32),
    )


def make_pool(original: Callable[..., None], pool: Any, **kwargs: Any) -> None:
    """``MambaPool.__init__``: SGLang's pool for no nodes at all, then windows and deltas for those of the tree.

    Only a pool for a verify pass (SGLang's ``SpeculativeState``) is another than SGLang's.
    """
    width = kwargs.get("speculative_num_draft_tokens")
    if width is None:
        return original(pool, **kwargs)
    original(pool, **{**kwargs, "speculative_num_draft_tokens": 0})
    from sglang.srt.constants import GPU_MEMORY_TYPE_KV_CACHE

    cache, shape = pool.mamba_cache, kwargs["cache_params"].shape
    layers, _, value_heads, value_dim, key_dim = cache.temporal.shape
    before = _bytes(cache.intermediate_conv_window)
    own = torch.cuda.use_mem_pool(pool.custom_mem_pool) if pool.enable_custom_mem_pool else contextlib.nullcontext()
    with pool.memory_saver_adapter.region(GPU_MEMORY_TYPE_KV_CACHE), own:
        # Dense, whatever SGLang made of no nodes: a node's window is its ancestors', not its neighbours'.
        windows = [
            window.new_zeros((*window.shape[:2], width, *window.shape[3:])) for window in cache.intermediate_conv_window
        ]
        deltas = allocate(
            layers,
            kwargs["spec_state_size"] + 1,
            width,
            key_heads=shape.num_k_heads_per_tp,
            value_heads=value_heads,
            key_dim=key_dim,
            value_dim=value_dim,
            device=kwargs["device"],
        )
    pool._intermediate_conv_window_phys = windows
    pool.mamba_cache = dataclasses.replace(cache, intermediate_ssm=deltas, intermediate_conv_window=windows)
    taken = deltas.shape[0] + _bytes(windows)
    pool.mem_usage += (taken - before) / GIB
    logger.info(
        "DDTREE: deltas of the verify pass are allocated: %.2f GiB, convolution windows %.2f GiB",
        deltas.shape[0] / GIB,
        _bytes(windows) / GIB,
    )


def verify(original: Callable[..., torch.Tensor], kernel: Any, **kwargs: Any) -> torch.Tensor:
    """``TritonGDNKernel.target_verify``: the same outputs, ``[1, tokens, HV, V]``, and deltas instead of states."""
    deltas = kwargs.get("intermediate_states_buffer")
    if not isinstance(deltas, Deltas):
        return original(kernel, **kwargs)
    q, k, v = (kwargs[name][0] for name in ("q", "k", "v"))
    if k.shape[1:] != deltas.key.shape[2:] or v.shape[1:] != deltas.update.shape[2:]:
        raise DDTreeError(
            f"a layer has keys {tuple(k.shape[1:])} and values {tuple(v.shape[1:])}, its deltas are for "
            f"{tuple(deltas.key.shape[2:])} and {tuple(deltas.update.shape[2:])}."
        )
    width = kwargs["cache_steps"]
    count = len(q) // width
    parents = kwargs["retrieve_parent_token"]
    q, k, v, a, b = (x.unflatten(0, (count, width)) for x in (q, k, v, kwargs["a"], kwargs["b"]))
    out = verify_triton(
        q,
        k,
        v,
        a,
        b,
        a_log=kwargs["A_log"],
        dt_bias=kwargs["dt_bias"],
        states=kwargs["ssm_states"],
        slots=kwargs["cache_indices"][:count],
        rows=kwargs["intermediate_state_indices"][:count],
        parents=None if parents is None else parents[:count],
        deltas=deltas,
    )
    return out.view(1, count * width, *out.shape[2:])


def commit(
    original: Callable[..., None],
    caches: Any,
    slots: torch.Tensor,
    last: torch.Tensor,
    track_slots: torch.Tensor | None,
    track_last: torch.Tensor | None,
    src_indices_raw: torch.Tensor | None = None,
) -> None:
    """``scatter_mamba_states_after_mtp_verify``: states by folding, then SGLang's own for the windows.

    Args: as SGLang's; ``slots`` and ``last`` are integers ``[bs]``, ``track_slots`` and ``track_last`` too where a
        prefix's state is to be kept.
    """
    deltas = caches.intermediate_ssm
    if not isinstance(deltas, Deltas):
        return original(caches, slots, last, track_slots, track_last, src_indices_raw=src_indices_raw)
    assert src_indices_raw is None, "state_form.check has refused SGLANG_ENABLE_PP_SPEC"
    # The kernel reads them by address, as SGLang's does.
    slots, last = slots.contiguous(), last.contiguous()
    if track_slots is not None and track_last is not None:
        track_slots, track_last = track_slots.contiguous(), track_last.contiguous()
    fold_triton(caches.temporal, slots, last, track_slots, track_last, deltas)
    # SGLang skips states where there are none.
    original(dataclasses.replace(caches, temporal=caches.temporal[:, :0]), slots, last, track_slots, track_last)


def _bytes(tensors: list[torch.Tensor]) -> int:
    return sum(each.nbytes for each in tensors)
