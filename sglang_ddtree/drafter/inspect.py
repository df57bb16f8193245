"""What a drafter file or directory holds, from headers alone: instant whatever its size."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from sglang_ddtree.drafter.check import default_target_layer_ids, expected_tensors, read_drafter, read_target
from sglang_ddtree.drafter.families import DFLASH, HARMLESS, family_of, plain_name
from sglang_ddtree.drafter.files import CONFIG, has_weights, read_config, read_header, weight_files
from sglang_ddtree.drafter.header import sha256
from sglang_ddtree.drafter.known import candidate
from sglang_ddtree.drafter.sizes import Sizes, read_sizes
from sglang_ddtree.errors import DDTreeError

#: Names of missing or unknown tensors that the text shows; --json has all.
_SHOWN = 12


def inspect(path: Path, target_dir: Path | None = None, with_sha256: bool = False) -> dict[str, Any]:
    """A JSON-ready description.

    Keys: ``path``, ``family``, ``tensors``, ``parameters``, ``bytes`` of all tensors' files, ``dtypes`` (tensors per
    type); for plain DFlash also ``sizes``, ``missing``, ``unknown``; with a target ``taps``, ``default_taps`` and
    ``known``; on demand ``sha256`` by file.

    Raises:
        DDTreeError: not readable as safetensors, or sizes that fit no drafter or not this target.
    """
    tensors = {plain_name(name): info for name, info in read_header(path).items()}
    if not tensors:
        kind = "pickled weights only, which are never opened" if _has_pickles(path) else "no tensors"
        raise DDTreeError(f"{path} holds {kind}: give a .safetensors file, or a directory of them.")
    files = weight_files(path) if path.is_dir() else [path]
    dtypes: dict[str, int] = {}
    for info in tensors.values():
        dtypes[info.dtype] = dtypes.get(info.dtype, 0) + 1
    report: dict[str, Any] = {
        "path": str(path),
        "family": family_of(tensors),
        "tensors": len(tensors),
        "parameters": sum(math.prod(info.shape) for info in tensors.values()),
        "bytes": sum(file.stat().st_size for file in files),
        "dtypes": dtypes,
    }
    if report["family"] == DFLASH:
        sizes = read_sizes(tensors, str(path))
        report["sizes"] = sizes.as_config()
        config = sizes.as_config()
        expected = expected_tensors(config, read_drafter(config, str(path)), tensors, str(path))
        report["missing"] = sorted(name for name in expected if name not in tensors)
        report["unknown"] = sorted(name for name in tensors if name not in expected and not HARMLESS.search(name))
        if target_dir is not None:
            report.update(_with_target(sizes, target_dir))
        else:
            # Without the target its hidden size is taken to be the drafter's, as DFlash needs.
            report["taps"] = sizes.taps(sizes.hidden_size)
    if with_sha256:
        report["sha256"] = {file.name: sha256(file) for file in files}
    report["config"] = path.is_dir() and (path / CONFIG).is_file()
    return report


def _with_target(sizes: Sizes, target_dir: Path) -> dict[str, Any]:
    target = read_target(read_config(target_dir), str(target_dir))
    taps = sizes.taps(target.hidden_size)
    known = candidate(sizes, taps, target.num_layers, target.vocab_size)
    try:
        rule = list(default_target_layer_ids(target.num_layers, sizes.num_hidden_layers))
    except DDTreeError:  # Too few layers for the rule, which a drafter with layers of its own does not need.
        rule = []
    return {
        "taps": taps,
        "fits_target": sizes.hidden_size == target.hidden_size,
        "default_taps": rule if len(rule) == taps else None,
        "known": known.name if known else None,
    }


def _has_pickles(path: Path) -> bool:
    return path.is_dir() and has_weights(path)


def describe(report: dict[str, Any]) -> str:
    """The report as text, a line per fact."""
    lines = [
        f"{report['path']}: {report['family']}",
        f"  {report['tensors']} tensors, {report['parameters']:,} parameters, {report['bytes']:,} bytes, "
        + ", ".join(f"{count} x {name}" for name, count in sorted(report["dtypes"].items())),
    ]
    sizes = report.get("sizes")
    if sizes:
        lines += [
            f"  layers {sizes['num_hidden_layers']}, hidden {sizes['hidden_size']}, intermediate "
            f"{sizes['intermediate_size']}, heads {sizes['num_attention_heads']} (KV {sizes['num_key_value_heads']}, "
            f"head size {sizes['head_dim']}), attention bias {'yes' if sizes['attention_bias'] else 'no'}",
            f"  reads {report['taps']} target layers",
        ]
        for kind in ("missing", "unknown"):
            if report[kind]:
                more = f" and {len(report[kind]) - _SHOWN} more" if len(report[kind]) > _SHOWN else ""
                lines.append(f"  {kind} tensors: {', '.join(report[kind][:_SHOWN])}{more}")
    if "fits_target" in report:
        fits = "fits" if report["fits_target"] else "does NOT fit"
        rule = report["default_taps"]
        layers = ", ".join(map(str, rule)) if rule else "does not give so many"
        lines.append(f"  {fits} the target's hidden size; SGLang's rule for the target's layers: {layers}")
        lines.append(f"  sizes of a known drafter: {report['known'] or 'no'}")
    lines += [f"  sha256 {digest}  {name}" for name, digest in report.get("sha256", {}).items()]
    if sizes and not report["config"]:
        lines.append("  no config.json: sglang-ddtree drafter prepare makes one")
    return "\n".join(lines)
