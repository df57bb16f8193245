"""The counters of a real server agree with what its answers say."""

from __future__ import annotations

import urllib.request

import pytest
from engines import base_flags, ddtree_flags
from prometheus_client.parser import text_string_to_metric_families

from sglang_ddtree.bench.lossless import generate_all

BUDGET, TOKENS = 8, 24


def scrape(server) -> dict[tuple[str, str], float]:
    """Every ``sglang:ddtree_`` sample, by its name and its stage ("" where it has none)."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(server.url + "/metrics/", timeout=30) as answer:
        families = text_string_to_metric_families(answer.read().decode())
        return {
            (sample.name, sample.labels.get("stage", "")): sample.value
            for family in families
            for sample in family.samples
            if sample.name.startswith("sglang:ddtree_") and "le" not in sample.labels
        }


@pytest.fixture(scope="module")
def server(serve, model):
    # With overlap scheduling a finished request takes part in one more step, whose tokens nobody gets.
    flags = [*base_flags(model), *ddtree_flags(BUDGET), "--enable-metrics", "--disable-overlap-schedule"]
    with serve("metrics", [*flags, "--max-total-tokens", "8192"]) as started:
        yield started


def test_counters_agree_with_the_answers(server, questions):
    before = scrape(server)
    answers = generate_all(server, questions[:6], TOKENS, 3)
    after = scrape(server)

    def delta(name: str, stage: str = "") -> float:
        key = (f"sglang:ddtree_{name}", stage)
        return after[key] - before[key]

    steps = sum(answer.verify_steps for answer in answers)
    assert delta("committed_tokens_count") == steps > 0
    assert delta("tree_nodes_sum") == BUDGET * steps
    # The first token of an answer is the prefill's; a last step may commit tokens behind the end of the answer.
    generated = sum(len(answer.ids) - 1 for answer in answers)
    assert generated <= delta("committed_tokens_sum") <= generated + 7 * len(answers)
    assert 1 <= delta("tree_depth_sum") / steps <= 7
    for stage in ("draft", "build", "verify", "commit"):
        assert delta("stage_seconds_sum", stage) > 0
        assert delta("stage_seconds_count", stage) <= steps
