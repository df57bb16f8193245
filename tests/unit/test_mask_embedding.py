"""``mask_embedding.pt`` becomes a safetensors file, and nothing of the pickle is run or believed."""

from __future__ import annotations

import os
import pickle
import zipfile

import pytest
import safetensors.torch
import torch
from safetensors.torch import save_file
from tiny_models import HIDDEN, write_drafter, write_target

from sglang_ddtree.drafter import mask_embedding
from sglang_ddtree.drafter.check import findings
from sglang_ddtree.drafter.cli import main
from sglang_ddtree.drafter.files import has_weights

VECTOR = torch.linspace(-1, 1, HIDDEN)
SAVED = {"embedding": VECTOR, "mask_token_id": 255}


@pytest.fixture
def draft(tmp_path):
    return write_drafter(tmp_path / "draft")


@pytest.fixture
def target(tmp_path):
    return write_target(tmp_path / "target")


def convert(directory, *flags) -> int:
    return main(["convert-mask-embedding", str(directory), *flags])


def test_converted_it_is_used_and_the_original_stays(draft, target, capsys):
    torch.save(SAVED, draft / "mask_embedding.pt")
    assert "convert-mask-embedding" in findings(draft, target)[0].text
    assert convert(draft) == 0
    assert findings(draft, target) == []
    assert torch.equal(mask_embedding.read(draft), VECTOR)
    assert (draft / "mask_embedding.pt").exists()  # DFLASH reads it
    assert convert(draft) == 2 and "exists already" in capsys.readouterr().err


@pytest.mark.parametrize(
    "saved",
    [
        {**SAVED, "embedding": VECTOR.bfloat16()},
        {**SAVED, "embedding": torch.nn.Parameter(VECTOR[None].clone()), "mask_token_id": torch.tensor(255)},
        {**SAVED, "per_position": False},
    ],
)
def test_forms_that_sglang_reads(draft, target, saved):
    torch.save(saved, draft / "mask_embedding.pt")
    assert convert(draft / "mask_embedding.pt") == 0 and findings(draft, target) == []
    torch.testing.assert_close(mask_embedding.read(draft), VECTOR, atol=0.01, rtol=0)


def test_a_bare_tensor_needs_its_token(draft, target, capsys):
    torch.save(VECTOR, draft / "mask_embedding.pt")
    assert convert(draft) == 2 and "--mask-token-id" in capsys.readouterr().err
    assert convert(draft, "--mask-token-id", "255") == 0 and findings(draft, target) == []


class Hostile:
    def __reduce__(self):
        return os.mkdir, (os.environ["HOSTILE_DIR"],)


@pytest.mark.parametrize(
    ("saved", "reason"),
    [
        ({**SAVED, "per_position": True}, "a vector for each position"),
        ({**SAVED, "mask_token_id": "255"}, "no valid mask_token_id"),
        ({**SAVED, "mask_token_id": -1}, "no valid mask_token_id"),
        ({**SAVED, "embedding": None}, "no plain floating-point tensor"),
        ({**SAVED, "embedding": torch.arange(HIDDEN)}, "no plain floating-point tensor"),
        ({**SAVED, "embedding": torch.eye(4).to_sparse()}, "no plain floating-point tensor"),
        ({**SAVED, "embedding": torch.ones(2, HIDDEN)}, "one vector"),
        ({**SAVED, "embedding": torch.ones(1).expand(10**9)}, "one vector"),
        ({**SAVED, "embedding": torch.full((HIDDEN,), torch.nan)}, "not finite"),
        ([VECTOR], "no plain floating-point tensor"),
    ],
)
def test_what_is_not_one_vector_is_refused(draft, capsys, saved, reason):
    torch.save(saved, draft / "mask_embedding.pt")
    assert convert(draft, "--mask-token-id", "255") == 2
    assert reason in capsys.readouterr().err
    assert not list(draft.glob("*mask_embedding*safetensors*"))


def test_nothing_of_the_file_is_run(draft, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("HOSTILE_DIR", str(tmp_path / "made"))
    torch.save({**SAVED, "extra": Hostile()}, draft / "mask_embedding.pt")
    assert convert(draft) == 2 and "plain tensors" in capsys.readouterr().err
    (draft / "mask_embedding.pt").write_bytes(pickle.dumps(Hostile()))
    assert convert(draft) == 2 and "plain tensors" in capsys.readouterr().err
    assert not (tmp_path / "made").exists()


def test_a_directory_that_cannot_be_written(draft, capsys, monkeypatch):
    """The error of safetensors, which is no OSError; root may write everywhere else."""
    torch.save(SAVED, draft / "mask_embedding.pt")
    monkeypatch.setattr(safetensors.torch, "save_file", lambda tensors, path, **_: save_file(tensors, "/proc/no/such"))
    assert convert(draft) == 2
    error = capsys.readouterr().err
    assert "cannot write" in error and "No such file" in error and error.count("\n") == 1


def test_files_that_unpack_to_more_are_refused(draft, capsys):
    path = draft / "mask_embedding.pt"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as parts:
        parts.writestr("archive/data.pkl", bytes(50_000_000))
    assert path.stat().st_size < 1_000_000
    assert convert(draft) == 2 and "unpacks to more" in capsys.readouterr().err
    path.write_bytes(bytes(1_000_001))
    assert convert(draft) == 2 and "larger than" in capsys.readouterr().err
    path.write_bytes(b"")
    assert convert(draft) == 2 and "not a torch file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("saved", "reason"),
    [
        ({**SAVED, "mask_token_id": 254}, "trained with mask token 254"),
        ({**SAVED, "embedding": torch.ones(HIDDEN + 1)}, "hidden size is 64"),
    ],
)
def test_one_that_does_not_fit_the_drafter(draft, target, saved, reason):
    torch.save(saved, draft / "mask_embedding.pt")
    assert convert(draft) == 0
    assert reason in findings(draft, target)[0].text


def test_one_whose_original_has_changed(draft, target):
    torch.save(SAVED, draft / "mask_embedding.pt")
    assert convert(draft) == 0
    torch.save({**SAVED, "embedding": -VECTOR}, draft / "mask_embedding.pt")
    assert "made from another" in findings(draft, target)[0].text


def test_another_file_of_that_name(draft, target):
    os.link(draft / "model.safetensors", draft / "mask_embedding.safetensors")
    assert "was not made by" in findings(draft, target)[0].text


def test_it_is_no_weights_file(draft):
    torch.save(SAVED, draft / "mask_embedding.pt")
    assert convert(draft) == 0
    (draft / "model.safetensors").unlink()
    assert not has_weights(draft)
