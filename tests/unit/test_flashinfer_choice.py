"""Which mask FlashInfer verifies with: the reasons, the fallback, the switch, and the limit of the stock mask."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
import torch
from fake_runner import install, make_runner

from sglang_ddtree import doctor, hooks
from sglang_ddtree.attention import flashinfer_choice as choice
from sglang_ddtree.attention import tree_check
from sglang_ddtree.attention.flashinfer_layout import MAX_ELEMENTS
from sglang_ddtree.errors import DDTreeError
from sglang_ddtree.gpu.flashinfer_stand_in import flashinfer_on_cpu

WIDTH = 9
ORIGINAL = object()


@pytest.fixture
def made(monkeypatch):
    """Our backend's module, on a host that has what it needs; the check at start runs on the CPU."""
    monkeypatch.delenv(choice.ENV, raising=False)
    monkeypatch.setattr(choice, "against_host", lambda: None)
    found = install(monkeypatch, WIDTH)
    check = found.ours.check_wrapper
    monkeypatch.setattr(found.ours, "check_wrapper", lambda *args: check(*args, torch.device("cpu")))
    with flashinfer_on_cpu():
        yield found


def build(made, runner=None):
    return made.ours.build_verifier(lambda: ORIGINAL, runner or make_runner(width=WIDTH), init_new_workspace=False)


def test_it_is_taken_where_nothing_is_against_it(made, caplog):
    with caplog.at_level(logging.INFO):
        backend = build(made)
    assert type(backend) is made.ours.TreeFlashInferBackend
    assert [r.message for r in caplog.records if "verifies with" in r.message] == [
        f"DDTREE verifies with FlashInfer and bit rows ({backend.variant.name})."
    ]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"dim": 80}, "heads have 80"),
        ({"dtype": torch.float32, "kv_dtype": torch.float32}, "queries are torch.float32"),
        ({"kv_dtype": torch.uint8}, "KV cache is torch.uint8"),
        ({"sliding_window_size": 127}, "a layer has a sliding window"),
        ({"logit_cap": 30.0}, "caps its logits"),
        ({"v_head_dim": 32}, "heads of 64 and 32"),
        ({"is_cross_attention": True}, "not causal self-attention"),
        ({"layers": 0}, "not SGLang's"),
    ],
)
def test_targets_that_keep_the_stock_mask(made, caplog, monkeypatch, options, reason):
    if options.get("kv_dtype") is torch.uint8:
        runner = make_runner(width=WIDTH)
        runner.kv_cache_dtype = torch.uint8
    else:
        runner = make_runner(width=WIDTH, **options)
    with caplog.at_level(logging.INFO):
        assert build(made, runner) is ORIGINAL
    assert reason in caplog.text and "custom_mask" in caplog.text
    monkeypatch.setenv(choice.ENV, "tree")
    with pytest.raises(DDTreeError, match=reason):
        build(made, runner)


def test_servers_that_keep_the_stock_mask(made, caplog):
    caplog.set_level(logging.INFO)
    for section, name, reason in (
        (made.execution.overlap, "enable_two_batch_overlap", "two-batch overlap"),
        (made.execution.features, "enable_mis", "multi-item scoring"),
    ):
        setattr(section, name, True)
        assert build(made) is ORIGINAL and f"{reason} is on" in caplog.text
        setattr(section, name, False)


def test_the_switch(made, monkeypatch):
    monkeypatch.setenv(choice.ENV, "stock")
    assert build(made) is ORIGINAL
    monkeypatch.setenv(choice.ENV, " Tree ")
    assert build(made) is not ORIGINAL
    monkeypatch.setenv(choice.ENV, "bits")
    with pytest.raises(DDTreeError, match="must be auto, tree or stock, got 'bits'"):
        build(made)


def test_a_kernel_that_computes_something_else_is_not_used(made, caplog, monkeypatch):
    """The check at start: a module that takes the tree for a chain, which no other error would show."""
    from sglang_ddtree.gpu import flashinfer_stand_in

    def chain(bits, rows, request, kv_len, window):
        q_len = rows[request + 1] - rows[request]
        return torch.ones(q_len, kv_len, dtype=torch.bool).tril(kv_len - q_len)

    monkeypatch.setattr(flashinfer_stand_in, "read_tree_bits", chain)
    with caplog.at_level(logging.INFO):
        assert build(made) is ORIGINAL
    assert "WrongAttention: request 0" in caplog.text
    monkeypatch.setenv(choice.ENV, "tree")
    with pytest.raises(DDTreeError, match="WrongAttention"):
        build(made)


@pytest.mark.parametrize("error", [RuntimeError("Ninja build failed\n  nvcc fatal"), FileNotFoundError("nvcc")])
def test_a_compiler_that_fails_leaves_the_stock_mask(made, caplog, monkeypatch, error):
    def fail(*args):
        raise error

    monkeypatch.setattr(made.ours, "tree_wrapper_class", fail)
    with caplog.at_level(logging.INFO):
        assert build(made) is ORIGINAL
    assert type(error).__name__ in caplog.text and "nvcc" in caplog.text


def test_other_ranks_log_nothing(made, caplog):
    made.parallel.tp_rank = 1
    with caplog.at_level(logging.INFO):
        build(made)
    assert "verifies with" not in caplog.text


