"""The torch attention backend against attention computed one query and one head at a time."""

from types import SimpleNamespace

import pytest
import torch
from sglang.srt.layers.radix_attention import AttentionType

from sglang_ddtree.attention.torch_tree import TorchTreeAttnBackend, _by_length
from sglang_ddtree.tree.build import build_tree
from sglang_ddtree.tree.mask import ancestor_mask, positions

HEADS, KV_HEADS, DIM, POOL = 6, 2, 8, 400


class Pool:
    """A KV pool that keeps what the backend writes."""

    def __init__(self, generator):
        self.k = torch.randn(POOL, KV_HEADS, DIM, generator=generator)
        self.v = torch.randn(POOL, KV_HEADS, DIM, generator=generator)

    def set_kv_buffer(self, layer, loc, k, v):
        self.k[loc.loc if hasattr(loc, "loc") else loc[0]] = k.view(-1, KV_HEADS, DIM)
        self.v[loc.loc if hasattr(loc, "loc") else loc[0]] = v.view(-1, KV_HEADS, DIM)

    def get_key_buffer(self, layer_id):
        return self.k

    def get_value_buffer(self, layer_id):
        return self.v


def make_backend(generator, rows):
    """A backend over ``rows`` requests whose slots are scattered over the pool (slot 0 is SGLang's sink)."""
    backend = TorchTreeAttnBackend.__new__(TorchTreeAttnBackend)
    backend.use_sliding_window_kv_pool = False
    backend.swa_out_cache_loc = None
    backend.token_to_kv_pool = Pool(generator)
    slots = torch.randperm(POOL - 1, generator=generator)[: rows * 90] + 1
    backend.req_to_token_pool = SimpleNamespace(req_to_token=slots.view(rows, 90).to(torch.int32))
    backend._groups = []
    backend._dtype = torch.float32
    return backend


def make_layer(bidirectional=False, window=None, logit_cap=0.0):
    return SimpleNamespace(
        tp_q_head_num=HEADS,
        tp_k_head_num=KV_HEADS,
        qk_head_dim=DIM,
        v_head_dim=DIM,
        layer_id=0,
        scaling=DIM**-0.5,
        logit_cap=logit_cap,
        is_cross_attention=False,
        sliding_window_size=window,
        attn_type=AttentionType.ENCODER_ONLY if bidirectional else AttentionType.DECODER,
    )


def make_batch(mode, backend, prefix, new, spec_info=None, node_positions=None):
    """A ForwardBatch stand-in: request i has ``prefix[i]`` cached tokens and brings ``new[i]``."""
    table = backend.req_to_token_pool.req_to_token
    out = torch.cat([table[i, p : p + n] for i, (p, n) in enumerate(zip(prefix, new, strict=True))]).long()
    flags = {name: False for name in ("is_idle", "is_decode", "is_target_verify")}
    flags[f"is_{mode}"] = True
    lens = torch.tensor(prefix)
    if mode != "target_verify":
        lens = lens + torch.tensor(new)
    return SimpleNamespace(
        forward_mode=SimpleNamespace(**{k: (lambda v=v: v) for k, v in flags.items()}),
        req_pool_indices=torch.arange(len(prefix)),
        seq_lens=lens,
        extend_prefix_lens=torch.tensor(prefix),
        extend_seq_lens=torch.tensor(new),
        out_cache_loc=out,
        positions=node_positions,
        spec_info=spec_info,
    )


def reference(backend, q, batch, prefix, new, visible, layer, positions_of):
    """``visible[i]`` bool ``[new, prefix + new]``; ``positions_of[i]`` positions of all columns of request i."""
    table = backend.req_to_token_pool.req_to_token
    pool, rows, at = backend.token_to_kv_pool, [], 0
    for i, (p, n) in enumerate(zip(prefix, new, strict=True)):
        slots = table[i, : p + n].long()
        for j in range(n):
            see = visible[i][j].clone()
            if layer.sliding_window_size is not None:
                see &= positions_of[i] >= positions_of[i][p + j] - layer.sliding_window_size
            for h in range(HEADS):
                kv = h // (HEADS // KV_HEADS)
                score = pool.k[slots[see], kv] @ q[at, h] * layer.scaling
                if layer.logit_cap:
                    score = layer.logit_cap * torch.tanh(score / layer.logit_cap)
                rows.append(torch.softmax(score, 0) @ pool.v[slots[see], kv])
            at += 1
    return torch.stack(rows).view(at, HEADS * DIM)


def run(backend, batch, layer, tokens, generator, dtype=torch.float32):
    q = torch.randn(tokens, HEADS * DIM, generator=generator)
    k = torch.randn(tokens, KV_HEADS * DIM, generator=generator)
    v = torch.randn(tokens, KV_HEADS * DIM, generator=generator)
    backend.init_forward_metadata(batch)
    out = backend.forward_extend(q.to(dtype), k, v, layer, batch)
    assert out.dtype == dtype
    return q.view(-1, HEADS, DIM), out.float()


