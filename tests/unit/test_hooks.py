"""Registration of the hook table, and whether SGLang has applied it."""

import os
import sys
import types

import pytest
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from sglang_ddtree import hook_probe, hooks
from sglang_ddtree.errors import DDTreeError
from sglang_ddtree.patching import installed, series


def test_a_hook_of_two_groups_is_registered_once(monkeypatch):
    """A DDTREE server on the CPU platform has both; SGLang warns its user of functions that are wrapped twice."""
    seen = []
    monkeypatch.setattr(hooks, "is_applied", lambda patch: False)
    monkeypatch.setattr(HookRegistry, "register", lambda target, function, kind: seen.append((target, function)))
    hooks.register(hooks.COMMAND_LINE, hooks.ENGINE, hooks.STATES, hooks.CPU)
    assert len(seen) == len(set(seen))
    every = (*hooks.COMMAND_LINE, *hooks.ENGINE, *hooks.STATES, *hooks.CPU)
    assert {target for target, _ in seen} == {h.target for h in every}
    shared = {h.target for h in hooks.ENGINE} & {h.target for h in hooks.CPU}
    assert shared


@pytest.mark.parametrize("patch", [installed.ROW_WIDTH, installed.WITHOUT_TRITON])
def test_a_hook_stays_away_where_its_patch_is_in(monkeypatch, patch):
    groups = (hooks.COMMAND_LINE, hooks.ENGINE, hooks.CPU)
    monkeypatch.setattr(hooks, "is_applied", lambda name: False)
    before = hooks.needed(*groups)
    monkeypatch.setattr(hooks, "is_applied", lambda name: name == patch)
    after = hooks.needed(*groups)
    assert after == [hook for hook in before if hook.patch != patch]
    assert len(after) < len(before)


def test_every_hook_names_a_patch_that_there_is():
    names = {hook.patch for hook in (*hooks.ENGINE, *hooks.CPU)} - {""}
    assert names and names <= {patch.name for patch in series.load()}


@pytest.fixture
def target(monkeypatch):
    """A module of its own, so that no hook stays behind."""
    module = types.ModuleType("hooked_module")
    module.function = lambda: "stock"
    module.Class = type("Class", (), {"method": staticmethod(lambda: "stock")})
    monkeypatch.setitem(sys.modules, "hooked_module", module)
    monkeypatch.setattr(HookRegistry, "_hooks", HookRegistry._hooks.copy())
    monkeypatch.setattr(HookRegistry, "_patched", HookRegistry._patched.copy())
    return module


def around(original, *args):
    return f"around {original()}"


@pytest.mark.parametrize("path", ["hooked_module.function", "hooked_module.Class.method"])
@pytest.mark.parametrize("kind", ["around", "replace"])
def test_whether_a_hook_is_in_place(target, path, kind):
    group = (hooks.Hook(path, around if kind == "around" else lambda: "ours", kind, ""),)
    assert hooks.missing(group) == [path]
    hooks.register(group)
    HookRegistry.register(path, lambda original: original(), HookType.AROUND)  # another plugin's, around ours
    HookRegistry.apply_hooks()
    assert hooks.missing(group) == []
    hooks.require_applied(group)


def test_a_server_without_its_hooks_does_not_start(target):
    group = (hooks.Hook("hooked_module.no_such_function", around, "around", ""),)
    hooks.register(group)
    HookRegistry.apply_hooks()  # logs, and goes on
    with pytest.raises(DDTreeError, match=r"no_such_function.*doctor"):
        hooks.require_applied(group)


def test_a_scheduler_process_answers(monkeypatch):
    """Half a minute: it imports SGLang in a process of its own."""
    monkeypatch.setenv("SGLANG_PLATFORM", "ddtree_cpu")
    monkeypatch.delenv("SGLANG_PLUGINS", raising=False)
    monkeypatch.setenv("SGLANG_DDTREE_STATES", "deltas")
    answer = hook_probe.ask_scheduler()
    groups = (hooks.COMMAND_LINE, hooks.ENGINE, hooks.STATES, hooks.CPU)
    every = {(hook.target, hook.function) for group in groups for hook in group}
    assert answer.missing == [] and answer.applied + answer.unneeded == len(every)


def test_a_scheduler_process_that_ends(monkeypatch):
    monkeypatch.setattr(hook_probe, "_answer", os.abort)
    with pytest.raises(DDTreeError, match="ended before"):
        hook_probe.ask_scheduler()
