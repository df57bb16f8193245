"""Does this drafter fit this target? Answered from config files and tensor headers, before any model loads.

SGLang's loader ignores unknown and missing drafter tensors and finds most mismatches only after both models are in
memory, or never; here each of them is one line. The rules for reading a drafter's config are those of SGLang 0.5.23
(``speculative/dflash_utils.py: parse_dflash_draft_config``); a unit test holds the two together.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_ddtree.drafter.families import HARMLESS, architecture, other_family, plain_name
from sglang_ddtree.drafter.files import has_weights, read_config, read_header
from sglang_ddtree.drafter.header import TensorInfo
from sglang_ddtree.drafter.mask_embedding import refuse_unusable
from sglang_ddtree.drafter.settings import Finding, mask_token_findings, setting_findings
from sglang_ddtree.errors import DDTreeError

logger = logging.getLogger(__name__)

ARCHITECTURE = "DFlashDraftModel"
_MAX_LAYERS = 1000


@dataclass(frozen=True)
class DrafterInfo:
    """What a drafter's ``config.json`` says. None: it does not say.

    ``target_layer_ids`` are 0-based target layers whose outputs the drafter reads.
    """

    architecture: str
    hidden_size: int
    num_layers: int
    vocab_size: int | None
    block_size: int | None
    mask_token_id: int | None
    target_layer_ids: tuple[int, ...] | None
    num_target_layers: int | None


@dataclass(frozen=True)
class TargetInfo:
    hidden_size: int
    num_layers: int
    vocab_size: int | None


def check_pair(draft_dir: Path, target_dir: Path, json_model_override_args: str = "{}") -> DrafterInfo:
    """The drafter's settings, after everything that can be checked without loading has been checked.

    Args:
        json_model_override_args: SGLang's ``--json-model-override-args``, which it applies to both configs.

    Raises:
        DDTreeError: one line for the first fatal finding.
    """
    overrides = _parse_overrides(json_model_override_args)
    for finding in _findings(draft_dir, target_dir, overrides):
        if finding.level == "error":
            raise DDTreeError(finding.text)
        logger.warning("%s", finding.text)
    info = read_drafter(_apply(read_config(draft_dir), overrides), str(draft_dir))
    if info.target_layer_ids is None:
        target = read_target(_apply(read_config(target_dir), overrides), str(target_dir))
        default = default_target_layer_ids(target.num_layers, info.num_layers)
        info = DrafterInfo(**{**vars(info), "target_layer_ids": default})
    return info


def findings(draft_dir: Path, target_dir: Path, json_model_override_args: str = "{}") -> list[Finding]:
    """Every error and warning about the pair; an empty list is a clean bill."""
    try:
        return list(_findings(draft_dir, target_dir, _parse_overrides(json_model_override_args)))
    except DDTreeError as error:
        return [Finding("error", str(error))]


def _findings(draft_dir: Path, target_dir: Path, overrides: dict[str, Any]) -> Iterator[Finding]:
    where = str(draft_dir)
    try:
        config = _apply(read_config(draft_dir), overrides)
        if not has_weights(draft_dir):
            raise DDTreeError(f"{where} has no weights (*.safetensors): download or export the drafter again.")
        tensors = {plain_name(name): info for name, info in read_header(draft_dir).items()}
        _refuse_other_families(config, tensors, where)
        drafter = read_drafter(config, where)
        refuse_unusable(draft_dir, drafter.mask_token_id, drafter.hidden_size)
        target = read_target(_apply(read_config(target_dir), overrides), str(target_dir))
    except DDTreeError as error:
        yield Finding("error", str(error))
        return
    yield from _against_target(drafter, target, where)
    yield from setting_findings(config, _apply(read_config(target_dir), overrides), drafter.num_layers, where)
    if drafter.hidden_size != target.hidden_size:
        return  # Another target's drafter: every shape below would be reported again.
    yield from mask_token_findings(drafter.mask_token_id, target_dir, where)
    if not tensors:
        yield Finding(
            "warning",
            f"{where} holds pickled weights, whose tensors are not checked: convert them to safetensors.",
        )
        return
    yield from _against_tensors(config, drafter, target, tensors, where)


# Reading the configs


def read_drafter(config: dict[str, Any], where: str) -> DrafterInfo:
    """Parse a drafter's config; ``dflash_config`` wins over the top level, as in SGLang.

    Raises:
        DDTreeError: a field that is missing, of the wrong type or out of range.
    """
    nested = config.get("dflash_config") or {}
    where = f"{where}/config.json"
    text = _text(config, where)

    def own(key: str) -> Any:
        return nested.get(key, config.get(key))

    layer_ids = own("target_layer_ids")
    if layer_ids is not None:
        if not isinstance(layer_ids, list) or not layer_ids or not all(_is_int(value) for value in layer_ids):
            raise DDTreeError(f"{where}: target_layer_ids must be a list of layer numbers, got {layer_ids!r}.")
        layer_ids = tuple(layer_ids)
    mask_token_id = own("mask_token_id")
    if mask_token_id is not None and (not _is_int(mask_token_id) or mask_token_id < 0):
        raise DDTreeError(f"{where}: mask_token_id must be a token id (0 or more), got {mask_token_id!r}.")
    hidden_size = _positive(text.get("hidden_size"), "hidden_size", where)
    num_layers = _positive(text.get("num_hidden_layers"), "num_hidden_layers", where)
    if hidden_size is None or num_layers is None:
        missing = "hidden_size" if hidden_size is None else "num_hidden_layers"
        raise DDTreeError(f"{where} has no {missing}: it is not a DFlash drafter's config.")
    if num_layers > _MAX_LAYERS:
        # The names of all their tensors would be written down.
        raise DDTreeError(f"{where}: num_hidden_layers is {num_layers}, which no drafter has.")
    return DrafterInfo(
        architecture=architecture(config) or "",
        hidden_size=hidden_size,
        num_layers=num_layers,
        vocab_size=_positive(text.get("vocab_size"), "vocab_size", where),
        block_size=_positive(own("block_size"), "block_size", where),
        mask_token_id=mask_token_id,
        target_layer_ids=layer_ids,
        num_target_layers=_positive(own("num_target_layers"), "num_target_layers", where),
    )


def read_target(config: dict[str, Any], where: str) -> TargetInfo:
    """Sizes of the target's language model; multimodal families nest them in ``text_config``.

    Raises:
        DDTreeError: a size that is missing or not a positive number.
    """
    where = f"{where}/config.json"
    text = _text(config, where)
    hidden_size = _positive(text.get("hidden_size"), "hidden_size", where)
    num_layers = _positive(text.get("num_hidden_layers"), "num_hidden_layers", where)
    if hidden_size is None or num_layers is None:
        missing = "hidden_size" if hidden_size is None else "num_hidden_layers"
        raise DDTreeError(f"{where} has no {missing}: DDTREE needs a decoder language model as its target.")
    # Models that run their layers several times number every pass.
    num_layers *= _positive(text.get("num_loops"), "num_loops", where) or 1
    vocab_size = _positive(text.get("vocab_size", config.get("vocab_size")), "vocab_size", where)
    return TargetInfo(hidden_size, num_layers, vocab_size)


def default_target_layer_ids(num_target_layers: int, num_draft_layers: int) -> tuple[int, ...]:
    """The layers SGLang taps when the drafter does not name them (``build_target_layer_ids``).

    Raises:
        DDTreeError: the target has too few layers for the rule.
    """
    if num_draft_layers == 1:
        return (num_target_layers // 2,)
    span = num_target_layers - 4
    if span < 0:
        raise DDTreeError(
            "the drafter's config.json names no target_layer_ids and the target has fewer than 4 layers: "
            "add the layers it was trained on to dflash_config."
        )
    return tuple(round(1 + i * span / (num_draft_layers - 1)) for i in range(num_draft_layers))


def _text(config: dict[str, Any], where: str) -> dict[str, Any]:
    """The part of a config that describes the language model."""
    text = config.get("text_config") or config
    if not isinstance(text, dict):
        raise DDTreeError(f"{where}: text_config must be a JSON object, got {type(text).__name__}.")
    return text


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _positive(value: Any, name: str, where: str) -> int | None:
    if value is None:
        return None
    if not _is_int(value) or value < 1:
        raise DDTreeError(f"{where}: {name} must be a positive whole number, got {value!r}.")
    return value


def _parse_overrides(text: str) -> dict[str, Any]:
    try:
        overrides = json.loads(text or "{}")
    except ValueError as error:
        raise DDTreeError(f"--json-model-override-args is not valid JSON: {error}.") from None
    if not isinstance(overrides, dict):
        raise DDTreeError(f"--json-model-override-args must be a JSON object, got {text!r}.")
    return overrides


def _apply(config: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    """SGLang's rule: nested model configs and RoPE settings are merged, everything else is replaced."""
    result = dict(config)
    for key, value in overrides.items():
        current = result.get(key)
        merges = (key.endswith("_config") and key != "dflash_config") or key in ("rope_scaling", "rope_parameters")
        if merges and isinstance(current, dict) and isinstance(value, dict):
            result[key] = {**current, **value}
        else:
            result[key] = value
    return result


