"""What each patch is for: not so in the release, so with the patch alone."""

from __future__ import annotations

import ast
import textwrap
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from stock_sglang import modules, texts

# 0001


@pytest.mark.parametrize(("algorithm", "width"), [("DFLASH", 8), ("DFLASH", 32), ("EAGLE", 16)])
@pytest.mark.parametrize("page", [1, 16])
def test_rows_hold_what_a_step_reserves(algorithm, width, page):
    stock, patched = modules("sglang.srt.mem_cache.allocation_sizing", "0001")
    context = 64
    held = []
    for module in (stock, patched):
        spec = SimpleNamespace(
            speculative_algorithm=algorithm, speculative_num_steps=1, speculative_eagle_topk=1, draft_tokens=width
        )
        module.get_spec = lambda spec=spec: spec
        module.get_schedule = lambda: SimpleNamespace(page_size=page)
        module.get_parallel = lambda: SimpleNamespace(attn_dcp_size=1)
        module.max_speculative_num_draft_tokens = lambda: width
        columns = context + module.get_req_to_token_extra_context_len()
        kv = SimpleNamespace(kv_committed_len=context - 1, kv_allocated_len=context - 1)
        _, (end,), _ = module.page_aligned_decode_alloc_lens(
            [SimpleNamespace(kv=kv)], reserve=module.get_alloc_reserve_per_decode(), page_size=page
        )
        held.append(end <= columns)
    assert held == [page > 1, True]


def test_rows_without_speculation_stay_as_they_are():
    sizes = []
    for module in modules("sglang.srt.mem_cache.allocation_sizing", "0001"):
        module.get_spec = lambda: SimpleNamespace(speculative_algorithm=None)
        module.get_schedule = lambda: SimpleNamespace(page_size=16)
        module.get_parallel = lambda: SimpleNamespace(attn_dcp_size=1)
        module.max_speculative_num_draft_tokens = lambda: None
        sizes.append(module.get_req_to_token_extra_context_len())
    assert sizes[0] == sizes[1] == 4


# 0002


def test_a_registered_algorithm_answers_whatever_the_enum_answers():
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    interface = {name for name, member in vars(SpeculativeAlgorithm).items() if callable(member) and name[0] != "_"}
    interface -= {"from_string", "register"}
    stock, patched = modules("sglang.srt.speculative.spec_registry", "0002")
    missing = {"create_future_map", "need_topk", "carries_draft_hidden_states", "get_platform_worker_cls"}
    assert interface - set(dir(stock.CustomSpecAlgo)) == missing
    assert not interface - set(dir(patched.CustomSpecAlgo))
    algorithm = patched.CustomSpecAlgo("X", lambda args: object)
    assert (algorithm.need_topk(), algorithm.carries_draft_hidden_states()) == (False, False)
    assert algorithm.get_platform_worker_cls() is None


def test_registration_refuses_an_incomplete_class():
    stock, patched = modules("sglang.srt.speculative.spec_registry", "0002")

    class Incomplete(stock.CustomSpecAlgo):
        pass

    stock._assert_custom_spec_algo_conforms(Incomplete)
    with pytest.raises(TypeError, match="create_future_map"):
        patched._assert_custom_spec_algo_conforms(Incomplete)


def test_ddtree_is_complete_with_and_without_the_patch():
    from sglang_ddtree.algorithm import DDTreeAlgorithm

    for module in modules("sglang.srt.speculative.spec_registry", "0002"):
        module._assert_custom_spec_algo_conforms(DDTreeAlgorithm)


def test_the_future_map_is_sglangs(monkeypatch):
    from sglang.srt.managers import overlap_utils

    _, patched = modules("sglang.srt.speculative.spec_registry", "0002")
    monkeypatch.setattr(overlap_utils, "FutureMap", lambda *args: args)
    algorithm = patched.CustomSpecAlgo("X", lambda args: object)
    assert algorithm.create_future_map("cpu", "pool", needs_cpu_seq_lens=False) == (
        ("cpu", algorithm, "pool", False, False)
    )


# 0003


class Broken:
    name, value, dist = "broken", "broken:register", None

    def __init__(self, at):
        self.at = at

    def load(self):
        if self.at == "import":
            raise ImportError("no module named flux_capacitor")
        return self.register

    def register(self):
        raise RuntimeError("needs 1.21 gigawatts")


class Entries(list):
    names = property(lambda self: {entry.name for entry in self})


