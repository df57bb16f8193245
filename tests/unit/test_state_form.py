"""``SGLANG_DDTREE_STATES``: its values, and the targets and servers that deltas are refused for."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from sglang.srt.server_args import ServerArgs

from sglang_ddtree import algorithm, state_form
from sglang_ddtree.errors import DDTreeError
from sglang_ddtree.tree.kernels import dispatch

DELTA_NET = {
    "model_type": "qwen3_5_text",
    "num_hidden_layers": 4,
    "full_attention_interval": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
}
OTHERS = {
    "Kimi Linear": {"num_hidden_layers": 4, "linear_attn_config": {"num_heads": 4, "head_dim": 16}},
    "Mamba2": {"num_hidden_layers": 4, "mamba_d_state": 16, "layers_block_type": ["mamba", "attention"]},
    "Jet Nemotron": {"num_hidden_layers": 4, "layer_types": ["linear_attention", "full_attention"]},
    "heads that do not divide": {**DELTA_NET, "linear_num_value_heads": 3},
}


@pytest.fixture(autouse=True)
def deltas(monkeypatch):
    monkeypatch.setenv(state_form.ENV, "deltas")


def check(config=DELTA_NET, **changes):
    arguments = {"device": "cuda", "width": 33, "verify_backend": None, "by_rows": False, **changes}
    state_form.check(config, **arguments)


@pytest.mark.parametrize(("value", "form"), [("", "stored"), ("stored", "stored"), (" Deltas ", "deltas")])
def test_values(monkeypatch, value, form):
    monkeypatch.setenv(state_form.ENV, value)
    assert state_form.wanted() == form and state_form.is_deltas() == (form == "deltas")


def test_stored_is_the_default(monkeypatch):
    monkeypatch.delenv(state_form.ENV)
    assert state_form.wanted() == "stored" and not state_form.is_deltas()


def test_another_value_is_told(monkeypatch):
    monkeypatch.setenv(state_form.ENV, "delta")
    assert not state_form.is_deltas()
    with pytest.raises(DDTreeError, match="SGLANG_DDTREE_STATES must be stored or deltas, got 'delta'"):
        check()


def test_a_delta_net_on_a_gpu_is_accepted(caplog):
    check()
    check({"model_type": "qwen3_5", "text_config": DELTA_NET})
    check(verify_backend="triton")
    assert not caplog.text


@pytest.mark.parametrize("name", OTHERS)
def test_other_hybrids_are_refused(name):
    with pytest.raises(DDTreeError, match=r"made for Gated DeltaNet targets.*leave SGLANG_DDTREE_STATES at stored"):
        check(OTHERS[name])


def test_a_target_without_states_is_told_that_it_has_no_effect(caplog):
    check({"model_type": "qwen3", "num_hidden_layers": 4})
    assert "SGLANG_DDTREE_STATES=deltas has no effect" in caplog.text


@pytest.mark.parametrize("changes", [{"device": "cpu"}, {"device": "xpu"}, {"width": 258}], ids=str)
def test_without_the_kernels_it_is_refused(changes):
    with pytest.raises(DDTreeError, match=r"Triton kernels.*leave SGLANG_DDTREE_STATES at stored"):
        check(**changes)


def test_without_triton_it_is_refused(monkeypatch):
    monkeypatch.setattr(dispatch, "has_triton", lambda: False)
    with pytest.raises(DDTreeError, match="Triton kernels"):
        check()


@pytest.mark.parametrize("backend", ["flashinfer", "cutedsl", "nv_cutedsl", "helion"])
def test_other_verify_backends_are_refused(backend):
    with pytest.raises(DDTreeError, match=rf"--linear-attn-verify-backend {backend} knows \(triton does\)"):
        check(verify_backend=backend)


def test_rows_by_slot_are_refused():
    with pytest.raises(DDTreeError, match="SGLANG_ENABLE_PP_SPEC"):
        check(by_rows=True)


@pytest.mark.parametrize("refused", [{"device": "cpu"}, {"verify_backend": "flashinfer"}, {"by_rows": True}], ids=str)
def test_stored_is_refused_nothing(monkeypatch, refused):
    monkeypatch.setenv(state_form.ENV, "stored")
    for config in (DELTA_NET, *OTHERS.values()):
        check(config, **refused)


def test_the_servers_arguments_are_checked(monkeypatch):
    args = ServerArgs(model_path="target", device="cuda", linear_attn_verify_backend="flashinfer")
    with pytest.raises(DDTreeError, match="--linear-attn-verify-backend flashinfer"):
        algorithm._check_states(args, DELTA_NET, 33)
    monkeypatch.setenv("SGLANG_ENABLE_PP_SPEC", "1")
    with pytest.raises(DDTreeError, match="SGLANG_ENABLE_PP_SPEC"):
        algorithm._check_states(ServerArgs(model_path="target", device="cuda"), DELTA_NET, 33)


def test_a_device_that_this_torch_does_not_know_is_refused():
    with pytest.raises(RuntimeError):
        torch.device("npu")
    with pytest.raises(DDTreeError, match="device 'npu' does not run"):
        check(device="npu")


def test_passes_without_links_are_verified_with_deltas_too(monkeypatch):
    """SGLang's dummy passes (FlashInfer's autotune) have no tree; its rule gives those to FlashInfer's kernel where the
    decode kernel is FlashInfer's, which SM100 with states in bfloat16 has by default, and that one knows no deltas."""
    from sglang.srt.arg_groups.overrides import record_foreign_defaults, resolving_view
    from sglang.srt.layers.attention.linear import utils

    def verify_kernel(config, **changes):
        server = ServerArgs(model_path="target", device="cuda", **changes)
        record_foreign_defaults(server, "DDTREE", lambda args: algorithm._check_states(args, config, 33))
        monkeypatch.setattr(utils, "get_exec", lambda: SimpleNamespace(mamba=resolving_view(server)))
        return utils.resolve_linear_attn_backends().verify.value

    assert verify_kernel(DELTA_NET, linear_attn_decode_backend="flashinfer") == "triton"
    assert verify_kernel(DELTA_NET, linear_attn_backend="flashinfer") == "triton"
    # What SGLang does without deltas stays.
    no_states = {"model_type": "qwen3", "num_hidden_layers": 4}
    assert verify_kernel(no_states, linear_attn_decode_backend="flashinfer") == "flashinfer"
    monkeypatch.setenv(state_form.ENV, "stored")
    assert verify_kernel(DELTA_NET, linear_attn_decode_backend="flashinfer") == "flashinfer"
