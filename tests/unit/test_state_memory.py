"""Memory of hybrid states: the sums are SGLang's allocations, and what does not fit is refused with what would."""

from __future__ import annotations

import pytest
import torch
from state_pools import allocated, make_pool, pool_params

from sglang_ddtree.errors import DDTreeError
from sglang_ddtree.state_check import report
from sglang_ddtree.state_memory import (
    GIB,
    DeltaNet,
    StateSizes,
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
TENTH, WHOLE = StateSizes.stored(GIB // 10), StateSizes.stored(GIB)
#: As TENTH, without a state per node.
LEAN = StateSizes(GIB // 10, GIB // 300)


@pytest.mark.parametrize("width", [2, 17])
@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize("deltas", [False, True])
def test_the_sums_are_what_is_allocated(width, state_dtype, tp_size, deltas):
    sizes = DeltaNet.of_config(CONFIG, state_dtype).sizes(tp_size, deltas=deltas)
    requests, slots = 5, 3
    pool = make_pool(
        pool_params(getattr(torch, state_dtype), tp_size), requests, requests * slots, width, deltas=deltas
    )
    assert total_bytes(sizes, width, requests, slots) == allocated(pool)
    # What SGLang says of itself is as much.
    assert pool.mem_usage == pytest.approx(allocated(pool) / GIB)
    assert pool.get_kv_size_bytes() == allocated(pool)


def test_the_dtype_is_the_flag_then_the_config_then_float32():
    assert DeltaNet.of_config(CONFIG).state_bytes == 4
    assert DeltaNet.of_config({**CONFIG, "mamba_ssm_dtype": "bfloat16"}).state_bytes == 2
    assert DeltaNet.of_config({**CONFIG, "mamba_ssm_dtype": "bfloat16"}, "float32").state_bytes == 4


def test_the_interval_says_how_many_layers_where_no_list_does():
    config = {**CONFIG, "layer_types": None, "full_attention_interval": 4}
    assert DeltaNet.of_config(config) == DeltaNet.of_config(CONFIG)


@pytest.mark.parametrize("slots", [1, 3, 5])
@pytest.mark.parametrize(("state", "node"), [(1000, 1000), (154 << 20, 154 << 20), (154 << 20, 4 << 20)])
def test_what_fits_is_the_most_that_fits(slots, state, node):
    sizes = StateSizes(state, node)
    for free in (0, state * 40, state * 333 + 7):
        for width in (2, 9, 33):
            requests = requests_that_fit(free, sizes, width, slots)
            assert requests == 0 or total_bytes(sizes, width, requests, slots) <= free
            assert total_bytes(sizes, width, requests + 1, slots) > free
        for requests in (1, 4):
            width = widest_that_fits(free, sizes, requests, slots)
            assert width == 0 or total_bytes(sizes, width, requests, slots) <= free
            assert total_bytes(sizes, width + 1, requests, slots) > free


def test_sglang_divides_memory_by_its_ratio():
    assert share_for_states(19 * GIB, 0.9) == 9 * GIB


def test_sizes_are_logged(caplog):
    with caplog.at_level("INFO"):
        report(TENTH, width=9, wanted=4, slots=3, free=20 * GIB, is_fixed=False)
    assert "width 9 x 102.4 MiB x (4 + 1) requests = 4.50 GiB" in caplog.text
    assert verify_bytes(TENTH, 9, 4) / GIB == pytest.approx(4.5, abs=0.01)
    assert "leave room" not in caplog.text


def test_fewer_requests_are_a_warning_with_the_budget_that_has_room_for_all(caplog):
    report(TENTH, width=33, wanted=16, slots=3, free=20 * GIB, is_fixed=False)
    widest = widest_that_fits(20 * GIB, TENTH, 16, 3)
    assert 2 <= widest < 33
    assert f"room for 4 of 16 running requests; all fit with --speculative-ddtree-budget {widest - 1}" in caplog.text
    report(WHOLE, width=5, wanted=16, slots=3, free=20 * GIB, is_fixed=False)
    assert "room for 1 of 16 running requests; no budget makes room" in caplog.text


def test_what_does_not_fit_is_refused_with_the_largest_budget_that_does():
    widest = widest_that_fits(20 * GIB, TENTH, 1, 3)
    with pytest.raises(DDTreeError, match=f"states of 1 request at verify width 200 .*budget {widest - 1}"):
        report(TENTH, width=200, wanted=16, slots=3, free=20 * GIB, is_fixed=False)
    # A number of requests that was asked for is not reduced.
    with pytest.raises(DDTreeError, match=r"16 requests at .*budget 8, or --max-running-requests 4, or a higher"):
        report(TENTH, width=33, wanted=16, slots=1, free=18 * GIB, is_fixed=True)
    with pytest.raises(DDTreeError, match="use a higher --mem-fraction-static"):
        report(WHOLE, width=17, wanted=1, slots=1, free=2 * GIB, is_fixed=True)


def test_both_forms_are_named(caplog):
    with caplog.at_level("INFO"):
        report(TENTH, width=9, wanted=4, slots=3, free=20 * GIB, is_fixed=False, other=LEAN)
        report(LEAN, width=9, wanted=4, slots=3, free=20 * GIB, is_fixed=False, other=TENTH)
    first, second = caplog.messages
    assert "DDTREE: states of the verify pass" in first and "deltas instead of states of the verify pass" in second
    assert "5.80 GiB of 20.00 GiB (with SGLANG_DDTREE_STATES=deltas it would be 1.45 GiB)" in first
    assert "1.45 GiB of 20.00 GiB (with SGLANG_DDTREE_STATES=stored it would be 5.80 GiB)" in second


def test_where_stored_states_do_not_fit_deltas_are_offered(caplog):
    report(TENTH, width=33, wanted=16, slots=3, free=20 * GIB, is_fixed=False, other=LEAN)
    assert "room for 4 of 16 running requests; all fit with" in caplog.text
    assert f"SGLANG_DDTREE_STATES=deltas has room for {requests_that_fit(20 * GIB, LEAN, 33, 3)}" in caplog.text
    with pytest.raises(DDTreeError, match="budget 8, or --max-running-requests 4, or SGLANG_DDTREE_STATES=deltas, or"):
        report(TENTH, width=33, wanted=16, slots=1, free=18 * GIB, is_fixed=True, other=LEAN)
    # Not where they would not fit either, and not the other way round.
    with pytest.raises(DDTreeError) as refused:
        report(TENTH, width=33, wanted=16, slots=1, free=GIB, is_fixed=True, other=LEAN)
    assert "deltas" not in str(refused.value)
    with pytest.raises(DDTreeError) as refused:
        report(LEAN, width=33, wanted=16, slots=1, free=GIB, is_fixed=True, other=TENTH)
    assert "STATES" not in str(refused.value)
