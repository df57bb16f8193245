"""The drafter in plain torch, its training on a tiny random target, and the drafter that is shipped."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from sglang_ddtree.training import local_heads
from sglang_ddtree.training.corpus import Sequence, load_sequences, make_batch
from sglang_ddtree.training.generate import generate_batch, generate_shards
from sglang_ddtree.training.measure import accepted_drafts, replay
from sglang_ddtree.training.model import (
    Drafter,
    DrafterShape,
    block_embeddings,
    drafter_config,
    load_drafter,
    save_drafter,
)
from sglang_ddtree.training.target import Target, rotary_table, rotate
from sglang_ddtree.training.train import Recipe, folded_fc, initial_drafter, train, whitening

SHIPPED = Path(__file__).resolve().parents[2] / "drafters" / "smollm2-135m-dflash-b8"
TAPS = (0, 2)
SHAPE = DrafterShape(
    hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
    vocab_size=64, block_size=5, num_target_layers=4, target_layer_ids=TAPS, mask_token_id=3,
)  # fmt: skip


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def tiny_target(seed: int = 0) -> Target:
    """A random Llama of four layers."""
    g = torch.Generator().manual_seed(seed)

    def weight(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=g) * columns**-0.5

    h, f, d = SHAPE.hidden_size, 64, SHAPE.head_dim
    blocks = [
        {
            "norm1": torch.ones(h),
            "norm2": torch.ones(h),
            "qkv": weight((4 + 2 * 2) * d, h),
            "out": weight(h, 4 * d),
            "gate_up": weight(2 * f, h),
            "down": weight(h, f),
        }
        for _ in range(4)
    ]
    cos, sin = rotary_table(d, 10000.0, 128)
    return Target(4, h, 4, 2, d, 1e-5, 10000.0, weight(64, h) * 4, torch.ones(h), blocks, cos, sin)


def tiny_drafter(seed: int = 0) -> Drafter:
    torch.manual_seed(seed)
    return Drafter(SHAPE).eval()


def some_input(seed: int = 0, context: int = 12, anchors: tuple[int, ...] = (4, 9)) -> tuple[torch.Tensor, ...]:
    g = torch.Generator().manual_seed(seed)
    taps = torch.randn(1, context, len(TAPS) * 32, generator=g)
    block = torch.randn(1, len(anchors), SHAPE.block_size, 32, generator=g)
    return taps, torch.tensor([anchors]), block


def test_drafter_shape():
    drafter = tiny_drafter()
    taps, anchors, block = some_input()
    assert drafter(drafter.project(taps), anchors, block).shape == (1, 2, 5, 32)


def test_leaving_out_row_0_changes_no_other_row():
    drafter = tiny_drafter()
    taps, anchors, block = some_input()
    context = drafter.project(taps)
    torch.testing.assert_close(
        drafter(context, anchors, block, first_row=1), drafter(context, anchors, block)[:, :, 1:]
    )


def test_inside_a_block_every_row_sees_every_other():
    drafter = tiny_drafter()
    taps, anchors, block = some_input()
    changed = block.clone()
    changed[:, :, -1] += 1
    before, after = (drafter(drafter.project(taps), anchors, b) for b in (block, changed))
    assert ((before - after).abs().amax(-1) > 1e-4).all()


def test_blocks_do_not_see_each_other():
    drafter = tiny_drafter()
    taps, anchors, block = some_input()
    changed = block.clone()
    changed[:, 0] += 1
    before, after = (drafter(drafter.project(taps), anchors, b) for b in (block, changed))
    torch.testing.assert_close(before[:, 1], after[:, 1])


def test_context_is_visible_up_to_the_token_before_the_anchor():
    drafter = tiny_drafter()
    taps, anchors, block = some_input()
    before = drafter(drafter.project(taps), anchors, block)
    for position in range(taps.shape[1]):
        changed = taps.clone()
        changed[:, position] = -changed[:, position]
        difference = (drafter(drafter.project(changed), anchors, block) - before).abs().amax((0, 2, 3))
        assert [bool(x > 1e-5) for x in difference] == [position < 4, position < 9]


def test_saved_drafter_loads_to_the_same_function(tmp_path):
    drafter = tiny_drafter().bfloat16().float()
    save_drafter(drafter, tmp_path)
    loaded = load_drafter(tmp_path)
    assert loaded.shape == SHAPE
    taps, anchors, block = some_input()
    torch.testing.assert_close(
        loaded(loaded.project(taps), anchors, block), drafter(drafter.project(taps), anchors, block), rtol=0, atol=0
    )


def test_a_drafter_file_with_a_missing_tensor_is_refused(tmp_path):
    save_drafter(tiny_drafter(), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    with pytest.raises(RuntimeError, match="Missing key"):
        load_drafter(tmp_path)


def test_batched_generation_equals_one_by_one():
    target = tiny_target()
    prompts = [[1, 7, 9, 11], [1, 7, 30, 31, 32, 33, 34], [1, 7, 40]]
    with torch.inference_mode():
        together = generate_batch(target, prompts, 12, eos=2, taps=TAPS, prefix=2)
        for prompt, result in zip(prompts, together):
            alone = generate_batch(target, [prompt], 12, eos=2, taps=TAPS)[0]
            assert result["tokens"].tolist() == alone["tokens"].tolist()
            assert result["tokens"][: len(prompt)].tolist() == prompt
            torch.testing.assert_close(result["taps"], alone["taps"], rtol=0.02, atol=0.02)
            # The recorded final hidden states are those that chose the tokens.
            chosen = (result["final"].float() @ target.embed.T).argmax(-1)
            agree = (chosen[len(prompt) - 1 : -1] == result["tokens"][len(prompt) :]).float().mean()
            assert agree > 0.9  # stored in bf16, so a near-tie may flip


def tiny_corpus(directory: Path, target: Target) -> list[Sequence]:
    g = torch.Generator().manual_seed(5)
    prompts = [[1, 7, *torch.randint(4, 64, (3 + i % 4,), generator=g).tolist()] for i in range(24)]
    generate_shards(target, prompts, directory, TAPS, 2, 24, 8, progress=lambda message: None)
    return load_sequences(directory)


def test_generation_goes_on_where_it_stopped(tmp_path):
    target = tiny_target()
    tiny_corpus(tmp_path, target)
    first, second = sorted(tmp_path.glob("*.safetensors"))[:2]
    content, time_kept = first.read_bytes(), second.stat().st_mtime_ns
    first.unlink()
    tiny_corpus(tmp_path, target)
    assert first.read_bytes() == content and second.stat().st_mtime_ns == time_kept


def test_labels_follow_the_anchors(tmp_path):
    sequences = tiny_corpus(tmp_path, tiny_target())[:3]
    batch = make_batch(sequences, 6, 5, torch.Generator().manual_seed(0))
    for row, q in enumerate(sequences):
        for block in range(6):
            anchor = int(batch.anchors[row, block])
            assert q.prompt <= anchor < len(q.tokens) - 1
            assert batch.first[row, block] == q.tokens[anchor]
            following = q.tokens[anchor + 1 : anchor + 5].tolist()
            assert batch.labels[row, block][batch.valid[row, block]].tolist() == following
            torch.testing.assert_close(batch.final[row, block, 0], q.final[anchor].float())


def test_whitened_taps_have_unit_second_moments(tmp_path):
    g = torch.Generator().manual_seed(0)
    taps = torch.randn(6000, 64, generator=g) * (torch.rand(64, generator=g) * 20 + 10)
    q = Sequence(torch.zeros(6000).int(), 1, taps.bfloat16(), torch.zeros(6000, 32))
    whiteners, inverses = whitening([q], 2, g)
    torch.testing.assert_close(torch.bmm(whiteners, inverses), torch.eye(32).expand(2, 32, 32), rtol=1e-3, atol=1e-3)
    x = q.taps[24:-1].float().view(-1, 2, 32)[:, 0] @ whiteners[0]
    # Small directions are shrunk a little, so the second moments lie below 1.
    moments = (x.T @ x / len(x)).diagonal()
    assert float(moments.min()) > 0.5 and float(moments.max()) < 1.1
    fc = torch.randn(2, 32, 32, generator=g)
    taps = q.taps[:5].float()
    wanted = sum(taps[:, 32 * i : 32 * i + 32] @ whiteners[i] @ fc[i].T for i in range(2))
    torch.testing.assert_close(taps @ folded_fc(fc, whiteners).T, wanted, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("offset", [1, 2, 5])
def test_local_heads_look_back_by_their_offset(offset, monkeypatch):
    """Inputs with a constant part: at every position the product of query and key is largest ``offset`` back."""
    monkeypatch.setattr(local_heads, "OFFSETS", (offset, None, None, None))
    g = torch.Generator().manual_seed(0)
    shape = replace(SHAPE, hidden_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=64)
    inputs = 1.0 + torch.randn(400, 64, generator=g)
    monkeypatch.setattr(local_heads, "layer_inputs", lambda *_: (inputs[:200], inputs[200:]))
    torch.manual_seed(0)
    drafter = Drafter(shape)
    local_heads.start_local_heads(drafter, torch.empty(0), [])
    attention = drafter.layers[0].self_attn
    positions = torch.arange(20)
    cos, sin = (table[positions] for table in rotary_table(64, shape.rope_theta, 20))
    x = inputs[:20]
    keys, _ = attention.keys_values(x, cos, sin)
    query = rotate(attention.q_norm(attention.q_proj(x)[:, :64]), cos, sin)
    scores = query @ keys[0].T  # [query position, key position]
    distances = torch.stack([scores.diagonal(-back).mean() for back in range(10)])
    assert int(distances.argmax()) == offset


def test_reader_finds_the_constant_part():
    x = torch.randn(500, 32, generator=torch.Generator().manual_seed(0)) + 2.0
    read = x @ local_heads.constant_reader(x)
    assert abs(float(read.mean()) - 1) < 0.05 and float(read.std()) < 0.2


def test_training_lowers_the_loss_and_resumes(tmp_path):
    target = tiny_target()
    sequences = tiny_corpus(tmp_path / "shards", target)
    recipe = Recipe(steps=40, sequences=4, blocks=6, short_block=3, warmup=5, frequent=32, sampled=8)
    seen: list[float] = []

    def note(message: str) -> None:
        if "loss" in message:
            seen.append(float(message.split("loss ")[1].split(",")[0]))

    def run() -> Drafter:
        whitened = whitening(sequences, len(TAPS), torch.Generator().manual_seed(0))
        drafter = initial_drafter(SHAPE, target, sequences, whitened[0], 0)
        dev, checkpoint = sequences[:4], tmp_path / "checkpoint.pt"
        return train(drafter, target.embed, whitened, lambda: sequences, dev, recipe, checkpoint, note, every=5)

    trained = run()
    assert seen[-1] < seen[0]
    # With the checkpoint of the last step there is nothing left to do, and the weights are the same.
    resumed = run()
    for a, b in zip(trained.parameters(), resumed.parameters()):
        torch.testing.assert_close(a, b)


def test_replay_counts_the_bonus_token():
    # Token 0 comes from the prefill; 6 more follow. Steps begin at 0 (2 accepted), 3 (0 accepted), 4 (5 would match).
    assert replay(torch.tensor([2, 0, 0, 0, 5, 0])) == (3, 6)


def test_acceptance_of_chain_and_trees():
    q = Sequence(torch.tensor([9, 9, 5, 6, 7, 8]), 2, torch.zeros(6, 1), torch.zeros(6, 1))
    ids = torch.arange(8).repeat(3, 3, 1)  # [answer - 1, depth, K]
    log_probs = torch.log_softmax(-torch.arange(8.0), 0).repeat(3, 3, 1)
    # Nothing but token 0 at rank 0 would be drafted by the chain; put the right token first at two places.
    ids[0, 0] = torch.tensor([6, 1, 2, 3, 4, 5, 0, 7])
    ids[0, 1] = torch.tensor([0, 7, 2, 3, 4, 5, 6, 1])
    accepted = accepted_drafts(log_probs, ids, q)
    assert accepted["chain"].tolist() == [1, 0, 0]
    # 6 (rank 0) then 7 (rank 1) needs few nodes; token 8 is no candidate, so no tree gets further.
    assert accepted["8"].tolist()[0] == 2 and accepted["64"].tolist()[0] == 2
    # From token 6 on: 7 is rank 7, found by the larger trees only.
    assert accepted["4"].tolist()[1] == 0 and accepted["64"].tolist()[1] >= accepted["16"].tolist()[1]


def expected_tensors(shape: DrafterShape) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a checkpoint, written out instead of taken from the module."""
    h, f, d = shape.hidden_size, shape.intermediate_size, shape.head_dim
    q, kv = shape.num_attention_heads * d, shape.num_key_value_heads * d
    tensors = {"fc.weight": (h, len(shape.target_layer_ids) * h), "hidden_norm.weight": (h,), "norm.weight": (h,)}
    for i in range(shape.num_hidden_layers):
        layer = {
            "input_layernorm": (h,),
            "post_attention_layernorm": (h,),
            "self_attn.q_proj": (q, h),
            "self_attn.k_proj": (kv, h),
            "self_attn.v_proj": (kv, h),
            "self_attn.o_proj": (h, q),
            "self_attn.q_norm": (d,),
            "self_attn.k_norm": (d,),
            "mlp.gate_proj": (f, h),
            "mlp.up_proj": (f, h),
            "mlp.down_proj": (h, f),
        }
        tensors |= {f"layers.{i}.{name}.weight": size for name, size in layer.items()}
    return tensors


