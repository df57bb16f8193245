"""FlashInfer attention over a draft tree's bit rows: no mask that grows with the context, nothing to pack.

The variant is ``flashinfer_tree.cuh``; FlashInfer compiles it on first use, once per dtype and head size.
``flashinfer_backend.py`` has SGLang use it, where ``flashinfer_choice.py`` finds nothing against it. Not run on a GPU
yet: ``docs/gpu.md``.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

SOURCE = Path(__file__).with_name("flashinfer_tree.cuh")

#: FP8 keys and values are read with 16-bit queries; FA2 has no FP8 queries.
QUERY_DTYPES = (torch.float16, torch.bfloat16)
KV_DTYPES = (torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)
HEAD_DIMS = (64, 128, 256)


@dataclass(frozen=True)
class Variant:
    """What one compiled module is for."""

    query: torch.dtype
    kv: torch.dtype
    head_dim: int
    soft_cap: bool = False
    window: bool = False

    @property
    def name(self) -> str:
        """FlashInfer's key for the module, with the source's digest, so that an old build is never taken for it."""
        digest = hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:8]
        parts = [str(self.query), str(self.kv), f"d{self.head_dim}"]
        parts += ["cap"] * self.soft_cap + ["window"] * self.window
        return "ddtree_prefill_" + "_".join(part.removeprefix("torch.") for part in parts) + f"_{digest}"

    @property
    def scalars(self) -> list[str]:
        """Scalar parameters in order. ``run`` takes the first by position and knows the others by name."""
        return ["tree_window"] * self.window + ["logits_soft_cap"] * self.soft_cap + ["sm_scale"]


def why_not(query: torch.dtype, kv: torch.dtype, head_dim: int) -> str | None:
    """Why there is no variant for these, or None."""
    if query not in QUERY_DTYPES:
        return f"queries are {query}, it takes float16 and bfloat16"
    if kv not in KV_DTYPES:
        return f"the KV cache is {kv}, it takes 16-bit and FP8 caches"
    if kv.itemsize == 2 and kv != query:
        return f"queries are {query} and the KV cache is {kv}"
    if head_dim not in HEAD_DIMS:
        return f"heads have {head_dim} elements, it takes {', '.join(map(str, HEAD_DIMS))}"
    return None


def jit_args(variant: Variant) -> list[Any]:
    """``jit_args`` of ``BatchPrefillWithPagedKVCacheWrapper``: the arguments of ``gen_customize_batch_prefill_module``
    after the backend."""
    truth = {False: "false", True: "true"}
    return [
        variant.name,
        variant.query,
        variant.kv,
        variant.query,
        torch.int32,
        variant.head_dim,
        variant.head_dim,
        ["tree_bits"],
        ["int32_t"],
        variant.scalars,
        ["double"] * len(variant.scalars),
        f"DDTreeAttention<{truth[variant.soft_cap]}, {truth[variant.window]}>",
        SOURCE.read_text(),
    ]


def jit_kwargs() -> dict[str, Any]:
    """SGLang's K and V buffers have equal strides; a module for them alone compiles in half the time."""
    return {"paged_kv_stride_mode": "equal"}


def planned_window(window: int, width: int) -> int:
    """``plan``'s ``window_left`` for a variant with ``window``: the tiles before it hold nothing that a node sees.

    FlashInfer counts back from a node's number, which is at most ``width - 1`` more than its depth.
    """
    return window + width


