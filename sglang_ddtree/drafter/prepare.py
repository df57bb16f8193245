"""From one bare ``.safetensors`` file to the model directory SGLang loads.

Every field of the config has an origin: the shapes of the tensors, the target's config, the table of known drafters, a
flag, or the format itself. What none of them gives is asked for, never guessed.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sglang_ddtree.drafter.check import (
    ARCHITECTURE,
    TargetInfo,
    default_target_layer_ids,
    read_target,
)
from sglang_ddtree.drafter.families import DFLASH, family_of, plain_name
from sglang_ddtree.drafter.files import CONFIG, MASK_EMBEDDING_SAFE, read_config
from sglang_ddtree.drafter.header import read_file_header, sha256
from sglang_ddtree.drafter.known import candidate
from sglang_ddtree.drafter.mask_embedding import refuse_unusable
from sglang_ddtree.drafter.sizes import Sizes, read_sizes
from sglang_ddtree.errors import DDTreeError

#: Beside config.json: where each of its fields came from.
ORIGINS = "ddtree_origins.json"
WEIGHTS = "model.safetensors"

#: Fields the weights cannot tell, and the flag that gives each.
FLAGS = {
    "block_size": "--block-size N",
    "mask_token_id": "--mask-token-id ID",
    "target_layer_ids": "--target-layer-ids 1,9,17|default",
    "layer_types": "--layer-types full|sliding|LIST",
    "sliding_window": "--sliding-window N",
    "is_causal": "--is-causal true|false|unset",
    "rope_theta": "--rope-theta BASE",
    "rms_norm_eps": "--rms-norm-eps EPS",
}
#: What the Qwen3 code that defines DFlash uses; SGLang's own default as well.
_DEFAULT_EPS = 1e-6


@dataclass(frozen=True)
class Field:
    name: str
    value: Any
    origin: str


@dataclass
class Prepared:
    """``fields`` in the order of config.json; ``notes`` are warnings for the user, a line each."""

    fields: list[Field] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def config(self) -> dict[str, Any]:
        """config.json: DFlash's own fields nested, the rest at the top."""
        config: dict[str, Any] = {}
        dflash: dict[str, Any] = {}
        for each in self.fields:
            if each.name in ("mask_token_id", "target_layer_ids"):
                dflash[each.name] = each.value
            elif each.value is not None or each.name == "sliding_window":
                config[each.name] = each.value
        theta = config["rope_theta"]
        config["rope_parameters"] = {"rope_type": "default", "rope_theta": theta}
        config["torch_dtype"] = config["dtype"]
        return {**config, "dflash_config": dflash}


def derive(weights: Path, target_dir: Path, given: dict[str, Any]) -> Prepared:
    """All fields of the config, each with its origin.

    Args:
        weights: the bare file.
        target_dir: directory of the target; only its config.json is read.
        given: values of flags by field name; ``layer_types`` may be one name for all layers, ``target_layer_ids``
            "default" for SGLang's rule, ``is_causal`` None for a config that does not mention it.

    Raises:
        DDTreeError: another family's drafter, another target's, or a field that nothing gives.
    """
    if weights.is_dir():
        raise DDTreeError(
            f"{weights} is a directory: give one .safetensors file. Sharded drafters need their config.json."
        )
    tensors = {plain_name(name): info for name, info in read_file_header(weights).items()}
    family = family_of(tensors)
    if family != DFLASH:
        raise DDTreeError(f"{weights} is {_article(family)}: DDTREE serves plain DFlash drafters only.")
    sizes = read_sizes(tensors, str(weights))
    raw = read_config(target_dir)
    target = read_target(raw, str(target_dir))
    if sizes.hidden_size != target.hidden_size:
        raise DDTreeError(
            f"{weights} has hidden size {sizes.hidden_size}, the target {target.hidden_size}: "
            "give the target it was trained for."
        )
    if target.vocab_size is None:
        raise DDTreeError(f"{target_dir}/{CONFIG} has no vocab_size: the drafter's cannot be filled in.")
    result = Prepared()
    settings = _settings(weights, sizes, target, given, result)
    mask = next(field.value for field in settings if field.name == "mask_token_id")
    refuse_unusable(weights.parent, mask, sizes.hidden_size)
    if (weights.parent / MASK_EMBEDDING_SAFE).exists():
        result.notes.append(f"{MASK_EMBEDDING_SAFE} beside the weights is copied; DDTREE uses it, DFLASH does not")
    text = raw.get("text_config") or raw
    result.fields = [
        Field("architectures", [ARCHITECTURE], "format"),
        Field("model_type", "qwen3", "format"),
        *(Field(name, value, "weights") for name, value in sizes.as_config().items()),
        Field("vocab_size", target.vocab_size, "target"),
        Field("num_target_layers", target.num_layers, "target"),
        _positions(text),
        *settings,
        # transformers drops sliding_window without it.
        Field(
            "use_sliding_window", any("sliding" in str(f.value) for f in settings if f.name == "layer_types"), "format"
        ),
        Field("hidden_act", "silu", "format"),
        Field("attention_dropout", 0.0, "format"),
        Field("tie_word_embeddings", True, "format"),
        *(Field(key, _token(text, raw, key), "target") for key in ("bos_token_id", "eos_token_id", "pad_token_id")),
    ]
    return result


