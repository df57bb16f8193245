"""A drafter's own vector for the mask token: ``mask_embedding.safetensors``, and how it is made from a ``.pt`` file.

SGLang 0.5.23's DFLASH reads ``mask_embedding.pt`` only, a pickle, and writes the vector over the mask token's row of
the *target's* embedding (``DFlashWorkerV2._maybe_merge_trained_mask_embedding``): what the target says can change, for
targets whose LM head is the embedding on every token. DDTREE reads the converted file and gives the vector to the
drafter's blocks alone.
"""

from __future__ import annotations

import hashlib
import os
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglang_ddtree.drafter.files import MASK_EMBEDDING, MASK_EMBEDDING_SAFE
from sglang_ddtree.drafter.header import open_regular, read_file_header
from sglang_ddtree.errors import DDTreeError

if TYPE_CHECKING:
    import torch

_TENSOR = "mask_embedding"
_TOKEN, _SOURCE = "mask_token_id", "source_sha256"
#: One vector. The largest hidden sizes are about 20,000; the rest of a real file is a kilobyte.
_MAX_HIDDEN, _MAX_BYTES = 65536, 1_000_000


def convert(path: Path, mask_token_id: int | None = None) -> Path:
    """Write ``mask_embedding.safetensors`` beside a ``mask_embedding.pt``; returns its path. The original stays.

    Args:
        path: the file, or the directory that holds it.
        mask_token_id: needed where the file is a bare tensor, which does not say it.

    Raises:
        DDTreeError: not a small zip-format torch file with one plain vector, or one that SGLang would not use either.
    """
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    source = path / MASK_EMBEDDING if path.is_dir() else path
    out = source.with_name(MASK_EMBEDDING_SAFE)
    if out.exists() or out.is_symlink():
        raise DDTreeError(f"{out} exists already: remove it to convert again.")
    vector, stored = _vector(_load(source), source)
    if stored is None and mask_token_id is None:
        raise DDTreeError(f"{source} does not say its mask token: give --mask-token-id ID.")
    if stored is not None and mask_token_id not in (None, stored):
        raise DDTreeError(f"{source} was trained with mask token {stored}, not {mask_token_id}.")
    token = mask_token_id if stored is None else stored
    working = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        save_file(
            {_TENSOR: vector.to(torch.float32).contiguous().clone()},
            working,
            metadata={"format": "pt", _TOKEN: str(token), _SOURCE: _sha256(source)},
        )
        working.rename(out)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or str(error).removeprefix("Error while serializing: ")
        raise DDTreeError(f"cannot write {out}: {reason}.") from None
    finally:
        working.unlink(missing_ok=True)
    return out


def _load(source: Path) -> Any:
    """What a torch file holds, by torch's unpickler for plain tensors, which runs no code of the file."""
    import torch

    with open_regular(source) as file:
        if os.fstat(file.fileno()).st_size > _MAX_BYTES:
            raise DDTreeError(f"{source} is larger than {_MAX_BYTES} bytes: a mask embedding is one vector.")
        try:
            # The format before torch 1.6 may announce any size; a zip says the sizes of its parts.
            with zipfile.ZipFile(file) as parts:
                if sum(part.file_size for part in parts.infolist()) > _MAX_BYTES:
                    raise DDTreeError(f"{source} unpacks to more than {_MAX_BYTES} bytes: do not use it.")
            file.seek(0)
            return torch.load(file, map_location="cpu", weights_only=True)
        except DDTreeError:
            raise
        except Exception as error:  # Whatever a broken or hostile file leads to.
            first = next(iter(str(error).splitlines()), type(error).__name__)[:160]
            raise DDTreeError(f"{source} is not a torch file of plain tensors, so it is not read ({first}).") from None


def _vector(saved: Any, source: Path) -> tuple[torch.Tensor, int | None]:
    """The vector [hidden] and the mask token, None for a bare tensor. The keys are those SGLang reads."""
    import torch

    token = None
    if isinstance(saved, dict):
        if saved.get("per_position"):
            raise DDTreeError(f"{source} has a vector for each position, which SGLang 0.5.23 does not support either.")
        token = saved.get("mask_token_id")
        if isinstance(token, torch.Tensor) and token.numel() == 1 and not token.is_floating_point():
            token = int(token)
        if not isinstance(token, int) or isinstance(token, bool) or token < 0:
            raise DDTreeError(f"{source} has no valid mask_token_id ({str(token)[:40]!r}).")
        saved = saved.get("embedding")
    plain = type(saved) in (torch.Tensor, torch.nn.Parameter) and saved.layout == torch.strided
    if not plain or saved.dtype not in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
        raise DDTreeError(f"{source} holds no plain floating-point tensor.")
    if saved.dim() == 2 and saved.shape[0] == 1:
        saved = saved[0]
    if saved.dim() != 1 or not 1 <= saved.shape[0] <= _MAX_HIDDEN:
        raise DDTreeError(f"{source} holds a tensor of shape {list(saved.shape)}: a mask embedding is one vector.")
    if not bool(saved.isfinite().all()):
        raise DDTreeError(f"{source} holds numbers that are not finite.")
    return saved.detach(), token


def refuse_unusable(directory: Path, mask_token_id: int | None, hidden_size: int) -> None:
    """Check the mask embedding of a directory, if it has one; reads headers only, and the ``.pt`` file's checksum.

    Raises:
        DDTreeError: a ``.pt`` file that is not converted, or was changed since, or a vector that does not fit.
    """
    pickled, safe = directory / MASK_EMBEDDING, directory / MASK_EMBEDDING_SAFE
    if not safe.exists():
        if pickled.exists():
            raise DDTreeError(
                f"{pickled} is refused, because it is a pickle: convert it with "
                f"'sglang-ddtree drafter convert-mask-embedding {directory}', or move it away to serve without it."
            )
        return
    tensors, facts = read_file_header(safe), _metadata(safe)
    advice = f"remove it and convert {MASK_EMBEDDING} again"
    if set(tensors) != {_TENSOR} or not facts.get(_TOKEN, "").isdecimal():
        raise DDTreeError(f"{safe} was not made by 'sglang-ddtree drafter convert-mask-embedding': remove it.")
    if tensors[_TENSOR].shape != (hidden_size,):
        raise DDTreeError(
            f"{safe} has shape {list(tensors[_TENSOR].shape)}, the drafter's hidden size is {hidden_size}."
        )
    if mask_token_id is not None and int(facts[_TOKEN]) != mask_token_id:
        raise DDTreeError(f"{safe} was trained with mask token {facts[_TOKEN]}, config.json has {mask_token_id}.")
    if pickled.exists() and _sha256(pickled) != facts.get(_SOURCE):
        raise DDTreeError(f"{safe} was made from another {MASK_EMBEDDING} than the one beside it: {advice}.")


def read(directory: Path) -> torch.Tensor | None:
    """The vector [hidden] in float32 of a directory that has been checked; None where it has none."""
    safe = directory / MASK_EMBEDDING_SAFE
    if not safe.exists():
        return None
    from safetensors.torch import load_file

    return load_file(safe)[_TENSOR]


def _metadata(path: Path) -> dict[str, str]:
    from safetensors import safe_open

    with safe_open(path, framework="numpy") as opened:
        return opened.metadata() or {}


def _sha256(path: Path) -> str:
    with open_regular(path) as file:
        digest = hashlib.sha256()
        while part := file.read(1 << 20):
            digest.update(part)
        return digest.hexdigest()
