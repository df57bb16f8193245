"""What the CUDA graphs take: the head's logits as SGLang computes them, the log at start, and the refusals."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peak_memory import Peak
from sglang.srt.model_executor.graph_shared_output import GraphSharedOutput
from sglang.srt.model_executor.runner import base_cuda_graph_runner
from sglang.srt.models import dflash
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils import common

from sglang_ddtree import folding, graph_memory, graphs, mask_memory
from sglang_ddtree.config import DDTreeConfig
from sglang_ddtree.drafting import draft_candidates
from sglang_ddtree.errors import DDTreeError
from sglang_ddtree.mask_memory import Shape
from sglang_ddtree.worker import DDTreeWorker

CONFIG = DDTreeConfig(budget=16, block_size=8, top_k=8)
MIB = 1 << 20


def head(vocab: int, dtype: torch.dtype = torch.float32, hidden: int = 4) -> SimpleNamespace:
    weight = torch.randn(vocab, hidden, generator=torch.Generator().manual_seed(0)).to(dtype)
    return SimpleNamespace(weight=weight, org_vocab_size=vocab - 64)


@pytest.fixture(autouse=True)
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    parallel = SimpleNamespace(tp_size=1, attn_tp_size=2)
    monkeypatch.setattr(dflash, "get_parallel", lambda: parallel)
    monkeypatch.setattr(graph_memory, "get_parallel", lambda: parallel)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [5000, 40_000])
@pytest.mark.parametrize("bs", [1, 3, 8])
def test_the_logits_are_what_the_candidates_take(bs: int, vocab: int, dtype: torch.dtype) -> None:
    """A K that goes through torch, which is what a CPU has; ``tests/interpreter`` does SGLang's kernels."""
    config = DDTreeConfig(budget=16, block_size=6, top_k=5)
    lm_head = head(vocab, dtype)
    counted = graph_memory.check_draft_graph(lm_head, config, [1, bs], "cpu")
    with Peak() as peak:
        draft_candidates(torch.randn(bs, 6, 4), lm_head, config.depth, config.top_k)
    assert counted == 3 * bs * 5 * (vocab - 64) * dtype.itemsize
    assert counted <= peak.most <= 1.02 * counted + 4096


def test_a_rank_counts_its_part_of_the_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_memory, "get_parallel", lambda: SimpleNamespace(tp_size=2))
    part = SimpleNamespace(weight=torch.zeros(600, 4), shard_indices=SimpleNamespace(num_org_elements=500))
    assert graph_memory.head_logits(part) == (500, 4)
    packed = SimpleNamespace(weight=torch.zeros(600, 4, dtype=torch.uint8), org_vocab_size=1000)
    assert graph_memory.head_logits(SimpleNamespace(shard_indices=part.shard_indices)) == (500, 2)
    monkeypatch.setattr(graph_memory, "get_parallel", lambda: SimpleNamespace(tp_size=1))
    assert graph_memory.head_logits(packed) == (1000, 2)


