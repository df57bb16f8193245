"""SGLang's FlashInfer backend with the tree's bits: SGLang's and FlashInfer's own Python on CPU tensors, and torch in
place of the compiled kernel, which reads the buffers that were handed to it at the time of the run."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from fake_runner import install, make_runner
from no_sync import Synchronised
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from stock_sglang import modules

from sglang_ddtree import graphs
from sglang_ddtree.attention import tree_check
from sglang_ddtree.gpu.cases import Size, random_candidates
from sglang_ddtree.gpu.flashinfer_stand_in import flashinfer_on_cpu
from sglang_ddtree.tree.build import build_tree_reference
from sglang_ddtree.verify import DDTreeVerifyInput, make_verify_input

WIDTH, CONTEXT, REQUESTS = 9, 64, 4
CPU = torch.device("cpu")
FP8 = torch.float8_e4m3fn


class Server:
    """A target's verify passes: the backend, its captured batch sizes, and what a step writes before the pass."""

    def __init__(self, made, modules_made, monkeypatch, *, width=WIDTH, **options):
        self.width = width
        self.runner = make_runner(requests=REQUESTS, context=CONTEXT, width=width, **options)
        self.backend = made.ours.TreeFlashInferBackend(self.runner, init_new_workspace=False)
        self.layer = self.runner.model[0]
        (self.module,) = modules_made.values()
        rows = (REQUESTS + 1) * width
        self.queries = torch.zeros(rows, self.layer.tp_q_head_num * self.layer.head_dim, dtype=self.runner.dtype)
        monkeypatch.setattr(graphs, "get_spec", lambda: made.spec)
        self.captured = {}

    def capture(self, sizes):
        self.backend.init_cuda_graph_state(max(sizes), max(sizes) * self.width)
        for bs in sorted(sizes, reverse=True):
            lens = torch.ones(bs, dtype=torch.int64)
            batch = self.view(torch.zeros(bs, dtype=torch.int64), lens, graphs.capture_input(torch.ones(1).bool()))
            self.backend.init_forward_metadata_out_graph(batch, in_capture=True)
            self.captured[bs] = len(self.module.runs)
            self.forward(bs, batch)

    def view(self, rows, lens, spec_info):
        return SimpleNamespace(
            batch_size=len(lens),
            req_pool_indices=rows,
            seq_lens=lens,
            seq_lens_cpu=lens.clone(),
            seq_lens_sum=int(lens.sum()),
            encoder_lens=None,
            forward_mode=ForwardMode.TARGET_VERIFY,
            spec_info=spec_info,
            positions=torch.zeros(len(lens) * self.width),
            kv_loc_plan=None,
            out_cache_loc=None,
        )

    def forward(self, bs, batch):
        queries = self.queries[: bs * self.width]
        return self.backend.forward_extend(queries, None, None, self.layer, batch, save_kv_cache=False)

    def step(self, rows, prefixes, seed):
        """Trees and queries of a step, as the worker leaves them before the pass."""
        bs = len(prefixes)
        rng = torch.Generator().manual_seed(seed)
        self.queries[: bs * self.width] = torch.randn(bs * self.width, self.queries.shape[1], generator=rng)
        made = random_candidates(Size(bs, self.width - 1, 7, 4), seed)
        tree = build_tree_reference(*made.on(CPU))
        prefix_lens = torch.tensor(prefixes)
        info = make_verify_input(
            tree,
            prefix_lens=prefix_lens,
            attn_backend=self.backend,
            prefix_lens_sum=sum(prefixes),
            depth=7,
            top_k=4,
            out_cache_loc=torch.zeros(bs * self.width, dtype=torch.int64),
            kv_loc_plan=None,
            sampler=None,
            penalties=None,
        )
        return tree, self.view(torch.tensor(rows), prefix_lens, info)

    def replay(self, rows, prefixes, seed):
        """A step through the graph of the next larger captured batch size, filled up with padding as SGLang does."""
        tree, batch = self.step(rows, prefixes, seed)
        bs = min(size for size in self.captured if size >= len(prefixes))
        missing = bs - len(prefixes)
        padded = self.view(
            torch.cat((batch.req_pool_indices, torch.zeros(missing, dtype=torch.int64))),
            torch.cat((batch.seq_lens, torch.ones(missing, dtype=torch.int64))),
            batch.spec_info,
        )
        self.backend.init_forward_metadata_out_graph(padded)
        out = self.module.replay(self.captured[bs])
        return tree, out.view(bs * self.width, -1)[: len(prefixes) * self.width]

    def eager(self, rows, prefixes, seed):
        tree, batch = self.step(rows, prefixes, seed)
        self.backend.init_forward_metadata(batch)
        return tree, self.forward(len(prefixes), batch)

    def check(self, tree, out, rows, prefixes):
        """Against plain attention over the slot table's rows, from the trees' parents."""
        pool, layer, width = self.runner.token_to_kv_pool, self.layer, self.width
        shape = len(prefixes), width, layer.tp_q_head_num, layer.head_dim
        assert out.shape == (len(prefixes) * width, shape[2] * shape[3])
        queries, out = self.queries[: len(out)].view(shape), out.view(shape)
        for request, (row, prefix) in enumerate(zip(rows, prefixes)):
            slots = self.runner.req_to_token_pool.req_to_token[row, : prefix + width].long()
            nodes = int(tree.num_nodes[request])
            mask = tree_check.visible(tree, request, prefix)[:nodes]
            keys, values = pool.keys[slots], pool.values[slots]
            want = tree_check.attend(queries[request, :nodes], keys, values, mask, layer.scaling, 0.0)
            assert torch.allclose(out[request, :nodes].float(), want, atol=0.03)
            if nodes > 2:  # and not what a chain would see
                chain = torch.ones(nodes, prefix + width).tril(prefix).bool()
                wrong = tree_check.attend(queries[request, :nodes], keys, values, chain, layer.scaling, 0.0)
                if not torch.equal(mask, chain):
                    assert not torch.allclose(out[request, :nodes].float(), wrong, atol=0.03)


