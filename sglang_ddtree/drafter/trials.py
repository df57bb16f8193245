"""Other settings of a drafter tried on recorded answers: the drafter runs again, the target does not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from sglang_ddtree.drafter.alternatives import Alternative
from sglang_ddtree.drafter.answers import Answer, Heads
from sglang_ddtree.drafter.compare import Comparison, Drafts, compare
from sglang_ddtree.drafter.progress import Progress
from sglang_ddtree.drafter.replica import Replica
from sglang_ddtree.errors import DDTreeError
from sglang_ddtree.training.model import block_embeddings

#: Chance that anything is reported about a drafter whose settings are right, over all alternatives of one run.
ALPHA = 0.01
#: Depths that are compared.
_DEPTHS = 7
#: Settings of more values than this (mask tokens, taps) are tried on fewer positions and depths first, and only the
#: best ones on all of them.
_MANY, _FINALISTS, _COARSE_STEP, _COARSE_DEPTHS = 8, 6, 4, 2


@dataclass(frozen=True)
class Trial:
    """One alternative. ``values``: how many p-values its own shares ALPHA with; ``coarse``: dropped at first look."""

    alternative: Alternative
    comparison: Comparison
    values: int
    coarse: bool = False

    @property
    def p(self) -> float:
        """The p-value, corrected for everything that was tried (Bonferroni)."""
        return min(1.0, self.comparison.p * self.values)

    @property
    def better(self) -> bool:
        return not self.coarse and self.comparison.better(ALPHA / self.values)

    def as_json(self) -> dict[str, Any]:
        named = {"setting": self.alternative.setting, "value": self.alternative.value}
        return {**named, **asdict(self.comparison), "corrected_p": self.p, "coarse": self.coarse, "better": self.better}


def try_all(
    replica: Replica,
    answers: Sequence[Answer],
    heads: Heads,
    others: Sequence[Alternative],
    positions: int,
    progress: Callable[[str], None],
) -> list[Trial]:
    """Every alternative against the config on about ``positions`` positions spread over the answers, best first.

    ALPHA is shared out evenly among the settings, and a setting's part among its values.

    Raises:
        DDTreeError: the answers are too short to compare anything.
    """
    depths = min(_DEPTHS, replica.drafter.shape.block_size - 1)
    anchors = spread(answers, positions, depths)
    by_setting: dict[str, list[Alternative]] = {}
    for other in others:
        by_setting.setdefault(other.setting, []).append(other)
    few, shallow = [one[::_COARSE_STEP] for one in anchors], min(_COARSE_DEPTHS, depths)
    coarse = shallow / depths / _COARSE_STEP  # of the cost of a whole one, which is nearly all in the head
    cost = 1 + sum(_FINALISTS + (len(v) + 1) * coarse if len(v) > _MANY else len(v) for v in by_setting.values())
    count = Progress(progress, f"trying other values of {', '.join(by_setting) or 'nothing'}", cost)

    def drafted(where: Sequence[torch.Tensor], deep: int, other: Alternative | None = None) -> Drafts:
        result = draft(replica, answers, heads, where, deep, other)
        count.add(1 if where is anchors else coarse)
        return result

    given = drafted(anchors, depths)
    trials: list[Trial] = []
    for values in by_setting.values():
        shares = len(values) * len(by_setting)
        if len(values) > _MANY:
            base = drafted(few, shallow)
            first = [Trial(v, compare(base, drafted(few, shallow, v)), shares, True) for v in values]
            first.sort(key=lambda trial: -trial.comparison.t_probability)
            values = [trial.alternative for trial in first[:_FINALISTS]]
            trials += first[_FINALISTS:]
        trials += [Trial(v, compare(given, drafted(anchors, depths, v)), shares) for v in values]
    return sorted(trials, key=lambda trial: (trial.coarse, trial.comparison.p))


def spread(answers: Sequence[Answer], positions: int, depths: int) -> list[torch.Tensor]:
    """Positions [k] of each answer at which to draft, all of them with ``depths`` known tokens behind.

    Raises:
        DDTreeError: no answer has one.
    """
    share = -(-positions // len(answers))
    found = []
    for one in answers:
        last = len(one.tokens) - 1 - depths
        count = min(share, last - one.prompt + 1)
        # Rounded down from evenly spaced ones, hence all different.
        found.append(torch.linspace(one.prompt, last, count).long() if count > 0 else torch.zeros(0).long())
    if not any(map(len, found)):
        raise DDTreeError("the answers are too short to compare settings: give other prompts, or more --max-tokens.")
    return found


def draft(
    replica: Replica,
    answers: Sequence[Answer],
    heads: Heads,
    anchors: Sequence[torch.Tensor],
    depths: int,
    other: Alternative | None = None,
) -> Drafts:
    """What the drafter gives at ``anchors`` with one setting changed (None: as the config has it)."""
    other = other or Alternative("", None)
    drafter, original = replica.drafter, replica.drafter.shape
    drafter.shape = shape = replace(original, **other.changes)
    replica.set_attention(other.causal or replica.causal, other.windows or replica.windows)
    depths = min(depths, shape.block_size - 1)
    blocks = heads.blocks if "mask_token_id" not in other.changes else heads.embed
    right, log_prob, prompt = [], [], []
    try:
        for number, (one, where) in enumerate(zip(answers, anchors, strict=True)):
            if not len(where):
                continue
            taps = torch.cat([one.states[layer] for layer in shape.target_layer_ids], dim=-1)
            block = block_embeddings(blocks, one.tokens[where[None]].long(), shape)
            hidden = drafter(drafter.project(taps[None].float()), where[None], block, first_row=1)[0, :, :depths]
            logits = hidden @ heads.head.T
            wanted = one.tokens[where[:, None] + torch.arange(1, depths + 1)].long()
            right.append(logits.argmax(-1) == wanted)
            log_prob.append(logits.gather(-1, wanted[..., None])[..., 0] - logits.logsumexp(-1))
            prompt.append(torch.full((len(where),), number))
    finally:
        drafter.shape = original
        replica.set_attention(replica.causal, replica.windows)
    return Drafts(torch.cat(right), torch.cat(log_prob), torch.cat(prompt))
