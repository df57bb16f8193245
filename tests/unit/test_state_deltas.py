"""Deltas in SGLang's pool and in its sums; ``tests/interpreter/test_state_deltas_hooks.py`` has the kernels' part."""

from __future__ import annotations

import contextlib
import types

import pytest
import torch
from state_pools import KEY_DIM, KEY_HEADS, LAYERS, VALUE_DIM, VALUE_HEADS, allocated, make_pool, pool_params

from sglang_ddtree import hooks, plugin, state_check, state_deltas, state_form
from sglang_ddtree.errors import DDTreeError
from sglang_ddtree.state_memory import GIB, requests_that_fit, total_bytes
from sglang_ddtree.tree.kernels.delta_rule import Deltas


@pytest.fixture
def running(monkeypatch):
    monkeypatch.setattr(hooks, "_ddtree_is_running", lambda: True)


# The pool


def test_the_pool_has_deltas_for_states_and_whole_windows():
    stored = make_pool(pool_params(), 5, 15, 17, deltas=False)
    pool = make_pool(pool_params(), 5, 15, 17, deltas=True)
    cache, deltas = pool.mamba_cache, pool.mamba_cache.intermediate_ssm
    assert [w.shape for w in cache.intermediate_conv_window] == [
        w.shape for w in stored.mamba_cache.intermediate_conv_window
    ]
    assert all(window.is_contiguous() for window in cache.intermediate_conv_window)
    assert cache.temporal.shape == stored.mamba_cache.temporal.shape
    assert deltas.key.shape == (len(LAYERS), 6, 17, KEY_HEADS, KEY_DIM)
    assert deltas.update.shape == (len(LAYERS), 6, 17, VALUE_HEADS, VALUE_DIM)
    assert deltas.log_decay.shape == (len(LAYERS), 6, 17, VALUE_HEADS) and deltas.parents.shape == (6, 17)
    assert pool.get_speculative_mamba2_params_all_layers() is cache
    assert pool._intermediate_conv_window_phys is cache.intermediate_conv_window


def test_a_layer_is_handed_on_by_sglang():
    pool = make_pool(pool_params(), 5, 15, 17, deltas=True)
    layer = pool.mamba2_layer_cache(3)
    of_layer, whole = layer.intermediate_ssm, pool.mamba_cache.intermediate_ssm
    assert type(of_layer) is Deltas
    assert of_layer.update.data_ptr() == whole.update[3].data_ptr() and of_layer.key.shape == whole.key.shape[1:]
    assert of_layer.parents is whole.parents
    assert layer.temporal.shape == pool.mamba_cache.temporal.shape[1:]
    # What goes to another machine or to the host is without what a verify pass keeps.
    sizes = pool.get_contiguous_buf_infos()[1]
    assert sum(sizes) == pool.mamba_cache.temporal.nbytes + sum(conv.nbytes for conv in pool.mamba_cache.conv)


def test_a_pool_without_speculation_is_sglangs():
    pool = make_pool(pool_params(), 5, 15, None, deltas=True)
    assert type(pool.mamba_cache) is type(make_pool(pool_params(), 5, 15, None, deltas=False).mamba_cache)


def test_the_hook_leaves_other_servers_alone(monkeypatch):
    monkeypatch.setattr(hooks, "_ddtree_is_running", lambda: False)
    seen = []
    hooks._pool_of_deltas(lambda pool, **kwargs: seen.append((pool, kwargs)), "pool", speculative_num_draft_tokens=4)
    assert seen == [("pool", {"speculative_num_draft_tokens": 4})]


def test_the_hook_makes_deltas(running):
    from sglang.srt.mem_cache.memory_pool import MambaPool

    pool = MambaPool.__new__(MambaPool)
    hooks._pool_of_deltas(
        MambaPool.__init__,
        pool,
        size=4,
        spec_state_size=2,
        cache_params=pool_params(),
        mamba_layer_ids=list(LAYERS),
        device="cpu",
        speculative_num_draft_tokens=3,
        speculative_eagle_topk=8,
    )
    assert isinstance(pool.mamba_cache.intermediate_ssm, Deltas)


# Verification and commit, where there are no deltas


