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
        repetition: float32 ``[bs]``, 1 is none; or None when no request of the batch has one.
        min_new_tokens: int64 ``[bs]``, 0 is none.
        stop_tokens: int64 ``[bs, n]``, what may not be drawn before ``min_new_tokens``; rows are padded by repetition.
            None when no request ever had any.
    """

    frequency: torch.Tensor
    presence: torch.Tensor
    repetition: torch.Tensor | None
    min_new_tokens: torch.Tensor
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

    if penalties.stop_tokens is not None:
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


class PenaltyTable:
    """Penalty parameters and generated tokens of every request slot.

    Kept on the device: parameters never change while a request runs, and under overlap scheduling the host learns of a
    step's tokens only after the next step was launched.

    Every prefill must :meth:`start` its rows once the table exists. Requests older than the table have no penalties,
    and neither has a row that was never started.
    """

    def __init__(self, slots: int, vocab_size: int, device: torch.device | str):
        self._counts = torch.zeros(slots, vocab_size, dtype=torch.int32, device=device)
        self._lengths = torch.zeros(slots, dtype=torch.int64, device=device)
        self._frequency = torch.zeros(slots, dtype=torch.float32, device=device)
        self._presence = torch.zeros(slots, dtype=torch.float32, device=device)
        self._repetition = torch.ones(slots, dtype=torch.float32, device=device)
        self._minimum = torch.zeros(slots, dtype=torch.int64, device=device)
        self._stops: torch.Tensor | None = None

    def start(self, slots: torch.Tensor, reqs: Sequence[Any], first: torch.Tensor) -> None:
        """Begin rows ``slots`` int64 ``[bs]`` with SGLang's ``Req`` objects, whose ``output_ids`` are not empty when
        they were retracted, and then ``first`` int ``[bs]``, the token that the prefill drew."""
        params = [req.sampling_params for req in reqs]
        stops = [_stop_tokens(req) if req.sampling_params.min_new_tokens > 0 else [] for req in reqs]

        def put(table: torch.Tensor, values: Any) -> None:
            table[slots] = torch.tensor(values, dtype=table.dtype).to(slots.device, non_blocking=True)

        put(self._frequency, [p.frequency_penalty for p in params])
        put(self._presence, [p.presence_penalty for p in params])
        put(self._repetition, [p.repetition_penalty for p in params])
        # Without a stop token there is nothing to forbid, and the row's padding must not be.
        put(self._minimum, [p.min_new_tokens if row else 0 for p, row in zip(params, stops, strict=True)])
        longest = max(map(len, stops))
        if self._stops is None or longest > self._stops.shape[1]:
            self._widen_stops(longest)
        if self._stops is not None:
            width = self._stops.shape[1]
            put(self._stops, [row + (row[:1] or [0]) * (width - len(row)) for row in stops])

        self._counts[slots] = 0
        put(self._lengths, [len(req.output_ids) for req in reqs])
        for row, req in enumerate(reqs):
            if req.output_ids:
                ids = torch.tensor(list(req.output_ids), dtype=torch.int64).to(slots.device)
                self._add(slots[row : row + 1].expand(len(ids)), ids)
        self.commit(slots, first.to(torch.int64).unsqueeze(1))

    def commit(self, slots: torch.Tensor, tokens: torch.Tensor) -> None:
        """Add ``tokens`` int64 ``[bs, n]`` to rows ``slots`` int64 ``[bs]``; negative ones are none."""
        self._add(slots.unsqueeze(1).expand(tokens.shape), tokens)
        self._lengths.index_add_(0, slots, (tokens >= 0).sum(1))

    def of(self, slots: torch.Tensor, *, scaling: bool = True) -> tuple[Penalties, History]:
        """The parameters and the history of ``slots`` int64 ``[bs]``; without ``scaling`` no repetition penalties."""
        penalties = Penalties(
            frequency=self._frequency[slots],
            presence=self._presence[slots],
            repetition=self._repetition[slots] if scaling else None,
            min_new_tokens=self._minimum[slots],
            stop_tokens=None if self._stops is None else self._stops[slots],
        )
        return penalties, History(self._counts[slots], self._lengths[slots])

    def _widen_stops(self, width: int) -> None:
        if width == 0:
            return
        wider = torch.zeros(self._counts.shape[0], width, dtype=torch.int64, device=self._counts.device)
        if self._stops is not None:
            old = self._stops.shape[1]
            wider[:, :old] = self._stops
            wider[:, old:] = self._stops[:, :1]
        self._stops = wider

    def _add(self, slots: torch.Tensor, tokens: torch.Tensor) -> None:
        flat = slots * self._counts.shape[1] + tokens.clamp(min=0)
        self._counts.view(-1).scatter_add_(0, flat.flatten(), (tokens >= 0).to(torch.int32).flatten())
