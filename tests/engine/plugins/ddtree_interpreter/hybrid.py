"""What SGLang's Gated DeltaNet layers need in the interpreter.

Decode, convolution, tree verification and the commit of states run SGLang's kernels. The chunked prefill does not: it
refuses fp32 and uses what the interpreter lacks, so the recurrence itself stands in.
"""

from __future__ import annotations

from typing import Any

import torch

#: Tokens per chunk of SGLang's prefill; it keeps the state at the start of each.
CHUNK = 64


def register() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    fla = "sglang.kernels.ops.attention.fla"
    scatter = "sglang.kernels.ops.mamba.mamba_state_scatter_triton"
    for target, function in (
        (f"{fla}.chunk.chunk_gated_delta_rule", chunk_gated_delta_rule),
        (f"{fla}.layernorm_gated._get_sm_count", lambda device: 8),
        (f"{scatter}.scatter_mamba_states_after_mtp_verify", scatter_states),
    ):
        HookRegistry.register(target, function, HookType.REPLACE)


def init_worker() -> None:
    """Once per worker process."""
    from sglang.kernels.ops.attention.fla import fused_recurrent
    from triton.runtime.autotuner import Autotuner

    from ddtree_interpreter import functions

    # SGLang's is an alias of ``tl.exp``, made at import, which the interpreter does not replace.
    fused_recurrent.exp = functions.exp

    def first_configuration(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self.fn.run(*args, **kwargs, **self.configs[0].all_kwargs())

    # There is no driver to measure with.
    Autotuner.run = first_configuration
    # Models allocate on "the current device" of torch's accelerator module.
    torch.cuda.current_device = lambda: torch.device("cpu")
    # Pinning needs a driver, and is for copies to a GPU.
    torch.Tensor.pin_memory = lambda tensor, *args: tensor


def chunk_gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    initial_state_indices: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    head_first: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    inplace_update: bool = True,
) -> tuple[torch.Tensor, None, torch.Tensor]:
    """The gated delta rule token by token.

    Args:
        q, k: ``[1, T, H, K]``.
        v: ``[1, T, HV, V]``; ``HV`` is a multiple of ``H``.
        g, beta: ``[1, T, HV]``, log decay and step.
        initial_state: ``[slots, HV, V, K]``; each sequence's final state is written back to its slot.

    Returns:
        Outputs ``[1, T, HV, V]``, None, and the state at the start of each chunk, ``[1, chunks, HV, V, K]``.
    """
    repeat = v.shape[2] // k.shape[2]
    scale = k.shape[-1] ** -0.5 if scale is None else scale
    if use_qk_l2norm_in_kernel:
        q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    q, k = (x[0].float().repeat_interleave(repeat, dim=1) for x in (q * scale, k))
    out = torch.empty_like(v)
    chunks = []
    bounds = cu_seqlens.tolist()
    for slot, start, end in zip(initial_state_indices.tolist(), bounds, bounds[1:], strict=False):
        state = initial_state[slot].float().clone()
        for t in range(start, end):
            if (t - start) % CHUNK == 0:
                chunks.append(state.clone())
            state *= g[0, t].float().exp()[:, None, None]
            change = beta[0, t].float()[:, None] * (v[0, t].float() - torch.einsum("hvk,hk->hv", state, k[t]))
            state += change.unsqueeze(2) * k[t].unsqueeze(1)
            out[0, t] = torch.einsum("hvk,hk->hv", state, q[t]).to(out.dtype)
        if inplace_update:
            initial_state[slot] = state.to(initial_state.dtype)
    return out, None, torch.stack(chunks).unsqueeze(0)


def scatter_states(
    caches: Any,
    slots: torch.Tensor,
    steps: torch.Tensor,
    track_slots: torch.Tensor | None,
    track_steps: torch.Tensor | None,
    src_indices_raw: torch.Tensor | None = None,
) -> None:
    """SGLang's two scatter kernels; its launchers accept tensors of a GPU only."""
    assert src_indices_raw is None
    for to, which in ((slots, steps), (track_slots, track_steps)):
        if to is not None:
            rows = [x.to(torch.int32).contiguous() for x in (to, which)]
            rows.append(torch.arange(len(rows[1]), dtype=torch.int32))
            # SGLang skips states where there are none, as with deltas.
            if caches.temporal.numel():
                _scatter_recurrent(caches.temporal, caches.intermediate_ssm, rows)
            for conv, windows in zip(caches.conv, caches.intermediate_conv_window, strict=True):
                _scatter_windows(conv, windows, rows)


def _scatter_recurrent(dst: torch.Tensor, src: torch.Tensor, rows: list[torch.Tensor]) -> None:
    import triton
    from sglang.kernels.ops.mamba.mamba_state_scatter_triton import (
        _fused_mamba_state_scatter_with_mask_kernel as kernel,
    )

    entry = dst[0, 0].numel()
    kernel[(len(rows[0]), dst.shape[0], triton.cdiv(entry, 1024))](
        src, dst, *rows, entry, *src.stride()[:3], *dst.stride()[:2], *src.shape[1:3], dst.shape[1], BLOCK_SIZE=1024
    )


def _scatter_windows(dst: torch.Tensor, src: torch.Tensor, rows: list[torch.Tensor]) -> None:
    import triton
    from sglang.kernels.ops.mamba.mamba_state_scatter_triton import (
        _fused_conv_window_scatter_with_mask_kernel as kernel,
    )

    entry = dst[0, 0].numel()
    kernel[(len(rows[0]), dst.shape[0], triton.cdiv(entry, 1024))](
        src, dst, *rows, entry, dst.shape[3], *src.stride(), *dst.stride()[:2], *src.shape[1:3], dst.shape[1],
        BLOCK_SIZE=1024,
    )  # fmt: skip