def test_the_sampler_logs_what_its_logits_take(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        made = folding.make_tree_sampler(head(100_064, torch.bfloat16), CONFIG, [1, 2, 32], "cpu")  # type: ignore[arg-type]
    assert made is not None and made.trees.batch_size == 32
    assert "of 32 requests the logits take 43 MiB, the trees 24 KiB" in caplog.text
    assert 32 * 7 * 100_000 * 2 // MIB == 42 and made.trees.nbytes == 32 * (17 * 44 + 8)


@pytest.mark.parametrize(
    ("free", "fits"), [(32, [4, 8, 16, 32]), (31, [4, 8, 16]), (16, [4, 8, 16]), (5, [4]), (3, [])]
)
def test_logits_that_do_not_fit_are_refused_with_what_does(free: int, fits: list[int]) -> None:
    sizes, lm_head = [4, 8, 16, 32], head(100_064, torch.bfloat16)
    per_request = 7 * 100_000 * 2
    if fits == sizes:
        assert graph_memory.check_draft_graph(lm_head, CONFIG, sizes, "cpu", free * per_request) == 32 * per_request
        return
    with pytest.raises(DDTreeError) as refused:
        graph_memory.check_draft_graph(lm_head, CONFIG, sizes, "cpu", free * per_request)
    said = str(refused.value)
    assert said.startswith("the drafter's logits take 43 MiB in the CUDA graphs for 32 requests, and ")
    assert (f"--cuda-graph-max-bs-decode {fits[-1]}, or a lower" in said) if fits else ("max-bs" not in said)
    assert said.endswith("a lower --mem-fraction-static.") and "\n" not in said
    if fits:
        graph_memory.check_draft_graph(lm_head, CONFIG, fits, "cpu", free * per_request)


def runner(requests: int = 16, **changes: Any) -> SimpleNamespace:
    """A target's, as far as it is looked at; ``requests`` can run together."""
    model = SimpleNamespace(context_len=4096, num_attention_heads=8, v_head_dim=None, head_dim=64, vocab_size=50_000)
    made = {
        "model_config": model,
        "server_args": ServerArgs(model_path="target"),
        "req_to_token_pool": SimpleNamespace(size=requests),
        "decode_num_tokens_per_req": lambda: CONFIG.verify_width,
        "decode_graph_gather_requirements": lambda: (False, False),
        "graph_shared_output": None,
        "prefill_attention_backend_str": "triton",
        "decode_attention_backend_str": "fa3",
        "attn_backend": SimpleNamespace(verify_mask=None),
        "page_size": 1,
        "device": "cpu",
    }
    return SimpleNamespace(**{**made, **changes})


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """SGLang's: batch sizes up to 32, of which 16 requests leave those up to 16."""
    graph = SimpleNamespace(cuda_graph_config=SimpleNamespace(decode=SimpleNamespace(bs=[1, 2, 4, 8, 16, 32])))
    kernel = SimpleNamespace(triton_attention_num_kv_splits=4)
    overlap = SimpleNamespace(enable_two_batch_overlap=False)
    execution = SimpleNamespace(graph=graph, kernel=kernel, overlap=overlap)
    flags = SimpleNamespace(capture=SimpleNamespace(enable_torch_compile=False))
    for module in (graph_memory, base_cuda_graph_runner, common):
        monkeypatch.setattr(module, "get_exec", lambda: execution)
    monkeypatch.setattr(base_cuda_graph_runner, "get_flags", lambda: flags)
    monkeypatch.setattr(common, "get_parallel", lambda: SimpleNamespace(attn_tp_size=2, attn_cp_size=1))
    spec = SimpleNamespace(speculative_attention_mode="prefill")
    monkeypatch.setattr(graph_memory, "get_spec", lambda: spec)
    return spec


def start(shape: Shape, found: list[mask_memory.Buffer]) -> int:
    return mask_memory.total(each for each in (*found, *mask_memory.verify_logits(shape)) if not each.step)


def test_the_verify_graphs_are_logged(settings: SimpleNamespace, caplog: pytest.LogCaptureFixture) -> None:
    shape = Shape(16, 17, 4096, graphs=5, top_k=8, heads=4, value_dim=64, kv_splits=4, vocab=50_000)
    with caplog.at_level(logging.INFO):
        assert graph_memory.check_verify_graphs(runner(), CONFIG) == start(shape, mask_memory.triton(shape))
    assert "verify graphs of 16 requests at width 17 and context 4096 take" in caplog.text
    assert "logits of the verify graphs 52 MiB" in caplog.text
    settings.speculative_attention_mode = "decode"
    assert graph_memory.check_verify_graphs(runner(), CONFIG) == start(shape, mask_memory.flash_attention(shape))


@pytest.mark.parametrize("mask", ["bytes", "bits", "tree"])
def test_the_mask_of_flashinfer_is_the_one_it_has(
    settings: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, mask: Any
) -> None:
    monkeypatch.setattr(graph_memory, "is_applied", lambda name: mask == "bits")
    bits = SimpleNamespace(verify_mask=SimpleNamespace(mode=graph_memory.TreeMaskMode.QLEN_ONLY_BITPACKING))
    server = runner(prefill_attention_backend_str="flashinfer")
    if mask == "tree":
        server.attn_backend = bits
    shape = Shape(16, 17, 4096, graphs=5, top_k=8, heads=4, value_dim=64, kv_splits=4, vocab=50_000)
    assert graph_memory.check_verify_graphs(server, CONFIG) == start(shape, mask_memory.flashinfer(shape, mask))


def test_verify_graphs_that_do_not_fit_are_not_captured(
    settings: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = Shape(8, 17, 4096, graphs=4, top_k=8, heads=4, value_dim=64, kv_splits=4, vocab=50_000)
    monkeypatch.setattr(graph_memory, "free_bytes", lambda device: start(shape, mask_memory.triton(shape)))
    monkeypatch.setattr(graphs, "get_spec", lambda: "spec")
    monkeypatch.setattr(graphs.DDTreeConfig, "from_spec", classmethod(lambda cls, spec: CONFIG))
    captured = []

    class Runner:
        def __init__(self, model_runner: Any, *, attn_backend: Any = None) -> None:
            captured.append(model_runner)

    with pytest.raises(
        DDTreeError, match=r"use --cuda-graph-max-bs-decode 8, or a smaller --speculative-ddtree-budget, "
    ):
        graphs.tree_graph_runner_class(Runner)(runner())
    assert not captured
    small = runner(requests=8)
    graphs.tree_graph_runner_class(Runner)(small, attn_backend=None)
    assert captured == [small]


@pytest.mark.parametrize(("requests", "largest"), [(5, 5), (16, 16), (100, 32)])
def test_the_largest_batch_is_that_of_all_requests_that_can_run(
    settings: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, requests: int, largest: int
) -> None:
    """SGLang chooses its batch sizes by the GPU alone, 256 or 512, and captures those that can be."""
    asked = []
    monkeypatch.setattr(graph_memory, "require_room", lambda what, needed, sizes, *_, **__: asked.append(sizes) or 1)
    graph_memory.check_verify_graphs(runner(requests), CONFIG)
    worker = SimpleNamespace(
        draft_model_runner=runner(requests, decode_num_tokens_per_req=lambda: CONFIG.block_size),
        tree_config=CONFIG,
        device="cpu",
        _lm_head=lambda: head(5000),
    )
    made = DDTreeWorker._maybe_build_draft_sampler(worker)  # type: ignore[arg-type]
    assert made is not None and made.trees.batch_size == largest
    assert [max(sizes) for sizes in asked] == [largest, largest]


def test_logits_that_graphs_of_the_prefill_have_allocated_are_not_asked_for_again(
    settings: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = Shape(16, 17, 4096, graphs=5, top_k=8, heads=4, value_dim=64, kv_splits=4, vocab=50_000)
    (logits,) = mask_memory.verify_logits(shape)
    rest = start(shape, mask_memory.triton(shape)) - logits.bytes
    server = runner(graph_shared_output=GraphSharedOutput(device=torch.device("cpu"), max_rows=shape.rows))
    monkeypatch.setattr(graph_memory, "free_bytes", lambda device: rest)
    with pytest.raises(DDTreeError):
        graph_memory.check_verify_graphs(server, CONFIG)
    assert server.graph_shared_output.get_logits_buffer(50_000, rows=16).nbytes < logits.bytes
    assert graph_memory.check_verify_graphs(server, CONFIG) == rest + logits.bytes
    monkeypatch.setattr(graph_memory, "free_bytes", lambda device: rest - 1)
    with pytest.raises(DDTreeError):
        graph_memory.check_verify_graphs(server, CONFIG)


def test_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    assert graph_memory.free_bytes("cpu") is None
    monkeypatch.setattr(graph_memory, "get_available_gpu_memory", lambda device, index, empty_cache: 2.5)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda index: 700)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda index: 500)
    assert graph_memory.free_bytes("cuda") == 2.5 * (1 << 30) + 200
