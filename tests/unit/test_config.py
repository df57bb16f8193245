"""DDTREE's settings from flags, the environment and the drafter, and the errors for values they cannot have."""

import pytest

from sglang_ddtree import config
from sglang_ddtree.config import DDTreeConfig
from sglang_ddtree.errors import DDTreeError


@pytest.fixture(autouse=True)
def no_environment(monkeypatch):
    monkeypatch.delenv(config.BUDGET_ENV, raising=False)


def one_line(error: pytest.ExceptionInfo) -> str:
    text = str(error.value)
    assert text and "\n" not in text
    return text


@pytest.mark.parametrize("text", ["0", "-1", str(config.MAX_BUDGET + 1), "100000"])
def test_budget_out_of_range(text):
    with pytest.raises(DDTreeError) as error:
        config.parse_budget(text, config.BUDGET_FLAG)
    message = one_line(error)
    assert config.BUDGET_FLAG in message and str(config.MAX_BUDGET) in message and text in message


@pytest.mark.parametrize("text", ["abc", "1.5", "", "16 nodes"])
def test_budget_not_a_number(text):
    with pytest.raises(DDTreeError, match="whole number") as error:
        config.parse_budget(text, config.BUDGET_FLAG)
    assert repr(text) in one_line(error)


@pytest.mark.parametrize("budget", [1, 16, config.MAX_BUDGET])
def test_budget_in_range(budget):
    assert config.parse_budget(str(budget), "x") == budget


def test_budget_default():
    assert config.resolve_budget(None, 16) == 16


def test_budget_from_num_draft_tokens_is_one_less():
    assert config.resolve_budget(33, 16) == 32


def test_num_draft_tokens_too_small():
    with pytest.raises(DDTreeError, match="num-draft-tokens"):
        config.resolve_budget(1, 16)


def test_budget_from_environment(monkeypatch):
    monkeypatch.setenv(config.BUDGET_ENV, "24")
    assert config.resolve_budget(None, 16) == 24
    assert config.resolve_budget(25, 16) == 24


def test_budget_and_num_draft_tokens_disagree(monkeypatch):
    monkeypatch.setenv(config.BUDGET_ENV, "24")
    with pytest.raises(DDTreeError, match="only one of them") as error:
        config.resolve_budget(24, 16)
    assert "25 verify tokens" in one_line(error)


def test_bad_budget_in_environment_names_the_variable(monkeypatch):
    monkeypatch.setenv(config.BUDGET_ENV, "many")
    with pytest.raises(DDTreeError, match=config.BUDGET_ENV):
        config.resolve_budget(None, 16)


def test_top_k():
    assert config.resolve_top_k(None) == config.DEFAULT_TOP_K
    assert config.resolve_top_k(4) == 4


def test_top_k_of_one_is_a_chain():
    with pytest.raises(DDTreeError, match="DFLASH"):
        config.resolve_top_k(1)


@pytest.mark.parametrize("top_k", [0, -3, config.MAX_TOP_K + 1])
def test_top_k_out_of_range(top_k):
    with pytest.raises(DDTreeError, match="eagle-topk"):
        config.resolve_top_k(top_k)


def test_block_size():
    assert config.resolve_block_size(None, 8) == 8
    assert config.resolve_block_size(8, 8) == 8
    assert config.resolve_block_size(8, None) == 8


@pytest.mark.parametrize(
    ("flag", "drafter", "reason"),
    [(16, 8, "drop the flag"), (None, None, "has no block_size"), (1, None, "between"), (None, 65, "between")],
)
def test_block_size_errors(flag, drafter, reason):
    with pytest.raises(DDTreeError, match=reason) as error:
        config.resolve_block_size(flag, drafter)
    one_line(error)


@pytest.mark.parametrize(
    ("budget", "block_size", "width", "depth", "window"),
    [(16, 8, 17, 7, 17), (4, 8, 5, 4, 8), (1, 16, 2, 1, 16)],
)
def test_derived_sizes(budget, block_size, width, depth, window):
    settings = DDTreeConfig(budget=budget, block_size=block_size, top_k=8)
    assert (settings.verify_width, settings.depth, settings.window) == (width, depth, window)


def test_server_fields_round_trip():
    settings = DDTreeConfig(budget=12, block_size=8, top_k=4)
    fields = settings.as_server_fields()

    class Spec:
        pass

    spec = Spec()
    spec.__dict__.update(fields)
    assert DDTreeConfig.from_spec(spec) == settings
