"""Step metrics: what they count, what they cost, and that the dashboard asks only for series that exist."""

import ast
import json
import re
import time
from importlib.util import find_spec
from pathlib import Path

import prometheus_client
import pytest
import torch
from prometheus_client import CollectorRegistry

from sglang_ddtree import metrics
from sglang_ddtree.config import DDTreeConfig
from sglang_ddtree.tree.build import build_tree

DASHBOARD = Path(__file__).resolve().parents[2] / "docs" / "grafana" / "ddtree.json"


def make(budget=8, block_size=8):
    registry = CollectorRegistry()
    config = DDTreeConfig(budget=budget, block_size=block_size, top_k=4)
    return metrics.StepMetrics(config, "model", torch.device("cpu"), registry), registry


def trees(bs, depth, budget):
    log_probs = torch.log_softmax(torch.randn(bs, depth, 50, generator=torch.Generator().manual_seed(0)), -1)
    values, ids = log_probs.topk(4, dim=-1)
    return build_tree(values, ids, torch.zeros(bs, dtype=torch.int64), budget)


def value(registry, name, **labels):
    return registry.get_sample_value(f"sglang:ddtree_{name}", {"model_name": "model", **labels})


def test_counts_are_those_of_the_trees():
    meter, registry = make()
    tree = trees(3, 7, 8)
    meter.begin()
    meter.end(tree, torch.tensor([1, 1, 4], dtype=torch.int32))
    assert value(registry, "tree_nodes_sum") == 3 * 8 and value(registry, "tree_nodes_count") == 3
    assert value(registry, "tree_nodes_bucket", le="7.0") == 0
    assert value(registry, "tree_depth_sum") == tree.depths.max(dim=1).values.sum()
    assert value(registry, "committed_tokens_sum") == 6
    assert [value(registry, "committed_tokens_bucket", le=f"{n}.0") for n in (1, 3, 4, 8)] == [2, 2, 3, 3]


def test_a_tree_that_is_not_full():
    meter, registry = make(budget=64, block_size=3)
    tree = trees(1, 2, 64)  # 4 + 4 * 4 candidates are all there are
    meter.begin()
    meter.end(tree, torch.tensor([1]))
    assert value(registry, "tree_nodes_sum") == 20
    assert value(registry, "tree_nodes_bucket", le="16.0") == 0 and value(registry, "tree_nodes_bucket", le="32.0") == 1


def test_counting_together_equals_prometheus_own_observe():
    one, two = (prometheus_client.Histogram("h", "h", buckets=(1, 2, 4), registry=CollectorRegistry()) for _ in "ab")
    values = [0, 1, 1, 2, 3, 4, 4, 5, 100]
    for each in values:
        one.observe(each)
    metrics._observe(two, metrics.Counter(values))
    samples = [
        {(s.name, str(s.labels)): s.value for s in h.collect()[0].samples if not s.name.endswith("_created")}
        for h in (one, two)
    ]
    assert samples[0] == samples[1]


def test_stage_seconds_are_the_time_between_marks(monkeypatch):
    clock = iter([10.0, 10.5, 10.75, 12.75, 13.0, 13.0])
    monkeypatch.setattr(metrics.time, "perf_counter", lambda: next(clock))
    meter, registry = make()
    meter.begin()
    for stage in metrics.STAGES:
        meter.mark(stage)
    meter.end(trees(1, 7, 8), torch.tensor([1]))
    assert [value(registry, "stage_seconds_sum", stage=stage) for stage in metrics.STAGES] == [0.5, 0.25, 2.0, 0.25]


def test_a_step_abandoned_by_an_error_is_not_counted():
    meter, registry = make()
    meter.begin()
    meter.mark("draft")
    meter.begin()
    meter.mark("draft")
    meter.end(trees(1, 7, 8), torch.tensor([2]))
    assert value(registry, "stage_seconds_count", stage="draft") == 1


def test_a_device_step_is_counted_once_it_has_arrived(monkeypatch):
    """The path of an accelerator, with events that this test completes."""

    class Event:
        done = False
        count = 0

        def record(self):
            Event.count += 1
            self.at = Event.count

        def query(self):
            return self.done

        def elapsed_time(self, other):
            return 1000.0 * (other.at - self.at)

    meter, registry = make()
    meter._on_cpu = False
    meter._device_module = type("Module", (), {"Event": staticmethod(lambda enable_timing: Event())})
    for _ in range(2):
        meter.begin()
        meter.mark("draft")
        meter.mark("build")
        meter.end(trees(2, 7, 8), torch.tensor([1, 2]))
    assert value(registry, "tree_nodes_count") == 0
    Event.done = True
    meter.begin()
    meter.mark("draft")
    meter.end(trees(1, 7, 8), torch.tensor([1]))
    assert value(registry, "tree_nodes_count") == 5
    assert value(registry, "stage_seconds_sum", stage="draft") == 3.0
    assert value(registry, "stage_seconds_count", stage="build") == 2


@pytest.mark.parametrize("budget", [1, 2, 3, 8, 17, 64, 256])
def test_node_buckets_rise_and_a_full_tree_has_its_own(budget):
    bounds = metrics._node_buckets(budget)
    assert list(bounds) == sorted(set(bounds)) and bounds[-1] == budget
    assert budget == 1 or bounds[-2] == budget - 1


def test_a_step_costs_little():
    """48 requests a step; docs/metrics.md has the figure. The bound leaves room for slow machines."""
    meter, _ = make(budget=32)
    tree, committed = trees(48, 7, 32), torch.randint(1, 8, (48,))
    times = []
    for _ in range(50):
        begin = time.thread_time()
        meter.begin()
        for stage in metrics.STAGES:
            meter.mark(stage)
        meter.end(tree, committed)
        times.append(time.thread_time() - begin)
    print(f"{1e6 * min(times):.0f} us of processor time a step")
    assert min(times) < 0.002


def test_the_dashboard_asks_only_for_series_that_exist():
    _, registry = make()
    # The series' names from SGLang's source: importing its collector takes half a minute.
    sglang = Path(find_spec("sglang").origin).parent / "srt" / "observability" / "metrics_collector.py"
    known = {metric.name for metric in registry.collect()} | {
        node.value
        for node in ast.walk(ast.parse(sglang.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("sglang:")
    }
    dashboard = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    asked = {
        name
        for panel in dashboard["panels"]
        for target in panel.get("targets", ())
        for name in re.findall(r"sglang:\w+", target["expr"])
    }
    assert {name for name in asked if name.startswith("sglang:ddtree_")}
    unknown = {name for name in asked if name not in known and re.sub("_(bucket|sum|count)$", "", name) not in known}
    assert not unknown
