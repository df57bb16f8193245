"""The results of ``scripts/gpu_check.py`` as JSON and as a page."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

import torch
import triton

from sglang_ddtree.bench import machine


def facts(options: argparse.Namespace) -> dict[str, Any]:
    """What the figures were taken on."""
    found = machine.facts(torch.get_num_threads())
    found["versions"]["triton"] = triton.__version__
    if options.device == "cuda":
        gpu = torch.cuda.get_device_properties(0)
        found["gpu"] = gpu.name
        found["gpu_memory_gb"] = round(gpu.total_memory / 1e9, 1)
        found["compute_capability"] = f"{gpu.major}.{gpu.minor}"
        found["cuda"] = torch.version.cuda
    else:
        found["gpu"] = "none"
    return found


def write(found: dict[str, Any], directory: Path, name: str | None) -> Path:
    """Write both files; the path of the JSON."""
    if name is None:
        gpu = re.sub("[^a-z0-9]+", "-", found["machine"]["gpu"].lower()).strip("-")
        name = f"gpu-{gpu}-{found['machine']['date'][:10]}"
    path = directory / f"{name}.json"
    directory.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found) + "\n", encoding="utf-8")
    path.with_suffix(".md").write_text(markdown(found), encoding="utf-8")
    return path


def markdown(found: dict[str, Any]) -> str:
    """The page: the machine, one line per part, then the tables."""
    here, parts = found["machine"], found["parts"]
    versions = ", ".join(f"{name} {version}" for name, version in here["versions"].items())
    title = f"GPU checks: {here['gpu']}" if here["gpu"] != "none" else "GPU checks, tried out on a CPU: no GPU result"
    lines = [f"# {title}", "", f"`{found['command']}`, {here['date']}, commit {here['commit']}", ""]
    if here["gpu"] != "none":
        lines += [
            f"{here['gpu']}, {here['gpu_memory_gb']} GB, compute capability {here['compute_capability']}, "
            f"CUDA {here['cuda']}; {versions}.",
            "",
        ]
    else:
        lines += [f"{here['cpu']}; {versions}.", ""]
    lines += ["| part | result | seconds | |", "|---|---|---|---|"]
    lines += [f"| {name} | {part['status']} | {part['seconds']} | {_detail(part)} |" for name, part in parts.items()]
    lines += _folds(parts.get("fold", {}).get("rows", []))
    lines += _attention(parts.get("attention", {}).get("times", []))
    lines += _states(parts.get("states", {}).get("rows", []))
    lines += _times(parts.get("timing", {}).get("rows", []))
    lines += _uno(parts.get("timing", {}).get("uno", []))
    lines += _served(parts.get("serve", {}).get("rows", []))
    return "\n".join(lines) + "\n"


def _detail(part: dict[str, Any]) -> str:
    if "reason" in part:
        return part["reason"].replace("|", "/")
    if "trees" in part:
        return f"{part['trees']} random trees of {part['sizes']} sizes, bit for bit"
    if "compared" in part:
        return f"{part['compared']} batches, largest difference {part['worst']:.2g}; {len(part['rows'])} rows below"
    if "replayed" in part:
        cases = sum(row["cases"] for row in part["rows"])
        where = ", torch in place of the kernels" if part["stand_in"] else ""
        return f"{cases} cases of {len(part['rows'])} variants, {part['replayed']} replays{where}"
    if "folded" in part:
        what = "replays" if part["graphs"] else "calls, no graphs"
        return f"{part['folded']} {what}, the trees those of a step, bit for bit"
    if "replays" in part:
        return f"{part['replays']} {'replays' if part['graphs'] else 'calls, no graphs'}, {part['sizes']} sizes"
    return f"{len(part['rows'])} rows below"


def _folds(rows: list[dict[str, Any]]) -> list[str]:
    if not rows:
        return []
    lines = ["", "Head, top-K and tree of a step, median microseconds: replayed from a CUDA graph, and called.", ""]
    lines += ["| bs | budget | graph | eager |", "|---|---|---|---|"]
    return lines + [f"| {row['bs']} | {row['budget']} | {row['graph']:.0f} | {row['eager']:.0f} |" for row in rows]


def _uno(rows: list[dict[str, Any]]) -> list[str]:
    if not rows:
        return []
    lines = [
        "",
        "The tree's kernel beside SGLang's own builder, UNO's, which leaves the links to another kernel: median",
    ]
    lines += ["microseconds from a CUDA graph, on the same candidates; the trees are the same.", ""]
    lines += ["| bs | budget | ours | UNO's | UNO's / ours |", "|---|---|---|---|---|"]
    for row in rows:
        lines.append(
            f"| {row['bs']} | {row['budget']} | {row['ours']:.0f} | {row['uno']:.0f} | {row['uno_over_ours']:.2f} |"
        )
    return lines


def _attention(rows: list[dict[str, Any]]) -> list[str]:
    if not rows:
        return []
    lines = ["", "One layer's attention, median microseconds from a CUDA graph (32 query heads, 8 of keys, size 128,"]
    lines += ["bfloat16), and one plan by the clock. *Tree* is the project's variant, *stock* FlashInfer's mask.", ""]
    lines += [
        "| context | bs | budget | tree | unmasked | stock | tree / unmasked | stock / tree | plan: tree | stock |"
    ]
    lines += ["|---|---|---|---|---|---|---|---|---|---|"]
    for row in rows:
        times = " | ".join(f"{row[name]:.0f}" for name in ("tree", "unmasked", "stock"))
        lines.append(
            f"| {row['context']} | {row['bs']} | {row['budget']} | {times} | {row['over_unmasked']:.2f} "
            f"| {row['stock_over_tree']:.2f} | {row['tree_plan']:.0f} | {row['stock_plan']:.0f} |"
        )
    return lines


def _states(rows: list[dict[str, Any]]) -> list[str]:
    if not rows:
        return []
    lines = ["", "One Gated DeltaNet layer, median microseconds from a CUDA graph: verification, and the commit of the"]
    lines += ["accepted node's state. *Deltas* are the project's kernels, *stored* SGLang's.", ""]
    lines += ["| bs | width | deltas: verify | commit | both | stored: verify | commit | both | deltas / stored |"]
    lines += ["|---|---|---|---|---|---|---|---|---|"]
    for row in rows:
        forms = [(row[f"{form}_verify"], row[f"{form}_commit"]) for form in ("deltas", "stored")]
        sums = [None if None in times else sum(times) for times in forms]
        cells = [value for times, both in zip(forms, sums, strict=True) for value in (*times, both)]
        written = " | ".join("-" if value is None else f"{value:.1f}" for value in cells)
        over = f"{sums[0] / sums[1]:.2f}" if sums[1] else "-"
        lines.append(f"| {row['bs']} | {row['width']} | {written} | {over} |")
    return lines


def _times(rows: list[dict[str, Any]]) -> list[str]:
    if not rows:
        return []
    lines = ["", "Median microseconds; *graph* is the replay of a CUDA graph that holds this call alone.", ""]
    lines += ["| bs | budget | what | kernel | kernel, graph | torch | torch, graph |", "|---|---|---|---|---|---|---|"]
    for row in rows:
        times = " | ".join(f"{row[key]:.0f}" for key in ("kernel_eager", "kernel_graph", "torch_eager", "torch_graph"))
        lines.append(f"| {row['bs']} | {row['budget']} | {row['what']} | {times} |")
    return lines


def _served(rows: list[dict[str, Any]]) -> list[str]:
    if not rows:
        return []
    lines = ["", "*Gap*: plain decoding's best token over its second where the answers part, in log-probability.", ""]
    lines += ["| setting | passed | identical | largest gap | acceptance | tokens/s | x plain | x stock mask |"]
    lines += ["|---|---|---|---|---|---|---|---|"]
    for row in rows:
        gap = max((part["gap"] for part in row["differences"] if part["gap"] is not None), default=None)
        stock = row.get("beside_stock")
        beside = f"{stock['speed']:.2f} ({stock['identical']} of {row['answers']} identical)" if stock else "-"
        lines.append(
            f"| {row['setting']} | {'yes' if row['passed'] else 'no'} | {row['identical']} of {row['answers']} "
            f"| {'-' if gap is None else f'{gap:.3f}'} | {row['acceptance'] or 0:.2f} | {row['speed']:.1f} "
            f"| {row['over_plain']:.2f} | {beside} |"
        )
    return lines