def test_the_stock_mask_must_fit_int32(made, monkeypatch):
    choice.require_stock_mask_fits(48, 65, 262_144)
    with pytest.raises(DDTreeError, match=r"budget (\d+), or --max-running-requests (\d+), or --attention") as raised:
        choice.require_stock_mask_fits(48, 257, 262_144)
    words = str(raised.value).replace(",", "").split()
    budget = int(words[words.index("--speculative-ddtree-budget") + 1])
    requests = int(words[words.index("--max-running-requests") + 1])
    choice.require_stock_mask_fits(48, budget + 1, 262_144)
    choice.require_stock_mask_fits(requests, 257, 262_144)
    for more in ((48, budget + 2), (requests + 1, 257)):
        with pytest.raises(DDTreeError):
            choice.require_stock_mask_fits(*more, 262_144)
    assert MAX_ELEMENTS < 48 * 257 * (262_144 + 257)
    with pytest.raises(DDTreeError, match="use --attention-backend triton"):
        choice.require_stock_mask_fits(1, 2, 2**31)
    monkeypatch.setenv(choice.ENV, "stock")
    runner = make_runner(width=WIDTH)
    runner.model_config.context_len = 2**31
    with pytest.raises(DDTreeError, match="counts in int32"):
        build(made, runner)


def test_the_hook_is_for_the_targets_verifier_alone(monkeypatch):
    asked = []
    monkeypatch.setattr(hooks, "_ddtree_is_running", lambda: True)
    spec = SimpleNamespace(speculative_attention_mode="prefill")
    monkeypatch.setattr("sglang.srt.runtime_context.get_spec", lambda: spec)
    monkeypatch.setattr(
        "sglang_ddtree.attention.flashinfer_backend.build_verifier",
        lambda original, runner, init_new_workspace: asked.append(original) or "ours",
    )

    def call(backend="flashinfer", **changes):
        runner = SimpleNamespace(
            **{
                "is_draft_worker": False,
                "prefill_attention_backend_str": "flashinfer",
                "decode_attention_backend_str": "flashinfer",
                **changes,
            }
        )
        return hooks._verify_attention(
            lambda **kwargs: kwargs["backend_str"], model_runner=runner, backend_str=backend, init_new_workspace=True
        )

    assert call() == "ours" and asked[0]() == "flashinfer"
    assert call("triton") == "triton"
    assert call(is_draft_worker=True) == "flashinfer"
    assert call(prefill_attention_backend_str="triton") == "flashinfer"
    spec.speculative_attention_mode = "decode"
    assert call(prefill_attention_backend_str="triton") == "ours"
    monkeypatch.setattr(hooks, "_ddtree_is_running", lambda: False)
    assert call() == "flashinfer"


def test_the_host(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    assert choice.against_host() is None
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    assert "7.5" in choice.against_host()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choice.against_host() == "there is no CUDA device"
    monkeypatch.setattr(choice.importlib.metadata, "version", lambda name: "0.7.3")
    assert choice.against_host() == "FlashInfer is 0.7.3, it is written for 0.7.2"


def test_what_doctor_says(monkeypatch):
    monkeypatch.delenv(choice.ENV, raising=False)
    monkeypatch.setattr(choice, "against_host", lambda: "there is no CUDA device")
    said = doctor.check_tree_mask()
    assert said.ok and said.detail.endswith("custom_mask, because there is no CUDA device")
    monkeypatch.setenv(choice.ENV, "tree")
    assert not doctor.check_tree_mask().ok
    monkeypatch.setenv(choice.ENV, "wrong")
    assert not doctor.check_tree_mask().ok
    monkeypatch.setattr(choice, "against_host", lambda: None)
    monkeypatch.setenv(choice.ENV, "auto")
    assert "bit rows" in doctor.check_tree_mask().detail
    monkeypatch.setenv(choice.ENV, "stock")
    assert "stock" in doctor.check_tree_mask().detail


@pytest.mark.parametrize("kind", ["count", "random"])
def test_the_check_finds_one_wrong_key(kind):
    """One bit of one node more: the count of keys shows it behind a prefix of any length, random values need not."""
    from sglang_ddtree.attention.flashinfer_tree import Variant, tree_wrapper_class
    from sglang_ddtree.tree.bits import ancestor_bits

    variant, heads = Variant(torch.bfloat16, torch.bfloat16, 64), tree_check.Heads(4, 2, 64)
    batch = tree_check.make_batch(variant, heads, 17, (2000,), torch.device("cpu"), kind=kind, seed=3)
    bits = ancestor_bits(batch.tree)
    layer = tree_check.Layer()
    with flashinfer_on_cpu():
        wrapper = tree_wrapper_class()(torch.empty(1024, dtype=torch.uint8), bits, variant)
        tree_check.compare(tree_check.plan_and_run(wrapper, batch, variant, heads, layer), batch, heads, layer)
        node = int(batch.tree.num_nodes[0]) - 1
        bits[node, 0] ^= 1 << (node - 1)
        out = tree_check.plan_and_run(wrapper, batch, variant, heads, layer)
        if kind == "count":
            with pytest.raises(tree_check.WrongAttention, match=rf"node {node}: off by .* keys"):
                tree_check.compare(out, batch, heads, layer)
