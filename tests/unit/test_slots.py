"""KV slots of a decode step: what SGLang foresees, and the row a request has, hold what the step really reserves."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from sglang.srt import runtime_context
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.mem_cache import allocation_sizing
from sglang.srt.speculative import dflash_info_v2
from stock_sglang import modules

from sglang_ddtree import hooks, worker
from sglang_ddtree.config import DDTreeConfig
from sglang_ddtree.cpu.ops import assign_req_to_token_pool_func

CONTEXT = 256
CONFIGS = [
    DDTreeConfig(budget=budget, block_size=block_size, top_k=top_k)
    for budget, block_size, top_k in ((1, 8, 2), (1, 16, 8), (5, 16, 2), (7, 8, 8), (32, 8, 8), (64, 16, 4))
]


class Spec(SimpleNamespace):
    @contextmanager
    def override(self, **values):
        before = dict(vars(self))
        vars(self).update(values)
        yield self
        vars(self).update(before)


@pytest.fixture
def publish(monkeypatch):
    """Make SGLang's sizing functions see one server's settings."""

    def published(config, page, algorithm="DDTREE"):
        spec = Spec(speculative_algorithm=algorithm, **config.as_server_fields())
        for module in (runtime_context, allocation_sizing, worker, dflash_info_v2):
            monkeypatch.setattr(module, "get_spec", lambda: spec)
        monkeypatch.setattr(allocation_sizing, "get_schedule", lambda: SimpleNamespace(page_size=page))
        monkeypatch.setattr(allocation_sizing, "get_parallel", lambda: SimpleNamespace(attn_dcp_size=1))
        width = config.verify_width
        monkeypatch.setattr(allocation_sizing, "max_speculative_num_draft_tokens", lambda: width)
        predicates = SimpleNamespace(is_uno=lambda: False, has_draft_kv=lambda: False)
        registry = SimpleNamespace(from_string=lambda name: predicates)
        monkeypatch.setattr("sglang.srt.speculative.spec_info.SpeculativeAlgorithm", registry)

    return published


def reserved(monkeypatch, committed, allocated, page, draft_input=worker.DDTreeDraftInput):
    """The slots up to which the draft input really allocates for one request, and how many it asks for."""
    asked = {}
    monkeypatch.setattr(dflash_info_v2, "alloc_for_spec_decode", lambda *args, **kwargs: asked.update(kwargs))
    kv = SimpleNamespace(kv_committed_len=committed, kv_allocated_len=allocated)
    req = SimpleNamespace(kv=kv, sampling_params=SimpleNamespace(top_k=1), decode_batch_idx=0)
    batch = SimpleNamespace(
        reqs=[req],
        device="cpu",
        batch_size=lambda: 1,
        maybe_evict_swa=lambda: None,
        tree_cache=None,
        req_to_token_pool=None,
        req_pool_indices=None,
        token_to_kv_pool_allocator=SimpleNamespace(page_size=page),
    )
    draft_input.create_idle_input(torch.device("cpu")).prepare_for_decode(batch)
    return int(asked["nxt_kv_lens_cpu"][0]), asked["num_needed_tokens"]


@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_a_row_holds_what_a_step_reserves_at_the_context_limit(publish, monkeypatch, config, page):
    publish(config, page)
    end, _ = reserved(monkeypatch, CONTEXT - 1, CONTEXT - 1, page)
    extra = hooks._row_headroom(allocation_sizing.get_req_to_token_extra_context_len)
    assert CONTEXT + extra >= end


@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize("block_size", [8, 16])
def test_a_row_holds_what_stock_dflash_reserves(publish, monkeypatch, block_size, page):
    """On the CPU platform, whose slot writer raises where SGLang's would write into the next row."""
    publish(DDTreeConfig(budget=block_size - 1, block_size=block_size, top_k=1), page, "DFLASH")
    end, _ = reserved(monkeypatch, CONTEXT - 1, CONTEXT - 1, page, dflash_info_v2.DFlashDraftInputV2)
    assert end >= CONTEXT - 1 + 2 * block_size
    assert CONTEXT + hooks._row_headroom(allocation_sizing.get_req_to_token_extra_context_len) >= end


def test_without_the_hook_the_row_is_too_short(publish, monkeypatch):
    """The reason for the hook; when this fails, SGLang has mended its rows and the hook can go.

    With the release's own function, since the installed SGLang may be patched.
    """
    publish(DDTreeConfig(budget=64, block_size=8, top_k=8), 1)
    end, _ = reserved(monkeypatch, CONTEXT - 1, CONTEXT - 1, 1)
    stock, _ = modules("sglang.srt.mem_cache.allocation_sizing", "0001")
    for name in ("get_spec", "get_schedule", "get_parallel", "max_speculative_num_draft_tokens"):
        setattr(stock, name, getattr(allocation_sizing, name))
    width = CONTEXT + stock.get_req_to_token_extra_context_len()
    assert end > width
    row = torch.zeros((2, width), dtype=torch.int32)
    slots = torch.arange(1, end - CONTEXT + 2)
    with pytest.raises(IndexError, match="row 0"):
        assign_req_to_token_pool_func(
            torch.tensor([0]), row, torch.tensor([CONTEXT - 1]), torch.tensor([end]), slots, batch_size=1
        )
    assert not row.any()


@pytest.mark.parametrize("allocated", [0, 5, 40])
@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_the_memory_check_foresees_what_a_step_reserves(publish, monkeypatch, config, page, allocated):
    """Less, and a full pool is an allocation error that ends the server; more, and requests are retracted early."""
    publish(config, page)
    committed = 48
    sizing = allocation_sizing.get_alloc_len_per_decode
    monkeypatch.setattr(allocation_sizing, "get_alloc_len_per_decode", lambda: hooks._slots_per_step(sizing))
    allocated = (committed + allocated + page - 1) // page * page
    _, needed = reserved(monkeypatch, committed, allocated, page)
    req = SimpleNamespace(kv=SimpleNamespace(kv_committed_len=committed, kv_allocated_len=allocated))
    assert ScheduleBatch._new_tokens_required_next_decode_spec_v2(None, [req], page) == needed