@pytest.fixture
def fake(monkeypatch):
    with flashinfer_on_cpu() as made:
        yield made


@pytest.fixture(params=["stock", "patched"])
def installed(request, monkeypatch):
    """SGLang's backend as released, and with patch 0004."""
    stock = None
    if request.param == "patched":
        _, stock = modules("sglang.srt.layers.attention.flashinfer_backend", "0004")
    return install(monkeypatch, WIDTH, stock)


@pytest.fixture
def server(installed, fake, monkeypatch):
    return Server(installed, fake, monkeypatch)


STEPS = [
    ([1, 2, 3, 4], [0, 5, 40, 64]),
    ([3], [41]),
    ([4, 2], [7, 6]),
    ([2, 1, 3], [64, 64, 64]),
    ([1, 3, 2], [1, 0, 2]),
    ([2, 4, 3, 1], [3, 9, 44, 17]),
]


def test_replays_with_changing_batches_over_stale_bits(server):
    """Batch sizes change, some are padded; bits, indices and schedule of the step before are still in the buffers."""
    server.capture([1, 2, 4])
    for seed, (rows, prefixes) in enumerate(STEPS):
        if seed == 3:
            server.backend.verify_mask.buffer[len(rows) * WIDTH :] = 0  # padding that sees no node at all
        tree, out = server.replay(rows, prefixes, seed)
        server.check(tree, out, rows, prefixes)


def test_eager_passes(server):
    for seed, (rows, prefixes) in enumerate(STEPS):
        tree, out = server.eager(rows, prefixes, seed)
        server.check(tree, out, rows, prefixes)


def test_eager_and_replayed_steps_take_turns(server):
    server.capture([2])
    for seed, (rows, prefixes) in enumerate(STEPS):
        run = server.replay if len(rows) <= 2 else server.eager
        tree, out = run(rows, prefixes, seed)
        server.check(tree, out, rows, prefixes)


