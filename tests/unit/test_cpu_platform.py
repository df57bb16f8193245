"""Defaults that the CPU platform gives to SGLang's arguments."""

from types import SimpleNamespace

import pytest

from sglang_ddtree.cpu import setup
from sglang_ddtree.cpu.platform import DDTreeCpuPlatform
from sglang_ddtree.cpu.plugin import ATTENTION_BACKEND


@pytest.fixture
def defaults(monkeypatch):
    monkeypatch.setattr(setup, "fix_threads", lambda: None)

    def resolve(**given):
        fields = ("sampling_backend", "attention_backend", "mem_fraction_static", "max_total_tokens")
        args = SimpleNamespace(**{**dict.fromkeys(fields), **given})
        DDTreeCpuPlatform().apply_server_args_defaults(args)
        return args

    return resolve


@pytest.mark.parametrize("found", [None, "intel_amx"])
def test_the_attention_backend_is_the_platforms(defaults, found):
    """SGLang's rule for CPUs runs first, and on a processor with AMX nothing after it takes its choice back."""
    assert defaults(attention_backend=found).attention_backend == ATTENTION_BACKEND


def test_a_users_values_stay(defaults):
    args = defaults(attention_backend="triton", mem_fraction_static=0.7, max_total_tokens=100)
    assert (args.attention_backend, args.mem_fraction_static, args.max_total_tokens) == ("triton", 0.7, 100)


def test_seeded_draws_may_use_the_platforms_backend(defaults):
    from sglang.srt.arg_groups.choices import DETERMINISTIC_ATTENTION_BACKEND_CHOICES

    defaults()
    defaults()
    assert DETERMINISTIC_ATTENTION_BACKEND_CHOICES.count(ATTENTION_BACKEND) == 1