def _settings(weights: Path, sizes: Sizes, target: TargetInfo, given: dict[str, Any], result: Prepared) -> list[Field]:
    taps = sizes.taps(target.hidden_size)
    known, origin = candidate(sizes, taps, target.num_layers, target.vocab_size), ""
    if known is not None and known.sha256 is not None:
        known = known if sha256(weights) == known.sha256 else None
        origin = f"known drafter {known.name}, by sha256" if known else ""
    elif known is not None:
        origin = f"known drafter {known.name}, by sizes"
        result.notes.append(
            f"the sizes are those of {known.name}; a retrained drafter of the same sizes may differ: run verify"
        )
    found: dict[str, Field] = {}
    for name in FLAGS:
        if name in given:
            found[name] = Field(name, given[name], f"flag {FLAGS[name].split()[0]}")
        elif known is not None:
            found[name] = Field(name, known.fields[name], origin)
            if name in known.unsure:
                result.notes.append(
                    f"{name} of {known.name} was deduced from its siblings, not read; {FLAGS[name]} overrides it"
                )
    found.setdefault("rms_norm_eps", Field("rms_norm_eps", _DEFAULT_EPS, "format (Qwen3's value)"))
    if "layer_types" in found:
        found["layer_types"] = _layer_types(found["layer_types"], sizes.num_hidden_layers)
        if "sliding_attention" not in found["layer_types"].value and "sliding_window" not in given:
            found["sliding_window"] = Field("sliding_window", None, "no sliding layer")
    elif "sliding_window" not in found:
        # Asked for only once a layer is known to have one.
        found["sliding_window"] = Field("sliding_window", None, "unknown")
    missing = [name for name in FLAGS if name not in found]
    if missing:
        raise DDTreeError(
            f"{weights.name} is no known drafter, and neither weights nor target tell {', '.join(missing)}: "
            f"give {' '.join(FLAGS[name] for name in missing)}{_rule(target, sizes, taps, missing)}."
        )
    found["target_layer_ids"] = _tap_ids(found["target_layer_ids"], taps, target, sizes)
    _refuse_values(found, target)
    return [found[name] for name in FLAGS]


def _rule(target: TargetInfo, sizes: Sizes, taps: int, missing: list[str]) -> str:
    if "target_layer_ids" not in missing or taps != sizes.num_hidden_layers or target.num_layers < 4:
        return ""
    ids = default_target_layer_ids(target.num_layers, sizes.num_hidden_layers)
    return f" (the default rule would tap layers {', '.join(map(str, ids))})"


def _layer_types(given: Field, layers: int) -> Field:
    short = {"full": "full_attention", "sliding": "sliding_attention"}
    names = given.value if isinstance(given.value, list) else [given.value] * layers
    names = [short.get(name, name) for name in names]
    unknown = [name for name in names if name not in short.values()]
    if unknown or len(names) != layers:
        raise DDTreeError(f"--layer-types needs one of full, sliding per layer ({layers} of them), got {names}.")
    return Field(given.name, names, given.origin)


