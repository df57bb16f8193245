"""Model directories: where they are, what their config says and which tensors they hold, without loading weights."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from sglang_ddtree.drafter.header import TensorInfo, read_file_header
from sglang_ddtree.errors import DDTreeError

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
#: A side file of some drafters, a pickle, and what ``drafter/mask_embedding.py`` makes of it.
MASK_EMBEDDING, MASK_EMBEDDING_SAFE = "mask_embedding.pt", "mask_embedding.safetensors"
#: Weights that SGLang loads but whose header cannot be read without unpickling.
PICKLED = ("*.bin", "*.pt")
WEIGHTS = ("*.safetensors", "*.safetensors.index.json")

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


def resolve_model_dir(path: str, revision: str | None = None, *, weights: bool = False) -> Path:
    """The directory of a model given as SGLang takes it: a local directory or a Hugging Face hub id.

    A hub id resolves to its snapshot in the local cache, without network when it is there. Otherwise ``config.json``
    is fetched, and with ``weights`` the weight files too: they go where SGLang would put them a moment later.

    Raises:
        DDTreeError: nothing there, not a model directory, or a hub id that can be found neither locally nor online.
    """
    if not path:  # to pathlib the working directory
        raise DDTreeError("an empty name is no model: give a model directory or a Hugging Face hub id (owner/name).")
    local = Path(path).expanduser()
    if local.is_file():
        # SGLang takes a .gguf file; what it holds is described by the config beside it.
        if (local.parent / CONFIG).is_file() and local.suffix == ".gguf":
            return local.parent
        raise DDTreeError(f"{path} is a file: give the directory that holds the model's {CONFIG} and its weights.")
    if local.is_dir():
        if not (local / CONFIG).is_file():
            raise DDTreeError(f"{path} has no {CONFIG}: give the directory of a model in Hugging Face format.")
        return local
    if local.is_absolute() or not _HUB_ID.fullmatch(path):
        raise DDTreeError(f"{path} does not exist: give a model directory or a Hugging Face hub id (owner/name).")
    return _hub_dir(path, revision, weights)


def _hub_dir(repo: str, revision: str | None, weights: bool) -> Path:
    from huggingface_hub import snapshot_download

    wanted = [CONFIG, INDEX, *(WEIGHTS if weights else ())]
    for offline in (True, False):
        try:
            found = Path(snapshot_download(repo, revision=revision, allow_patterns=wanted, local_files_only=offline))
        except Exception as error:  # A dozen types in huggingface_hub: not cached, no network, no such repository...
            reason = _first_line(error)
            continue
        complete = (found / CONFIG).is_file() and (not weights or has_weights(found))
        if complete or not offline:
            return found
    raise DDTreeError(
        f"{repo} is neither a directory nor in the local Hugging Face cache, and it cannot be downloaded ({reason}): "
        "give the model's directory."
    )


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def has_weights(model_dir: Path) -> bool:
    """Whether the directory holds weights in a format SGLang loads for a drafter."""
    names = (path.name for pattern in (WEIGHTS[0], *PICKLED) for path in model_dir.glob(pattern))
    return any(name not in (MASK_EMBEDDING, MASK_EMBEDDING_SAFE) for name in names)


def read_config(model_dir: Path) -> dict[str, Any]:
    """``config.json`` of a model directory.

    Raises:
        DDTreeError: missing, not JSON, or not a JSON object.
    """
    path = model_dir / CONFIG
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DDTreeError(f"cannot read {path}: {error.strerror or error}.") from None
    except (ValueError, RecursionError) as error:
        raise DDTreeError(f"{path} is not valid JSON: {_first_line(error)}.") from None
    if not isinstance(config, dict):
        raise DDTreeError(f"{path} must hold a JSON object, got {type(config).__name__}.")
    return config


def read_header(path: Path) -> dict[str, TensorInfo]:
    """Tensors of one ``.safetensors`` file, or of all those of a model directory, from their headers only.

    A directory without safetensors files (pickled weights) gives an empty dict.

    Raises:
        DDTreeError: a damaged or truncated file, or a shard that the index names and the directory lacks.
    """
    if not path.is_dir():
        return read_file_header(path)
    tensors: dict[str, TensorInfo] = {}
    for shard in weight_files(path):
        tensors.update(read_file_header(shard))
    return tensors


def weight_files(model_dir: Path) -> list[Path]:
    """The safetensors files of a model directory: those its index names, all of them where it has none.

    Raises:
        DDTreeError: an index that is none, or names a file that is not there or not of this directory.
    """
    index = model_dir / INDEX
    if not index.is_file():
        return sorted(model_dir.glob(WEIGHTS[0]))
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise DDTreeError(f"{index} is not a safetensors index (a JSON object with a weight_map).") from None
    # The index is text from a stranger: it may name files of this directory only.
    outside = [
        name
        for name in names
        if not isinstance(name, str) or not 0 < len(name) < 256 or name == ".." or Path(name).name != name
    ]
    if not names:
        raise DDTreeError(f"{index} names no file: download the model again.")
    if outside:
        raise DDTreeError(
            f"{index} names {str(outside[0])[:80]!r}, which is not a file of its own directory: do not use it."
        )
    missing = [name for name in names if not (model_dir / name).is_file()]
    if missing:
        raise DDTreeError(f"{model_dir} lacks {missing[0]}, which {INDEX} names: download the model again.")
    return [model_dir / name for name in names]
