"""A bare file becomes the directory SGLang loads; what nothing tells is asked for."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from bare_files import PUBLISHED, sparse_drafter
from tiny_models import DRAFTER, HIDDEN, TAPS, drafter_shapes, write_config, write_drafter, write_target

from sglang_ddtree.drafter import mask_embedding
from sglang_ddtree.drafter.check import findings
from sglang_ddtree.drafter.cli import main
from sglang_ddtree.drafter.files import read_config

SHIPPED = Path(__file__).parents[2] / "drafters" / "smollm2-135m-dflash-b8"
FLAGS = [
    *("--block-size", "8", "--mask-token-id", "255", "--target-layer-ids", ",".join(map(str, TAPS))),
    *("--layer-types", "full", "--is-causal", "unset", "--rope-theta", "10000"),
]


@pytest.fixture
def bare(tmp_path):
    """The tiny drafter's weights without anything else."""
    return shutil.copy(write_drafter(tmp_path / "original") / "model.safetensors", tmp_path / "bare.safetensors")


@pytest.fixture
def target(tmp_path):
    return write_target(tmp_path / "target")


def prepare(bare, target, out, *flags):
    return main(["prepare", str(bare), "--target", str(target), "--out", str(out), *flags])


def error(capsys) -> str:
    text = capsys.readouterr().err
    assert text.startswith("sglang-ddtree drafter ") and text.count("\n") == 1
    return text


def test_the_config_of_the_original(bare, target, tmp_path, capsys):
    assert prepare(bare, target, tmp_path / "out", *FLAGS) == 0
    config = read_config(tmp_path / "out")
    assert {key: config[key] for key in DRAFTER} == DRAFTER
    assert findings(tmp_path / "out", target) == []
    printed = capsys.readouterr().out
    origins = json.loads((tmp_path / "out" / "ddtree_origins.json").read_text())["fields"]
    for name, origin in (("head_dim", "weights"), ("vocab_size", "target"), ("block_size", "flag --block-size")):
        assert origins[name]["origin"] == origin
        assert any(line.startswith(name) and f"({origin})" in line for line in printed.splitlines())


@pytest.mark.parametrize("at", range(0, len(FLAGS), 2))
def test_each_missing_flag_is_named(bare, target, tmp_path, capsys, at):
    assert prepare(bare, target, tmp_path / "out", *FLAGS[:at], *FLAGS[at + 2 :]) == 2
    assert f"give {FLAGS[at]} " in error(capsys)
    assert not (tmp_path / "out").exists()


def test_all_missing_flags_at_once(bare, target, tmp_path, capsys):
    assert prepare(bare, target, tmp_path / "out") == 2
    text = error(capsys)
    assert all(flag in text for flag in FLAGS[::2])


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--mask-token-id", "256"], "outside the target's embedding"),
        (["--target-layer-ids", "1,2"], "reads 3 target layers"),
        (["--target-layer-ids", "1,2,6"], "no layer 6"),
        (["--target-layer-ids", "default"], "reads 3 target layers"),
        (["--layer-types", "full,odd"], "full, sliding"),
        (["--layer-types", "full,full,full"], "full, sliding"),
        (["--layer-types", "sliding"], "give --sliding-window"),
        (["--layer-types", "sliding", "--sliding-window", "-3"], "must be 1 or more"),
        (["--sliding-window", "5"], "no sliding layer"),
        (["--block-size", "1"], "between 2 and 64"),
        (["--rope-theta", "-1"], "rope_theta must be a positive number"),
        (["--rope-theta", "nan"], "rope_theta must be a positive number"),
    ],
)
def test_bad_values(bare, target, tmp_path, capsys, flags, reason):
    assert prepare(bare, target, tmp_path / "out", *FLAGS, *flags) == 2
    assert reason in error(capsys)


def test_sliding_layers_reach_sglang(bare, target, tmp_path):
    """Through transformers' config class, which drops a window that is not switched on."""
    flags = [*FLAGS, "--layer-types", "sliding,full", "--sliding-window", "32", "--is-causal", "false"]
    assert prepare(bare, target, tmp_path / "out", *flags) == 0
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(tmp_path / "out")
    assert (config.layer_types, config.sliding_window) == (["sliding_attention", "full_attention"], 32)
    assert config.is_causal is False


@pytest.mark.parametrize(("link", "kind"), [("hard", "hard"), ("symbolic", "symbolic"), ("copy", "copy")])
def test_weights_are_never_rewritten(bare, target, tmp_path, link, kind):
    before = Path(bare).stat()
    assert prepare(bare, target, tmp_path / "out", *FLAGS, "--weights", link) == 0
    placed = tmp_path / "out" / "model.safetensors"
    assert placed.read_bytes() == Path(bare).read_bytes()
    assert placed.is_symlink() == (kind == "symbolic")
    assert (placed.stat().st_ino == before.st_ino) == (kind != "copy")


def test_another_file_system_gets_a_symbolic_link(bare, target, tmp_path, monkeypatch):
    def refuse(self, other):
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(Path, "hardlink_to", refuse)
    assert prepare(bare, target, tmp_path / "out", *FLAGS) == 0
    assert (tmp_path / "out" / "model.safetensors").is_symlink()


def test_a_directory_is_no_bare_file(bare, target, tmp_path, capsys):
    assert prepare(tmp_path / "original", target, tmp_path / "out", *FLAGS) == 2
    assert "is a directory" in error(capsys)


