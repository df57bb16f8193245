"""The A/B file for Qwen3.6-27B: the arms, and that SGLang's own parser takes the flags of each."""

from __future__ import annotations

import argparse
import tomllib
from pathlib import Path

import pytest
from sglang.srt.server_args import ServerArgs

from sglang_ddtree import hooks
from sglang_ddtree.bench.ab.config import Settings, checked, read_toml

FILE = Path(__file__).parents[2] / "docs" / "qwen3.6-27b-ab.toml"


@pytest.fixture(scope="module")
def settings():
    return checked(Settings(**read_toml(FILE)))


@pytest.fixture(scope="module")
def parse():
    parser = argparse.ArgumentParser(exit_on_error=False)
    hooks._add_budget_flag(ServerArgs.add_cli_args, parser)
    return lambda flags: parser.parse_args([*flags, "--enable-metrics"])


def test_the_arms(settings):
    assert [arm.name for arm in settings.arms] == ["AR", "MTP", "DFLASH", "DDTREE 8", "DDTREE 16"]
    assert settings.reference_arm == "AR"


def test_the_mtp_arm_is_a_chain_of_the_targets_own_head(settings, parse):
    mtp = next(arm for arm in settings.arms if arm.name == "MTP")
    args = parse([*settings.common, *mtp.flags])
    assert args.speculative_algorithm == "NEXTN" and args.speculative_draft_model_path is None
    # SGLang's conditions for a chain: one candidate, and a verify pass of the steps and the last committed token.
    assert args.speculative_eagle_topk == 1
    assert args.speculative_num_draft_tokens == args.speculative_num_steps + 1


def test_every_arm_is_taken_and_differs_in_the_algorithm_only(settings, parse):
    plain = vars(parse(settings.common))
    for arm in settings.arms:
        found = vars(parse([*settings.common, *arm.flags]))
        changed = {name for name in found if found[name] != plain.get(name)}
        assert all(name.startswith(("speculative_", "ddtree_")) for name in changed), arm.name
        assert (found["speculative_algorithm"] or "AR") in arm.name.replace("MTP", "NEXTN")


def test_a_flag_that_sglang_does_not_know_is_seen(settings, parse):
    with pytest.raises((SystemExit, argparse.ArgumentError)):
        parse([*settings.common, "--speculative-mtp-steps", "3"])


def test_the_page_names_the_same_flags(settings):
    page = FILE.with_name("qwen3.6-27b.md").read_text(encoding="utf-8")
    mtp = next(entry for entry in tomllib.loads(FILE.read_text())["arm"] if entry["name"] == "MTP")
    assert f"`{mtp['flags']}`" in page and FILE.name in page
