"""Beside another plugin, left out of SGLANG_PLUGINS, and not asked for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap

import pytest

REPORT = """
import json, sys
from sglang.srt.plugins import load_plugins
from sglang.srt.plugins.hook_registry import HookRegistry
load_plugins()
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.srt.server_args import ServerArgs, prepare_server_args
import argparse
known = []
for name in ("DDTREE", "DUMMY"):
    try:
        known.append(SpeculativeAlgorithm.from_string(name).name)
    except ValueError:
        pass
parser = argparse.ArgumentParser()
ServerArgs.add_cli_args(parser)
args = prepare_server_args(["--model-path", "nowhere", "--speculative-algorithm", "DFLASH"])
print(json.dumps({
    "known": known,
    # Other packages bring hooks too: smg-grpc-servicer, which SGLang itself depends on.
    "hooks": sorted(
        f"{hook.__module__.split('.')[0]}: {target}"
        for target in HookRegistry._patched
        for _, hook, _ in HookRegistry._hooks[target]
        if hook.__module__.split(".")[0] in ("sglang_ddtree", "dummy_plugin")
    ),
    "ours": sorted(name for name in sys.modules if name.split(".")[0] == "sglang_ddtree"),
    "flags": sorted(flag for flag in parser._option_string_actions if "ddtree" in flag or "dummy" in flag),
    "fields": {key: repr(value) for key, value in sorted(vars(args).items())},
}))
"""

DUMMY = """
def register():
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
    from sglang.srt.speculative.spec_registry import CustomSpecAlgo

    SpeculativeAlgorithm.register("DUMMY", supports_overlap=True, spec_class=CustomSpecAlgo)(lambda args: object)

    def add(original, parser, *args, **kwargs):
        result = original(parser, *args, **kwargs)
        parser.add_argument("--dummy")
        return result

    HookRegistry.register("sglang.srt.server_args.ServerArgs.add_cli_args", add, HookType.AROUND)
"""


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """One process each: alone, beside a second plugin, and left out."""
    site = tmp_path_factory.mktemp("dummy")
    (site / "dummy_plugin.py").write_text(DUMMY)
    info = site / "dummy_plugin-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: dummy-plugin\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[sglang.srt.plugins]\ndummy = dummy_plugin:register\n")

    def start(**env):
        variables = {key: value for key, value in os.environ.items() if not key.startswith("SGLANG_")}
        command = [sys.executable, "-c", textwrap.dedent(REPORT)]
        return subprocess.Popen(
            command, env={**variables, **env}, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )

    started = {
        "alone": start(),
        "two": start(PYTHONPATH=str(site)),
        "left out": start(PYTHONPATH=str(site), SGLANG_PLUGINS="dummy"),
        "none": start(SGLANG_PLUGINS="none_of_them"),
    }
    found = {}
    for name, process in started.items():
        out, _ = process.communicate(timeout=300)
        assert process.returncode == 0, name
        found[name] = json.loads(out.splitlines()[-1])
    return found


TARGET = "sglang.srt.server_args.ServerArgs.add_cli_args"


def test_a_server_that_does_not_ask_for_ddtree_has_one_more_flag_and_nothing_else(reports):
    with_us, without = reports["alone"], reports["none"]
    assert with_us["known"] == ["DDTREE"] and with_us["hooks"] == [f"sglang_ddtree: {TARGET}"]
    assert with_us["flags"] == ["--speculative-ddtree-budget"]
    assert with_us["fields"] == without["fields"]


def test_beside_another_algorithm(reports):
    both = reports["two"]
    assert both["known"] == ["DDTREE", "DUMMY"]
    assert both["hooks"] == [f"dummy_plugin: {TARGET}", f"sglang_ddtree: {TARGET}"]
    assert both["flags"] == ["--dummy", "--speculative-ddtree-budget"]


def test_left_out_of_sglang_plugins(reports):
    for name, known in (("left out", ["DUMMY"]), ("none", [])):
        assert reports[name]["known"] == known
        assert "--speculative-ddtree-budget" not in reports[name]["flags"]
        # The platform's entry point, which answers None, is all that SGLang may have asked.
        assert not [module for module in reports[name]["ours"] if "plugin" in module and "cpu" not in module]