# The checks


def _refuse_other_families(config: dict[str, Any], tensors: dict[str, TensorInfo], where: str) -> None:
    """Raises DDTreeError when this is not a plain DFlash drafter."""
    family = other_family(config, tensors)
    if family is not None:
        raise DDTreeError(f"{where} is a {family} drafter, which DDTREE does not support: give a plain DFlash drafter.")
    nested = config.get("dflash_config")
    if nested is not None and not isinstance(nested, dict):
        raise DDTreeError(f"{where}/config.json: dflash_config must be a JSON object, got {nested!r}.")
    if not isinstance(config.get("model_type"), str) or not config["model_type"]:
        raise DDTreeError(
            f'{where}/config.json has no model_type and SGLang cannot read it: add "model_type": "qwen3".'
        )
    name = architecture(config)
    if name != ARCHITECTURE:
        is_dflash = nested is not None or "fc.weight" in tensors
        advice = (
            f'set "architectures": ["{ARCHITECTURE}"] in its config.json if it is one'
            if is_dflash
            else "give a drafter that was trained for this target"
        )
        raise DDTreeError(f"{where} is not a DFlash drafter (architecture {name or 'not given'}): {advice}.")


def _against_target(drafter: DrafterInfo, target: TargetInfo, where: str) -> Iterator[Finding]:
    if drafter.hidden_size != target.hidden_size:
        yield Finding(
            "error",
            f"{where} has hidden size {drafter.hidden_size}, the target {target.hidden_size}: "
            "give a drafter that was trained for this target.",
        )
        return
    if target.vocab_size is None:
        yield Finding("warning", "the target's config.json has no vocab_size: the drafter's vocabulary is not checked.")
    elif drafter.vocab_size is not None and drafter.vocab_size != target.vocab_size:
        yield Finding(
            "error",
            f"{where} has a vocabulary of {drafter.vocab_size}, the target {target.vocab_size}: "
            "give a drafter that was trained for this target.",
        )
    if drafter.mask_token_id is None:
        yield Finding(
            "warning",
            f"{where}/config.json has no mask_token_id: SGLang will use the id of <|MASK|> in the target's tokenizer, "
            "or add it; acceptance is poor if the drafter was trained with another one.",
        )
    elif target.vocab_size is not None and drafter.mask_token_id >= target.vocab_size:
        yield Finding(
            "error",
            f"{where}: mask_token_id {drafter.mask_token_id} is outside the target's embedding of {target.vocab_size} "
            "rows: give a drafter that was trained for this target.",
        )
    if drafter.num_target_layers is not None and drafter.num_target_layers != target.num_layers:
        yield Finding(
            "warning",
            f"{where} was trained for a target of {drafter.num_target_layers} layers, this one has "
            f"{target.num_layers}: acceptance will be poor if it is another model.",
        )
    for layer in drafter.target_layer_ids or ():
        if not 0 <= layer < target.num_layers:
            yield Finding(
                "error",
                f"{where} reads target layer {layer}, but the target has layers 0 to {target.num_layers - 1}: "
                "give a drafter that was trained for this target.",
            )
            return
    if drafter.target_layer_ids and target.num_layers - 1 in drafter.target_layer_ids:
        yield Finding(
            "warning",
            f"{where} reads the target's last layer ({target.num_layers - 1}), which SGLang captures for some models "
            "only (not for Llama and Qwen3).",
        )
    if drafter.block_size is not None and not 2 <= drafter.block_size <= 64:
        yield Finding("error", f"{where}/config.json: block_size must be between 2 and 64, got {drafter.block_size}.")
    if drafter.block_size is None:
        yield Finding(
            "warning",
            f"{where}/config.json has no block_size: give the one of its training, --speculative-dflash-block-size B.",
        )


