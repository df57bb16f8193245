"""The command line, without starting SGLang."""

import argparse
import importlib.metadata
import json
import shutil
import socket
import sys
import types

import pytest
from stock_sglang import copy_tree

from sglang_ddtree import __version__, cli, doctor, hook_probe
from sglang_ddtree.doctor import Check
from sglang_ddtree.errors import DDTreeError
from sglang_ddtree.patching import tree


@pytest.fixture
def no_accelerator(monkeypatch):
    monkeypatch.setattr(cli, "accelerator", lambda: None)


def test_version(capsys):
    with pytest.raises(SystemExit) as exit_:
        cli.main(["--version"])
    assert exit_.value.code == 0
    assert capsys.readouterr().out.strip() == f"sglang-ddtree {__version__}"


def test_help_lists_the_commands(capsys):
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    out = capsys.readouterr().out
    assert "serve" in out and "doctor" in out


def test_no_command(capsys):
    with pytest.raises(SystemExit) as exit_:
        cli.main([])
    assert exit_.value.code == 2


@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_serve_help_is_short_and_does_not_import_sglang(capsys, flag, monkeypatch):
    monkeypatch.setitem(sys.modules, "sglang", None)
    assert cli.main(["serve", "--model-path", "x", flag]) == 0
    out = capsys.readouterr().out
    assert len(out.splitlines()) <= 15
    for word in ("--speculative-draft-model-path", "--speculative-ddtree-budget", "doctor", "sglang serve --help"):
        assert word in out


def test_serve_without_flags_is_bad_input(capsys):
    assert cli.main(["serve"]) == 2
    assert "usage:" in capsys.readouterr().out


# Platform


def test_cpu_platform_without_an_accelerator(no_accelerator):
    environ = {}
    assert cli.pick_platform(environ) == "ddtree_cpu"
    assert environ == {"SGLANG_PLATFORM": "ddtree_cpu"}


@pytest.mark.parametrize("environ", [{"SGLANG_PLATFORM": "other"}, {"SGLANG_USE_CPU_ENGINE": "1"}])
def test_the_users_platform_stays(no_accelerator, environ):
    before = dict(environ)
    cli.pick_platform(environ)
    assert environ == before


def test_no_platform_with_an_accelerator(monkeypatch):
    monkeypatch.setattr(cli, "accelerator", lambda: "cuda")
    environ = {}
    assert cli.pick_platform(environ) is None
    assert environ == {}


# Serving, with SGLang's entry points replaced


@pytest.fixture
def fake_sglang(monkeypatch, no_accelerator):
    """Records what ``serve`` hands to SGLang; tests set ``prepare`` or ``run`` to something that raises."""
    monkeypatch.setenv("SGLANG_PLATFORM", "ddtree_cpu")
    calls = types.SimpleNamespace(seen=[], prepare=lambda argv: types.SimpleNamespace(argv=argv), run=lambda args: None)

    def module(name, **contents):
        fake = types.ModuleType(name)
        fake.__dict__.update(contents)
        monkeypatch.setitem(sys.modules, name, fake)

    def step(name, action):
        def call(*args, **kwargs):
            calls.seen.append(name)
            return action(*args, **kwargs)

        return call

    for package in ("sglang", "sglang.srt"):
        module(package, __spec__=types.SimpleNamespace())
    module("sglang.srt.plugins", load_plugins=step("plugins", lambda: None))
    module("sglang.srt.server_args", prepare_server_args=step("prepare", lambda argv: calls.prepare(argv)))
    module("sglang.launch_server", run_server=step("run", lambda args: calls.run(args)))
    module("sglang.srt.utils", kill_process_tree=step("kill", lambda pid, include_parent: None))
    return calls


def test_serve_hands_the_flags_over(fake_sglang):
    handed = []
    fake_sglang.run = lambda args: handed.append(args.argv)
    assert cli.main(["serve", "--model-path", "m", "--speculative-algorithm", "DDTREE", "--x=1"]) == 0
    assert handed == [["--model-path", "m", "--speculative-algorithm", "DDTREE", "--x=1"]]
    # Plugins first: they add a flag. Children last, whatever happens.
    assert fake_sglang.seen == ["plugins", "prepare", "run", "kill"]


def test_serve_on_a_platform_that_is_not_there(fake_sglang, monkeypatch, capsys):
    class Unplaced(types.ModuleType):
        def __getattr__(self, name):  # as sglang.srt.platforms raises while sglang.launch_server is imported
            raise RuntimeError("SGLANG_PLATFORM='x' not found in discovered platform plugins")

    monkeypatch.setitem(sys.modules, "sglang.launch_server", Unplaced("sglang.launch_server"))
    assert cli.main(["serve", "m"]) == 2
    assert capsys.readouterr().err.startswith("sglang-ddtree: error: SGLANG_PLATFORM='x' not found")
    assert fake_sglang.seen == []


