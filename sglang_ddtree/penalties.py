"""Frequency, presence and repetition penalties and ``min_new_tokens``, exact at every node of a draft tree.

SGLang's own speculative verification calls its penalties "relaxed": all nodes of a step share one state, and of several
tokens committed in a step only the last is counted. Plain decoding counts every token of the answer, so a node's
penalties must count the answer so far and the path from the root to the node. That is what this module does; the
formulas are those of ``sglang.srt.sampling.penaltylib``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Penalties:
    """The penalty parameters of a batch of ``bs`` requests.

    Attributes:
        frequency, presence: float32 ``[bs]``, 0 is none.
        repetition: float32 ``[bs]``, 1 is none; or None when no request has one.
        min_new_tokens: int64 ``[bs]``; or None when no request has any.
        stop_tokens: int64 ``[bs, n]``, what may not be drawn before ``min_new_tokens``; rows are padded by repetition.
            None where ``min_new_tokens`` is.
    """

    frequency: torch.Tensor
    presence: torch.Tensor
    repetition: torch.Tensor | None
    min_new_tokens: torch.Tensor | None
    stop_tokens: torch.Tensor | None


@dataclass(frozen=True)
class History:
    """What a batch of requests has generated so far, the tree's root included and the prompt not.

    Attributes:
        counts: int32 ``[bs, vocab]``, how often each token was generated.
        lengths: int64 ``[bs]``, number of generated tokens.
    """

    counts: torch.Tensor
    lengths: torch.Tensor


def has_penalties(info: Any) -> bool:
    """Whether a request of the batch has one; ``info`` is the ``SamplingBatchInfo`` of a forward pass."""
    return info.acc_additive_penalties is not None or info.acc_scaling_penalties is not None


def of_requests(reqs: Sequence[Any], device: torch.device | str) -> Penalties:
    """The parameters of SGLang's ``Req`` objects, on ``device``."""
    params = [req.sampling_params for req in reqs]

    def tensor(values: list[Any], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype).to(device, non_blocking=True)

    repetition = minimum = stops = None
    if any(p.repetition_penalty != 1.0 for p in params):
        repetition = tensor([p.repetition_penalty for p in params], torch.float32)
    if any(p.min_new_tokens > 0 for p in params):
        ids = [_stop_tokens(req) if req.sampling_params.min_new_tokens > 0 else [] for req in reqs]
        longest = max(map(len, ids))
        if longest:
            # A request without any gets a minimum of 0, so that its padding forbids nothing.
            least = [p.min_new_tokens if row else 0 for p, row in zip(params, ids, strict=True)]
            padded = [row + (row[:1] or [0]) * (longest - len(row)) for row in ids]
            minimum, stops = tensor(least, torch.int64), tensor(padded, torch.int64)
    return Penalties(
        frequency=tensor([p.frequency_penalty for p in params], torch.float32),
        presence=tensor([p.presence_penalty for p in params], torch.float32),
        repetition=repetition,
        min_new_tokens=minimum,
        stop_tokens=stops,
    )


def _stop_tokens(req: Any) -> list[int]:
    """As in SGLang's ``BatchedMinNewTokensPenalizer``."""
    found = set(req.sampling_params.stop_token_ids or ()) | set(req.eos_token_ids or ())
    if req.tokenizer is not None:
        found |= set(req.tokenizer.additional_stop_token_ids or ()) | {req.tokenizer.eos_token_id}
    return sorted(token for token in found if token is not None)


