"""The FlashInfer variant compiles for GPUs that are not here. The compiler comes with SGLang's own requirements."""

from __future__ import annotations

import pytest

from sglang_ddtree.gpu import flashinfer_build
from sglang_ddtree.gpu.flashinfer_build import ARCHITECTURES, VARIANTS, build


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_the_variant_compiles(arch, tmp_path):
    """With all that it can do: FP8 keys and values, soft cap, window."""
    done = build(VARIANTS[-1], arch, tmp_path)
    assert done.cubin_bytes > 10_000
    assert (tmp_path / f"sm_{arch}.cubin").read_bytes().startswith(b"\x7fELF")


def test_a_mistake_in_the_source_is_found(tmp_path, monkeypatch):
    from sglang_ddtree.attention import flashinfer_tree

    broken = tmp_path / "broken.cuh"
    broken.write_text(flashinfer_tree.SOURCE.read_text().replace("prefix_len = kv_len - qo_len;", "prefix = 1;"))
    monkeypatch.setattr(flashinfer_tree, "SOURCE", broken)
    with pytest.raises(RuntimeError, match='identifier "prefix" is undefined'):
        build(VARIANTS[0], "86", tmp_path)


def test_without_a_compiler_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr(flashinfer_build.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(flashinfer_build.shutil, "which", lambda name: None)
    with pytest.raises(FileNotFoundError, match="pip install nvidia-cuda-nvcc"):
        flashinfer_build.find_nvcc()