def test_serve_takes_the_model_as_first_argument(fake_sglang):
    handed = []
    fake_sglang.run = lambda args: handed.append(args.argv)
    cli.main(["serve", "my/model", "--tp-size", "2"])
    assert handed == [["--model-path", "my/model", "--tp-size", "2"]]


def raising(error):
    def call(*args):
        raise error

    return call


def test_sglang_not_installed(monkeypatch, capsys):
    monkeypatch.setattr(cli.importlib.util, "find_spec", lambda name: None)
    assert cli.main(["serve", "m"]) == 2
    (line,) = error_lines(capsys)
    assert line.startswith("sglang-ddtree: error: SGLang is not installed: ") and "pip install" in line


def error_lines(capsys):
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err.splitlines()


def test_our_errors_are_one_line(fake_sglang, capsys):
    fake_sglang.run = raising(DDTreeError("bad budget: give another"))
    assert cli.main(["serve", "m"]) == 2
    assert error_lines(capsys) == ["sglang-ddtree: error: bad budget: give another"]
    assert fake_sglang.seen[-1] == "kill"


def test_argument_errors_of_sglang_are_one_line(fake_sglang, capsys):
    def fail(args):
        args._resolution_failed = True
        raise ValueError("two\nlines")

    fake_sglang.run = fail
    assert cli.main(["serve", "m"]) == 2
    assert error_lines(capsys) == ["sglang-ddtree: error: two lines"]


def test_argparse_errors_are_one_line(fake_sglang, capsys):
    def parse(argv):
        parser = argparse.ArgumentParser()
        parser.add_argument("--known", type=int)
        parser.parse_args(argv)

    fake_sglang.prepare = parse
    assert cli.main(["serve", "--known", "x"]) == 2
    (line,) = error_lines(capsys)
    assert line.startswith("sglang-ddtree: error: argument --known: invalid int value: 'x'")
    with pytest.raises(SystemExit):
        parse(["--unknown"])  # argparse itself is as before


@pytest.mark.parametrize("error", [ValueError("while serving"), KeyError("a fault")])
def test_faults_keep_their_traceback(fake_sglang, error):
    fake_sglang.run = raising(error)
    with pytest.raises(type(error)):
        cli.main(["serve", "m"])
    assert fake_sglang.seen[-1] == "kill"


# Doctor


def test_doctor_needs_both_models(capsys):
    with pytest.raises(SystemExit):
        cli.main(["doctor", "--model", "m"])
    assert "together" in capsys.readouterr().err


@pytest.mark.parametrize(("ok", "code"), [(True, 0), (False, 1)])
def test_doctor_exit_code_and_json(monkeypatch, capsys, ok, code):
    checks = [Check("a", True, "fine"), Check("b", ok, "so so", "do this")]
    monkeypatch.setattr(doctor, "all_checks", lambda *asked: checks)
    assert doctor.run_doctor(None, None, as_json=True) == code
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is ok
    assert report["checks"][1] == {"name": "b", "ok": ok, "detail": "so so", "advice": "do this"}


def test_doctor_keeps_stdout_clean(monkeypatch, capsys):
    def checks(*asked):
        print("noise from an import")
        yield Check("a", True, "fine")

    monkeypatch.setattr(doctor, "all_checks", checks)
    assert doctor.run_doctor(None, None, as_json=True) == 0
    captured = capsys.readouterr()
    json.loads(captured.out)
    assert "noise" in captured.err


def test_report_says_what_to_do():
    text = doctor.render(
        [Check("sglang", True, "0.5.23"), Check("drafter", False, "hidden size differs", "give another")]
    )
    assert text.splitlines() == [
        "ok    sglang   0.5.23",
        "FAIL  drafter  hidden size differs",
        "               -> give another",
        "DDTREE would not start: 1 of 2 checks failed.",
    ]


def test_a_wrong_version_stops_the_checks_that_need_it(monkeypatch):
    monkeypatch.setattr(doctor.compat, "problems", lambda: [f"SGLang 0.5.22 is installed: {doctor.compat.ADVICE}"])
    monkeypatch.setattr(doctor, "check_plugin", raising(AssertionError("must not run")))
    monkeypatch.setenv("SGLANG_PLATFORM", "elsewhere")
    monkeypatch.setattr(doctor, "check_attention_backend", lambda: Check("attention", True, "x"))
    (version,) = [check for check in doctor.all_checks(None, None) if not check.ok]
    assert version == Check("sglang", False, "SGLang 0.5.22 is installed", doctor.compat.ADVICE)


def test_plugin_left_out_by_environment(monkeypatch):
    monkeypatch.setenv("SGLANG_PLUGINS", "other")
    check = doctor.check_plugin()
    assert not check.ok and check.advice == "set SGLANG_PLUGINS=other,ddtree"


