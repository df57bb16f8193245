"""When the Triton kernels are used, and that nothing needs Triton before."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from sglang_ddtree import config
from sglang_ddtree.tree.kernels import dispatch

CUDA = torch.device("cuda", 0)


def test_cuda_within_the_limits_takes_the_kernels():
    assert dispatch.use_kernels(CUDA, 257, max_depth=31, top_k=32)


def test_what_the_flags_allow_is_within_the_limits():
    assert config.MAX_BUDGET <= dispatch.MAX_BUDGET and config.MAX_TOP_K <= dispatch.MAX_TOP_K


@pytest.mark.parametrize(
    ("device", "width", "limits"),
    [
        ("cpu", 17, {}),
        ("meta", 17, {}),
        ("cuda", 258, {}),
        ("cuda", 17, {"max_depth": 32}),
        ("cuda", 17, {"top_k": 33}),
    ],
)
def test_everything_else_is_torch(device: str, width: int, limits: dict):
    assert not dispatch.use_kernels(torch.device(device), width, **limits)


def test_without_triton_it_is_torch(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(dispatch, "has_triton", lambda: False)
    assert not dispatch.use_kernels(CUDA, 17)


def test_the_tree_works_where_triton_cannot_be_imported():
    program = """
import sys
sys.modules["triton"] = None  # importing it now raises ImportError
import torch
from sglang_ddtree.tree import bits, build, mask, walk
tree = build.build_tree(torch.zeros(40, 3, 4), torch.arange(4).expand(40, 3, 4).contiguous(), torch.arange(40), 9)
bits.ancestor_bits(tree); mask.full_mask(tree, torch.arange(40)); walk.walk_targets(tree, tree.tokens, 3)
print(tree.num_nodes.sum().item())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stdout.strip() == "400", done.stderr
