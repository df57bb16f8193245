"""One model, one drafter, one reference server for all engine tests; every module starts its own server under test."""

from __future__ import annotations

import re

import pytest
from engines import Reference, base_flags, drafter_path

from sglang_ddtree.bench import lossless
from sglang_ddtree.bench.server import running


def pytest_collection_modifyitems(items):
    for item in items:
        if "tests/engine" in str(item.path):
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def model():
    from sglang_ddtree.demo.model import prepare_target

    return prepare_target()


@pytest.fixture(scope="session")
def tokenizer(model):
    return lossless.load_tokenizer(model)


@pytest.fixture(scope="session")
def questions(tokenizer):
    """18 held-out prompts of three sets; two thirds share an instruction in sixes, so that prefixes are cached."""
    return lossless.questions(tokenizer, 18)


@pytest.fixture(scope="session")
def reference(model, tmp_path_factory):
    """Plain decoding with the same model and flags."""
    found = Reference(base_flags(model), tmp_path_factory.mktemp("engine") / "reference.log")
    yield found
    found.close()


@pytest.fixture(scope="module")
def serve(tmp_path_factory):
    """Start a server: ``with serve(name, flags, env) as server``. The shipped drafter must be there."""
    assert (drafter_path() / "config.json").exists(), f"no drafter at {drafter_path()}"
    logs = tmp_path_factory.mktemp("servers")

    def start(name, flags, env=None):
        return running(flags, log=logs / f"{re.sub('[^A-Za-z0-9]+', '-', name)}.log", env=env)

    return start
