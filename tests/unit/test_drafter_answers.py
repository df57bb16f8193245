"""The prompts of ``drafter verify``, and what it refuses before it loads anything."""

from __future__ import annotations

import json

import pytest
from tiny_models import DRAFTER, write_config, write_drafter, write_target

from sglang_ddtree.drafter.answers import read_prompts
from sglang_ddtree.drafter.cli import main
from sglang_ddtree.errors import DDTreeError


def test_a_prompt_a_line(tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_text("one\n\n  two \n" + "more\n" * 300)
    assert read_prompts(path)[:3] == ["one", "two", "more"] and len(read_prompts(path)) == 256


def test_prompts_of_several_lines(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('"def f():\\n    pass"\n{"id": 3, "prompt": "two"}\n')
    assert read_prompts(path) == ["def f():\n    pass", "two"]


@pytest.mark.parametrize("line", ["plain", "{}", '{"prompt": 5}', "[1]", '" "', "[" * 100_000])
def test_lines_that_are_no_prompts(tmp_path, line):
    path = tmp_path / "prompts.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(DDTreeError, match="neither a JSON text") as error:
        read_prompts(path)
    assert len(str(error.value)) < 300 and "\n" not in str(error.value)


@pytest.fixture
def verify(tmp_path, capsys):
    """The last line that an ``sglang-ddtree drafter verify`` that fails prints."""
    (tmp_path / "prompts.txt").write_text("one\ntwo\n")
    target = write_target(tmp_path / "target")

    def run(drafter, *flags) -> str:
        command = ["verify", str(drafter), "--target", str(target), "--prompts", str(tmp_path / "prompts.txt")]
        assert main([*command, *flags]) == 2
        lines = capsys.readouterr().err.splitlines()
        assert all(line.startswith("[verify] ") for line in lines[:-1])
        return lines[-1]

    return run


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--max-tokens", "7"], "--max-tokens must be"),
        (["--positions", "31"], "--positions must be"),
        (["--context", "15"], "--context must be"),
        (["--device", "nonsense"], "--device nonsense cannot be used"),
        (["--device", "meta"], "--device meta cannot be used"),
    ],
)
def test_flags_that_make_no_sense(verify, tmp_path, flags, reason):
    assert reason in verify(write_drafter(tmp_path / "draft"), *flags)


def test_pickled_weights_are_not_measured(verify, tmp_path):
    """They were: as a drafter of random numbers."""
    draft = write_config(tmp_path / "draft", DRAFTER)
    (draft / "pytorch_model.bin").write_bytes(b"")
    assert "pickled weights, which it does not open" in verify(draft)


def test_what_a_target_lacks_is_named(verify, tmp_path):
    draft = write_drafter(tmp_path / "draft")
    assert "cannot load the tokenizer of the target" in verify(draft)
    tokenizer = {
        "version": "1.0",
        "added_tokens": [],
        "model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"},
    }
    (tmp_path / "target" / "tokenizer.json").write_text(json.dumps(tokenizer))
    (tmp_path / "target" / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    assert "cannot load the model of the target" in verify(draft)
