"""What every server here needs: SGLang branches by device name in a few places that no platform can answer."""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Callable
from typing import Any

import torch

logger = logging.getLogger(__name__)


def register() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from sglang_ddtree import plugin

    # SGLang leaves out the plugins of packages whose platform was not chosen, and sglang-ddtree has one.
    plugin.register()
    for target, function in (
        ("sglang_ddtree.algorithm._resolve_attention_backends", resolve_attention_backends),
        ("sglang_ddtree.tree.kernels.dispatch.use_kernels", use_kernels),
        ("sglang.srt.model_executor.model_runner.ModelRunner._extend_forward_kwargs", keep_embedding_dtype),
        ("sglang.kernels.ops.speculative.spec_tree.verify_tree_greedy_func", verify_tree_greedy),
    ):
        HookRegistry.register(target, function, HookType.AROUND)
    for target in ("build.build_tree_triton", "mask.write_tree_columns"):
        HookRegistry.register(f"sglang_ddtree.tree.kernels.{target}", said_once(target), HookType.AROUND)


def said_once(target: str) -> Callable[..., Any]:
    """Logs the first call: a test that means a kernel must see that it ran."""
    name = target.split(".")[1]
    calls = itertools.count()

    def call(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if next(calls) == 0:
            logger.info("interpreted: %s", name)
        return original(*args, **kwargs)

    return call


def init_worker() -> None:
    """Once per worker process."""
    from ddtree_interpreter.speed import patch_language_once
    from sglang_ddtree.tree import build

    patch_language_once()
    # On a CPU the heap takes small batches before any kernel is asked.
    build._HEAP_MAX_NODES = -1
    # A CPU tensor has no stream; SGLang's workers record one on every step.
    torch.Tensor.record_stream = lambda tensor, stream: None
    # Some kernels are launched under a device context of torch's CPU module, which has none.
    torch.cpu.device = lambda index: contextlib.nullcontext()
    # Models ask for the current device when they allocate.
    torch.cpu.current_device = lambda: torch.device("cpu")


def resolve_attention_backends(original: Callable[..., None], args: Any, cpu: bool) -> None:
    """DDTREE checks backends as on a GPU; on its own CPU platform only one exists."""
    original(args, cpu=False)


def use_kernels(original: Callable[..., bool], device: torch.device, width: int, **limits: int) -> bool:
    """The project's kernels, as on a GPU, within their limits."""
    return original(torch.device("cuda"), width, **limits)


def keep_embedding_dtype(original: Callable[..., dict[str, Any]], runner: Any, batch: Any, *args: Any) -> Any:
    """SGLang casts a draft block's embeddings to bf16; these models are fp32."""
    found = original(runner, batch, *args)
    if batch.input_embeds is not None:
        found["input_embeds"] = batch.input_embeds
    return found


def verify_tree_greedy(original: Callable[..., Any], **arguments: Any) -> Any:
    """SGLang's own Triton kernel, which it uses on Intel GPUs; on CUDA it has the same in C++."""
    from sglang.kernels.ops.speculative.spec_tree import verify_tree_greedy_triton

    arguments.pop("topk", None)
    verify_tree_greedy_triton(**arguments)
    return arguments["predicts"], arguments["accept_index"], arguments["accept_token_num"]


def assign_extend_cache_locs(
    *,
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    batch_size: int,
    draft_token_num: int,
    device: object,
) -> torch.Tensor:
    """SGLang's Triton kernel; int64 ``[bs * draft_token_num]``."""
    import triton
    from sglang.kernels.ops.speculative.cache_locs import assign_extend_cache_locs as kernel

    out = torch.empty(batch_size * draft_token_num, dtype=torch.int64)
    kernel[(batch_size,)](
        req_pool_indices,
        req_to_token,
        start_offset,
        end_offset,
        out,
        req_to_token.shape[1],
        triton.next_power_of_2(batch_size),
    )
    return out
