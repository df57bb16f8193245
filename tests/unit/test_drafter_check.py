"""Every way in which a drafter does not fit its target, each told in one line before anything loads."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tiny_models import DRAFTER, HIDDEN, KV_HEADS, TAPS, drafter_shapes, write_config, write_drafter, write_target

from sglang_ddtree.drafter.check import check_pair, default_target_layer_ids, findings, read_drafter, read_target
from sglang_ddtree.drafter.files import TensorInfo, read_config, read_header, resolve_model_dir
from sglang_ddtree.errors import DDTreeError

SHIPPED = Path(__file__).parents[2] / "drafters" / "smollm2-135m-dflash-b8"


@pytest.fixture
def target(tmp_path):
    return write_target(tmp_path / "target")


def changed(remove=(), **add):
    shapes = {name: shape for name, shape in drafter_shapes().items() if name not in remove}
    return shapes | add


def dflash(**changes):
    return {**DRAFTER["dflash_config"], **changes}


def error_of(draft_dir, target_dir, overrides="{}"):
    with pytest.raises(DDTreeError) as error:
        check_pair(draft_dir, target_dir, overrides)
    text = str(error.value)
    assert text and "\n" not in text
    assert ("error", text) in [(found.level, found.text) for found in findings(draft_dir, target_dir, overrides)]
    return text


def warnings_of(draft_dir, target_dir):
    check_pair(draft_dir, target_dir)
    found = findings(draft_dir, target_dir)
    assert all(finding.level == "warning" for finding in found)
    return " ".join(finding.text for finding in found)


# Pairs that fit


def test_a_good_pair(tmp_path, target):
    draft = write_drafter(tmp_path / "draft")
    assert findings(draft, target) == []
    info = check_pair(draft, target)
    assert (info.architecture, info.hidden_size, info.num_layers, info.vocab_size) == (
        "DFlashDraftModel",
        HIDDEN,
        2,
        256,
    )
    assert (info.block_size, info.mask_token_id, info.target_layer_ids) == (8, 255, TAPS)


def test_nested_target(tmp_path):
    target = write_config(
        tmp_path / "target",
        {"model_type": "qwen3_5", "text_config": {"hidden_size": HIDDEN, "num_hidden_layers": 6, "vocab_size": 256}},
    )
    assert findings(write_drafter(tmp_path / "draft"), target) == []


def test_dflash_config_wins_over_the_top_level(tmp_path, target):
    draft = write_drafter(tmp_path / "draft", block_size=16, dflash_config=dflash(block_size=4))
    assert check_pair(draft, target).block_size == 4


@pytest.mark.parametrize("rename", [lambda n: "model." + n, lambda n: {"fc.weight": "encoder.fc.weight"}.get(n, n)])
def test_other_exporters_names(tmp_path, target, rename):
    draft = write_drafter(tmp_path / "draft", {rename(name): shape for name, shape in drafter_shapes().items()})
    assert findings(draft, target) == []


def test_fused_projections(tmp_path, target):
    shapes = {
        n: s for n, s in drafter_shapes().items() if not any(f".{p}_proj" in n for p in ("q", "k", "v", "gate", "up"))
    }
    for i in range(2):
        shapes[f"layers.{i}.self_attn.qkv_proj.weight"] = (64 + 2 * KV_HEADS * 16, HIDDEN)
        shapes[f"layers.{i}.mlp.gate_up_proj.weight"] = (2 * 96, HIDDEN)
    assert findings(write_drafter(tmp_path / "draft", shapes), target) == []


def test_attention_bias(tmp_path, target):
    sizes = {"q": 64, "k": 32, "v": 32, "o": 64}
    bias = {f"layers.{i}.self_attn.{p}_proj.bias": (size,) for i in range(2) for p, size in sizes.items()}
    assert findings(write_drafter(tmp_path / "ok", changed(**bias), attention_bias=True), target) == []
    assert "lacks 8 tensors" in error_of(write_drafter(tmp_path / "bad", attention_bias=True), target)


def test_default_taps(tmp_path, target):
    shapes = changed(**{"fc.weight": (HIDDEN, 2 * HIDDEN)})
    draft = write_drafter(tmp_path / "draft", shapes, dflash_config={"mask_token_id": 255})
    assert check_pair(draft, target).target_layer_ids == (1, 3)


@pytest.mark.parametrize(("layers", "taps"), [(36, (1, 9, 17, 25, 33)), (64, (1, 16, 31, 46, 61))])
def test_default_taps_of_published_drafters(layers, taps):
    assert default_target_layer_ids(layers, 5) == taps


def test_overrides_apply_to_both(tmp_path):
    target = write_target(tmp_path / "target", vocab_size=512)
    draft = write_drafter(tmp_path / "draft")
    assert "vocabulary" in error_of(draft, target)
    assert check_pair(draft, target, '{"vocab_size": 512}').vocab_size == 512


def test_the_shipped_drafter(tmp_path):
    target = write_target(tmp_path / "smollm2", hidden_size=576, num_hidden_layers=30, vocab_size=49152)
    assert findings(SHIPPED, target) == []
    assert check_pair(SHIPPED, target).block_size == 8


# Files


def test_directory_errors(tmp_path):
    for path, reason in ((tmp_path / "none", "does not exist"), (tmp_path, "has no config.json")):
        with pytest.raises(DDTreeError, match=reason) as error:
            resolve_model_dir(str(path))
        assert str(path) in str(error.value) and "\n" not in str(error.value)


def test_a_file_is_not_a_directory(tmp_path):
    draft = write_drafter(tmp_path / "draft")
    with pytest.raises(DDTreeError, match="is a file"):
        resolve_model_dir(str(draft / "model.safetensors"))
    assert resolve_model_dir(str(draft)) == draft


def test_unknown_hub_id_offline(monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(DDTreeError, match="neither a directory nor") as error:
        resolve_model_dir("nobody/no-such-drafter", weights=True)
    assert "\n" not in str(error.value)


def test_cached_hub_id_needs_no_network(monkeypatch, tmp_path):
    repo = tmp_path / "models--somebody--drafter"
    snapshot = write_drafter(repo / "snapshots" / ("0" * 40))
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("0" * 40)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub._snapshot_download.constants.HF_HUB_CACHE", str(tmp_path))
    assert resolve_model_dir("somebody/drafter", weights=True) == snapshot


def test_no_weights(tmp_path, target):
    draft = write_config(tmp_path / "draft", DRAFTER)
    assert "no weights" in error_of(draft, target)


def test_pickled_weights_are_a_warning(tmp_path, target):
    draft = write_config(tmp_path / "draft", DRAFTER)
    (draft / "pytorch_model.bin").write_bytes(b"")
    assert "pickled" in warnings_of(draft, target)


@pytest.mark.parametrize("text", ["{", "[1]", "null"])
def test_config_is_not_an_object(tmp_path, target, text):
    draft = write_drafter(tmp_path / "draft")
    (draft / "config.json").write_text(text)
    assert "config.json" in error_of(draft, target)


def test_truncated_weights(tmp_path, target):
    draft = write_drafter(tmp_path / "draft")
    weights = draft / "model.safetensors"
    for size in (weights.stat().st_size - 1, 100, 4, 0):
        weights.write_bytes(weights.read_bytes()[:size])
        assert "not a complete safetensors file" in error_of(draft, target)


def test_headers_of_a_sharded_model(tmp_path, target):
    draft = write_drafter(tmp_path / "draft")
    (draft / "model.safetensors").unlink()
    names = sorted(drafter_shapes())
    weight_map = {}
    for shard, part in (("a.safetensors", names[:9]), ("b.safetensors", names[9:])):
        save_file({name: torch.zeros(drafter_shapes()[name], dtype=torch.bfloat16) for name in part}, draft / shard)
        weight_map |= dict.fromkeys(part, shard)
    index = draft / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    assert read_header(draft) == {name: TensorInfo(shape, "BF16") for name, shape in drafter_shapes().items()}
    assert findings(draft, target) == []
    (draft / "b.safetensors").unlink()
    assert "lacks b.safetensors" in error_of(draft, target)
    index.write_text("[]")
    assert "not a safetensors index" in error_of(draft, target)


# Foreign drafters


@pytest.mark.parametrize(
    ("changes", "family"),
    [
        ({"architectures": ["DFlash2DraftModel"]}, "DFlash2"),
        ({"dflash_config": dflash(conv_kernel_size=2, conv_group_size=16)}, "DFlash2"),
        ({"dflash_config": dflash(selector_rank=256, selector_top_k=16)}, "selector"),
        ({"architectures": ["Qwen3DSparkModel"]}, "DSpark"),
        ({"markov_rank": 64}, "DSpark"),
        ({"dflash_config": dflash(projector_type="domino")}, "Domino"),
        ({"architectures": ["LiLiCorrDraftModel"]}, "LiLiCorr"),
        ({"dflash_config": dflash(lilicorr_enabled=True)}, "LiLiCorr"),
        ({"dflash_config": dflash(attention_sink_bias=True)}, "attention-sink"),
        ({"architectures": ["DFlashLagunaForCausalLM"]}, "Laguna"),
    ],
)
def test_other_families_by_config(tmp_path, target, changes, family):
    text = error_of(write_drafter(tmp_path / "draft", **changes), target)
    assert family in text and "plain DFlash" in text


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("layers.0.attention_conv.base_kernel", "DFlash2"),
        ("candidate_selector.predecessor_codebook", "DFlash2"),
        ("markov_head.weight", "DSpark"),
        ("prefix_gru.weight_ih_l0", "Domino"),
        ("model.embed_proj.0.weight", "Domino"),
        ("lilicorr.slot_embedding", "LiLiCorr"),
        ("layers.1.self_attn.attention_sink_bias", "attention-sink"),
    ],
)
def test_other_families_by_tensors(tmp_path, target, name, family):
    assert family in error_of(write_drafter(tmp_path / "draft", changed(**{name: (4,)})), target)


def test_not_a_drafter(tmp_path, target):
    plain = {"model.embed_tokens.weight": (256, 64)}
    draft = write_drafter(tmp_path / "draft", plain, architectures=["Qwen3ForCausalLM"], dflash_config=None)
    assert "not a DFlash drafter (architecture Qwen3ForCausalLM)" in error_of(draft, target)


def test_architecture_missing(tmp_path, target):
    assert '"architectures": ["DFlashDraftModel"]' in error_of(
        write_drafter(tmp_path / "d", architectures=None), target
    )


def test_model_type_missing(tmp_path, target):
    assert "model_type" in error_of(write_drafter(tmp_path / "d", model_type=None), target)


# Another target's drafter


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"hidden_size": 128}, "has hidden size 64, the target 128"),
        ({"vocab_size": 300}, "has a vocabulary of 256, the target 300"),
        ({"num_hidden_layers": 4}, "reads target layer 4, but the target has layers 0 to 3"),
        ({"hidden_size": None}, "has no hidden_size"),
        ({"num_hidden_layers": "six"}, "num_hidden_layers must be a positive whole number"),
        ({"text_config": "x"}, "text_config must be a JSON object"),
    ],
)
def test_target_mismatch(tmp_path, changes, reason):
    target = write_target(tmp_path / "target", **changes)
    assert reason in error_of(write_drafter(tmp_path / "draft"), target)


def test_mask_token_outside_the_embedding(tmp_path, target):
    draft = write_drafter(tmp_path / "draft", dflash_config=dflash(mask_token_id=256))
    assert "mask_token_id 256 is outside the target's embedding of 256 rows" in error_of(draft, target)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dflash_config": dflash(mask_token_id=-1)}, "mask_token_id must be"),
        ({"dflash_config": dflash(mask_token_id="<mask>")}, "mask_token_id must be"),
        ({"dflash_config": dflash(target_layer_ids=[])}, "target_layer_ids must be"),
        ({"dflash_config": dflash(target_layer_ids=[1, 2, "4"])}, "target_layer_ids must be"),
        ({"dflash_config": dflash(target_layer_ids=[1, 2])}, "fc.weight has shape"),
        ({"dflash_config": dflash(target_layer_ids=[-1, 2, 4])}, "reads target layer -1"),
        ({"dflash_config": [1]}, "must be a JSON object"),
        ({"block_size": 0}, "block_size must be"),
        ({"block_size": "8"}, "block_size must be"),
        ({"block_size": 1}, "block_size must be between 2 and 64"),
        ({"block_size": 10**12}, "block_size must be between 2 and 64"),
        ({"model_type": ["qwen3"]}, "no model_type"),
        ({"num_hidden_layers": None}, "has no num_hidden_layers"),
        ({"num_attention_heads": None}, "has no num_attention_heads"),
        ({"num_hidden_layers": 1}, "holds 2 layers, but num_hidden_layers is 1"),
        ({"num_hidden_layers": 3}, "lacks 11 tensors"),
        ({"intermediate_size": 100}, "mlp"),
        ({"text_config": [1]}, "text_config must be a JSON object"),
        ({"num_hidden_layers": 10**9}, "which no drafter has"),
        ({"rope_theta": 0}, "rope_theta must be a positive number"),
        ({"rope_theta": "10000"}, "rope_theta must be a positive number"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": -1}}, "rope_theta must be a positive number"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps must be a positive number"),
        ({"layer_types": ["sliding_attention"] * 2, "sliding_window": True}, "need a sliding_window"),
    ],
)
def test_config_errors(tmp_path, target, changes, reason):
    assert reason in error_of(write_drafter(tmp_path / "draft", **changes), target)


@pytest.mark.parametrize("name", sorted(drafter_shapes()))
def test_each_missing_tensor(tmp_path, target, name):
    assert name in error_of(write_drafter(tmp_path / "draft", changed(remove=[name])), target)


def test_wrong_shape(tmp_path, target):
    draft = write_drafter(tmp_path / "draft", changed(**{"layers.1.self_attn.k_proj.weight": (64, 64)}))
    assert "layers.1.self_attn.k_proj.weight has shape [64, 64]" in error_of(draft, target)


def test_bad_overrides(tmp_path, target):
    draft = write_drafter(tmp_path / "draft")
    for overrides in ("{", "[]"):
        assert "--json-model-override-args" in error_of(draft, target, overrides)


# Warnings


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dflash_config": {"target_layer_ids": list(TAPS)}}, "no mask_token_id"),
        ({"num_target_layers": 8}, "trained for a target of 8 layers"),
        ({"block_size": None}, "--speculative-dflash-block-size"),
        ({"dflash_config": dflash(target_layer_ids=[1, 2, 5])}, "last layer"),
    ],
)
def test_warnings(tmp_path, target, changes, reason):
    assert reason in warnings_of(write_drafter(tmp_path / "draft", **changes), target)


def test_unknown_tensors_are_a_warning(tmp_path, target):
    extra = {"layers.0.mystery.weight": (4,), "layers.0.self_attn.rotary_emb.inv_freq": (8,)}
    text = warnings_of(write_drafter(tmp_path / "draft", changed(**extra)), target)
    assert "tensor layers.0.mystery.weight, which SGLang ignores" in text and "inv_freq" not in text


def test_all_findings_are_reported_at_once(tmp_path):
    target = write_target(tmp_path / "target", vocab_size=200)
    found = [finding.text for finding in findings(write_drafter(tmp_path / "draft"), target)]
    assert len(found) == 2 and "vocabulary" in found[0] and "mask_token_id" in found[1]


# The reading rules are SGLang's


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"block_size": 16, "dflash_config": dflash(block_size=4)},
        {"dflash_config": None, "mask_token_id": 7, "target_layer_ids": [1, 3]},
        {"dflash_config": dflash(mask_token_id=None), "mask_token_id": 7},
    ],
)
def test_same_values_as_sglang(tmp_path, changes):
    utils = pytest.importorskip("sglang.srt.speculative.dflash_utils")
    config = read_config(write_drafter(tmp_path / "draft", **changes))
    theirs = utils.parse_dflash_draft_config(draft_hf_config=config)
    ours = read_drafter(config, "draft")
    assert ours.block_size == theirs.block_size
    assert ours.mask_token_id == theirs.mask_token_id
    assert list(ours.target_layer_ids) == theirs.target_layer_ids
    assert (ours.num_layers, ours.num_target_layers) == (theirs.num_hidden_layers, theirs.num_target_layers)


def test_same_default_taps_as_sglang():
    utils = pytest.importorskip("sglang.srt.speculative.dflash_utils")
    for target_layers in range(4, 80):
        for draft_layers in (1, 2, 3, 5, 8):
            expected = utils.build_target_layer_ids(target_layers, draft_layers)
            assert list(default_target_layer_ids(target_layers, draft_layers)) == expected


def test_target_sizes():
    nested = {"text_config": {"hidden_size": 8, "num_hidden_layers": 3, "num_loops": 2}, "vocab_size": 11}
    target = read_target(nested, "target")
    assert (target.hidden_size, target.num_layers, target.vocab_size) == (8, 6, 11)
