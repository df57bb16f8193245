"""Memory of masks, indices and plans: the sums are SGLang's and FlashInfer's allocations, at small sizes on the CPU."""

from __future__ import annotations

import importlib
import json
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from fake_runner import install, make_runner
from stock_sglang import modules

from sglang_ddtree import mask_memory, memory_report
from sglang_ddtree.attention import flashinfer_layout
from sglang_ddtree.cli import main
from sglang_ddtree.gpu.flashinfer_stand_in import flashinfer_on_cpu
from sglang_ddtree.mask_memory import Buffer, Shape

SHAPES = [
    Shape(requests=3, width=5, context=64, top_k=4, heads=4, value_dim=16, kv_splits=8),
    Shape(requests=2, width=33, context=50, page_size=16, top_k=8, heads=2, value_dim=8, kv_splits=4),
]


def held(*things: object) -> int:
    """Bytes of all tensors in these objects; a tensor that is in two of them counts once."""
    found: dict[int, int] = {}

    def look(thing: object) -> None:
        if isinstance(thing, torch.Tensor):
            found[thing.untyped_storage().data_ptr()] = thing.untyped_storage().nbytes()
        elif isinstance(thing, dict):
            any(look(each) for each in thing.values())
        elif isinstance(thing, list | tuple):
            any(look(each) for each in thing)
        elif hasattr(thing, "buffer"):
            look(thing.buffer)

    for thing in things:
        look(thing)
    return sum(found.values())


def named(buffers: list[Buffer], *names: str) -> int:
    """Bytes of the buffers with these names, all of which are there."""
    assert set(names) <= {each.name for each in buffers}
    return mask_memory.total(each for each in buffers if each.name in names)


class OnCpu:
    """torch without CUDA: its devices are the CPU and no memory is pinned."""

    def __getattr__(self, name):
        made = getattr(torch, name)
        if name not in ("zeros", "empty"):
            return made
        return lambda *args, device=None, pin_memory=False, **kwargs: made(*args, **kwargs)


@pytest.fixture(scope="module")
def flashinfer_backends():
    return modules("sglang.srt.layers.attention.flashinfer_backend", "0004")


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("mask", ["bytes", "bits"])
def test_flashinfers_graph_buffers(flashinfer_backends, shape, mask):
    module = flashinfer_backends[mask == "bits"]
    module.torch = OnCpu()
    backend = object.__new__(module.FlashInferAttnBackend)
    pointers = torch.zeros(shape.requests + 1, dtype=torch.int32)
    vars(backend).update(
        max_context_len=shape.context, num_wrappers=1, use_sliding_window_kv_pool=False, skip_prefill=False,
        kv_indptr=[pointers],
    )  # fmt: skip
    backend.init_cuda_graph_state(shape.requests, shape.rows)
    buffers = mask_memory.flashinfer(shape, mask)
    assert held(backend.cuda_graph_custom_mask) == named(buffers, f"mask in the graphs, {mask}")
    assert held(backend.cuda_graph_kv_indices) == named(buffers, "KV indices in the graphs")
    # With the constructor's kv, qo and last page lengths; a step makes two more.
    fixed = held(backend.cuda_graph_qk_indptr, backend.cuda_graph_qo_indptr) + 2 * held(pointers) + shape.requests * 4
    assert named(buffers, "index pointers") == fixed + 2 * held(pointers)

    drafter = mask_memory.flashinfer_drafter(shape, 8, patched=mask == "bits")
    backend.init_cuda_graph_state(shape.requests, shape.requests * 8)
    assert held(backend.cuda_graph_custom_mask) == named(drafter, "drafter: mask in the graphs")
    assert held(backend.cuda_graph_kv_indices) == named(drafter, "drafter: KV indices in the graphs")


