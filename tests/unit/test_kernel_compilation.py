"""The kernels compile for GPUs that are not here. ``scripts/compile_kernels.py`` does every variant."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from sglang_ddtree.gpu.compilation import ARCHITECTURES, BUDGETS, Variant, compile_variant, delta_variants, variants

SCRIPT = Path(__file__).parents[2] / "scripts" / "compile_kernels.py"
LARGEST = [variant for variant in variants((256,))]


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


#: One shape has all kernels.
DELTA_RULE = list(delta_variants())[:3]


@pytest.mark.parametrize("variant", [*LARGEST, *DELTA_RULE], ids=lambda variant: variant.name)
def test_the_largest_variants_compile(variant: Variant):
    for arch in ARCHITECTURES:
        done = compile_variant(variant, arch)
        assert done.cubin_bytes > 1000
        # 255 is all that a thread can have; what does not fit goes to the stack.
        assert 0 < done.registers <= 255 and done.stack == 0, f"registers spill: {done}"


def test_every_kernel_and_budget_is_listed():
    every = list(variants())
    assert {variant.name for variant in every} == {"build", "bit rows", "mask", "full mask", "walk"}
    builds = {variant.constants["NODES"] for variant in every if variant.name == "build"}
    assert builds == {32, 64, 128, 256} and max(BUDGETS) == 256


def test_the_delta_rule_is_listed_for_both_shapes_and_state_types():
    every = list(delta_variants())
    kinds = {(variant.name, variant.constants["HV"]) for variant in every}
    assert len(kinds) == len(every) == 12 and {heads for _, heads in kinds} == {24, 48}
    for variant in every:
        signature = variant.signature()
        assert signature["states"] == ("*bf16" if "bf16" in variant.name else "*fp32")
        # Nothing is left to the default that is an address.
        strides = ("_tree", "_node", "_dim", "width", "num_slots")
        assert all(name.endswith(strides) for name, kind in signature.items() if kind == "i32")


def test_the_script_prints_its_table():
    command = [sys.executable, str(SCRIPT), "--parts", "triton", "--arch", "90", "--budgets", "16"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    names = [line.split("|")[1].strip().partition(" (")[0] for line in done.stdout.splitlines() if "| 90 |" in line]
    assert names[:5] == ["build", "bit rows", "mask", "full mask", "walk"]
    assert names[5:] == [variant.name for variant in delta_variants()]


@pytest.mark.parametrize(
    ("arguments", "environment", "reason"),
    [
        (["--budgets", "300"], {}, "between 1 and 256"),
        (["--arch", "ninety"], {}, "invalid int value"),
        (["--arch", "90", "999"], {}, "--arch 999 is none of 80, 86,"),
        ([], {"TRITON_INTERPRET": "1"}, "compiles nothing"),
    ],
)
def test_the_script_refuses(arguments, environment, reason, monkeypatch):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    done = subprocess.run([sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and reason in done.stderr.splitlines()[-1]


def test_the_script_fails_when_a_kernel_does(monkeypatch, capsys):
    def refuse(variant, arch):
        raise RuntimeError(f"no registers left\nptxas failed on sm_{arch}")

    monkeypatch.setattr("sglang_ddtree.gpu.compilation.compile_variant", refuse)
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--parts", "triton", "--arch", "90", "--budgets", "8"])
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(SystemExit) as done:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    assert done.value.code == 1 and "failed: ptxas failed on sm_90" in capsys.readouterr().out