def test_states_are_verified_and_committed_by_sglang():
    arguments = {"q": 1, "intermediate_states_buffer": torch.zeros(2), "retrieve_parent_token": None}
    assert hooks._verify_with_deltas(lambda kernel, **kwargs: (kernel, kwargs), "kernel", **arguments) == (
        "kernel",
        arguments,
    )
    cache = make_pool(pool_params(), 5, 15, 17, deltas=False).mamba_cache
    seen = []
    hooks._commit_deltas(lambda *args, **kwargs: seen.append((args, kwargs)), cache, 1, 2, 3, 4, src_indices_raw=5)
    assert seen == [((cache, 1, 2, 3, 4), {"src_indices_raw": 5})]


def test_layers_of_another_shape_are_not_written_over_others():
    deltas = make_pool(pool_params(), 5, 15, 17, deltas=True).mamba_cache.intermediate_ssm[0]
    q = k = torch.zeros(1, 17, KEY_HEADS + 1, KEY_DIM)
    with pytest.raises(DDTreeError, match=r"keys \(3, 16\)"):
        state_deltas.verify(
            None, None, intermediate_states_buffer=deltas, q=q, k=k, v=torch.zeros(1, 17, VALUE_HEADS, VALUE_DIM)
        )


# Memory


class Spec(types.SimpleNamespace):
    @contextlib.contextmanager
    def override(self, **values):
        before = dict(vars(self))
        vars(self).update(values)
        yield self
        vars(self).update(before)


class Configurator:
    """What the sums read of SGLang's object."""

    attn_dp_size = pp_size = 1
    extra_mamba_cache_bytes_per_req = 0
    hybrid_kda_config = None
    spec_algorithm = types.SimpleNamespace(is_none=lambda: False)

    def __init__(self, params, gdn=True, sizes=types.MappingProxyType({"linear_num_value_heads": 4})):
        self.mambaish_config = types.SimpleNamespace(mamba2_cache_params=params, **sizes)
        self.hybrid_gdn_config = self.mambaish_config if gdn else None

    def _calculate_mamba_ratio(self):
        return SLOTS

    def fused_entry_bytes(self, name):
        return None


WIDTH, SLOTS, FREE = 33, 3, 60_000_000


@pytest.fixture
def sized(monkeypatch):
    """SGLang's own division of FREE bytes, through the hook: the slots, and the bytes left for keys and values."""
    from sglang.srt.mem_cache import kv_cache_configurator as sglang

    def divide(form, *, gdn=True, params=None, fixed_slots=None, cache=True, running=100_000, only_prefill=False):
        monkeypatch.setenv(state_form.ENV, form)
        spec = Spec(speculative_num_draft_tokens=WIDTH)
        schedule = types.SimpleNamespace(
            max_running_requests=running, max_mamba_cache_size=fixed_slots, mamba_full_memory_ratio=0.9
        )
        memory = types.SimpleNamespace(disable_radix_cache=not cache)
        mamba = types.SimpleNamespace(enable_linear_replayssm_spec=False)
        context = types.SimpleNamespace(override=lambda source, **values: vars(schedule).update(values))
        for module in (sglang, state_check):
            monkeypatch.setattr(module, "get_spec", lambda: spec)
            monkeypatch.setattr(module, "get_schedule", lambda: schedule)
            monkeypatch.setattr(module, "get_memory", lambda: memory)
        monkeypatch.setattr(sglang, "get_exec", lambda: types.SimpleNamespace(mamba=mamba))
        monkeypatch.setattr(sglang, "get_context", lambda: context)
        monkeypatch.setattr(sglang, "_pd_prefill_skips_mamba_spec_state", lambda: only_prefill)
        original = sglang.KVCacheConfigurator._handle_max_mamba_cache
        left = state_check.size_states(original, Configurator(params or pool_params(), gdn), FREE / GIB)
        assert spec.speculative_num_draft_tokens == WIDTH
        return schedule.max_mamba_cache_size, left * GIB

    return divide


def of_form(form):
    return state_check.sizes_of(Configurator(pool_params()))[form == "deltas"]


