"""Arguments that only a hybrid target has: what cannot follow a tree is refused before any model loads.

SGLang refuses the same flags on a CPU for reasons of its own, so the checks are asked directly, with SGLang's defaults.
"""

from __future__ import annotations

import pytest
from sglang.srt.arg_groups.choices import LINEAR_ATTN_KERNEL_BACKEND_CHOICES
from sglang.srt.server_args import ServerArgs

from sglang_ddtree.algorithm import _refuse_unsupported, _require_track_interval
from sglang_ddtree.errors import DDTreeError
from sglang_ddtree.linear_attention import GDN_KERNELS, KDA_DECODE, KDA_PREFILL, KDA_TREE_VERIFY, check_kernels

GDN, KDA = {"linear_num_value_heads": 32}, {"linear_attn_config": {"kda_layers": [1, 2, 3]}}
#: Every kernel that SGLang offers for a flag: a new one must be looked at.
OFFERED = (*LINEAR_ATTN_KERNEL_BACKEND_CHOICES, "nv_cutedsl")
FLAGS = ("linear_attn_backend", "linear_attn_decode_backend", "linear_attn_prefill_backend")


def arguments(**changes):
    """SGLang's defaults, and some changes."""
    return ServerArgs(model_path="target", **changes)


def test_defaults_are_accepted():
    _refuse_unsupported(arguments())
    _require_track_interval(arguments(), 257)


def test_flashinfers_mamba_is_refused():
    with pytest.raises(DDTreeError, match="does not support --mamba-backend flashinfer: use --mamba-backend triton"):
        _refuse_unsupported(arguments(mamba_backend="flashinfer"))
    _refuse_unsupported(arguments(mamba_backend="triton"))


@pytest.mark.parametrize("strategy", ["extra_buffer", "extra_buffer_lazy"])
def test_a_verify_width_above_the_track_interval_is_refused(strategy):
    args = arguments(mamba_radix_cache_strategy=strategy, mamba_track_interval=16)
    _require_track_interval(args, 16)
    with pytest.raises(DDTreeError, match="got 16: use --speculative-ddtree-budget 15 or less"):
        _require_track_interval(args, 17)


def test_without_tracked_states_the_interval_does_not_matter():
    _require_track_interval(arguments(mamba_radix_cache_strategy="no_buffer", mamba_track_interval=16), 257)


@pytest.mark.parametrize("name", OFFERED)
@pytest.mark.parametrize("flag", FLAGS)
def test_every_kernel_that_sglang_offers_for_gated_delta_nets(flag, name):
    args = arguments(**{flag: name})
    if name in GDN_KERNELS:
        check_kernels(args, GDN)
        return
    with pytest.raises(DDTreeError, match=f"no Gated DeltaNet .* kernel named {name}: use --{flag.replace('_', '-')} "):
        check_kernels(args, GDN)


@pytest.mark.parametrize("name", OFFERED)
@pytest.mark.parametrize(("decode", "prefill"), [(True, False), (False, True)])
def test_the_tables_are_those_of_sglangs_dispatchers(name, decode, prefill):
    """Without a GPU they refuse most kernels, but for another reason than that the model has none of that name."""
    from sglang.srt.layers.attention.linear.gdn_backend import GDNKernelDispatcher
    from sglang.srt.layers.attention.linear.kda_backend import KDAKernelDispatcher
    from sglang.srt.layers.attention.linear.utils import LinearAttnKernelBackend

    triton, other = LinearAttnKernelBackend("triton"), LinearAttnKernelBackend(name)
    kinds = (other if decode else triton, other if prefill else triton, triton)
    for dispatcher, allowed in (
        (GDNKernelDispatcher, GDN_KERNELS),
        (KDAKernelDispatcher, KDA_DECODE if decode else KDA_PREFILL),
    ):
        reason = ""
        try:
            dispatcher(*kinds)
        except Exception as error:
            reason = str(error)
        assert (name in allowed) is not ("Unsupported" in reason or "KDA only" in reason), reason


@pytest.mark.parametrize("name", OFFERED)
def test_a_tree_over_gated_delta_nets_goes_to_triton_whatever_the_verify_flag(name):
    """SGLang's own dispatcher, on the kernels it would choose: the flag is free."""
    from types import SimpleNamespace

    from sglang.srt.layers.attention.linear.gdn_backend import GDNKernelDispatcher

    check_kernels(arguments(linear_attn_verify_backend=name), GDN)
    dispatcher = SimpleNamespace(tree_verify_kernel="triton", verify_kernel=name)
    assert GDNKernelDispatcher._get_target_verify_kernel(dispatcher, object()) == "triton"
    assert GDNKernelDispatcher._get_target_verify_kernel(dispatcher, None) == name


@pytest.mark.parametrize("name", OFFERED)
def test_every_kernel_that_sglang_offers_for_kda(name):
    checks = (
        ({"linear_attn_decode_backend": name, "linear_attn_verify_backend": "triton"}, KDA_DECODE),
        ({"linear_attn_prefill_backend": name}, KDA_PREFILL),
        ({"linear_attn_verify_backend": name}, KDA_TREE_VERIFY),
    )
    for changes, allowed in checks:
        if name in allowed:
            check_kernels(arguments(**changes), KDA)
            continue
        with pytest.raises(DDTreeError, match=f"{name}.*use --linear-attn-.*-backend triton"):
            check_kernels(arguments(**changes), KDA)


@pytest.mark.parametrize("flag", ["linear_attn_backend", "linear_attn_decode_backend"])
def test_a_kda_verify_kernel_that_follows_decode_is_seen(flag):
    with pytest.raises(DDTreeError, match="flashinfer kernel verifies KDA layers as a chain"):
        check_kernels(arguments(**{flag: "flashinfer"}), KDA)


def test_other_targets_have_no_such_kernels():
    check_kernels(arguments(linear_attn_backend="helion"), {"model_type": "llama"})
