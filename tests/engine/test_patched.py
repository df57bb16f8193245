"""SGLang with all patches in: DFLASH without any hook of ours, and DDTREE, answer as plain decoding on stock SGLang."""

from __future__ import annotations

import patched_site
import pytest
from engines import STRICT, assert_equal, base_flags, ddtree_flags, dflash_flags

from sglang_ddtree.bench.lossless import acceptance_length, generate_all

TOKENS = 24


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    return patched_site.make(tmp_path_factory.mktemp("patched"))


@pytest.mark.parametrize(
    ("name", "algorithm", "env"),
    [
        # The plugin is left out; only the CPU platform is ours. Stock SGLang needs five hooks for this.
        ("DFLASH", dflash_flags(), {"SGLANG_PLUGINS": "none_of_them"}),
        ("DDTREE", ddtree_flags(8), {}),
    ],
    ids=["DFLASH without our plugin", "DDTREE"],
)
def test_answers(serve, model, site, questions, reference, name, algorithm, env):
    flags = [*base_flags(model), *algorithm, "--max-total-tokens", "8192"]
    with serve(f"patched {name}", flags, {**STRICT, **env, "PYTHONPATH": str(site)}) as server:
        got = generate_all(server, questions[:8], TOKENS, 4)
        assert_equal(questions[:8], reference.answers(questions[:8], TOKENS), got)
        assert acceptance_length(got) > 1.2