def test_shipped_drafter_has_exactly_the_expected_tensors():
    shape = load_drafter(SHIPPED).shape
    with safe_open(SHIPPED / "model.safetensors", "pt") as file:
        found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    assert {name: tuple(t.shape) for name, t in found.items()} == expected_tensors(shape)
    assert {t.dtype for t in found.values()} == {torch.bfloat16}
    assert all(bool(t.isfinite().all()) for t in found.values())
    assert (SHIPPED / "model.safetensors").stat().st_size <= 20 * 2**20


def test_shipped_config_fits_the_target():
    config = json.loads((SHIPPED / "config.json").read_text())
    shape = load_drafter(SHIPPED).shape
    assert config["architectures"] == ["DFlashDraftModel"] and "is_causal" not in config
    assert (config["hidden_size"], config["vocab_size"], config["num_target_layers"]) == (576, 49152, 30)
    assert config["block_size"] == 8 and config["dflash_config"]["mask_token_id"] < config["vocab_size"]
    taps = config["dflash_config"]["target_layer_ids"]
    # The last layer's state is returned after the final norm, so it is no tap.
    assert taps == sorted(taps) and taps[-1] < config["num_target_layers"] - 1
    assert config["layer_types"] == ["full_attention"] * config["num_hidden_layers"]
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"]
    assert {**config, **drafter_config(shape)} == config


def test_masks_follow_the_first_token():
    embed = torch.randn(64, 32)
    block = block_embeddings(embed, torch.tensor([[10, 11]]), SHAPE)
    assert torch.equal(block[0, 1, 0], embed[11]) and torch.equal(block[0, 1, 4], embed[SHAPE.mask_token_id])
