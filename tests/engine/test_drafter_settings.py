"""``drafter verify``'s comparison on the demo pair: wrong settings are found, the right ones are left alone.

The target's greedy answers are recorded (``greedy_answers.json``), so one pass over each text gives what a drafter
reads; every setting then drafts at the same positions. Nothing is served.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import drafter_path

from sglang_ddtree.bench.prompts import SETS, load_prompts
from sglang_ddtree.drafter.alternatives import Alternative, other_settings, other_windows
from sglang_ddtree.drafter.answers import Answer, Heads, encode, heads_of, load_target, with_states
from sglang_ddtree.drafter.compare import Comparison, Drafts, compare
from sglang_ddtree.drafter.replica import Replica, load_replica
from sglang_ddtree.drafter.trials import ALPHA, draft, try_all

TAPS = (3, 10, 17, 23, 28)
LAYERS = 30
#: One text in so many is enough for most settings; causality needs them all.
SOME = 2
DEPTHS = 7
#: Settings that verify tries: taps, RoPE base, mask token, block size, causality, window.
SETTINGS = 6


@dataclass
class Wrong:
    """A config with one wrong value. ``right`` is what verify is to find, among ``values`` others, on one text in
    ``texts``."""

    setting: str
    config: dict[str, Any]
    right: Alternative
    texts: int
    values: int


WRONG = {
    "RoPE base 1e4": Wrong(
        "rope_theta", {"rope_theta": 1e4}, Alternative("rope_theta", 1e5, {"rope_theta": 1e5}), SOME, 5
    ),
    "RoPE base 1e7": Wrong(
        "rope_theta", {"rope_theta": 1e7}, Alternative("rope_theta", 1e5, {"rope_theta": 1e5}), SOME, 5
    ),
    "taps one layer late": Wrong(
        "target_layer_ids",
        {"target_layer_ids": [tap + 1 for tap in TAPS]},
        Alternative("target_layer_ids", list(TAPS), {"target_layer_ids": TAPS}),
        SOME,
        11,
    ),
    "mask token 0": Wrong(
        "mask_token_id", {"mask_token_id": 0}, Alternative("mask_token_id", 16, {"mask_token_id": 16}), SOME, 16
    ),
    "causal blocks": Wrong(
        "is_causal", {"is_causal": True}, Alternative("is_causal", "false", causal=(False, False)), 1, 1
    ),
}


class Recorded:
    """Texts with the target's states, and what each config drafts for them; each is computed once."""

    def __init__(self, model: Path, work: Path):
        self.model, self.work = model, work
        tokenizer, self.target = load_target(model, "cpu", torch.float32)
        prompts = {
            f"{name}/{split}/{prompt.id}": prompt.messages[-1]["content"]
            for name in SETS
            for split in ("heldout", "dev")
            for prompt in load_prompts(name, split, 1000)
        }
        known = json.loads(Path(__file__).with_name("greedy_answers.json").read_text())
        self.texts = [(encode(tokenizer, prompts[name]), answer) for name, answer in known.items()]
        self._drafts: dict[tuple[str, int], Drafts] = {}

    @cached_property
    def heads(self) -> Heads:
        return heads_of(self.target)

    @cached_property
    def answers(self) -> list[Answer]:
        """Every text; all layers of those that are asked for taps, or memory would not do."""
        found = []
        with torch.inference_mode():
            for number, (prompt, answer) in enumerate(self.texts):
                layers = range(LAYERS) if number % SOME == 0 else TAPS
                found.append(with_states(self.target, prompt + answer, len(prompt), layers))
        return found

    def replica(self, name: str) -> Replica:
        """The shipped drafter with the config of ``WRONG[name]``; "right" changes nothing."""
        changes = WRONG[name].config if name in WRONG else {}
        directory = self.work / name.replace(" ", "-")
        if not directory.exists():
            directory.mkdir()
            config = json.loads((drafter_path() / "config.json").read_text())
            for key, value in changes.items():
                (config["dflash_config"] if key in config["dflash_config"] else config)[key] = value
            if "rope_theta" in changes:
                config["rope_parameters"]["rope_theta"] = changes["rope_theta"]
            (directory / "config.json").write_text(json.dumps(config))
            os.symlink(drafter_path() / "model.safetensors", directory / "model.safetensors")
        return load_replica(directory, self.model)

    def drafts(self, name: str, step: int) -> Drafts:
        """What a config drafts at every fourth position of every ``step``-th text."""
        if name == "right" and step > 1:
            every = self.drafts(name, 1)
            kept = every.prompt % step == 0
            return Drafts(every.right[kept], every.log_prob[kept], every.prompt[kept])
        if (name, step) not in self._drafts:
            some = self.answers[::step]
            where = [torch.arange(one.prompt, len(one.tokens) - DEPTHS, 4) for one in some]
            with torch.inference_mode():
                self._drafts[name, step] = draft(self.replica(name), some, self.heads, where, DEPTHS)
        return self._drafts[name, step]

    def found(self, given: str, other: str, texts: int) -> Comparison:
        return compare(self.drafts(given, texts), self.drafts(other, texts))


