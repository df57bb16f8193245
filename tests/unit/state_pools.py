"""SGLang's pool of recurrent states for a small Gated DeltaNet, with states or deltas for the nodes of a tree."""

from __future__ import annotations

from typing import Any

import torch

from sglang_ddtree import state_deltas

LAYERS = (0, 1, 2, 4, 5, 6)
KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM = 2, 4, 16, 8


def pool_params(state_dtype: torch.dtype = torch.float32, tp_size: int = 1) -> Any:
    """SGLang's ``cache_params``."""
    from sglang.srt.configs.mamba_utils import Mamba2CacheParams, Mamba2StateDType, Mamba2StateShape

    shape = Mamba2StateShape.create(
        tp_world_size=tp_size,
        intermediate_size=VALUE_HEADS * VALUE_DIM,
        n_groups=KEY_HEADS,
        num_heads=VALUE_HEADS,
        head_dim=VALUE_DIM,
        state_size=KEY_DIM,
        conv_kernel=4,
    )
    dtype = Mamba2StateDType(conv=torch.bfloat16, temporal=state_dtype)
    return Mamba2CacheParams(shape=shape, layers=list(LAYERS), dtype=dtype)


def make_pool(params: Any, requests: int, slots: int, width: int | None, *, deltas: bool) -> Any:
    from sglang.srt.mem_cache.memory_pool import MambaPool

    arguments = {
        "size": slots,
        "spec_state_size": requests,
        "cache_params": params,
        "mamba_layer_ids": params.layers,
        "device": "cpu",
        "speculative_num_draft_tokens": width,
        "speculative_eagle_topk": 8,
    }
    if not deltas:
        return MambaPool(**arguments)
    pool = MambaPool.__new__(MambaPool)
    state_deltas.make_pool(MambaPool.__init__, pool, **arguments)
    return pool


def allocated(pool: Any) -> int:
    """Bytes of all its tensors."""
    cache = pool.mamba_cache
    nodes = cache.intermediate_ssm
    of_nodes = [nodes] if isinstance(nodes, torch.Tensor) else [nodes.key, nodes.update, nodes.log_decay, nodes.parents]
    return sum(each.nbytes for each in [cache.temporal, *cache.conv, *of_nodes, *cache.intermediate_conv_window])