@pytest.mark.parametrize("out", ["bare.safetensors/out", "x" * 300, "/proc/no/such"])
def test_an_out_that_cannot_be_made(bare, target, tmp_path, capsys, out):
    assert prepare(bare, target, tmp_path / out, *FLAGS) == 2
    assert ("too long" if out[0] == "x" else "cannot write") in error(capsys)


def test_an_existing_directory_is_left_alone(bare, target, tmp_path, capsys):
    (tmp_path / "out").mkdir()
    assert prepare(bare, target, tmp_path / "out", *FLAGS) == 2
    assert "exists already" in error(capsys) and os.listdir(tmp_path / "out") == []


def test_a_failed_copy_leaves_nothing(bare, target, tmp_path, capsys, monkeypatch):
    def full(source, destination):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shutil, "copyfile", full)
    assert prepare(bare, target, tmp_path / "out", *FLAGS, "--weights", "copy") == 2
    assert "No space left" in error(capsys)
    assert not list(tmp_path.glob("*out*"))


def test_a_pickled_mask_embedding_is_refused(bare, target, tmp_path, capsys):
    (tmp_path / "mask_embedding.pt").write_bytes(b"\x80")
    assert prepare(bare, target, tmp_path / "out", *FLAGS) == 2
    assert "mask_embedding.pt is refused" in error(capsys)
    draft = write_drafter(tmp_path / "draft")
    (draft / "mask_embedding.pt").write_bytes(b"\x80")
    assert "mask_embedding.pt is refused" in findings(draft, target)[0].text


def test_a_converted_mask_embedding_goes_along(bare, target, tmp_path, capsys):
    torch.save({"embedding": torch.ones(HIDDEN), "mask_token_id": 255}, tmp_path / "mask_embedding.pt")
    assert main(["convert-mask-embedding", str(tmp_path)]) == 0
    assert prepare(bare, target, tmp_path / "out", *FLAGS) == 0
    assert "mask_embedding.safetensors" in capsys.readouterr().out
    assert torch.equal(mask_embedding.read(tmp_path / "out"), torch.ones(HIDDEN))
    assert findings(tmp_path / "out", target) == []
    other = [flag if flag != "255" else "254" for flag in FLAGS]
    assert prepare(bare, target, tmp_path / "other", *other) == 2
    assert "trained with mask token 255" in error(capsys)


@pytest.mark.parametrize("name", ["markov_head.weight", "candidate_selector.weight", "prefix_gru.weight"])
def test_other_families_are_refused(target, tmp_path, capsys, name):
    other = write_drafter(tmp_path / "other", {**drafter_shapes(), name: (4,)})
    assert prepare(other / "model.safetensors", target, tmp_path / "out", *FLAGS) == 2
    assert "plain DFlash drafters only" in error(capsys)


def test_the_shipped_drafter_is_known(tmp_path):
    """Bare, without any flag: the fields that SGLang reads are those of its own config."""
    own = read_config(SHIPPED)
    target = write_target(
        tmp_path / "target",
        **{"hidden_size": 576, "num_hidden_layers": 30, "vocab_size": 49152, "max_position_embeddings": 8192},
        **{key: own[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")},
    )
    assert prepare(SHIPPED / "model.safetensors", target, tmp_path / "out", "--weights", "symbolic") == 0
    made = read_config(tmp_path / "out")
    irrelevant = {"initializer_range", "use_cache", "max_window_layers"}
    assert {key: made.get(key) for key in own if key not in irrelevant} == {
        key: value for key, value in own.items() if key not in irrelevant
    }


def test_the_same_sizes_with_other_weights_are_not_the_shipped_drafter(tmp_path, capsys):
    target = write_target(tmp_path / "target", hidden_size=576, num_hidden_layers=30, vocab_size=49152)
    other = tmp_path / "other.safetensors"
    content = bytearray((SHIPPED / "model.safetensors").read_bytes())
    content[-1] ^= 1
    other.write_bytes(content)
    assert prepare(other, target, tmp_path / "out") == 2
    assert "is no known drafter" in error(capsys)


# Published drafters, by files that have their headers and no data


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_published_drafters(tmp_path, capsys, name):
    published = PUBLISHED[name]
    bare = sparse_drafter(tmp_path / "bare.safetensors", published)
    target = write_config(tmp_path / "target", published.target)
    assert prepare(bare, target, tmp_path / "out") == 0
    config = read_config(tmp_path / "out")
    flat = {**config, **config["dflash_config"]}
    assert {key: flat.get(key) for key in published.expected} == published.expected
    assert "run verify" in capsys.readouterr().out
    assert [finding for finding in findings(tmp_path / "out", target) if finding.level == "error"] == []


@pytest.mark.parametrize("model_type", ["qwen3", "qwen3_moe", "qwen3_5", "llama", "gemma3_text", "gpt_oss"])
def test_target_families(bare, tmp_path, model_type):
    """Flat configs, and the nested one of Qwen3.5/3.6."""
    sizes = {"hidden_size": 64, "num_hidden_layers": 6, "vocab_size": 256, "max_position_embeddings": 512}
    nested = {"model_type": model_type, "text_config": {**sizes, "model_type": f"{model_type}_text"}}
    config = nested if model_type == "qwen3_5" else {"model_type": model_type, **sizes}
    target = write_config(tmp_path / "target", config)
    assert prepare(bare, target, tmp_path / "out", *FLAGS) == 0
    made = read_config(tmp_path / "out")
    assert (made["vocab_size"], made["num_target_layers"], made["max_position_embeddings"]) == (256, 6, 512)