def apply_penalties(
    logits: torch.Tensor, penalties: Penalties, history: History, paths: torch.Tensor, depths: torch.Tensor
) -> None:
    """Subtract and scale in place, at each node for the answer so far and the node's own path.

    Args:
        logits: float ``[bs, Q, vocab]``.
        paths: int64 ``[bs, Q, D]``, tokens from below the root to the node, -1 where there are none
            (``tree.paths.path_tokens``).
        depths: int64 ``[bs, Q]`` of the nodes.
    """
    counts, used = history.counts, history.counts > 0
    frequency, presence = penalties.frequency.unsqueeze(1), penalties.presence.unsqueeze(1)
    logits.sub_((frequency * counts + presence * used).unsqueeze(1))

    bs, width, depth = paths.shape
    on_path = paths >= 0
    tokens = paths.clamp(min=0)
    before = torch.ones(depth, depth, dtype=torch.bool, device=paths.device).tril(-1)
    repeated = ((paths.unsqueeze(3) == paths.unsqueeze(2)) & before).any(3)
    known = used.gather(1, tokens.view(bs, -1)).view(paths.shape)
    fresh = on_path & ~repeated & ~known
    per_step = -(frequency.unsqueeze(2) * on_path + presence.unsqueeze(2) * fresh)
    logits.scatter_add_(2, tokens, per_step.to(logits.dtype))

    if penalties.min_new_tokens is not None and penalties.stop_tokens is not None:
        # SGLang adds this before it scales; -inf stays -inf either way.
        early = history.lengths.unsqueeze(1) + depths < penalties.min_new_tokens.unsqueeze(1)
        forbidden = torch.where(early, float("-inf"), 0.0).to(logits.dtype).unsqueeze(2)
        stops = penalties.stop_tokens.unsqueeze(1).expand(-1, width, -1)
        logits.scatter_add_(2, stops, forbidden.expand(stops.shape).contiguous())

    if penalties.repetition is not None:
        factor = penalties.repetition.view(bs, 1, 1)
        scale = torch.where(used.unsqueeze(1), factor, 1.0).expand(logits.shape).clone()
        scale.scatter_reduce_(2, tokens, torch.where(fresh, factor, 1.0), "prod")
        logits.copy_(torch.where(logits < 0, logits * scale, logits / scale))


class HistoryTable:
    """Generated tokens of every request slot, kept on the device, because under overlap scheduling the host learns of a
    step's tokens only after the next step was launched.

    Only rows of requests that were in a batch with penalties when they started are right; no other row is read with a
    penalty.
    """

    def __init__(self, slots: int, vocab_size: int, device: torch.device | str):
        self._counts = torch.zeros(slots, vocab_size, dtype=torch.int32, device=device)
        self._lengths = torch.zeros(slots, dtype=torch.int64, device=device)

    def start(self, slots: torch.Tensor, earlier: Sequence[Sequence[int]], first: torch.Tensor) -> None:
        """Begin rows ``slots`` int64 ``[bs]`` with the tokens of ``earlier`` (not empty for a request that was
        retracted) and then ``first`` int ``[bs]``, the token that the prefill drew."""
        self._counts[slots] = 0
        lengths = torch.tensor([len(tokens) for tokens in earlier], dtype=torch.int64)
        self._lengths[slots] = lengths.to(slots.device, non_blocking=True)
        for row, tokens in enumerate(earlier):
            if tokens:
                ids = torch.tensor(tokens, dtype=torch.int64).to(slots.device)
                self._add(slots[row : row + 1].expand(len(tokens)), ids)
        self.commit(slots, first.to(torch.int64).unsqueeze(1))

    def commit(self, slots: torch.Tensor, tokens: torch.Tensor) -> None:
        """Add ``tokens`` int64 ``[bs, n]`` to rows ``slots`` int64 ``[bs]``; negative ones are none."""
        self._add(slots.unsqueeze(1).expand(tokens.shape), tokens)
        self._lengths.index_add_(0, slots, (tokens >= 0).sum(1))

    def of(self, slots: torch.Tensor) -> History:
        """The history of ``slots`` int64 ``[bs]``."""
        return History(self._counts[slots], self._lengths[slots])

    def _add(self, slots: torch.Tensor, tokens: torch.Tensor) -> None:
        flat = slots * self._counts.shape[1] + tokens.clamp(min=0)
        self._counts.view(-1).scatter_add_(0, flat.flatten(), (tokens >= 0).to(torch.int32).flatten())
