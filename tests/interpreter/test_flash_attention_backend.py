"""A tree verified by SGLang's FlashAttention backend: its prefix and suffix passes against plain attention.

Its page tables come from SGLang's own Triton kernel, so this runs in the interpreter. ``fake_flash_attention.py`` says
what is replaced.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import fake_flash_attention
import pytest
import torch
from captured_piece import Captured
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from sglang_ddtree import graphs
from sglang_ddtree.attention import tree_check
from sglang_ddtree.gpu.cases import Size, random_candidates
from sglang_ddtree.tree.build import build_tree_reference
from sglang_ddtree.tree.draft_tree import DraftTree
from sglang_ddtree.verify import make_verify_input

WIDTH, CONTEXT, REQUESTS, TOP_K = 9, 64, 4, 4
STEPS = [
    ([1, 2, 3, 4], [0, 5, 40, 64]),
    ([3], [41]),
    ([4, 2], [7, 6]),
    ([2, 1, 3], [64, 64, 64]),
    ([1, 3, 2], [1, 0, 2]),
]


class Server:
    """A target's verify passes, as the worker and the graph runner make them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, version: int = 3, page_size: int = 1, width: int = WIDTH):
        self.width = width
        module = fake_flash_attention.install(monkeypatch, width=width, top_k=TOP_K)
        monkeypatch.setattr(graphs, "get_spec", lambda: module.spec)
        self.runner = fake_flash_attention.paged_runner(
            requests=REQUESTS, context=CONTEXT, width=width, page_size=page_size
        )
        self.backend = module.FlashAttentionBackend(self.runner, fa_impl_ver=version)
        self.layer = self.runner.model[0]
        self.queries = torch.zeros(REQUESTS * width, self.layer.tp_q_head_num * self.layer.head_dim)
        self.captured: dict[int, Captured] = {}

    def view(self, rows: torch.Tensor, lens: torch.Tensor, spec_info: Any, host: bool = True) -> Any:
        return SimpleNamespace(
            batch_size=len(lens),
            req_pool_indices=rows,
            seq_lens=lens,
            seq_lens_cpu=lens.clone() if host else None,
            encoder_lens=None,
            forward_mode=ForwardMode.TARGET_VERIFY,
            spec_algorithm=SimpleNamespace(is_uno=lambda: False),
            spec_info=spec_info,
            positions=torch.zeros(len(lens) * self.width),
            kv_loc_plan=None,
            out_cache_loc=None,
        )

    def forward(self, bs: int, batch: Any) -> Any:
        queries = self.queries[: bs * self.width]
        return self.backend.forward_extend(queries, None, None, self.layer, batch, save_kv_cache=False)

    def capture(self, sizes: list[int]) -> None:
        self.backend.init_cuda_graph_state(max(sizes), max(sizes) * self.width)
        for bs in sorted(sizes, reverse=True):
            info = graphs.capture_input(torch.ones(1, dtype=torch.bool))
            batch = self.view(torch.zeros(bs, dtype=torch.int64), torch.ones(bs, dtype=torch.int64), info)
            self.backend.init_forward_metadata_out_graph(batch, in_capture=True)
            self.captured[bs] = Captured(lambda bs=bs, batch=batch: self.forward(bs, batch))

    def step(self, prefixes: list[int], seed: int, known_sum: bool) -> tuple[DraftTree, Any]:
        bs = len(prefixes)
        rng = torch.Generator().manual_seed(seed)
        self.queries[: bs * self.width] = torch.randn(bs * self.width, self.queries.shape[1], generator=rng)
        tree = build_tree_reference(
            *random_candidates(Size(bs, self.width - 1, 7, TOP_K), seed).on(torch.device("cpu"))
        )
        info = make_verify_input(
            tree,
            prefix_lens=torch.tensor(prefixes),
            attn_backend=self.backend,
            prefix_lens_sum=sum(prefixes) if known_sum else None,
            depth=7,
            top_k=TOP_K,
            out_cache_loc=torch.zeros(bs * self.width, dtype=torch.int64),
            kv_loc_plan=None,
            sampler=None,
            penalties=None,
        )
        return tree, info

    def replay(self, rows: list[int], prefixes: list[int], seed: int, known_sum: bool = True) -> Any:
        """Through the graph of the next larger captured batch size, padded as SGLang does it."""
        tree, info = self.step(prefixes, seed, known_sum)
        bs = min(size for size in self.captured if size >= len(prefixes))
        missing = bs - len(prefixes)
        batch = self.view(torch.tensor(rows + [0] * missing), torch.tensor(prefixes + [1] * missing), info)
        self.backend.init_forward_metadata_out_graph(batch)
        return tree, self.captured[bs].replay()[: len(prefixes) * self.width]

    def eager(self, rows: list[int], prefixes: list[int], seed: int, known_sum: bool = True) -> Any:
        tree, info = self.step(prefixes, seed, known_sum)
        batch = self.view(torch.tensor(rows), torch.tensor(prefixes), info, host=known_sum)
        self.backend.init_forward_metadata(batch)
        return tree, self.forward(len(prefixes), batch)

    def check(self, tree: DraftTree, out: torch.Tensor, rows: list[int], prefixes: list[int]) -> None:
        """Against plain attention over the slot table's rows, from the trees' parents."""
        pool, layer, width = self.runner.token_to_kv_pool, self.layer, self.width
        shape = len(prefixes), width, layer.tp_q_head_num, layer.head_dim
        queries, out = self.queries[: len(out)].view(shape), out.view(shape)
        for request, (row, prefix) in enumerate(zip(rows, prefixes)):
            slots = self.runner.req_to_token_pool.req_to_token[row, : prefix + width].long()
            mask = tree_check.visible(tree, request, prefix)
            keys, values = pool.keys[slots], pool.values[slots]
            want = tree_check.attend(queries[request], keys, values, mask, layer.scaling, 0.0)
            torch.testing.assert_close(out[request], want, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(("version", "page_size"), [(3, 1), (4, 16), (3, 16), (4, 1)])
def test_replays_with_changing_batches_over_stale_tables(
    monkeypatch: pytest.MonkeyPatch, version: int, page_size: int
) -> None:
    server = Server(monkeypatch, version=version, page_size=page_size)
    server.capture([1, 2, 4])
    for seed, (rows, prefixes) in enumerate(STEPS):
        tree, out = server.replay(rows, prefixes, seed, known_sum=seed % 2 == 0)
        server.check(tree, out, rows, prefixes)


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("known_sum", [True, False])
def test_eager_passes(monkeypatch: pytest.MonkeyPatch, page_size: int, known_sum: bool) -> None:
    """Also without graphs at all, where the mask has no buffer, and without lengths on the host."""
    server = Server(monkeypatch, page_size=page_size)
    for seed, (rows, prefixes) in enumerate(STEPS):
        tree, out = server.eager(rows, prefixes, seed, known_sum)
        server.check(tree, out, rows, prefixes)
    assert server.backend.verify_mask is None
    server.capture([2])
    tree, out = server.eager([1, 2, 3], [3, 60, 9], 7, known_sum)  # more than the mask's buffer is for
    server.check(tree, out, [1, 2, 3], [3, 60, 9])


def test_a_wider_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server(monkeypatch, width=33)
    server.capture([4])
    for seed, (rows, prefixes) in enumerate(STEPS[:2]):
        tree, out = server.replay(rows, prefixes, seed)
        server.check(tree, out, rows, prefixes)


@pytest.mark.parametrize("part", ["mask", "slots", "prefix"])
def test_a_replay_over_the_tables_of_another_step_is_found(monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    server = Server(monkeypatch)
    server.capture([4])
    rows, prefixes = STEPS[0]
    server.replay(rows, prefixes, 0)
    normal, expand = server.backend.forward_metadata, server.backend.forward_metadata_spec_decode_expand
    tables = {
        "mask": [expand.page_table, expand.cache_seqlens_int32],
        "slots": [normal.page_table],
        "prefix": [normal.cache_seqlens_int32],
    }[part]
    old = [table.clone() for table in tables]
    others = rows if part == "mask" else [4, 3, 2, 1]
    tree, out = server.replay(others, [5, 5, 20, 60], 1)
    server.check(tree, out, others, [5, 5, 20, 60])
    for table, before in zip(tables, old):
        table.copy_(before)
    out = server.captured[4].replay()
    with pytest.raises(AssertionError):
        server.check(tree, out, others, [5, 5, 20, 60])
