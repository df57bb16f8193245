"""What a figure was measured on, and how busy the machine was otherwise."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

#: Memory that one server of the demo model takes in fp32, with its three processes (about 4 GB measured).
SERVER_BYTES = 4.5e9


def facts(threads: int) -> dict[str, Any]:
    """:func:`host`, and what torch finds on it, for the head of a CPU result."""
    import torch

    return {
        **host(),
        "torch_threads": threads,
        "torch_cpu_capability": torch.backends.cpu.get_cpu_capability(),
    }


def host() -> dict[str, Any]:
    """CPU, cores, memory, GPUs, versions, commit and date; torch is not imported."""
    versions = {name: _version(name) for name in ("sglang-ddtree", "sglang", "torch", "transformers", "openai")}
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "cpu": cpu_name(),
        "gpus": gpu_names(),
        "usable_cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(_meminfo("MemTotal") / 1e9, 1),
        "python": platform.python_version(),
        "versions": versions,
        "commit": commit(),
    }


def gpu_names() -> list[str]:
    """Name and memory of each NVIDIA GPU, as nvidia-smi prints them; empty where it is not there."""
    query = ["nvidia-smi", "--query-gpu=name,memory.total,power.limit,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return []
    return done.stdout.strip().splitlines()


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def commit() -> str:
    """The checkout's commit, with a mark when the code differs from it."""
    git = ["git", "-C", str(Path(__file__).parents[2])]
    try:
        done = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
        changed = subprocess.run([*git, "status", "--porcelain", "sglang_ddtree"], capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip() + (" with changes" if changed.stdout.strip() else "")


def servers_that_fit() -> int:
    """How many servers of the demo model the free memory holds; at least one."""
    return max(1, int((_meminfo("MemAvailable") - 1e9) / SERVER_BYTES))


def busy_seconds() -> float:
    """CPU seconds the whole machine has worked since it started."""
    fields = Path("/proc/stat").read_text(encoding="utf-8").split("\n", 1)[0].split()[1:9]
    ticks = [int(field) for field in fields]
    return (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")


def group_seconds(group: int) -> float:
    """CPU seconds that the processes of one process group have used so far."""
    total = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text(encoding="utf-8").rpartition(")")[2].split()
        except OSError:  # it ended meanwhile
            continue
        if int(fields[2]) == group:
            total += int(fields[11]) + int(fields[12])
    return total / os.sysconf("SC_CLK_TCK")


def _meminfo(name: str) -> float:
    for line in Path("/proc/meminfo").read_text(encoding="utf-8").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise KeyError(name)


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def portable(value: object) -> str:
    """As text for a result file, without the checkout's and the home directory's names."""
    return str(value).replace(f"{Path(__file__).parents[2]}/", "").replace(str(Path.home()), "~")
