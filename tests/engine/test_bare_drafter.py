"""The shipped drafter as one bare file: prepared again, it is the same drafter, and a wrong setting is found out."""

from __future__ import annotations

import json
import os
import shutil

import pytest
import torch
from engines import assert_equal, base_flags, ddtree_flags, drafter_path
from safetensors import safe_open

from sglang_ddtree.bench.lossless import acceptance_length, generate_all
from sglang_ddtree.bench.prompts import SETS, load_prompts
from sglang_ddtree.drafter import verify as verifying
from sglang_ddtree.drafter.cli import main
from sglang_ddtree.drafter.verify import Report

TOKENS = 32


@pytest.fixture(scope="module")
def prepared(model, tmp_path_factory):
    """Made from the weights file alone."""
    tmp = tmp_path_factory.mktemp("bare")
    bare = tmp / "dflash.safetensors"
    shutil.copy(drafter_path() / "model.safetensors", bare)
    assert main(["prepare", str(bare), "--target", str(model), "--out", str(tmp / "made")]) == 0
    return tmp / "made"


def test_prepare_restores_what_the_drafter_was_trained_with(prepared, model, capsys):
    made, original = (json.loads((path / "config.json").read_text()) for path in (prepared, drafter_path()))
    # What the drafter's computation depends on; the rest is decoration.
    names = "block_size dflash_config hidden_size intermediate_size num_hidden_layers num_attention_heads head_dim"
    names += " num_key_value_heads vocab_size rms_norm_eps rope_theta sliding_window"
    for name in names.split():
        assert made[name] == original[name], name
    assert main(["check", str(prepared), "--target", str(model)]) == 0
    assert "fits" in capsys.readouterr().out


@pytest.fixture(scope="module")
def served(serve, questions):
    """Greedy answers of a drafter directory, from a server of its own; the shipped drafter's are asked for once."""
    answers = {}

    def ask(model, path):
        if path not in answers:
            flags = [*base_flags(model), *ddtree_flags(7), "--max-total-tokens", "8192"]
            flags[flags.index("--speculative-draft-model-path") + 1] = str(path)
            with serve(path.name, flags) as server:
                answers[path] = generate_all(server, questions[:8], TOKENS, 1)
        return answers[path]

    return ask


def assert_same_drafts(got, original):
    assert [one.verify_steps for one in got] == [one.verify_steps for one in original]
    assert (acceptance_length(got) or 0) > 1.5


def test_served_it_gives_the_same_tokens_and_acceptance(served, model, prepared, questions, reference):
    got = served(model, prepared)
    assert_equal(questions[:8], reference.answers(questions[:8], TOKENS), got)
    assert_same_drafts(got, served(model, drafter_path()))


def test_served_with_its_mask_row_as_a_mask_embedding(served, model, prepared, questions, reference, tmp_path):
    """Mask token 0, and the vector of the right mask token in a file of its own: the same drafts. Without the vector
    they are far worse, which test_drafter_settings.py has as "mask token 0"."""
    draft = tmp_path / "mask-embedding"
    draft.mkdir()
    config = json.loads((prepared / "config.json").read_text())
    right, config["dflash_config"]["mask_token_id"] = config["dflash_config"]["mask_token_id"], 0
    (draft / "config.json").write_text(json.dumps(config))
    os.link(prepared / "model.safetensors", draft / "model.safetensors")
    with safe_open(model / "model.safetensors", framework="pt") as weights:
        # A copy: a view would be saved with all rows.
        vector = weights.get_slice("model.embed_tokens.weight")[right].clone()
    torch.save({"embedding": vector, "mask_token_id": 0}, draft / "mask_embedding.pt")
    assert main(["convert-mask-embedding", str(draft)]) == 0
    got = served(model, draft)
    assert_equal(questions[:8], reference.answers(questions[:8], TOKENS), got)
    assert_same_drafts(got, served(model, drafter_path()))


# verify


@pytest.fixture(scope="module")
def measured(model, prepared, tmp_path_factory):
    """``verify`` with some settings changed; the target answers once."""
    tmp = tmp_path_factory.mktemp("verify")
    texts = [prompt.messages[-1]["content"] for name in SETS for prompt in load_prompts(name, "heldout", 3)]
    (tmp / "prompts.txt").write_text("".join(" ".join(text.split()) + "\n" for text in texts))
    answers: dict[tuple[int, ...], object] = {}
    ask = verifying.answer

    def once(target_dir, questions, layers, **options):
        key = tuple(layers)
        if key not in answers:
            answers[key] = ask(target_dir, questions, layers, **options)
        return answers[key]

    def run(**changes) -> Report:
        draft = tmp / f"draft-{len(list(tmp.iterdir()))}"
        draft.mkdir()
        config = json.loads((prepared / "config.json").read_text())
        for name, value in changes.items():
            if name in config["dflash_config"]:
                config["dflash_config"][name] = value
            else:
                config[name] = value
        (draft / "config.json").write_text(json.dumps(config))
        os.link(prepared / "model.safetensors", draft / "model.safetensors")
        return verifying.verify(draft, model, tmp / "prompts.txt", max_tokens=40, positions=160)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verifying, "answer", once)
        yield run


def test_verify_finds_nothing_wrong_with_the_right_settings(measured):
    report = measured()
    assert report.faults == [] and report.agreement[0] > 0.35
    # The training measured 1.91 and 2.47 on whole answers of these sets.
    assert 1.4 < report.lengths["chain"] < report.lengths["16"] < 3.5


def test_verify_names_taps_in_the_wrong_order(measured, prepared):
    taps = json.loads((prepared / "config.json").read_text())["dflash_config"]["target_layer_ids"]
    faults = measured(target_layer_ids=taps[::-1]).faults
    assert any("target_layer_ids looks wrong" in fault and str(taps) in fault for fault in faults), faults
