"""Which kernels of SGLang's linear attention can verify a tree, by the flags that choose them.

A node's state must come from its parent's. SGLang 0.5.23 gives a Gated DeltaNet tree to its Triton kernel whatever the
flags say (``layers/attention/linear/gdn_backend.py: _get_target_verify_kernel``); for KDA the flags decide
(``kda_backend.py: KDAKernelDispatcher``). It refuses a kernel that a model does not have only after the weights are
loaded; here that is told before.
"""

from __future__ import annotations

from typing import Any

from sglang_ddtree.errors import DDTreeError

#: What SGLang has for Gated DeltaNet; its verify flag does not matter for a tree.
GDN_KERNELS = ("triton", "flashinfer", "cutedsl", "intel_xpu")
#: For KDA: decode, prefill, and of the verify kernels those that follow a tree (``nv_cutedsl`` hands it to Triton).
KDA_DECODE = ("triton", "helion", "cutedsl", "flashinfer")
KDA_PREFILL = (*KDA_DECODE, "flashkda", "nvidia_kda", "ptx_kda")
KDA_TREE_VERIFY = ("triton", "helion", "nv_cutedsl")


def check_kernels(args: Any, text: dict[str, Any]) -> None:
    """Refuse flags that choose a kernel which cannot run this target, or runs a tree as a chain.

    Args:
        args: server arguments.
        text: the text part of the target's ``config.json``.

    Raises:
        DDTreeError: naming the flag and what to give instead.
    """
    if is_kda(text):
        _check(args, "decode", KDA_DECODE, "KDA")
        _check(args, "prefill", KDA_PREFILL, "KDA")
        decode = args.linear_attn_decode_backend or args.linear_attn_backend
        # SGLang's own rule for a verify kernel that was not chosen (linear/utils.py).
        verify = args.linear_attn_verify_backend or ("flashinfer" if decode == "flashinfer" else "triton")
        if verify not in KDA_TREE_VERIFY:
            raise DDTreeError(
                f"the {verify} kernel verifies KDA layers as a chain, so DDTREE's answers would be wrong: "
                "use --linear-attn-verify-backend triton."
            )
    elif is_gated_delta_net(text):
        _check(args, "decode", GDN_KERNELS, "Gated DeltaNet")
        _check(args, "prefill", GDN_KERNELS, "Gated DeltaNet")


def is_gated_delta_net(text: dict[str, Any]) -> bool:
    return bool(text.get("linear_num_value_heads"))


def is_kda(text: dict[str, Any]) -> bool:
    return bool((text.get("linear_attn_config") or {}).get("kda_layers"))


def _check(args: Any, mode: str, kernels: tuple[str, ...], kind: str) -> None:
    own = f"linear_attn_{mode}_backend"
    flag = own if getattr(args, own) else "linear_attn_backend"
    name = getattr(args, flag)
    if name not in kernels:
        raise DDTreeError(
            f"SGLang has no {kind} {mode} kernel named {name}: use --{flag.replace('_', '-')} {kernels[0]} "
            f"(or {', '.join(kernels[1:])})."
        )