def _against_tensors(
    config: dict[str, Any], drafter: DrafterInfo, target: TargetInfo, tensors: dict[str, TensorInfo], where: str
) -> Iterator[Finding]:
    fc = tensors.get("fc.weight")
    if fc is None:
        yield Finding("error", f"{where} has no tensor fc.weight: it is not a complete DFlash drafter.")
        return
    try:
        layer_ids = drafter.target_layer_ids or default_target_layer_ids(target.num_layers, drafter.num_layers)
    except DDTreeError as error:
        yield Finding("error", str(error))
        return
    wanted = (drafter.hidden_size, len(layer_ids) * target.hidden_size)
    if fc.shape != wanted:
        yield Finding(
            "error",
            f"{where}: fc.weight has shape {list(fc.shape)}, but {len(layer_ids)} target layers of hidden size "
            f"{target.hidden_size} need {list(wanted)}: its target_layer_ids and its weights do not belong together.",
        )
        return
    stored = 1 + max((int(match[1]) for name in tensors if (match := re.match(r"layers\.(\d+)\.", name))), default=-1)
    if stored > drafter.num_layers:
        yield Finding(
            "error",
            f"{where} holds {stored} layers, but num_hidden_layers is {drafter.num_layers} and SGLang would drop the "
            "rest without a word: correct config.json.",
        )
        return
    if config.get("quantization_config"):
        yield Finding("warning", f"{where} is quantised: the names and shapes of its tensors are not checked.")
        return
    try:
        expected = expected_tensors(config, drafter, tensors, where)
    except DDTreeError as error:
        yield Finding("error", str(error))
        return
    missing = sorted(name for name in expected if name not in tensors)
    if missing:
        yield Finding(
            "error",
            f"{where} lacks {_list(missing)}; SGLang would run it with uninitialised weights: download or export the "
            "drafter again.",
        )
        return
    for name, shape in expected.items():
        if tensors[name].shape != shape:
            yield Finding(
                "error",
                f"{where}: {name} has shape {list(tensors[name].shape)}, but its config.json means {list(shape)}: "
                "they do not belong together.",
            )
            return
    unknown = sorted(name for name in tensors if name not in expected and not HARMLESS.search(name))
    if unknown:
        yield Finding("warning", f"{where} holds {_list(unknown)}, which SGLang ignores.")


