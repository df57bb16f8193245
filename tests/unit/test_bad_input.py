"""Bad input to ``sglang-ddtree serve``: exit code 2 and one line that says what to do, before any model loads.

The arguments take their whole way through SGLang's parser and resolution, on the project's CPU platform.
"""

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest
from tiny_models import DRAFTER, HYBRID, drafter_shapes, write_config, write_drafter, write_target

PREFIX = "sglang-ddtree: error: "
CHILD = Path(__file__).with_name("serve_cases.py")


@dataclass
class Case:
    """One command line. ``{name}`` in ``flags`` stands for a directory of ``models``."""

    expect: str
    flags: list[str] = field(default_factory=list)
    model: str = "target"
    drafter: str | None = "good"
    env: dict[str, str] = field(default_factory=dict)


CASES = {
    "no drafter": Case("needs a DFlash drafter", drafter=None),
    "drafter is not there": Case("does not exist", drafter="nowhere"),
    "drafter without config": Case("has no config.json", drafter="no_config"),
    "drafter without weights": Case("has no weights", drafter="no_weights"),
    "drafter of another family": Case("is a DFlash2 drafter", drafter="dflash2"),
    "drafter is a plain model": Case("is not a DFlash drafter", drafter="plain"),
    "hidden size": Case("has hidden size 64, the target 128", model="wide_target"),
    "vocabulary": Case("has a vocabulary of 256, the target 512", model="large_vocabulary"),
    "taps beyond the target": Case("reads target layer 4", model="shallow_target"),
    "taps do not match fc": Case("fc.weight has shape", drafter="two_taps"),
    "mask token outside the embedding": Case("mask_token_id 256 is outside", drafter="mask_outside"),
    "missing tensor": Case("lacks tensor norm.weight", drafter="no_norm"),
    "no block size": Case("no block_size", drafter="no_block_size"),
    "another block size": Case("differs from the drafter's block_size 8", ["--speculative-dflash-block-size", "16"]),
    "budget 0": Case("must be between 1 and 256", ["--speculative-ddtree-budget", "0"]),
    "budget -1": Case("must be between 1 and 256", ["--speculative-ddtree-budget", "-1"]),
    "budget abc": Case("must be a whole number", ["--speculative-ddtree-budget", "abc"]),
    "budget 100000": Case("must be between 1 and 256", ["--speculative-ddtree-budget", "100000"]),
    "budget in the environment": Case("SGLANG_DDTREE_BUDGET", env={"SGLANG_DDTREE_BUDGET": "many"}),
    "two budgets": Case(
        "give only one of them", ["--speculative-ddtree-budget", "8", "--speculative-num-draft-tokens", "8"]
    ),
    "no draft tokens": Case("the tree budget", ["--speculative-num-draft-tokens", "1"]),
    "top-k 1": Case("use --speculative-algorithm DFLASH", ["--speculative-eagle-topk", "1"]),
    "top-k 1000": Case("must be between 2 and 32", ["--speculative-eagle-topk", "1000"]),
    "attention backend without tree masks": Case("ignores tree masks", ["--attention-backend", "triton"]),
    "decode backend without tree masks": Case("ignores tree masks", ["--decode-attention-backend", "flashinfer"]),
    "pipeline parallelism": Case("does not support pipeline parallelism", ["--pp-size", "2"]),
    "DP attention": Case(
        "does not support DP attention", ["--enable-dp-attention", "--tp-size", "2", "--dp-size", "2"]
    ),
    "DP attention flag alone": Case("does not support DP attention", ["--enable-dp-attention"]),
    "DP attention width": Case("does not support DP attention", ["--attn-dp-size", "2", "--tp-size", "2"]),
    "token map": Case("does not support --speculative-token-map", ["--speculative-token-map", "map.pt"]),
    "rejection sampling": Case(
        "does not support --speculative-use-rejection-sampling", ["--speculative-use-rejection-sampling"]
    ),
    "LoRA": Case("does not support LoRA", ["--enable-lora", "--max-lora-rank", "8", "--lora-target-modules", "all"]),
    "hidden states": Case("does not support hidden states", ["--enable-return-hidden-states"]),
    "hidden states mode": Case("does not support hidden states", ["--return-hidden-states-mode", "last"]),
    "watermark": Case("does not support --enable-watermark", ["--enable-watermark"]),
    "ReplaySSM": Case("does not support ReplaySSM", ["--enable-linear-replayssm-spec"]),
    "hybrid on the CPU platform": Case("no kernels for linear attention", ["--disable-radix-cache"], "hybrid"),
    # SGLang's own, which are clear enough.
    "states without a buffer, with overlap": Case(
        "no_buffer do not support overlap schedule", ["--mamba-radix-cache-strategy", "no_buffer"], "hybrid"
    ),
    "states without a buffer, in pages": Case(
        "no_buffer only supports page_size=1",
        ["--mamba-radix-cache-strategy", "no_buffer", "--disable-overlap-schedule", "--page-size", "16"],
        "hybrid",
    ),
    "tracked states of a target that has none": Case(
        "needs mamba state", ["--mamba-radix-cache-strategy", "extra_buffer"]
    ),
    "unknown flag": Case("unrecognized arguments: --no-such-flag", ["--no-such-flag"]),
    "bad overrides": Case("", ["--json-model-override-args", "{"]),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("models")
    write_target(root / "target")
    write_target(root / "wide_target", hidden_size=128, head_dim=32)
    write_target(root / "large_vocabulary", vocab_size=512)
    write_target(root / "shallow_target", num_hidden_layers=4)
    write_target(root / "hybrid", **HYBRID)
    write_drafter(root / "good")
    (root / "no_config").mkdir()
    write_config(root / "no_weights", DRAFTER)
    write_drafter(root / "dflash2", architectures=["DFlash2DraftModel"])
    write_drafter(root / "plain", {"a": (1,)}, architectures=["Qwen3ForCausalLM"], dflash_config=None)
    write_drafter(root / "two_taps", dflash_config={"mask_token_id": 255, "target_layer_ids": [1, 2]})
    write_drafter(root / "mask_outside", dflash_config={"mask_token_id": 256, "target_layer_ids": [1, 2, 4]})
    write_drafter(root / "no_norm", {k: v for k, v in drafter_shapes().items() if k != "norm.weight"})
    write_drafter(root / "no_block_size", block_size=None)
    return root


def environment(**changes: str) -> dict[str, str]:
    """This process's environment without anything of ours, offline, and with one thread."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SGLANG_")}
    return {**kept, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", **changes}


def command_line(case: Case, models: Path) -> list[str]:
    drafter = [] if case.drafter is None else ["--speculative-draft-model-path", str(models / case.drafter)]
    return [str(models / case.model), "--speculative-algorithm", "DDTREE", *drafter, *case.flags]


def run_child(cases: list[Case], pairs: list[tuple[str, str]], models: Path, version: str | None = None) -> dict:
    job = {
        "version": version,
        "cases": [{"argv": command_line(case, models), "env": case.env} for case in cases],
        "doctor": [[str(models / model), str(models / drafter)] for model, drafter in pairs],
    }
    done = subprocess.run(
        [sys.executable, str(CHILD)],
        input=json.dumps(job),
        capture_output=True,
        text=True,
        env=environment(),
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


def the_error(code: int, stderr: str) -> str:
    """The one error line; there is no traceback and no second one."""
    assert code == 2, stderr[-4000:]
    assert "Traceback" not in stderr
    (line,) = [line for line in stderr.splitlines() if line.startswith(PREFIX)]
    return line.removeprefix(PREFIX)


@pytest.fixture(scope="module")
def outcome(models) -> dict:
    return run_child([*CASES.values(), Case("")], [("target", "good"), ("wide_target", "good")], models)


@pytest.fixture(scope="module")
def results(outcome) -> dict[str, dict]:
    return dict(zip([*CASES, "good"], outcome["cases"], strict=True))


@pytest.mark.parametrize("name", CASES)
def test_bad_input(results, name):
    result = results[name]
    assert CASES[name].expect in the_error(result["code"], result["stderr"])
    assert result["fields"] == {}


def test_good_input(results):
    assert results["good"]["code"] == 0, results["good"]["stderr"][-4000:]
    assert results["good"]["fields"] == {
        "device": "cpu",
        "attention_backend": "torch_native",
        "speculative_draft_attention_backend": "torch_native",
        "speculative_num_draft_tokens": 5,
        "speculative_dflash_block_size": 8,
        "speculative_eagle_topk": 8,
        "speculative_num_steps": 4,
        "max_running_requests": 48,
    }


def test_another_sglang_version(models):
    outcome = run_child([Case("")], [("target", "good")], models, version="0.5.24")
    (result,) = outcome["cases"]
    message = the_error(result["code"], result["stderr"])
    assert "0.5.24" in message and "pip install sglang==0.5.23" in message
    (failed,) = [check for check in outcome["doctor"][0] if not check["ok"]]
    assert failed["name"] == "sglang" and "0.5.24" in failed["detail"] and "pip install" in failed["advice"]


def test_doctor_on_a_good_pair(outcome):
    checks = {check["name"]: check for check in outcome["doctor"][0]}
    assert [check for check in checks.values() if not check["ok"]] == []
    assert {"sglang", "contract", "plugin", "device", "threads", "drafter", "arguments"} <= set(checks)
    assert "budget 4, block size 8" in checks["arguments"]["detail"]


def test_doctor_on_a_foreign_drafter(outcome):
    (failed,) = [check for check in outcome["doctor"][1] if not check["ok"]]
    assert failed["name"] == "drafter" and "hidden size 64, the target 128" in failed["detail"]
    assert failed["advice"] == "give a drafter that was trained for this target."


def test_the_real_command(models):
    """Nothing replaced: the console script's own process, from start to exit code."""
    command = command_line(CASES["hidden size"], models)
    done = subprocess.run(
        [sys.executable, "-m", "sglang_ddtree.cli", "serve", *command],
        capture_output=True,
        text=True,
        env=environment(),
        timeout=600,
    )
    assert CASES["hidden size"].expect in the_error(done.returncode, done.stderr)
    assert done.stdout == ""
    assert "Load weight" not in done.stderr


# The GPU's attention backends, without a GPU: the function that chooses them.


def resolved_backends(**given) -> SimpleNamespace:
    from sglang_ddtree.algorithm import _resolve_attention_backends

    names = ("attention_backend", "decode_attention_backend", "prefill_attention_backend")
    args = SimpleNamespace(
        **dict.fromkeys((*names, "speculative_draft_attention_backend"))
        | {"speculative_attention_mode": "prefill"}
        | given
    )
    _resolve_attention_backends(args, cpu=False)
    return args


IGNORING = ["trtllm_mha", "aiter", "torch_native", "flex_attention", "flashinfer_mla", "flashmla"]


@pytest.mark.parametrize(
    ("flag", "mode"),
    [
        ("attention_backend", "prefill"),
        ("attention_backend", "decode"),
        ("prefill_attention_backend", "prefill"),
        ("decode_attention_backend", "decode"),
    ],
)
@pytest.mark.parametrize("name", IGNORING)
def test_gpu_backends_that_ignore_masks(flag, mode, name):
    with pytest.raises(ValueError, match="ignores tree masks") as error:
        resolved_backends(speculative_attention_mode=mode, **{flag: name})
    assert f"--{flag.replace('_', '-')} {name}" in str(error.value) and "use flashinfer" in str(error.value)


@pytest.mark.parametrize("name", IGNORING)
def test_the_half_that_never_verifies_may_ignore_masks(name):
    split = resolved_backends(attention_backend="flashinfer", decode_attention_backend=name)
    assert split.speculative_draft_attention_backend == "flashinfer"
    split = resolved_backends(
        attention_backend="triton", prefill_attention_backend=name, speculative_attention_mode="decode"
    )
    assert split.speculative_draft_attention_backend == "triton"


@pytest.mark.parametrize("name", ["flashinfer", "triton", "fa3", "fa4"])
def test_gpu_backends_that_read_masks(name):
    assert resolved_backends(attention_backend=name).speculative_draft_attention_backend == name
    split = resolved_backends(attention_backend="flashinfer", prefill_attention_backend=name)
    assert split.speculative_draft_attention_backend == name


def test_gpu_backend_by_default():
    assert resolved_backends().attention_backend == "flashinfer"
