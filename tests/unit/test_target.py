"""Which targets DDTREE refuses, by what their config.json says."""

import pytest

from sglang_ddtree.errors import DDTreeError
from sglang_ddtree.target import check_target

QWEN3 = {"model_type": "qwen3", "sliding_window": None, "use_sliding_window": False, "layer_types": ["full_attention"]}
QWEN2 = {"model_type": "qwen2", "sliding_window": 32768, "use_sliding_window": False}
MISTRAL = {"model_type": "mistral", "sliding_window": 4096}
GEMMA2 = {"model_type": "gemma2", "sliding_window": 4096}
GEMMA3 = {
    "model_type": "gemma3",
    "text_config": {
        "model_type": "gemma3_text",
        "sliding_window": 512,
        "layer_types": ["sliding_attention", "full_attention"],
    },
}
QWEN35 = {
    "model_type": "qwen3_5",
    "text_config": {"layer_types": ["linear_attention"] * 3 + ["full_attention"]},
}
QWEN3_NEXT = {"model_type": "qwen3_next", "full_attention_interval": 4}
QWEN35_MOE = {"model_type": "qwen3_5_moe_text", "full_attention_interval": 4}
NEMOTRON_H = {"model_type": "nemotron_h", "hybrid_override_pattern": "M-M*-"}
FALCON_H1 = {"model_type": "falcon_h1", "mamba_d_state": 256}
LFM2 = {"model_type": "lfm2", "layer_types": ["conv", "full_attention"]}
LFM2_VL = {"model_type": "lfm2_vl", "text_config": {"model_type": "lfm2", "layer_types": ["short_conv"]}}
ZAYA = {"model_type": "zaya"}
MINICPM_SALA = {"model_type": "minicpm_sala", "mixer_types": ["lightning-attn", "minicpm4"]}
QWEN4_QSA = {
    "model_type": "qwen4_exp",
    "text_config": {"full_attention_interval": 4, "indexer_n_heads": 4, "indexer_compress_ratio": 4},
}
DEEPSEEK = {"model_type": "deepseek_v3", "kv_lora_rank": 512}


@pytest.mark.parametrize("config", [QWEN3, QWEN2, MISTRAL, QWEN35, {"model_type": "llama"}])
@pytest.mark.parametrize("cpu", [False, True])
def test_accepted(config, cpu):
    check_target(config, cpu)


@pytest.mark.parametrize("config", [GEMMA2, GEMMA3])
def test_sliding_windows_only_where_they_are_cut_by_depth(config):
    check_target(config, cpu=True)
    with pytest.raises(DDTreeError, match="sliding-window"):
        check_target(config, cpu=False)


@pytest.mark.parametrize("cpu", [False, True])
def test_mla_is_refused(cpu):
    with pytest.raises(DDTreeError, match="MLA"):
        check_target(DEEPSEEK, cpu)


@pytest.mark.parametrize("config", [LFM2, LFM2_VL, ZAYA])
def test_short_convolutions_are_refused(config):
    with pytest.raises(DDTreeError, match="short convolutions"):
        check_target(config, cpu=False)


@pytest.mark.parametrize(
    ("config", "what"), [(MINICPM_SALA, "lightning attention"), (QWEN4_QSA, "compressed sparse attention")]
)
def test_what_sglang_verifies_as_a_chain_is_refused(config, what):
    with pytest.raises(DDTreeError, match=f"{what}.*use --speculative-algorithm DFLASH"):
        check_target(config, cpu=False)


@pytest.mark.parametrize("config", [QWEN3_NEXT, NEMOTRON_H, FALCON_H1])
def test_hybrids_without_an_engine_test_start_with_a_warning(config, caplog):
    with caplog.at_level("WARNING"):
        check_target(config, cpu=False)
    assert "not verified yet" in caplog.text


@pytest.mark.parametrize("config", [QWEN35, QWEN35_MOE])
def test_hybrids_with_one_start_without(config, caplog):
    with caplog.at_level("WARNING"):
        check_target(config, cpu=False)
    assert not caplog.text