@pytest.mark.parametrize("shape", [*SHAPES, Shape(requests=4, width=70, context=64)])
def test_the_tree_backends_graph_buffers(monkeypatch, shape):
    """Our own FlashInfer backend: everything that its constructor and its capture leave in it."""
    installed = install(monkeypatch, shape.width)
    runner = make_runner(requests=shape.requests, context=shape.context, width=shape.width)
    with flashinfer_on_cpu():
        backend = installed.ours.TreeFlashInferBackend(runner, init_new_workspace=False)
        backend.init_cuda_graph_state(shape.requests, shape.rows)
        graphs = [backend._create_prefill_wrappers(bs, use_custom_mask=True)[0] for bs in range(1, shape.requests + 1)]
    buffers = mask_memory.flashinfer(replace(shape, graphs=len(graphs)), "tree")
    assert held(backend.verify_mask) == named(buffers, "bit rows in the graphs")
    assert held(backend.cuda_graph_kv_indices) == named(buffers, "KV indices in the graphs")
    # The capture's copy of kv and qo; SGLang's own has one for the mask besides, and a step makes two more.
    fixed = held(backend.kv_indptr, backend.qo_indptr, backend.cuda_graph_qo_indptr, backend.kv_last_page_len)
    assert named(buffers, "index pointers") - fixed == 3 * (shape.requests + 1) * 4
    shared = (backend.workspace_buffer, backend.verify_mask.buffer, *backend.cuda_graph_kv_indices, *backend.kv_indptr)
    shared += (*backend.cuda_graph_qo_indptr, backend.kv_last_page_len)
    storages = {each.untyped_storage().data_ptr() for each in shared}
    own = []
    for wrapper in (*graphs, *backend.prefill_wrappers_verify):
        tensors = {name: each for name, each in vars(wrapper).items() if isinstance(each, torch.Tensor)}
        tensors.pop("_pin_memory_int_workspace_buffer")
        own += [each for each in tensors.values() if each.untyped_storage().data_ptr() not in storages]
    assert held(own) == named(buffers, "plans")


@pytest.mark.parametrize("shape", SHAPES)
def test_the_mask_of_a_step_and_its_padded_copy(shape):
    """SGLang's own arguments for a verify pass, at full context; one request fewer is padded to the captured size."""
    from sglang.srt.speculative.eagle_info import EagleVerifyInput

    buffers = mask_memory.flashinfer(shape, "bytes")
    full = mask_memory.mask_elements(shape.requests, shape.width, shape.context)
    for real in (shape.requests, shape.requests - 1):
        mask = torch.ones(mask_memory.mask_elements(real, shape.width, shape.context), dtype=torch.bool)
        inputs = EagleVerifyInput(
            draft_token=None, custom_mask=mask, positions=None, retrieve_index=None, retrieve_next_token=None,
            retrieve_next_sibling=None, retrieve_cum_len=None, spec_steps=4, topk=4, draft_token_num=shape.width,
            capture_hidden_mode=None, seq_lens_sum=None, seq_lens_cpu=None,
        )  # fmt: skip
        lens = torch.full((shape.requests,), shape.context)
        indices, kv, qo, taken = inputs.generate_attn_arg_prefill(
            req_pool_indices=torch.arange(shape.requests),
            paged_kernel_lens=lens,
            paged_kernel_lens_sum=int(lens.sum()),
            translator=SimpleNamespace(pack_read_stream=lambda *args, **kwargs: None),
            plan=None,
        )
        assert held(taken) == named(buffers, "mask of a step") == full
        assert (taken is mask) == (real == shape.requests)
        assert held(indices) == named(buffers, "KV indices of a step")
        assert held(indices) == named(mask_memory.flashinfer(shape, "tree"), "KV indices in the graphs")
        assert held(kv) == held(qo) == (shape.requests + 1) * 4
    if taken is not mask:
        assert held(taken) == named(buffers, "its copy, when a batch is padded to a captured size")


@pytest.mark.parametrize("shape", SHAPES)
def test_the_packed_mask(shape):
    packed = flashinfer_layout.byte_indptr(
        [shape.width] * shape.requests, [shape.context + shape.width] * shape.requests
    )
    buffers = mask_memory.flashinfer(shape, "bytes")
    assert int(packed[-1]) == named(buffers, "packed mask of a step")
    assert named(mask_memory.flashinfer(shape, "bits"), "mask in the graphs, bits") >= int(packed[-1])


@pytest.mark.parametrize("shape", SHAPES)
def test_the_mask_of_the_graph_runner(shape, monkeypatch):
    from sglang.srt.model_executor.runner_utils import buffers

    monkeypatch.setattr(buffers, "enable_num_token_non_padded", lambda: False)
    made = buffers.DecodeInputBuffers.create(
        device="cpu", max_bs=shape.requests, max_num_token=shape.rows, hidden_size=8,
        next_token_logits_buffer=None, dtype=torch.float32, num_dp_ranks=1, pp_size=1, is_encoder_decoder=False,
        require_mlp_tp_gather=False, seq_len_fill_value=1, encoder_len_fill_value=0, num_tokens_per_req=shape.width,
        cache_loc_dtype=torch.int64, enable_mamba_track=False,
    )  # fmt: skip
    assert held(made.custom_mask) == named(mask_memory.flashinfer(shape, "tree"), "mask that captures are shown")


@pytest.mark.parametrize("shape", [replace(SHAPES[0], vocab=1000), replace(SHAPES[1], vocab=32_064)])
def test_the_logits_of_the_verify_graphs(shape):
    from sglang.srt.model_executor.graph_shared_output import GraphSharedOutput

    shared = GraphSharedOutput(device="cpu", max_rows=shape.rows)
    buffer = shared.get_logits_buffer(shape.vocab, rows=shape.rows)
    assert held(buffer) == mask_memory.total(mask_memory.verify_logits(shape))