@pytest.mark.parametrize("prefix", [[5], [7, 7], [3, 60, 1, 22]])
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("logit_cap", [0.0, 5.0])
def test_tree_verification_sees_prefix_and_ancestors_only(prefix, window, logit_cap):
    generator = torch.Generator().manual_seed(1)
    bs, depth, budget = len(prefix), 4, 9
    values, ids = torch.randn(bs, depth, 12, generator=generator).log_softmax(-1).topk(3, -1)
    tree = build_tree(values, ids, torch.zeros(bs, dtype=torch.int64), budget)
    width = tree.width
    mask = ancestor_mask(tree)
    node_positions = positions(tree, torch.tensor(prefix))
    backend, layer = make_backend(generator, bs), make_layer(window=window, logit_cap=logit_cap)
    spec = SimpleNamespace(draft_token_num=width, custom_mask=mask.reshape(-1))
    batch = make_batch("target_verify", backend, prefix, [width] * bs, spec, node_positions.reshape(-1))
    q, out = run(backend, batch, layer, bs * width, generator)
    visible = [torch.cat((torch.ones(width, p, dtype=torch.bool), mask[i]), 1) for i, p in enumerate(prefix)]
    columns = [torch.cat((torch.arange(p), node_positions[i])) for i, p in enumerate(prefix)]
    want = reference(backend, q, batch, prefix, [width] * bs, visible, layer, columns)
    torch.testing.assert_close(out, want, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("prefix", [[5], [7, 7], [3, 60, 1, 22]])
@pytest.mark.parametrize("bidirectional", [False, True])
def test_a_chain_block_is_causal_or_fully_visible_by_layer(prefix, bidirectional):
    generator = torch.Generator().manual_seed(2)
    bs, width = len(prefix), 6
    backend, layer = make_backend(generator, bs), make_layer(bidirectional)
    spec = SimpleNamespace(draft_token_num=width, custom_mask=None)
    node_positions = (torch.tensor(prefix).unsqueeze(1) + torch.arange(width)).reshape(-1)
    batch = make_batch("target_verify", backend, prefix, [width] * bs, spec, node_positions)
    q, out = run(backend, batch, layer, bs * width, generator)
    block = torch.ones(width, width, dtype=torch.bool)
    block = block if bidirectional else block.tril()
    visible = [torch.cat((torch.ones(width, p, dtype=torch.bool), block), 1) for p in prefix]
    columns = [torch.arange(p + width) for p in prefix]
    want = reference(backend, q, batch, prefix, [width] * bs, visible, layer, columns)
    torch.testing.assert_close(out, want, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("window", [None, 4])
def test_decode_and_prefill_with_a_cached_prefix(window):
    generator = torch.Generator().manual_seed(3)
    prefix, layer = [4, 70, 0, 31], make_layer(window=window)
    for mode, new in (("decode", [1] * 4), ("extend", [3, 1, 17, 5])):
        backend = make_backend(generator, 4)
        batch = make_batch(mode, backend, prefix, new)
        q, out = run(backend, batch, layer, sum(new), generator)
        visible = [torch.ones(n, p + n, dtype=torch.bool).tril(p) for p, n in zip(prefix, new, strict=True)]
        columns = [torch.arange(p + n) for p, n in zip(prefix, new, strict=True)]
        want = reference(backend, q, batch, prefix, new, visible, layer, columns)
        torch.testing.assert_close(out, want, atol=2e-5, rtol=1e-5)


def test_slots_past_a_request_are_never_read_even_when_they_hold_nan():
    generator = torch.Generator().manual_seed(4)
    backend, layer = make_backend(generator, 2), make_layer()
    table = backend.req_to_token_pool.req_to_token
    backend.token_to_kv_pool.v[table[0, 11:].long()] = float("nan")
    batch = make_batch("decode", backend, [10, 13], [1, 1])
    _, out = run(backend, batch, layer, 2, generator)
    assert torch.isfinite(out).all()


def test_half_precision_models_attend_in_fp32():
    generator = torch.Generator().manual_seed(5)
    backend, layer = make_backend(generator, 1), make_layer()
    batch = make_batch("decode", backend, [20], [1])
    q, out = run(backend, batch, layer, 1, generator, torch.bfloat16)
    q = q.bfloat16().float()
    want = reference(backend, q, batch, [20], [1], [torch.ones(1, 21, dtype=torch.bool)], layer, [torch.arange(21)])
    torch.testing.assert_close(out, want.bfloat16().float(), atol=0.02, rtol=0.02)


def test_in_float64_a_token_attends_with_the_same_bits_in_a_tree_and_alone():
    """What --enable-deterministic-inference asks for; in float32 the last bits differ."""
    same = {}
    for dtype in (torch.float32, torch.float64):
        generator = torch.Generator().manual_seed(7)
        prefix, width, layer = [33, 60, 5], 6, make_layer()
        backend = make_backend(generator, 3)
        backend._dtype = dtype
        block = torch.ones(width, width, dtype=torch.bool).tril().expand(3, width, width)
        spec = SimpleNamespace(draft_token_num=width, custom_mask=block.reshape(-1))
        places = (torch.tensor(prefix).unsqueeze(1) + torch.arange(width)).reshape(-1)
        batch = make_batch("target_verify", backend, prefix, [width] * 3, spec, places)
        q, together = run(backend, batch, layer, 3 * width, generator)
        alone = []
        for j in range(width):
            step = make_batch("decode", backend, [p + j for p in prefix], [1] * 3)
            backend.init_forward_metadata(step)
            rows = q.view(3, width, -1)[:, j]
            alone.append(backend.forward_decode(rows, None, None, layer, step))
        same[dtype] = torch.equal(torch.stack(alone, 1).reshape(together.shape), together)
    assert same == {torch.float32: False, torch.float64: True}


def test_groups_cover_every_request_once_and_bound_the_padding():
    generator = torch.Generator().manual_seed(6)
    for _ in range(50):
        lens = torch.randint(1, 5000, (int(torch.randint(1, 40, (1,), generator=generator)),), generator=generator)
        groups = _by_length(lens)
        assert sorted(torch.cat(groups).tolist()) == list(range(lens.numel()))
        for group in groups:
            assert lens[group].max() <= 1.5 * lens[group].min() + 32
