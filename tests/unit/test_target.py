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


def test_hybrids_start_with_a_warning(caplog):
    with caplog.at_level("WARNING"):
        check_target(QWEN35, cpu=False)
    assert "not verified yet" in caplog.text
