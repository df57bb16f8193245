"""The kernels through the functions that a server calls, and the kernel parts of ``scripts/gpu_check.py``."""

from __future__ import annotations

import json

import pytest
import torch

from sglang_ddtree.gpu import checks, replay, states
from sglang_ddtree.gpu.cases import Size
from sglang_ddtree.tree import bits, build, mask, walk
from sglang_ddtree.tree.kernels import build as build_kernels
from sglang_ddtree.tree.kernels import mask as mask_kernels
from sglang_ddtree.tree.kernels import walk as walk_kernels
from sglang_ddtree.tree.kernels.delta_rule import fold_triton

CPU = torch.device("cpu")


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The dispatch answers as on a GPU; which kernels were launched."""
    for module in (bits, build, mask, walk):
        monkeypatch.setattr(module, "use_kernels", lambda *args, **limits: True)
    launched: list[str] = []
    for module, name in (
        (build_kernels, "build_tree_triton"),
        (mask_kernels, "ancestor_bits_triton"),
        (mask_kernels, "write_ancestor_mask"),
        (mask_kernels, "write_tree_columns"),
        (walk_kernels, "walk_targets_triton"),
    ):
        original = getattr(module, name)
        monkeypatch.setattr(
            module, name, lambda *args, f=original, name=name, **kw: (launched.append(name), f(*args, **kw))[1]
        )
    return launched


def test_the_public_functions_launch_the_kernels(on_a_gpu: list[str]):
    replay.check_replays(Size(40, 16, 7, 8), CPU, 2)
    assert set(on_a_gpu) == {
        *("build_tree_triton", "ancestor_bits_triton", "write_ancestor_mask", "write_tree_columns"),
        "walk_targets_triton",
    }


def test_a_sampled_walk_launches_the_kernel(on_a_gpu: list[str]):
    log_probs = torch.tensor([[[-0.1, -0.5], [-0.2, -0.3]]])
    tree = build.build_tree_reference(log_probs, torch.tensor([[[5, 6], [7, 8]]]), torch.tensor([4]), 6)
    probs = torch.zeros(1, 7, 10)
    probs[0, :, 7] = 1.0
    probs[0, 0] = torch.nn.functional.one_hot(torch.tensor(6), 10)
    found = walk.walk_sampled(tree, probs, 2)
    assert on_a_gpu == ["walk_targets_triton"]
    path = found.accepted[0].tolist()
    assert [int(tree.tokens[0, node]) for node in path] == [4, 6, 7] and found.bonus.tolist() == [7]


def test_kernel_parts_of_the_script(tmp_path):
    arguments = ["--device", "cpu", "--parts", "kernels", "timing", "--trees", "16", "--repeats", "1"]
    arguments += ["--batch-sizes", "2", "--budgets", "8", "--out", str(tmp_path), "--name", "tried"]
    assert checks.main(arguments) == 0
    parts = json.loads((tmp_path / "tried.json").read_text())["parts"]
    assert parts["kernels"]["status"] == parts["timing"]["status"] == "passed"
    assert parts["kernels"]["trees"] == 16 * 9
    assert parts["timing"]["uno"] == []  # a budget of 8 is below the depth; tests of their own for the others
    names = [row["what"] for row in parts["timing"]["rows"]]
    assert names == ["build", "mask", "bit rows", "walk", "build + mask + walk"]
    assert all(row["kernel_eager"] > 0 and row["torch_graph"] > 0 for row in parts["timing"]["rows"])


def test_the_states_part_of_the_script(tmp_path):
    arguments = ["--device", "cpu", "--parts", "states", "--repeats", "1", "--out", str(tmp_path), "--name", "tried"]
    assert checks.main(arguments) == 0
    part = json.loads((tmp_path / "tried.json").read_text())["parts"]["states"]
    assert part["status"] == "passed" and part["compared"] == 2 and part["worst"] < 1e-4
    assert [(row["bs"], row["width"]) for row in part["rows"]] == [(1, 5), (2, 5)]
    times = ("deltas_verify", "deltas_commit", "stored_verify", "stored_commit")
    assert all(row[name] > 0 for row in part["rows"] for name in times)
    page = (tmp_path / "tried.md").read_text()
    assert "One Gated DeltaNet layer" in page and "no GPU result" in page


def test_what_is_timed_computes_the_same():
    """Both forms on the same step: outputs, and states after the commit."""
    found = []
    for form in ("deltas", "stored"):
        step = states.random_step(states.SMALL, 2, 3, 7, CPU)
        if form == "deltas":
            deltas = states.deltas_of(states.SMALL, step)
            outputs = states.verify_deltas(step, deltas)
            fold_triton(step.states, step.slots, step.last, None, None, deltas)
        else:
            nodes = torch.zeros(2, 3, 7, *step.states.shape[2:])
            outputs = states.verify_stored(step, nodes)
            states.commit_stored(step, nodes)
        found.append((torch.stack(outputs).float(), step.states))
    (outputs, committed), (stored_outputs, stored) = found
    torch.testing.assert_close(outputs, stored_outputs, rtol=2**-6, atol=1e-4)
    torch.testing.assert_close(committed, stored, rtol=1e-4, atol=1e-4)
    assert not torch.equal(committed, states.random_step(states.SMALL, 2, 3, 7, CPU).states)


@pytest.mark.parametrize("part", ["verify", "fold"])
def test_a_wrong_kernel_fails_the_states_part(tmp_path, monkeypatch, part):
    if part == "verify":
        right = states.verify_triton
        monkeypatch.setattr(states, "verify_triton", lambda *args: right(*args).mul_(1.02))
    else:
        right = states.fold_triton
        monkeypatch.setattr(
            states, "fold_triton", lambda s, to, last, *rest: right(s, to, (last - 1).clamp(min=0), *rest)
        )
    arguments = ["--device", "cpu", "--parts", "states", "--repeats", "1", "--out", str(tmp_path), "--name", "tried"]
    assert checks.main(arguments) == 1
    reason = json.loads((tmp_path / "tried.json").read_text())["parts"]["states"]["reason"]
    assert ("outputs differ" if part == "verify" else "committed states differ") in reason