@pytest.mark.parametrize(
    ("width", "options"),
    [
        (33, {"heads": (8, 1)}),
        (2, {"heads": (3, 3)}),
        (65, {"dtype": torch.float16, "kv_dtype": torch.float16}),
        (32, {"kv_dtype": FP8}),
    ],
)
def test_other_widths_heads_and_dtypes(monkeypatch, fake, width, options):
    server = Server(install(monkeypatch, width), fake, monkeypatch, width=width, **options)
    server.capture([1, 4])
    for seed, (rows, prefixes) in enumerate(STEPS[:3]):
        tree, out = server.replay(rows, prefixes, seed)
        server.check(tree, out, rows, prefixes)


def test_stale_bits_would_be_found(server):
    """The checks above can fail: a step whose bits do not reach the buffer gives other outputs."""
    server.capture([4])
    rows, prefixes = STEPS[0]
    server.replay(rows, prefixes, 0)
    old = server.backend.verify_mask.buffer.clone()
    tree, _ = server.replay(rows, prefixes, 1)
    server.backend.verify_mask.buffer.copy_(old)
    out = server.module.replay(server.captured[4]).view(4 * WIDTH, -1)
    with pytest.raises(AssertionError):
        server.check(tree, out, rows, prefixes)


def test_a_replay_plans_from_the_host(server, installed, monkeypatch):
    """FlashInfer's own plan reads lengths back from the device; a replay must not call it, a capture must."""
    server.capture([2])
    (wrapper,) = server.backend.forward_metadata.prefill_wrappers
    assert wrapper.begin_forward.func is installed.stock.fast_prefill_plan
    monkeypatch.setattr(type(wrapper), "plan", lambda *args, **kwargs: pytest.fail("plan() waits for the device"))
    server.replay([1, 2], [3, 4], 0)


class OnDevice(torch.Tensor):
    """What FlashInfer's ``plan`` would have to wait for: a tensor that it copies to the host."""

    def to(self, *args, **options):
        raise Synchronised("Tensor.to")


@pytest.mark.parametrize("on_host", [True, False])
def test_an_eager_pass_plans_from_the_host(server, monkeypatch, on_host):
    """With lengths on the host, FlashInfer's own plan gets its index pointers from there, with the same values; without
    them it reads the device's."""
    (wrapper,) = server.backend.prefill_wrappers_verify
    begin, plan, planned = type(wrapper).begin_forward, type(wrapper).plan, []

    def on_device(self, rows, starts, pages, last, *args, **kwargs):
        given = rows, starts, last
        begin(
            self,
            *(each.as_subclass(OnDevice) for each in given[:2]),
            pages,
            last.as_subclass(OnDevice),
            *args,
            **kwargs,
        )
        assert all(torch.equal(*pair) for pair in zip(given, planned.pop(), strict=True))

    def kept(self, rows, starts, pages, last, *args, **kwargs):
        planned.append((rows, starts, last))
        plan(self, rows, starts, pages, last, *args, **kwargs)

    monkeypatch.setattr(type(wrapper), "begin_forward", on_device)
    monkeypatch.setattr(type(wrapper), "plan", kept)
    for seed, (rows, prefixes) in enumerate(STEPS):
        tree, batch = server.step(rows, prefixes, seed)
        if not on_host:
            batch.seq_lens_cpu = None
            with pytest.raises(Synchronised):
                server.backend.init_forward_metadata(batch)
            continue
        server.backend.init_forward_metadata(batch)
        server.check(tree, server.forward(len(prefixes), batch), rows, prefixes)


