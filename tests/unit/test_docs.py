"""What the documents point at is there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_paths_exist(page):
    text = page.read_text(encoding="utf-8")
    links = [link.partition("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in link]
    missing = [link for link in links if link and not (page.parent / link).exists()]
    # Paths in code style, from the root of the repository or of the package.
    named = re.findall(r"`((?:scripts|docs|drafters|tests|sglang_ddtree|tree|cpu|attention)/[\w./-]+)`", text)
    missing += [path for path in named if not (ROOT / path).exists() and not (ROOT / "sglang_ddtree" / path).exists()]
    assert not missing


def test_readme_names_the_flags_and_defaults():
    """So that a changed default does not leave the README behind."""
    from sglang_ddtree import config
    from sglang_ddtree.cpu import threads

    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for name in (config.BUDGET_FLAG, config.BUDGET_ENV, threads.ENV):
        assert name in text
    assert f"1 to {config.MAX_BUDGET};" in text
    assert f"| {config.DEFAULT_BUDGET}; {config.DEFAULT_BUDGET_CPU} on a CPU |" in text
    assert f"2 to {config.MAX_TOP_K} | {config.DEFAULT_TOP_K} |" in text


def test_what_is_made_from_code_is_current():
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "make_docs.py", "--check"], capture_output=True, text=True
    )
    assert done.returncode == 0, f"run scripts/make_docs.py: {done.stdout}{done.stderr}"


def test_every_flag_of_the_table_is_one_that_sglang_knows():
    import argparse

    from sglang.srt.server_args import ServerArgs

    from sglang_ddtree import flags, hooks

    parser = argparse.ArgumentParser()
    hooks._add_budget_flag(ServerArgs.add_cli_args, parser)
    assert not [flag.name for flag in flags.SERVE if flag.name not in parser._option_string_actions]