@pytest.fixture(scope="module")
def recorded(model, tmp_path_factory):
    return Recorded(model, tmp_path_factory.mktemp("settings"))


def test_the_recorded_answers_are_the_targets_own(recorded):
    for prompt, answer in recorded.texts[::16]:
        with torch.inference_mode():
            logits = recorded.target(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
        assert logits.argmax(-1).tolist() == answer


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_setting_is_found_and_the_right_one_is_not(recorded, name):
    wrong = WRONG[name]
    alpha = ALPHA / (SETTINGS * wrong.values)
    found = recorded.found(name, "right", wrong.texts)
    assert found.prompts == len(recorded.answers[:: wrong.texts])
    assert found.better(alpha), found
    assert not recorded.found("right", name, wrong.texts).better(alpha)


@pytest.mark.parametrize("name", WRONG)
def test_the_right_value_tried_is_the_right_config(recorded, name):
    """What verify tries instead of a wrong config is the drafter of the right one, number for number."""
    wrong = recorded.replica(name)
    few = recorded.answers[:1]
    where = [torch.arange(few[0].prompt, few[0].prompt + 9)]
    with torch.inference_mode():
        tried = draft(wrong, few, recorded.heads, where, DEPTHS, WRONG[name].right)
        right = draft(recorded.replica("right"), few, recorded.heads, where, DEPTHS)
        given = draft(wrong, few, recorded.heads, where, DEPTHS)
    assert torch.equal(tried.log_prob, right.log_prob)
    assert not torch.allclose(given.log_prob, right.log_prob, atol=1e-3)
    offered = [*other_settings(wrong, recorded.model, LAYERS)]
    assert WRONG[name].right in offered
    assert sum(one.setting == WRONG[name].setting for one in offered) == WRONG[name].values


@pytest.mark.parametrize("seed", [1, 2])
def test_everything_tried_on_the_right_config_and_nothing_found(recorded, seed):
    order = torch.randperm(len(recorded.answers[::SOME]), generator=torch.Generator().manual_seed(seed))
    some = [recorded.answers[::SOME][i] for i in order[:8]]
    replica = recorded.replica("right")
    others = [*other_settings(replica, recorded.model, LAYERS)]
    others += other_windows(replica, max(len(one.tokens) for one in some))
    with torch.inference_mode():
        trials = try_all(replica, some, recorded.heads, others, 32, lambda text: None)
    assert len({trial.alternative.setting for trial in trials}) >= 5 and len(trials) == len(others)
    assert [trial.alternative for trial in trials if trial.better] == []


def test_no_draw_of_prompts_accuses_the_right_config(recorded):
    generator = torch.Generator().manual_seed(7)
    for name, wrong in WRONG.items():
        right, other = (recorded.drafts(each, wrong.texts) for each in ("right", name))
        prompts = right.prompt.unique()
        alpha = ALPHA / (SETTINGS * wrong.values)
        for _ in range(100):
            drawn = prompts[torch.randperm(len(prompts), generator=generator)[: max(10, len(prompts) // 3)]]
            kept = torch.isin(right.prompt, drawn)
            pair = [Drafts(one.right[kept], one.log_prob[kept], one.prompt[kept]) for one in (right, other)]
            assert not compare(*pair).better(alpha), name