def test_a_flashinfer_wrapper(monkeypatch):
    """What FlashInfer's own constructor allocates."""
    prefill = pytest.importorskip("flashinfer.prefill")
    monkeypatch.setattr(prefill, "torch", OnCpu())
    workspace = torch.empty(16, dtype=torch.uint8)
    wrapper = prefill.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend="fa2")
    made = {name: each for name, each in vars(wrapper).items() if each is not workspace}
    pinned = made.pop("_pin_memory_int_workspace_buffer")
    assert held(made) == mask_memory.WRAPPER_BYTES
    assert held(pinned) == held(wrapper._int_workspace_buffer)
    plans = mask_memory.flashinfer_plans(replace(SHAPES[0], graphs=3))
    assert mask_memory.total(plans) == 4 * mask_memory.WRAPPER_BYTES


@pytest.mark.parametrize("shape", SHAPES)
def test_the_bit_rows_and_the_trees(shape):
    from sglang_ddtree.tree.bits import ancestor_bits
    from sglang_ddtree.tree.build import build_tree
    from sglang_ddtree.tree.mask import positions

    shapes = (shape.requests, 7, 4)
    log_probs = torch.rand(shapes).log_softmax(-1)
    roots = torch.zeros(shape.requests, dtype=torch.int64)
    tree = build_tree(log_probs, torch.arange(4).expand(shapes).contiguous(), roots, shape.width - 1)
    assert tree.width == shape.width
    assert held(ancestor_bits(tree)) == named(mask_memory.flashinfer(shape, "tree"), "bit rows in the graphs")
    order = torch.arange(shape.rows, dtype=torch.int64)
    ours = sum(each.numel() * each.element_size() for each in (*vars(tree).values(), positions(tree, roots), order))
    assert ours == mask_memory.total(mask_memory.trees(shape))


@pytest.mark.parametrize("shape", SHAPES)
def test_tritons_graph_buffers(shape):
    from sglang.srt.layers.attention.triton_backend import TritonAttnBackend

    lean = 2, 16
    backend = SimpleNamespace(
        dllm_attention=None, num_head=shape.heads, max_kv_splits=shape.kv_splits, v_head_dim=shape.value_dim,
        swa_v_head_dim=None, device="cpu", lean_total_programs=lean[0], lean_block_m=lean[1], is_draft_runner=False,
        skip_prefill=False, max_context_len=shape.context, num_draft_tokens=shape.width, sliding_window_size=None,
        use_sliding_window_kv_pool=False,
    )  # fmt: skip
    TritonAttnBackend.init_cuda_graph_state(backend, shape.requests, shape.rows)
    made = {name: each for name, each in vars(backend).items() if "lean" not in name and "uneven" not in name}
    assert held(list(made.values())) == mask_memory.total(mask_memory.triton(shape))
    assert held(backend._verify_mask) == named(mask_memory.triton(shape), "mask")
    assert held(backend.cuda_graph_kv_indices) == named(mask_memory.triton(shape), "KV indices in the graphs")


@pytest.fixture
def flash_attention_backend(monkeypatch):
    """The class, where sgl_kernel cannot be imported for want of a driver."""
    name = "sglang.srt.layers.attention.flashattention_backend"
    monkeypatch.setitem(sys.modules, "sgl_kernel", SimpleNamespace(merge_state_v2=None))
    monkeypatch.delitem(sys.modules, name, raising=False)
    yield importlib.import_module(name).FlashAttentionBackend
    sys.modules.pop(name)


@pytest.mark.parametrize("shape", SHAPES)
def test_fa3s_graph_buffers(shape, flash_attention_backend):
    backend = SimpleNamespace(
        max_context_len=shape.context, page_size=shape.page_size, device="cpu", topk=shape.top_k,
        _get_scheduler_metadata=None, use_mla=False, local_attn_builder=None, use_sliding_window_kv_pool=False,
        speculative_step_id=0, speculative_num_draft_tokens=shape.width, is_draft_runner=False, skip_prefill=False,
        has_swa=False, is_encoder_decoder=False,
    )  # fmt: skip
    flash_attention_backend.init_cuda_graph_state(backend, shape.requests, shape.rows)
    buffers = [each for each in mask_memory.flash_attention(shape) if not each.step]
    assert held(list(vars(backend).values())) == mask_memory.total(buffers)
    assert held(backend._verify_mask) == named(buffers, "mask")
    verify = [backend.target_verify_metadata, backend.target_verify_metadata_topk_normal]
    verify += [backend.target_verify_metadata_topk_expand]
    assert held([each["page_table"] for each in verify]) == named(buffers, "page tables of verify passes")


