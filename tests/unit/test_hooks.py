"""Registration of the hook table."""

from sglang.srt.plugins.hook_registry import HookRegistry

from sglang_ddtree import hooks


def test_a_hook_of_two_groups_is_registered_once(monkeypatch):
    """A DDTREE server on the CPU platform has both; SGLang warns its user of functions that are wrapped twice."""
    seen = []
    monkeypatch.setattr(HookRegistry, "register", lambda target, function, kind: seen.append((target, function)))
    hooks.register(hooks.COMMAND_LINE, hooks.ENGINE, hooks.CPU)
    assert len(seen) == len(set(seen))
    assert {target for target, _ in seen} == {h.target for h in (*hooks.COMMAND_LINE, *hooks.ENGINE, *hooks.CPU)}
    shared = {h.target for h in hooks.ENGINE} & {h.target for h in hooks.CPU}
    assert shared