def test_plugin_left_out_by_platform(monkeypatch):
    monkeypatch.delenv("SGLANG_PLUGINS", raising=False)
    monkeypatch.setenv("SGLANG_PLATFORM", "somebody_elses")
    check = doctor.check_plugin()
    assert not check.ok and "ddtree_cpu" in check.advice


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("SGLANG_DDTREE_BUDGET", "0", "must be between 1 and 256"),
        ("SGLANG_DDTREE_BUDGET", "many", "must be a whole number"),
        ("SGLANG_DDTREE_STATES", "delta", "must be stored or deltas"),
        ("SGLANG_DDTREE_FLASHINFER", "bits", "must be auto, tree or stock"),
        ("SGLANG_DDTREE_CPU_LINEAR", "fast", "must be packed or torch"),
    ],
)
def test_a_wrong_variable_is_told_without_models(monkeypatch, name, value, message):
    monkeypatch.setenv("SGLANG_PLATFORM", cli.CPU_PLATFORM)
    assert doctor.check_variables().ok
    monkeypatch.setenv(name, value)
    check = doctor.check_variables()
    assert not check.ok and name in check.detail and message in check.detail


def test_a_variable_that_nothing_reads_is_told(monkeypatch):
    monkeypatch.setenv("SGLANG_DDTREE_BUGDET", "8")
    check = doctor.check_variables()
    assert check.ok and "nothing reads SGLANG_DDTREE_BUGDET" in check.detail and "SGLANG_DDTREE_BUDGET" in check.advice


def test_drafter_findings_become_checks(tmp_path):
    (check,) = doctor.check_drafter(str(tmp_path / "model"), str(tmp_path / "drafter"))
    assert (
        not check.ok and check.detail.endswith("does not exist") and check.advice.startswith("give a model directory")
    )


def test_the_port(free_port):
    assert doctor.check_port(free_port).ok
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", free_port))
        taken.listen()
        check = doctor.check_port(free_port)
    assert not check.ok and "--port" in check.advice
    for port in (-1, 0, 70000):
        assert not doctor.check_port(port).ok


@pytest.fixture
def free_port():
    from sglang_ddtree.bench.server import free_port

    return free_port()


@pytest.mark.parametrize(
    ("state", "ok", "detail"),
    [
        ({}, True, "none applied"),
        ({"1": "applied"}, True, "0001-req-to-token-rows"),
        ({"6": "partly"}, False, "half applied"),
        ({"1": "edited"}, True, "srt/mem_cache/allocation_sizing.py"),
    ],
)
def test_patches_in_the_report(monkeypatch, tmp_path, state, ok, detail):
    package = copy_tree(tmp_path / "sglang")
    monkeypatch.setattr(tree, "find_package", lambda root: package)
    for number, what in state.items():
        assert cli.main(["patch", "apply", number]) == 0
        if what == "partly":
            shutil.copy(package / tree.ORIGINALS / "srt/models/dflash.py", package / "srt/models/dflash.py")
        if what == "edited":
            (package / "srt/mem_cache/allocation_sizing.py").write_text("# mine\n")
    check = doctor.check_patches()
    assert check.ok == ok and detail in check.detail
    assert check.advice or "edited" not in state.values()


def test_missing_hooks_are_red(monkeypatch):
    monkeypatch.setattr(hook_probe, "ask_scheduler", lambda: hook_probe.Answer(3, ["a.b", "c.d"], 0))
    check = doctor.check_hooks()
    assert not check.ok and "a.b, c.d" in check.detail and "SGLANG_PLUGINS" in check.advice
    monkeypatch.setattr(hook_probe, "ask_scheduler", raising(DDTreeError("ended")))
    assert not doctor.check_hooks().ok
    monkeypatch.setattr(hook_probe, "ask_scheduler", lambda: hook_probe.Answer(3, [], 2))
    assert doctor.check_hooks().ok and "2 made unneeded" in doctor.check_hooks().detail


@pytest.mark.parametrize(
    ("version", "problem"),
    [("0.7.2", None), ("0.6.18", "is 0.6.18, and SGLang needs ==0.7.2"), (None, "is not installed")],
)
def test_flashinfers_version(monkeypatch, version, problem):
    def installed(name):
        if version is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return version

    fake = types.ModuleType("flashinfer")
    fake.BatchPrefillWithPagedKVCacheWrapper = object
    monkeypatch.setitem(sys.modules, "flashinfer", fake)
    monkeypatch.setattr(importlib.metadata, "version", installed)
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: ["torch", "flashinfer_python[cu13]==0.7.2"])
    assert doctor.flashinfer_problem() == problem


def test_a_bare_assertion_is_told_by_its_line():
    page_size = 48
    try:
        assert page_size % 64 == 0
    except AssertionError as error:
        # pytest gives assertions a message of its own.
        error.args = ()
        assert cli.one_line(error) == "assert page_size % 64 == 0"
    assert cli.one_line(AssertionError()) == "AssertionError" and cli.one_line(ValueError("a\n b")) == "a b"