@pytest.mark.parametrize("largest", [1, 7, 8, 9, 48, 66, 256, 300])
def test_captured_sizes_are_sglangs(monkeypatch, largest):
    from sglang.srt.arg_groups import cuda_graph_hook

    args = SimpleNamespace(disable_cuda_graph_padding=False, speculative_algorithm="DDTREE")
    monkeypatch.setattr(cuda_graph_hook, "resolving_view", lambda args: args)
    sizes = cuda_graph_hook.generate_decode_cuda_graph_batch_sizes(args, largest)
    assert memory_report.captured_sizes(largest) == len(sizes) == len(set(sizes))


@pytest.mark.parametrize(
    ("requests", "width", "context", "fits"),
    [(48, 65, 262144, True), (48, 257, 262144, False), (1, 257, 262144, True), (64, 256, 131072 - 256, False)],
)
def test_the_int32_limit(requests, width, context, fits):
    """The stock mask fits exactly where FlashInfer's own index does not wrap."""
    assert mask_memory.stock_mask_fits(requests, width, context) is fits
    lens = [width] * requests, [context + width] * requests
    try:
        flashinfer_layout.element_indptr(*lens)
    except flashinfer_layout.MaskTooLarge:
        assert not fits
    else:
        assert fits
    most = mask_memory.most_requests_with_stock_mask(width, context)
    longest = mask_memory.longest_context_with_stock_mask(requests, width)
    assert mask_memory.stock_mask_fits(most, width, context)
    assert not mask_memory.stock_mask_fits(most + 1, width, context)
    assert mask_memory.stock_mask_fits(requests, width, longest)
    assert not mask_memory.stock_mask_fits(requests, width, longest + 1)


def test_flashinfers_index_wraps_without_an_error():
    """What :func:`stock_mask_fits` is for, in FlashInfer's own function."""
    prefill = pytest.importorskip("flashinfer.prefill")
    ends = []
    for requests in (31, 32):
        qo = torch.arange(0, (requests + 1) * 257, 257, dtype=torch.int32)
        kv = torch.arange(0, requests + 1, dtype=torch.int32) * 262401
        ends.append(int(prefill._compute_page_mask_indptr(qo, kv, torch.ones(requests, dtype=torch.int32), 1)[-1]))
        assert mask_memory.stock_mask_fits(requests, 257, 262144) == (ends[-1] > 0)
    assert ends[0] == 31 * 257 * 262401 and ends[1] < 0


def test_the_command(capsys):
    assert main(["memory", "--requests", "48", "--budget", "256", "--context", "262144"]) == 0
    page = capsys.readouterr().out
    assert "DOES NOT FIT" in page and "up to 31 requests" in page
    assert main(["memory", "--requests", "48", "--budget", "64", "--context", "262144"]) == 0
    page = capsys.readouterr().out
    assert "stock mask fits" in page and "| mask in the graphs, bits | " in page
    for bad in (["--requests", "0"], ["--budget", "257"]):
        with pytest.raises(SystemExit):
            main(["memory", *bad])
        assert "must be" in capsys.readouterr().err


def test_the_states_of_a_target(tmp_path, capsys):
    """The sums of ``state_memory`` for what the target's config says, in both forms."""
    text = {
        "num_hidden_layers": 4,
        "full_attention_interval": 4,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 48,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
    }
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_5", "text_config": text}))
    asked = ["memory", "--requests", "16", "--budget", "32", "--target", str(tmp_path)]
    assert main(asked) == 0
    # Three layers of 48 x 128 x 128 x 4 + 10240 x 3 x 2 bytes; 8240 x 4 + 10240 x 3 x 2 bytes and a parent.
    page = capsys.readouterr().out
    assert "| one node of the verify pass | 9.18 MiB | 277 KiB |" in page
    assert "| nodes: (16 + 1) x 33 | 5.03 GiB | 152 MiB |" in page
    assert main([*asked, "--tp-size", "2", "--mamba-ssm-dtype", "bfloat16"]) == 0
    assert "| one node of the verify pass | 2.34 MiB | 138 KiB |" in capsys.readouterr().out
    (tmp_path / "config.json").write_text(json.dumps({"num_hidden_layers": 4}))
    for refused, reason in (
        (asked, "is not a Gated DeltaNet target: its config.json has no full_attention_interval"),
        ([*asked[:-1], str(tmp_path / "nowhere")], "nowhere"),
    ):
        assert main(refused) == 2 and reason in capsys.readouterr().err
