"""``sglang-ddtree memory``: mistakes end in one line, before any table."""

from __future__ import annotations

import json
import time

import pytest

from sglang_ddtree import cli

CONFIG = {
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 48,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}


def refused(capsys, *argv: str) -> str:
    """The error line; there is nothing on stdout and no traceback."""
    try:
        code = cli.main(["memory", *argv])
    except SystemExit as exit_:
        code = exit_.code
    captured = capsys.readouterr()
    assert code == 2 and captured.out == "" and "Traceback" not in captured.err
    line = captured.err.splitlines()[-1]
    assert line.startswith("sglang-ddtree memory: error: ")
    return line


@pytest.mark.parametrize(
    ("flag", "value", "message"),
    [
        ("--requests", "0", "of at least 1, got '0'"),
        ("--requests", "-5", "got '-5'"),
        ("--requests", "1.5", "whole number"),
        ("--requests", "²", "whole number"),
        ("--context", "9" * 5000, "whole number"),
        ("--budget", "257", "between 1 and 256"),
        ("--budget", "", "between 1 and 256"),
        ("--block-size", "1", "between 2 and 64"),
        ("--block-size", "65", "between 2 and 64"),
        ("--tp-size", "0", "of at least 1"),
        ("--target", "", "an empty name is no model"),
        ("--target", "x" * 300, "File name too long"),
    ],
)
def test_bad_arguments(capsys, flag, value, message):
    line = refused(capsys, flag, value)
    assert flag in line or flag == "--target"
    assert message in line and len(line) < 400


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"linear_num_value_heads": "many"}, "linear_num_value_heads must be a whole number of at least 1, got 'many'"),
        ({"linear_num_key_heads": None}, "linear_num_key_heads must be"),
        ({"linear_num_key_heads": 0}, "linear_num_key_heads must be"),
        ({"linear_key_head_dim": -3}, "linear_key_head_dim must be"),
        ({"linear_conv_kernel_dim": 4.5}, "linear_conv_kernel_dim must be"),
        ({"layer_types": 5}, "layer_types must be a list"),
        ({"layer_types": None}, "has no full_attention_interval"),
        ({"layer_types": None, "full_attention_interval": 0}, "full_attention_interval must be"),
        ({"mamba_ssm_dtype": "float7"}, "must be one of float32, bfloat16, float16, got 'float7'"),
        ({"mamba_ssm_dtype": [1]}, "mamba_ssm_dtype must be"),
        ({"text_config": [1]}, "text_config in the target's config.json must be a JSON object, got list"),
    ],
)
def test_a_config_that_cannot_be(tmp_path, capsys, changes, message):
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    assert message in refused(capsys, "--target", str(tmp_path))


def test_ranks_that_do_not_divide_the_heads(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    assert "--tp-size 3 does not divide the 16 key and 48 value heads" in refused(
        capsys, "--target", str(tmp_path), "--tp-size", "3"
    )
    assert cli.main(["memory", "--target", str(tmp_path), "--tp-size", "2"]) == 0
    assert "states of the target" in capsys.readouterr().out


def test_a_huge_batch_takes_no_time(capsys):
    before = time.process_time()
    assert cli.main(["memory", "--requests", "1000000000"]) == 0
    assert time.process_time() - before < 2
    assert "DOES NOT FIT" in capsys.readouterr().out
