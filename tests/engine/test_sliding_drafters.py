"""The drafter's hidden states in SGLang's draft pass, DFLASH's and DDTREE's, against the drafter in plain torch.

Drafters as Qwen3.6-27B's: sliding-window layers and one of full attention at the end. What a wrong window or causality
would give is compared as well, and must be seen.
"""

from __future__ import annotations

import json
from typing import NamedTuple

import pytest
import random_models
import torch
from engines import STRICT
from schedulers import Schedulers, ask
from server_plugins import INTERPRETER, INTERPRETER_FLAGS, joined

from sglang_ddtree.drafter.replica import load_replica
from sglang_ddtree.training.model import block_embeddings
from sglang_ddtree.training.target import Cache, forward, load_target

LENGTHS, TOKENS = (5, 70, 33), 7
#: Windows of the sliding layers: shorter than most contexts, and longer than all.
SHORT, LONG = 24, 400
#: Of ``--speculative-draft-window-size``.
DRAFT_WINDOW = 40
CLOSE = {"rtol": 1e-3, "atol": 1e-3}


class Case(NamedTuple):
    """``is_causal`` as in the drafter's config (None: it does not say)."""

    window: int
    is_causal: bool | None
    draft_window: int | None


CPU, INTERPRETED = "ddtree_cpu", "ddtree_interpreter"
CASES = [
    *((CPU, Case(SHORT, is_causal, None)) for is_causal in (None, True, False)),
    *((CPU, Case(SHORT, is_causal, DRAFT_WINDOW)) for is_causal in (None, True)),
    (CPU, Case(LONG, None, None)),
    *((INTERPRETED, Case(SHORT, is_causal, None)) for is_causal in (None, True)),
]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tmp_path_factory.mktemp("sliding")


@pytest.fixture(scope="module")
def target(directory):
    return random_models.write_target(directory / "target")


@pytest.fixture(scope="module")
def asked():
    return random_models.questions(7, LENGTHS)


@pytest.fixture(scope="module")
def started(directory, target, asked):
    """``started(platform)``: schedulers with the CPU platform's attention, or SGLang's Triton attention in Triton's
    interpreter, and plain decoding's answers; each is started once."""
    found = {}

    def start(name):
        if name not in found:
            place = directory / name
            oracle = random_models.write_oracle(place / "oracle", [])
            platform = INTERPRETER if name == INTERPRETED else {"SGLANG_PLATFORM": name}
            schedulers = Schedulers(place, joined(platform, STRICT, oracle))
            found[name] = schedulers, []
            flags = ["--model-path", str(target), *INTERPRETER_FLAGS]
            found[name][1].extend(schedulers.run("plain", flags, [ask(asked, [TOKENS] * len(asked))]).answers[0])
        return found[name]

    yield start
    for schedulers, _ in found.values():
        schedulers.close()


@pytest.mark.parametrize(
    ("platform", "case"),
    CASES,
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, Case) else None,
)
def test_the_draft_pass_is_the_drafters(started, target, asked, tmp_path, platform, case):
    schedulers, answers = started(platform)
    drafter = random_models.write_drafter(tmp_path / "drafter", (case.window, case.window, None), case.is_causal)
    flags = ["--model-path", str(target), *INTERPRETER_FLAGS, "--speculative-draft-model-path", str(drafter)]
    if case.draft_window is not None:
        flags += ["--speculative-draft-window-size", str(case.draft_window)]
    known = [(q.input_ids, a.ids) for q, a in zip(asked, answers, strict=True)]
    env = random_models.write_answers(tmp_path / "known.json", known)
    passes = {}
    for name, more in (("DFLASH", []), ("DDTREE", ["--speculative-ddtree-budget", "12"])):
        file, steps = tmp_path / f"{name}.pt", [ask(asked, [TOKENS] * len(asked))]
        run = schedulers.run(name, [*flags, "--speculative-algorithm", name, *more], steps, env, draft_passes=file)
        assert [a.ids for a in run.answers[0]] == [a.ids for a in answers]
        passes[name] = torch.load(file)

    reference = Reference(drafter, target, [[*q.input_ids, *a.ids] for q, a in zip(asked, answers, strict=True)])
    sliding = reference.causal[0]
    for name, found in passes.items():
        # With overlap a step begins before the last one is known to end the answer.
        found[:] = [one for one in found if reference.covers(one)]
        assert len(found) >= 4, name
        for one in found:
            torch.testing.assert_close(one["hidden"], reference.hidden(one, case), **CLOSE)
        wrong = [case._replace(window=case.window - 1)] if case.window == SHORT else []
        if case.draft_window is not None:
            wrong.append(case._replace(draft_window=case.draft_window - 1))
        for other in wrong:
            assert differs(found, lambda one, other=other: reference.hidden(one, other)), (name, other)
        for causal in ((not sliding, not sliding, reference.causal[2]), (sliding, sliding, not reference.causal[2])):
            assert differs(found, lambda one, causal=causal: reference.hidden(one, case, causal)), (name, causal)

    # Where both had a block at the same place, it is the same block.
    flat = {(one["request"], int(one["positions"][0])): one["hidden"] for one in passes["DFLASH"]}
    same = [one for one in passes["DDTREE"] if (one["request"], int(one["positions"][0])) in flat]
    assert len(same) >= 4
    for one in same:
        torch.testing.assert_close(one["hidden"], flat[one["request"], int(one["positions"][0])], rtol=1e-4, atol=1e-4)


def differs(found, other):
    """Whether some block is not what ``other`` says."""
    return any(not torch.allclose(one["hidden"], other(one), **CLOSE) for one in found)


class Reference:
    """The drafter's and the target's forward passes in plain torch; the config's causality by SGLang's rule."""

    def __init__(self, drafter, target, tokens):
        self._drafter = load_replica(drafter, target).drafter
        config = json.loads((drafter / "config.json").read_text())
        given = config.get("is_causal")
        self.causal = [kind == "sliding_attention" if given is None else given for kind in config["layer_types"]]
        self._embed = load_target(target).embed
        self._tokens, self._contexts = tokens, []
        for sequence in tokens:
            taps = tapped(load_target(target), sequence, self._drafter.shape.target_layer_ids)
            self._contexts.append(self._drafter.project(taps).detach())

    def covers(self, one):
        return int(one["positions"][0]) < len(self._tokens[one["request"]])

    @torch.no_grad()
    def hidden(self, one, case, causal=None):
        """Hidden states ``[B, hidden]`` of the block that a draft pass computed."""
        windows = (case.window, case.window, None)
        for layer, is_causal, window in zip(self._drafter.layers, causal or self.causal, windows, strict=True):
            layer.self_attn.causal, layer.self_attn.window = is_causal, window
        start = int(one["positions"][0])
        assert one["positions"].tolist() == list(range(start, start + self._drafter.shape.block_size))
        assert one["root"] == self._tokens[one["request"]][start]
        first = 0 if case.draft_window is None else max(0, start - case.draft_window)
        context = self._contexts[one["request"]][:, first:start]
        block = block_embeddings(self._embed, torch.tensor([[one["root"]]]), self._drafter.shape)
        return self._drafter(context, torch.tensor([[start]]), block, torch.arange(first, start))[0, 0]


@torch.no_grad()
def tapped(target, tokens, layers):
    """The target's hidden states after some layers, ``[1, tokens, layers * hidden]``."""
    count = len(tokens)
    mask = torch.full((1, count, count), float("-inf")).triu(1)
    ids, places = torch.tensor([tokens]), torch.arange(count)[None]
    return forward(target, ids, places, Cache.empty(target, 1, count), 0, mask, tuple(layers))[1]