def host_layout(kv_lens: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Row and page index pointers, int32 ``[bs + 1]``, and last page lengths, int32 ``[bs]``, for pages of one token.

    On the host, where FlashInfer's ``plan`` needs them; it copies them to the device without waiting.
    """
    bs = kv_lens.numel()
    rows = torch.arange(0, (bs + 1) * width, width, dtype=torch.int32)
    starts = torch.zeros(bs + 1, dtype=torch.int32)
    starts[1:] = torch.cumsum(kv_lens, 0)
    return rows, starts, torch.ones(bs, dtype=torch.int32)


class OnePlanAtATime:
    """A FlashInfer module whose ``plan`` waits until its previous plan is on the device.

    ``plan`` writes one pinned buffer per wrapper and copies it without waiting. When nothing else waits, the next plan
    could overwrite it too early; the event has normally fired long before.
    """

    def __init__(self, module: Any) -> None:
        self._module = module
        self._copied: Any = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def plan(self, *args: Any) -> Any:
        if self._copied is None:
            self._copied = torch.cuda.Event()
        else:
            self._copied.synchronize()
        info = self._module.plan(*args)
        self._copied.record()
        return info


@cache
def tree_wrapper_class() -> type:
    """FlashInfer's paged prefill wrapper for a :class:`Variant`. A function: importing FlashInfer takes seconds."""
    from flashinfer import BatchPrefillWithPagedKVCacheWrapper

    # Without FlashInfer's trace decorator, which would take this for a plain causal prefill: under Trace Apply another
    # kernel would run. FlashInfer's own wrapper of such a variant does the same (attention/_core.py).
    run = getattr(BatchPrefillWithPagedKVCacheWrapper.run, "__wrapped__", BatchPrefillWithPagedKVCacheWrapper.run)

    class TreeWrapper(BatchPrefillWithPagedKVCacheWrapper):
        """Takes the place of the stock wrapper in SGLang's backend: same ``begin_forward`` and ``forward``.

        Args:
            workspace: FlashInfer's float workspace.
            tree_bits: int32 ``[rows, ceil(Q / 32)]``, read at every ``forward``; at a fixed address under CUDA graphs.
            variant: what to compile.
            buffers: ``use_cuda_graph`` and the wrapper's index buffers.
        """

        def __init__(self, workspace: torch.Tensor, tree_bits: torch.Tensor, variant: Variant, **buffers: Any) -> None:
            super().__init__(
                workspace,
                "NHD",
                backend="fa2",
                jit_args=jit_args(variant),
                jit_kwargs=jit_kwargs(),
                variant_owns_mask=True,
                **buffers,
            )
            module: Any = self._jit_module  # type: ignore[has-type]
            self._jit_module = OnePlanAtATime(module)
            self.tree_bits = tree_bits
            self.variant = variant
            self._known: tuple[torch.Tensor, int] | None = None

        def know_lengths(self, kv_lens: torch.Tensor, width: int) -> None:
            """Lengths of the next plan's requests, integers ``[bs]`` on the host, and ``width`` rows for each.

            With them that plan reads nothing back from the device, where FlashInfer would wait three times.
            """
            self._known = kv_lens, width

        def begin_forward(self, *args: Any, custom_mask: torch.Tensor | None = None, **kwargs: Any) -> None:
            if custom_mask is not None:
                raise ValueError("this wrapper's mask is its tree bits; a custom_mask would be ignored")
            known, self._known = self._known, None
            if known is not None:
                rows, starts, last_page_len = host_layout(*known)
                args = (rows, starts, args[2], last_page_len, *args[4:])
            self.plan(*args, **kwargs)

        def forward(
            self,
            q: torch.Tensor,
            paged_kv_cache: Any,
            *,
            sm_scale: float | None = None,
            window_left: int = -1,
            logits_soft_cap: float | None = None,
            k_scale: float | None = None,
            v_scale: float | None = None,
            **_: Any,
        ) -> torch.Tensor:
            """As the stock wrapper's; ``window_left`` is the layer's window, by depth here. A module that knows windows
            or soft caps takes layers without them too.

            Raises:
                ValueError: the layer has a window or a soft cap, and the module was compiled without.
            """
            if (window_left >= 0) > self.variant.window or bool(logits_soft_cap) > self.variant.soft_cap:
                raise ValueError(f"{self.variant.name} has not what this layer needs: window or soft cap")
            self._sm_scale = sm_scale
            self._logits_soft_cap = logits_soft_cap
            window = [float(window_left)] * self.variant.window
            out: torch.Tensor = run(self, q, paged_kv_cache, self.tree_bits, *window, k_scale=k_scale, v_scale=v_scale)
            return out

    return TreeWrapper