@pytest.mark.parametrize("form", ["stored", "deltas"])
@pytest.mark.parametrize(
    "how", [{}, {"fixed_slots": 30}, {"cache": False, "running": 20}], ids=["by memory", "slots", "requests"]
)
def test_sglang_takes_from_the_memory_what_the_form_allocates(sized, form, how):
    slots, left = sized(form, **how)
    requests = slots // SLOTS if how.get("cache", True) else slots
    sizes = of_form(form)
    # Of slots that make no whole request the nodes are not there.
    taken = sizes.state * (slots + 1) + sizes.node * WIDTH * (requests + 1)
    assert FREE - left == pytest.approx(taken, abs=1)


def test_what_deltas_free_goes_to_requests(sized):
    stored, stored_left = sized("stored")
    deltas, deltas_left = sized("deltas")
    share = FREE * 0.9 / 1.9
    # As many as fit, up to what rounding by slots leaves.
    for slots, form in ((stored, "stored"), (deltas, "deltas")):
        assert abs(slots // SLOTS - requests_that_fit(int(share), of_form(form), WIDTH, SLOTS)) <= 1
    assert deltas > 2 * stored
    # SGLang's share of keys and values stays.
    assert deltas_left == pytest.approx(stored_left, rel=0.05)


def test_what_deltas_free_goes_to_keys_and_values_where_requests_are_fixed(sized):
    _, stored_left = sized("stored", fixed_slots=30)
    _, deltas_left = sized("deltas", fixed_slots=30)
    stored, deltas = (total_bytes(of_form(form), WIDTH, 10, SLOTS) for form in ("stored", "deltas"))
    assert deltas_left - stored_left == pytest.approx(stored - deltas, abs=1)


@pytest.mark.parametrize("form", ["stored", "deltas"])
def test_a_server_of_prefills_alone_keeps_nothing_of_nodes(sized, form):
    """Where prefill and decoding are on two servers, SGLang's pool for the first has no states of nodes."""
    requests = {"cache": False, "running": 1000}
    with pytest.raises(DDTreeError, match="states of 1000 requests"):
        sized("stored", **requests)
    slots, left = sized(form, **requests, only_prefill=True)
    assert slots == 1000 and FREE - left == pytest.approx(of_form("stored").state * 1001, abs=1)


def test_the_sums_are_the_pools(sized):
    """SGLang's configuration says what the pool then takes, for both forms and both state types."""
    for dtype in (torch.float32, torch.bfloat16):
        params = pool_params(dtype, tp_size=2)
        for sizes, deltas in zip(state_check.sizes_of(Configurator(params)), (False, True), strict=True):
            assert allocated(make_pool(params, 5, 15, 9, deltas=deltas)) == total_bytes(sizes, 9, 5, 3)


def test_a_target_that_sglang_does_not_run_as_a_delta_net_is_refused(sized):
    with pytest.raises(DDTreeError, match="does not run this target as a Gated DeltaNet: leave SGLANG_DDTREE_STATES"):
        sized("deltas", gdn=False)
    kda = types.SimpleNamespace(**{**vars(pool_params()), "mamba_cache_per_req": 1000, "is_kda": True})
    with pytest.raises(DDTreeError, match="does not run this target as a Gated DeltaNet"):
        sized("deltas", params=kda)
    assert sized("stored", gdn=False) == sized("stored")


def test_deltas_are_not_offered_to_layers_that_only_share_the_name():
    """Jet Nemotron is a Gated DeltaNet to SGLang's configuration."""
    assert state_check.sizes_of(Configurator(pool_params(), sizes={"efficient_attention_config": {}}))[1] is None
    assert state_check.sizes_of(Configurator(pool_params()))[1] is not None


# Which hooks there are


@pytest.mark.parametrize(
    ("form", "active", "there"), [("deltas", "1", True), ("stored", "1", False), ("deltas", "0", False)]
)
def test_the_hooks_are_in_servers_that_ask_for_deltas(monkeypatch, form, active, there):
    monkeypatch.setenv(state_form.ENV, form)
    monkeypatch.setenv(plugin.ACTIVE_ENV, active)
    assert (hooks.STATES in plugin.hook_groups()) == there