def expected_tensors(
    config: dict[str, Any], drafter: DrafterInfo, present: dict[str, TensorInfo], where: str
) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a plain DFlash drafter's tensors; projections may be stored split or fused.

    Raises:
        DDTreeError: the config lacks the head or MLP sizes.
    """
    text = config.get("text_config") or config
    where = f"{where}/config.json"
    hidden = drafter.hidden_size
    heads = _positive(text.get("num_attention_heads"), "num_attention_heads", where)
    inner = _positive(text.get("intermediate_size"), "intermediate_size", where)
    if heads is None or inner is None:
        missing = "num_attention_heads" if heads is None else "intermediate_size"
        raise DDTreeError(f"{where} has no {missing}.")
    kv_heads = _positive(text.get("num_key_value_heads"), "num_key_value_heads", where) or heads
    head_dim = _positive(text.get("head_dim"), "head_dim", where) or hidden // heads
    q, kv = heads * head_dim, kv_heads * head_dim

    fc = present["fc.weight"].shape
    names: dict[str, tuple[int, ...]] = {"fc.weight": fc, "hidden_norm.weight": (hidden,), "norm.weight": (hidden,)}
    for i in range(drafter.num_layers):
        layer = f"layers.{i}."
        names[layer + "input_layernorm.weight"] = (hidden,)
        names[layer + "post_attention_layernorm.weight"] = (hidden,)
        names[layer + "self_attn.q_norm.weight"] = (head_dim,)
        names[layer + "self_attn.k_norm.weight"] = (head_dim,)
        rows = {"self_attn.q_proj": q, "self_attn.k_proj": kv, "self_attn.v_proj": kv}
        if layer + "self_attn.qkv_proj.weight" in present:
            rows = {"self_attn.qkv_proj": q + 2 * kv}
        attention = {**{name: (size, hidden) for name, size in rows.items()}, "self_attn.o_proj": (hidden, q)}
        for name, shape in attention.items():
            names[layer + name + ".weight"] = shape
            if text.get("attention_bias"):
                names[layer + name + ".bias"] = shape[:1]
        if layer + "mlp.gate_up_proj.weight" in present:
            names[layer + "mlp.gate_up_proj.weight"] = (2 * inner, hidden)
        else:
            names[layer + "mlp.gate_proj.weight"] = names[layer + "mlp.up_proj.weight"] = (inner, hidden)
        names[layer + "mlp.down_proj.weight"] = (hidden, inner)
    return names


def _list(names: list[str]) -> str:
    shown = ", ".join(names[:3])
    return f"{len(names)} tensors ({shown}{', ...' if len(names) > 3 else ''})" if len(names) > 1 else f"tensor {shown}"
