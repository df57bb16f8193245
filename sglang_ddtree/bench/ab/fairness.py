"""Do two servers differ in anything but the algorithm? Compared is everything that SGLang's ``/server_info`` says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

#: What may differ: the algorithm itself, ...
_ALGORITHM = ("speculative_", "ddtree_")
#: ... addresses, times and names of one process, where it logs, and what was left of memory after loading.
_INCIDENTAL = frozenset(
    "port host nccl_port dist_init_addr startup_time start_time random_seed internal_states status uptime kv_events "
    "served_model_name log_level log_level_http log_requests log_requests_level show_time_cost enable_metrics "
    "decode_log_interval crash_dump_folder frontend max_total_num_tokens max_req_input_len base_gpu_id "
    "scheduler_pids rpc_ipc_name tokenizer_ipc_name scheduler_input_ipc_name detokenizer_ipc_name metrics_ipc_name "
    "forward_pass_metrics_ipc_name forward_pass_metrics_worker_id instance_id".split()
)
#: SGLang raises the limit of running requests by the arm; the limit in force is what counts.
_LIMIT = "max_running_requests"


def differences(ours: Mapping[str, Any] | None, theirs: Mapping[str, Any] | None, most_sent: int) -> list[str]:
    """What makes a comparison of two arms unfair, one short text each; empty when nothing does.

    Args:
        ours, theirs: ``/server_info`` of both; None when a server does not have it.
        most_sent: most requests sent at once: limits above that do not matter.
    """
    if ours is None or theirs is None:
        return ["one of the servers does not tell its settings (no /server_info)"]
    found = []
    for key in sorted((set(ours) | set(theirs)) - _INCIDENTAL):
        if key.startswith(_ALGORITHM):
            continue
        a, b = ours.get(key), theirs.get(key)
        if a == b or (key == _LIMIT and _is_above(a, most_sent) and _is_above(b, most_sent)):
            continue
        found.append(f"{key} {_short(a)} against {_short(b)}")
    return found


def _is_above(limit: Any, most_sent: int) -> bool:
    return limit is None or limit >= most_sent


def _short(value: Any) -> str:
    text = "not set" if value is None else str(value)
    return text if len(text) <= 40 else text[:37] + "..."