@pytest.fixture
def plugins(monkeypatch):
    """Both forms of SGLang's plugin loader, with these entry points and no hooks of their own."""

    def load(entries, allowed=""):
        monkeypatch.setenv("SGLANG_PLUGINS", allowed)
        found = modules("sglang.srt.plugins", "0003")
        registries = modules("sglang.srt.plugins.hook_registry", "0003")
        for module, registry in zip(found, registries):
            module.entry_points = lambda group: Entries(entries if group.endswith("plugins") else ())
            module.HookRegistry = registry.HookRegistry
        return found

    return load


@pytest.mark.parametrize("at", ["import", "call"])
def test_a_failed_plugin_is_named_where_its_algorithm_is_asked_for(plugins, monkeypatch, at):
    told = []
    for module, info in zip(plugins([Broken(at)]), modules("sglang.srt.speculative.spec_info", "0003")):
        module.load_plugins()
        monkeypatch.setitem(__import__("sys").modules, "sglang.srt.plugins", module)
        with pytest.raises(ValueError, match="Unknown speculative algorithm name: WARP") as error:
            info.SpeculativeAlgorithm.from_string("WARP")
        told.append("broken" in str(error.value) and ("flux" in str(error.value) or "gigawatts" in str(error.value)))
    assert told == [False, True]


def test_a_name_in_sglang_plugins_that_is_not_there(plugins):
    stock, patched = plugins([], allowed="missing")
    stock.load_plugins()
    patched.load_plugins()
    assert not hasattr(stock, "plugin_failures")
    assert patched.plugin_failures() == ("SGLANG_PLUGINS names missing, which is not installed",)


def test_a_hook_whose_target_is_missing(plugins):
    _, patched = plugins([])
    patched.HookRegistry.register("sglang.srt.environ.no_such_function", lambda original: original())
    patched.load_plugins()
    (failure,) = patched.plugin_failures()
    assert "sglang.srt.environ.no_such_function" in failure and "AttributeError" in failure


def test_nothing_is_told_when_nothing_failed(plugins):
    _, patched = plugins([])
    patched.load_plugins()
    assert patched.plugin_failures() == ()


# 0004: the kernels need a GPU; this is the choice of the plan, the buffer and the keys, with stand-ins for wrappers.


class OnCpu:
    """torch, with "cuda" tensors on the CPU."""

    def __getattr__(self, name):
        return getattr(torch, name)

    def zeros(self, *args, device=None, **kwargs):
        return torch.zeros(*args, **kwargs)


@pytest.fixture(scope="module")
def backends():
    return modules("sglang.srt.layers.attention.flashinfer_backend", "0004")


def make_backend(module, context=1000):
    module.torch = OnCpu()
    backend = object.__new__(module.FlashInferAttnBackend)
    vars(backend).update(
        max_context_len=context,
        num_wrappers=1,
        use_sliding_window_kv_pool=False,
        skip_prefill=False,
        kv_indptr=[torch.zeros(9, dtype=torch.int32)],
        prefill_cuda_graph_metadata={},
        prefill_backend="fa2",
        dispatch_reason=None,
        flashinfer_kv_cache_dtype=torch.bfloat16,
        planned=[],
    )
    backend.indices_updater_prefill = SimpleNamespace(
        update=lambda *args, prefill_wrappers, **kwargs: backend.planned.append(prefill_wrappers)
    )
    backend._create_prefill_wrappers = lambda bs, use_custom_mask: [SimpleNamespace(begin_forward="plan")]
    return backend


def verify_batch(bs, width, topk):
    from sglang.srt.model_executor.forward_batch_info import ForwardMode
    from sglang.srt.speculative.spec_info import SpecInputType

    spec = SimpleNamespace(
        ragged_verify_layout=None,
        custom_mask=torch.ones(1, dtype=torch.bool),
        spec_input_type=SpecInputType.EAGLE_VERIFY,
        topk=topk,
    )
    lens = torch.ones(bs, dtype=torch.int64)
    return SimpleNamespace(
        batch_size=bs,
        req_pool_indices=lens,
        seq_lens=lens,
        seq_lens_cpu=lens,
        seq_lens_sum=bs,
        encoder_lens=None,
        forward_mode=ForwardMode.TARGET_VERIFY,
        spec_info=spec,
        positions=torch.zeros(bs * width),
        kv_loc_plan=None,
        out_cache_loc=None,
    )


