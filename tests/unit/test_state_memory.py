"""Memory of hybrid states: the sums are SGLang's allocations, and what does not fit is refused with what would."""

from __future__ import annotations

import pytest
import torch

from sglang_ddtree.errors import DDTreeError
from sglang_ddtree.state_check import report
from sglang_ddtree.state_memory import (
    GIB,
    DeltaNet,
    requests_that_fit,
    share_for_states,
    total_bytes,
    verify_bytes,
    widest_that_fits,
)

CONFIG = {
    "num_hidden_layers": 8,
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
}


def allocated(state_dtype: torch.dtype, width: int, requests: int, slots: int, tp_size: int) -> int:
    """Bytes of the pool that SGLang makes for a tree."""
    from sglang.srt.configs.mamba_utils import Mamba2CacheParams, Mamba2StateDType, Mamba2StateShape
    from sglang.srt.mem_cache.memory_pool import MambaPool

    shape = Mamba2StateShape.create(
        tp_world_size=tp_size, intermediate_size=32, n_groups=2, num_heads=4, head_dim=8, state_size=16, conv_kernel=4
    )
    layers = [0, 1, 2, 4, 5, 6]
    params = Mamba2CacheParams(
        shape=shape, layers=layers, dtype=Mamba2StateDType(conv=torch.bfloat16, temporal=state_dtype)
    )
    pool = MambaPool(
        size=slots,
        spec_state_size=requests,
        cache_params=params,
        mamba_layer_ids=layers,
        device="cpu",
        speculative_num_draft_tokens=width,
        speculative_eagle_topk=8,
    )
    cache = pool.mamba_cache
    tensors = [cache.temporal, cache.intermediate_ssm, *cache.conv, *cache.intermediate_conv_window]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@pytest.mark.parametrize("width", [2, 17])
@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tp_size", [1, 2])
def test_the_sums_are_what_sglang_allocates(width, state_dtype, tp_size):
    state = DeltaNet.of_config(CONFIG, state_dtype).bytes(tp_size)
    requests, slots = 5, 3
    assert total_bytes(state, width, requests, slots) == allocated(
        getattr(torch, state_dtype), width, requests, requests * slots, tp_size
    )


def test_the_dtype_is_the_flag_then_the_config_then_float32():
    assert DeltaNet.of_config(CONFIG).state_bytes == 4
    assert DeltaNet.of_config({**CONFIG, "mamba_ssm_dtype": "bfloat16"}).state_bytes == 2
    assert DeltaNet.of_config({**CONFIG, "mamba_ssm_dtype": "bfloat16"}, "float32").state_bytes == 4


def test_the_interval_says_how_many_layers_where_no_list_does():
    config = {**CONFIG, "layer_types": None, "full_attention_interval": 4}
    assert DeltaNet.of_config(config) == DeltaNet.of_config(CONFIG)


@pytest.mark.parametrize("slots", [1, 3, 5])
@pytest.mark.parametrize("state", [1000, 154 << 20])
def test_what_fits_is_the_most_that_fits(slots, state):
    for free in (0, state * 40, state * 333 + 7):
        for width in (2, 9, 33):
            requests = requests_that_fit(free, state, width, slots)
            assert requests == 0 or total_bytes(state, width, requests, slots) <= free
            assert total_bytes(state, width, requests + 1, slots) > free
        for requests in (1, 4):
            width = widest_that_fits(free, state, requests, slots)
            assert width == 0 or total_bytes(state, width, requests, slots) <= free
            assert total_bytes(state, width + 1, requests, slots) > free


def test_sglang_divides_memory_by_its_ratio():
    assert share_for_states(19 * GIB, 0.9) == 9 * GIB


def test_sizes_are_logged(caplog):
    with caplog.at_level("INFO"):
        report(state=GIB // 10, width=9, wanted=4, slots=3, free=20 * GIB, is_fixed=False)
    assert "width 9 x 102.4 MiB x (4 + 1) requests = 4.50 GiB" in caplog.text
    assert verify_bytes(GIB // 10, 9, 4) / GIB == pytest.approx(4.5, abs=0.01)
    assert "leave room" not in caplog.text


def test_fewer_requests_are_a_warning_with_the_budget_that_has_room_for_all(caplog):
    report(state=GIB // 10, width=33, wanted=16, slots=3, free=20 * GIB, is_fixed=False)
    widest = widest_that_fits(20 * GIB, GIB // 10, 16, 3)
    assert 2 <= widest < 33
    assert f"room for 4 of 16 running requests; all fit with --speculative-ddtree-budget {widest - 1}" in caplog.text
    report(state=GIB, width=5, wanted=16, slots=3, free=20 * GIB, is_fixed=False)
    assert "room for 1 of 16 running requests; no budget makes room" in caplog.text


def test_what_does_not_fit_is_refused_with_the_largest_budget_that_does():
    widest = widest_that_fits(20 * GIB, GIB // 10, 1, 3)
    with pytest.raises(DDTreeError, match=f"states of 1 request at verify width 200 .*budget {widest - 1}"):
        report(state=GIB // 10, width=200, wanted=16, slots=3, free=20 * GIB, is_fixed=False)
    # A number of requests that was asked for is not reduced.
    with pytest.raises(DDTreeError, match=r"16 requests at .*budget 8, or --max-running-requests 4, or a higher"):
        report(state=GIB // 10, width=33, wanted=16, slots=1, free=18 * GIB, is_fixed=True)
    with pytest.raises(DDTreeError, match="use a higher --mem-fraction-static"):
        report(state=GIB, width=17, wanted=1, slots=1, free=2 * GIB, is_fixed=True)