def _tap_ids(given: Field, taps: int, target: TargetInfo, sizes: Sizes) -> Field:
    if given.value != "default":
        ids = list(given.value)
        origin = given.origin
    else:
        ids = list(default_target_layer_ids(target.num_layers, sizes.num_hidden_layers))
        origin = f"{given.origin} (SGLang's rule)"
    if len(ids) != taps:
        raise DDTreeError(f"fc.weight reads {taps} target layers, but target_layer_ids names {len(ids)}: {ids}.")
    outside = [layer for layer in ids if not 0 <= layer < target.num_layers]
    if outside:
        raise DDTreeError(f"the target has layers 0 to {target.num_layers - 1}; it has no layer {outside[0]} to tap.")
    return Field(given.name, ids, origin)


def _refuse_values(found: dict[str, Field], target: TargetInfo) -> None:
    mask, window = found["mask_token_id"].value, found["sliding_window"].value
    if not 0 <= mask < (target.vocab_size or 0):
        raise DDTreeError(f"mask token {mask} is outside the target's embedding of {target.vocab_size} rows.")
    if not 2 <= found["block_size"].value <= 64:
        raise DDTreeError(f"block size must be between 2 and 64, got {found['block_size'].value}.")
    if "sliding_attention" in found["layer_types"].value and not window:
        raise DDTreeError(f"layers with sliding attention need their window: give {FLAGS['sliding_window']}.")
    if "sliding_attention" not in found["layer_types"].value and window is not None:
        raise DDTreeError(
            f"a sliding window of {window}, but no sliding layer: give {FLAGS['layer_types']}, or no window."
        )
    if window is not None and window < 1:
        raise DDTreeError(f"the sliding window must be 1 or more, got {window}.")
    for name in ("rope_theta", "rms_norm_eps"):
        if not 0 < found[name].value < float("inf"):
            raise DDTreeError(f"{name} must be a positive number, got {found[name].value}.")


def _positions(text: dict[str, Any]) -> Field:
    given = text.get("max_position_embeddings")
    # SGLang's own default for a config without it.
    return Field("max_position_embeddings", given or 32768, "target" if given else "format (the target does not say)")


def _token(text: dict[str, Any], raw: dict[str, Any], key: str) -> Any:
    value = text.get(key, raw.get(key))
    return value if isinstance(value, int) or (isinstance(value, list) and value) else None


def _article(family: str) -> str:
    return family if family.startswith("not") else f"a {family} drafter"


def write_directory(weights: Path, out: Path, prepared: Prepared, link: str = "auto") -> str:
    """Make the model directory, complete or not at all; returns how the weights got there.

    Args:
        link: "hard", "symbolic", "copy", or "auto": a hard link where the file system allows it, else a symbolic one.

    Raises:
        DDTreeError: ``out`` exists, or cannot be written.
    """
    if out.exists() or out.is_symlink():
        raise DDTreeError(f"{out} exists already: give a directory that does not, or remove it.")
    working = out.with_name(f".{out.name}.{os.getpid()}")
    source = weights.resolve()
    try:
        working.mkdir(parents=True)
        how = _place(source, working / WEIGHTS, link)
        side = weights.with_name(MASK_EMBEDDING_SAFE)
        if side.exists():
            shutil.copyfile(side, working / MASK_EMBEDDING_SAFE)
        _write_json(working / CONFIG, prepared.config())
        origins = {each.name: {"value": each.value, "origin": each.origin} for each in prepared.fields}
        _write_json(
            working / ORIGINS,
            {"weights": {"file": weights.name, "bytes": source.stat().st_size, "placed": how}, "fields": origins},
        )
        working.rename(out)
    except OSError as error:
        raise DDTreeError(f"cannot write {out}: {error.strerror or error}.") from None
    finally:
        shutil.rmtree(working, ignore_errors=True)
    return how


def _place(source: Path, path: Path, link: str) -> str:
    makers: dict[str, Callable[[], Any]] = {
        "hard": lambda: path.hardlink_to(source),
        "symbolic": lambda: path.symlink_to(source),
        "copy": lambda: shutil.copyfile(source, path),
    }
    if link != "auto":
        makers[link]()
        return link
    try:
        makers["hard"]()
        return "hard"
    except OSError:  # Another file system, or one without links.
        makers["symbolic"]()
        return "symbolic"


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