def test_the_mask_buffer_holds_bits(backends):
    sizes = []
    bs, width, context = 4, 17, 1000
    for module in backends:
        backend = make_backend(module, context)
        backend.init_cuda_graph_state(bs, bs * width, kv_indices_buf=torch.zeros(1, dtype=torch.int32))
        sizes.append(backend.cuda_graph_custom_mask.numel())
    most = bs * -(-(width * (context + width)) // 8)
    assert sizes[0] > 7 * most
    assert most <= sizes[1] < 1.01 * most


def test_trees_are_planned_without_waiting(backends):
    plans = []
    for module in backends:
        for topk in (4, 1):
            backend = make_backend(module)
            backend.init_forward_metadata_out_graph(verify_batch(2, 17, topk), in_capture=True)
            (wrapper,) = backend.planned[0]
            fast = isinstance(wrapper.begin_forward, partial) and wrapper.begin_forward.func is module.fast_prefill_plan
            plans.append(fast)
    assert plans == [False, False, True, False]


def test_two_widths_of_one_batch_size_keep_their_wrappers(backends):
    same = []
    for module in backends:
        backend = make_backend(module)
        for width in (17, 5):
            backend.init_forward_metadata_out_graph(verify_batch(2, width, 4), in_capture=True)
        for width in (17, 5):
            backend.init_forward_metadata_out_graph(verify_batch(2, width, 4))
        captured, replayed = backend.planned[:2], backend.planned[2:]
        same.append([before is after for before, after in zip(captured, replayed)])
    assert same == [[False, True], [True, True]]


def test_a_plan_waits_for_the_copy_of_the_one_before(backends):
    orders = []
    for module in backends:
        order: list[str] = []

        class Event:
            def synchronize(self, order=order):
                order.append("wait")

            def record(self, order=order):
                order.append("record")

        module.torch = OnCpu()
        module.torch.cuda = SimpleNamespace(Event=Event)
        lens = torch.tensor([20, 30], dtype=torch.int32)
        indptr = torch.tensor([0, 20, 50], dtype=torch.int32)
        rows = torch.tensor([0, 8, 16], dtype=torch.int32)
        wrapper = SimpleNamespace(
            is_cuda_graph_enabled=True,
            _backend="fa2",
            _cached_module=SimpleNamespace(plan=lambda *args, order=order: order.append("plan")),
            _max_total_num_rows=None,
            _qo_indptr_buf=torch.zeros(3, dtype=torch.int32),
            _paged_kv_indptr_buf=torch.zeros(3, dtype=torch.int32),
            _paged_kv_last_page_len_buf=torch.zeros(2, dtype=torch.int32),
            _paged_kv_indices_buf=torch.zeros(64, dtype=torch.int32),
            _float_workspace_buffer=None,
            _int_workspace_buffer=None,
            _pin_memory_int_workspace_buffer=None,
            device=torch.device("cpu"),
        )
        host = dict(qo_indptr_host=rows, kv_indptr_host=indptr, kv_lens_host=lens, max_q_len=8, max_kv_len=30)
        for _ in range(2):
            module.fast_prefill_plan(
                wrapper,
                rows,
                indptr,
                torch.zeros(50, dtype=torch.int32),
                torch.ones(2, dtype=torch.int32),
                4,
                2,
                64,
                1,
                **host,
            )
        orders.append(order)
    assert orders == [["plan", "plan"], ["plan", "record", "wait", "plan", "record"]]


# 0005


def method_names(text):
    (worker,) = (node for node in ast.parse(text).body if getattr(node, "name", "") == "DFlashWorkerV2")
    return {node.name: node for node in worker.body if isinstance(node, ast.FunctionDef)}


def test_an_algorithm_can_override_one_step():
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    stock, patched = modules("sglang.srt.speculative.dflash_worker_v2", "0005")
    steps = {"_decode_draft", "_decode_verify", "_decode_commit"}
    assert not steps & set(dir(stock.DFlashWorkerV2))
    calls = []

    class Mine(patched.DFlashWorkerV2):
        def __init__(self):
            pass

        def _validate_phase1_sampling_support(self, batch):
            pass

        def _decode_draft(self, batch, draft_input):
            calls.append("draft")
            return "block"

        def _decode_verify(self, batch, draft_input, block, grammar_barrier):
            calls.append(("verify", block, grammar_barrier))
            return SimpleNamespace(new_seq_lens="lens")

        def _decode_commit(self, block, verified):
            calls.append(("commit", block))
            return "result"

    batch = SimpleNamespace(
        forward_mode=ForwardMode.DECODE,
        is_extend_in_batch=False,
        spec_info=object.__new__(patched.DFlashDraftInputV2),
    )
    publish = lambda lens: calls.append(("publish", lens))  # noqa: E731
    assert Mine().forward_batch_generation(batch, publish, "barrier") == "result"
    assert calls == ["draft", ("verify", "block", "barrier"), ("publish", "lens"), ("commit", "block")]


def test_the_split_keeps_every_statement_in_its_order():
    """All calls of the stock decode step, in order, are those of the three methods."""
    stock, patched = (method_names(text) for text in texts("sglang.srt.speculative.dflash_worker_v2", "0005"))

    def calls(*functions):
        found = [node for function in functions for node in ast.walk(function) if isinstance(node, ast.Call)]
        named = sorted(found, key=lambda node: (node.lineno, node.col_offset))
        return [ast.unparse(node.func) for node in named]

    ours = {"self._decode_draft", "self._decode_verify", "self._decode_commit", "DFlashBlock", "DFlashVerified"}
    split = calls(
        patched["forward_batch_generation"],
        patched["_decode_draft"],
        patched["_decode_verify"],
        patched["_decode_commit"],
    )
    before = calls(stock["forward_batch_generation"])

    # The two published lengths move to the caller, and two locals are taken from the block again.
    def rest(names):
        return [
            name.removeprefix("block.")
            for name in names
            if name not in ours | {"on_publish", "len", "int"} and not name.endswith("reshape")
        ]

    assert rest(split) == rest(before)


# 0006


def function(module, patch, path, **names):
    """One function of a module in the release and with a patch, each seeing ``names`` instead of the module's own."""
    owner, _, name = path.rpartition(".")
    found = []
    for text in texts(module, patch):
        body = ast.parse(text).body
        if owner:
            (body,) = (node.body for node in body if getattr(node, "name", "") == owner)
        (node,) = (node for node in body if getattr(node, "name", "") == name)
        source = "from __future__ import annotations\n" + textwrap.dedent(ast.unparse(node))
        scope = {**vars(__import__("importlib").import_module(module)), **names}
        exec(source, scope)
        found.append(scope[name])
    return found


def test_embeddings_keep_the_models_dtype():
    kept = []
    for extend in function("sglang.srt.model_executor.model_runner", "0006", "ModelRunner._extend_forward_kwargs"):
        runner = SimpleNamespace(dtype=torch.float32, is_generation=True, _pp_kwargs=lambda tensors: {})
        batch = SimpleNamespace(input_embeds=torch.ones(2, 3), replace_embeds=None, replace_positions=None)
        kept.append(extend(runner, batch, None)["input_embeds"].dtype == torch.float32)
    assert kept == [False, True]


def test_slots_are_written_without_triton():
    no_triton = SimpleNamespace(capabilities=SimpleNamespace(supports_triton=False))
    stock, patched = function(
        "sglang.srt.mem_cache.allocation", "0006", "assign_req_to_token_pool_func", current_platform=no_triton
    )
    table = torch.zeros(3, 8, dtype=torch.int32)
    args = (torch.tensor([2, 0]), table, torch.tensor([1, 5]), torch.tensor([3, 8]), torch.arange(10, 15), 2)
    with pytest.raises(RuntimeError, match="driver"):
        stock(*args)
    patched(*args)
    assert table.tolist() == [[0, 0, 0, 0, 0, 12, 13, 14], [0] * 8, [0, 10, 11, 0, 0, 0, 0, 0]]
    with pytest.raises(IndexError, match="row 1 has 8 columns, slots up to 9"):
        patched(torch.tensor([1]), table, torch.tensor([7]), torch.tensor([9]), torch.arange(2), 1)
    assert table[2].tolist() == [0, 10, 11, 0, 0, 0, 0, 0]


def test_a_cpu_tensor_has_no_stream():
    """The statement that stock DFLASH runs at the head of every decode step."""
    done = []
    for text in texts("sglang.srt.speculative.dflash_worker_v2", "0006"):
        step = method_names(text)["forward_batch_generation"]
        (statement,) = (
            node
            for node in step.body
            if isinstance(node, ast.Expr | ast.If) and "seq_lens.record_stream" in ast.unparse(node)
        )
        scope = {
            "batch": SimpleNamespace(seq_lens=torch.zeros(1)),
            "self": SimpleNamespace(device="cpu"),
            "torch": torch,
        }
        # The CPU platform of this package makes record_stream harmless; the release's is meant here.
        original = torch._C.TensorBase.record_stream
        scope["batch"].seq_lens = type("Seq", (torch.Tensor,), {"record_stream": original})(1)
        try:
            exec(ast.unparse(statement), scope)
            done.append(True)
        except (RuntimeError, TypeError, ValueError) as error:
            assert "stream" in str(error).lower() or "parameter" in str(error)
            done.append(False)
    assert done == [False, True]
