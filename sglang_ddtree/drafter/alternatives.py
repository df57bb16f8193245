"""Other settings that a drafter may have been trained with, one changed at a time."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sglang_ddtree.drafter.check import default_target_layer_ids
from sglang_ddtree.drafter.files import read_config
from sglang_ddtree.drafter.replica import Replica
from sglang_ddtree.drafter.settings import read_tokens, rope_of
from sglang_ddtree.errors import DDTreeError
from sglang_ddtree.training.model import DrafterShape

_ROPE_BASES = (1e4, 1e5, 5e5, 1e6, 5e6, 1e7)
_BLOCK_SIZES = (4, 8, 16, 32)
_WINDOWS = (256, 512, 1024, 2048, 4096)
#: Mask tokens tried: each costs one pass of the drafter.
_MAX_MASKS = 48
_LIKELY_MASKS = ("mask", "pad", "unused", "reserved", "fim", "unk")


@dataclass(frozen=True)
class Alternative:
    """``setting`` is config.json's name, ``value`` what it would be; ``changes`` are fields of DrafterShape.

    ``causal`` and ``windows`` replace those of the layers where they are not None.
    """

    setting: str
    value: Any
    changes: dict[str, Any] = field(default_factory=dict)
    causal: tuple[bool, ...] | None = None
    windows: tuple[int | None, ...] | None = None


def other_settings(replica: Replica, target_dir: Path, target_layers: int) -> Iterator[Alternative]:
    """Everything ``verify`` tries instead of the settings of the drafter's config, but for :func:`other_windows`."""
    shape = replica.drafter.shape
    for ids in _taps(shape, target_layers):
        yield Alternative("target_layer_ids", list(ids), {"target_layer_ids": ids})
    target = read_config(target_dir)
    target_base = rope_of(target.get("text_config") or target).get("rope_theta")
    bases = dict.fromkeys((*_ROPE_BASES, *([float(target_base)] if target_base else [])))
    for base in bases:
        if base != shape.rope_theta:
            yield Alternative("rope_theta", base, {"rope_theta": base})
    for token in _masks(target_dir, shape):
        yield Alternative("mask_token_id", token, {"mask_token_id": token})
    if replica.mask_embedding is not None:
        yield Alternative("mask_token_id", "the target's row", {"mask_token_id": shape.mask_token_id})
    for size in _BLOCK_SIZES:
        if size != shape.block_size:
            yield Alternative("block_size", size, {"block_size": size})
    for value, layers in _causalities(replica).items():
        if layers != replica.causal:
            yield Alternative("is_causal", value, causal=layers)


def _causalities(replica: Replica) -> dict[str, tuple[bool, ...]]:
    """By the value of is_causal; "unset" is SGLang's rule: layers with a window are causal, the others are not."""
    layers = len(replica.causal)
    return {
        "true": (True,) * layers,
        "false": (False,) * layers,
        **({"unset": tuple(window is not None for window in replica.windows)} if any(replica.windows) else {}),
    }


def other_windows(replica: Replica, longest: int) -> Iterator[Alternative]:
    """Other attention windows, as far as a text of ``longest`` tokens tells them apart.

    Where the config has windows: none at all, and others on the same layers. Where it has none: windows on all layers.
    """
    layers = len(replica.windows)
    given = next((window for window in replica.windows if window is not None), None)
    sliding = tuple(window is not None for window in replica.windows) if given is not None else (True,) * layers
    tells = [window for window in _WINDOWS if window < longest and window != given]
    if given is not None and given < longest:
        yield Alternative("sliding_window", "none", windows=(None,) * layers)
        tells = list(dict.fromkeys([*(w for w in (given // 2, given * 2) if 0 < w < longest), *tells]))
    for window in tells:
        yield Alternative("sliding_window", window, windows=tuple(window if on else None for on in sliding))


def _taps(shape: DrafterShape, target_layers: int) -> list[tuple[int, ...]]:
    given = shape.target_layer_ids
    tried = [tuple(sorted(given)), given[::-1], tuple(i + 1 for i in given), tuple(i - 1 for i in given)]
    with contextlib.suppress(DDTreeError):  # Too few layers for the rule.
        tried.append(default_target_layer_ids(target_layers, shape.num_hidden_layers))
    fits = [ids for ids in tried if len(ids) == len(given) and min(ids) >= 0 and max(ids) < target_layers]
    # Each alone as well: one wrong number among right ones.
    for place, layer in enumerate(given):
        for moved in (layer - 1, layer + 1):
            ids = (*given[:place], moved, *given[place + 1 :])
            if 0 <= moved < target_layers and moved not in given:
                fits.append(ids)
    return [ids for ids in dict.fromkeys(fits) if ids != given]


def _masks(target_dir: Path, shape: DrafterShape) -> list[int]:
    """Special tokens, and the first id that no token has, which is where a new mask token would be put."""
    tokens = read_tokens(target_dir)
    if tokens is None:
        return []
    ordinary, added = tokens
    unused = max((*ordinary, *added), default=-1) + 1
    likely = [i for i, text in added.items() if any(word in text.lower() for word in _LIKELY_MASKS)]
    found = dict.fromkeys([unused, *likely, *sorted(added)])
    return [i for i in found if i != shape.mask_token_id and i < shape.vocab_size][:_MAX_MASKS]