def test_buffers(server):
    """One buffer of bits for all wrappers; indices for what a batch can have; no mask."""
    server.capture([1, 4])
    backend = server.backend
    bits = backend.verify_mask.buffer
    assert bits.shape == (REQUESTS * WIDTH, 1) and bits.dtype == torch.int32
    graphs_ = [wrapper for wrappers in backend.prefill_cuda_graph_metadata.values() for wrapper in wrappers]
    assert len(graphs_) == 2 and all(w.tree_bits is bits for w in (*graphs_, *backend.prefill_wrappers_verify))
    assert backend.cuda_graph_kv_indices[0].numel() == REQUESTS * (CONTEXT + WIDTH)
    assert not hasattr(backend, "cuda_graph_custom_mask")
    assert all(w._custom_mask_buf is None for w in graphs_)


def test_other_passes_keep_sglangs_wrappers(server):
    from fake_runner import Stock

    server.backend.init_cuda_graph_state(2, 2 * WIDTH)
    (wrapper,) = server.backend._create_prefill_wrappers(2, use_custom_mask=False)
    assert type(wrapper) is Stock and "custom_mask_buf" not in wrapper.options
    assert all(type(w) is Stock for w in server.backend.prefill_wrappers_paged + server.backend.decode_wrappers)


def test_trees_that_were_written_elsewhere_are_an_error(server):
    _, batch = server.step([1, 2], [3, 4], 0)
    batch.spec_info.custom_mask = torch.ones(100, dtype=torch.bool)
    with pytest.raises(RuntimeError, match="not in the bit rows"):
        server.backend.init_forward_metadata(batch)
    batch.spec_info.custom_mask = server.backend.verify_mask.buffer.clone()
    with pytest.raises(RuntimeError, match="not in the bit rows"):
        server.backend.init_forward_metadata_out_graph(batch)
    batch.spec_info = SimpleNamespace(tree=None)
    with pytest.raises(RuntimeError, match="no mask of a SimpleNamespace"):
        server.backend.init_forward_metadata(batch)


def test_a_batch_beyond_the_buffer_is_an_error(server):
    with pytest.raises(ValueError, match="out must be contiguous int32"):
        server.step([1] * 5, [1] * 5, 0)


def test_the_warm_up_pass_runs_without_a_tree(server):
    info = graphs.capture_input(torch.ones(3, dtype=torch.bool))
    lens = torch.ones(3, dtype=torch.int64)
    batch = server.view(torch.zeros(3, dtype=torch.int64), lens, info)
    server.backend.init_forward_metadata(batch)
    assert bool(server.forward(3, batch).isfinite().all())


def test_the_stock_mask_is_as_it_was(monkeypatch):
    """Without the variant's backend the verify input is EAGLE's: a bool mask, padded to the length SGLang computes."""
    prefix_lens = torch.tensor([3, 5])
    tree = build_tree_reference(*random_candidates(Size(2, 8, 7, 4), 0).on(CPU))
    info = make_verify_input(
        tree,
        prefix_lens=prefix_lens,
        attn_backend=SimpleNamespace(verify_mask=None, max_context_len=64),
        prefix_lens_sum=8,
        depth=7,
        top_k=4,
        out_cache_loc=torch.zeros(18, dtype=torch.int64),
        kv_loc_plan=None,
        sampler=None,
        penalties=None,
    )
    runner = make_runner()
    arguments = dict(
        req_pool_indices=torch.tensor([1, 2]),
        paged_kernel_lens=prefix_lens,
        paged_kernel_lens_sum=8,
        translator=runner.kv_index_translator,
        plan=None,
    )
    slots, starts, rows, mask = info.generate_attn_arg_prefill(**arguments)
    assert mask.dtype == torch.bool and mask.numel() == 9 * (8 + 18)
    info.custom_mask = torch.zeros(18, 1, dtype=torch.int32)
    *ours, no_mask = DDTreeVerifyInput.generate_attn_arg_prefill(info, **arguments, kind=None)
    assert no_mask is None
    for stock, mine in zip((slots, starts, rows), ours, strict=True):
        assert stock.dtype == mine.dtype and torch.equal(stock, mine)
