"""What a server tells about itself: settings, limits and counters. One that tells nothing is driven all the same."""

from __future__ import annotations

import time
import urllib.error
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from sglang_ddtree.bench.ab.config import Arm
from sglang_ddtree.bench.ab.telemetry import ddtree_sums
from sglang_ddtree.bench.server import Server, fetch

#: Kept out of result files.
_SECRET = ("api_key", "password", "secret", "watermark_key", "launch_command")
#: Verify steps and accepted drafts in the metrics of SGLang and vLLM. SGLang counts the steps alone; its accepted
#: drafts come with each request.
_STEPS = ("sglang:spec_verify_calls_total", "vllm:spec_decode_num_drafts_total")
_ACCEPTED = ("vllm:spec_decode_num_accepted_tokens_total",)


@dataclass(frozen=True)
class Endpoint:
    """A running arm.

    Attributes:
        info: SGLang's ``/server_info`` without secrets; None when the server has no such page.
        server: the process, when it was started here.
    """

    arm: Arm
    url: str
    info: Mapping[str, Any] | None
    server: Server | None = None

    @property
    def sglang(self) -> bool:
        return self.info is not None

    @property
    def max_requests(self) -> int | None:
        """Requests that the server runs at once; more wait in its queue. None when it does not say."""
        return None if self.info is None else running_limit(self.info)

    def flush(self) -> bool:
        """Empty the prefix cache, so that every cell computes its prompts; whether that worked."""
        for _ in range(10):
            try:
                fetch(f"{self.url}/flush_cache", {})
                return True
            except urllib.error.HTTPError as error:
                if error.code != 400:  # SGLang's "a request is still running"
                    return False
                time.sleep(0.2)
            except OSError:
                return False
        return False

    def counters(self) -> dict[str, float]:
        """Sums of the counters of ``/metrics`` that are used here; empty when there are none."""
        try:
            text = fetch(f"{self.url}/metrics")
            samples = [one for family in text_string_to_metric_families(text) for one in family.samples]
        except (OSError, ValueError, AttributeError):
            return {}
        found: dict[str, float] = {}
        for sample in samples:
            if sample.name in _STEPS + _ACCEPTED:
                found[sample.name] = found.get(sample.name, 0.0) + sample.value
        return found | ddtree_sums(samples)


def delta(before: Mapping[str, float], after: Mapping[str, float]) -> tuple[float | None, float | None]:
    """Verify steps and accepted drafts between two readings; None for what the server does not count."""

    def grown(names: tuple[str, ...]) -> float | None:
        found = [after[name] - before.get(name, 0.0) for name in names if name in after]
        return sum(found) if found else None

    return grown(_STEPS), grown(_ACCEPTED)


def look_up(arm: Arm, url: str, server: Server | None = None) -> Endpoint:
    """Ask a running server what it is."""
    try:
        info = fetch(f"{url}/server_info")
    except OSError:
        info = None
    if not isinstance(info, dict) or "version" not in info:
        return Endpoint(arm, url, None, server)
    return Endpoint(arm, url, without_secrets(info), server)


def without_secrets(info: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in info.items() if not any(word in key for word in _SECRET)}


def running_limit(info: Mapping[str, Any]) -> int | None:
    """How many requests SGLang runs at once, over all its replicas."""
    states = info.get("internal_states") or []
    limits = [state.get("effective_max_running_requests_per_dp") for state in states if isinstance(state, dict)]
    known = [int(limit) for limit in limits if limit]
    return sum(known) if known else info.get("max_running_requests")
