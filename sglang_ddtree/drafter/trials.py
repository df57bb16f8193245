"""Other settings of a drafter tried on recorded answers: the drafter runs again, the target does not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
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
#: Tokens before a position that count when settings are compared, windows apart. Beyond the lengths of its training a
#: drafter may be better with settings that are wrong below them.
CONTEXT = 256
#: Depths that are compared.
_DEPTHS = 7
#: Settings of more values than _MANY (mask tokens, taps) are tried at a few depths first, those of more than _SEVERAL
#: at all; both on every fourth position. Only what may still be better is tried on all of them.
_MANY, _FINALISTS, _SEVERAL, _COARSE_STEP, _COARSE_DEPTHS = 8, 6, 2, 4, 2
#: Rows of hidden states that go through the head together: 100 MB of logits for 49,152 tokens.
_ROWS = 512
#: Part of a pass's cost that is for the texts; the rest, which grows with positions and depths, is for the head.
_BASE = 0.2
#: t at the first look below which a value is dropped; one that is as good as the config's falls there once in 50 times.
_HOPELESS = -2.0


@dataclass(frozen=True)
class Trial:
    """One alternative.

    ``values``: how many p-values its own shares ALPHA with; ``coarse``: dropped at first look; ``half_as_good``: a
    window half as wide is no worse, so that it is not the one that the drafter was trained with.
    """

    alternative: Alternative
    comparison: Comparison
    values: int
    coarse: bool = False
    half_as_good: bool = False

    @property
    def t(self) -> float:
        return max(self.comparison.t_probability, self.comparison.t_log_prob)

    @property
    def p(self) -> float:
        """The p-value, corrected for everything that was tried (Bonferroni)."""
        return min(1.0, self.comparison.p * self.values)

    @property
    def significant(self) -> bool:
        return not self.coarse and self.comparison.better(ALPHA / self.values)

    @property
    def better(self) -> bool:
        return self.significant and not self.half_as_good

    def as_json(self) -> dict[str, Any]:
        named = {"setting": self.alternative.setting, "value": self.alternative.value}
        verdict = {"coarse": self.coarse, "half_as_good": self.half_as_good, "better": self.better}
        return {**named, **asdict(self.comparison), "corrected_p": self.p, **verdict}


def try_all(
    replica: Replica,
    answers: Sequence[Answer],
    heads: Heads,
    others: Sequence[Alternative],
    positions: int,
    progress: Callable[[str], None],
    context: int = CONTEXT,
) -> list[Trial]:
    """Every alternative against the config on about ``positions`` positions spread over the answers, best first.

    ALPHA is shared out evenly among the settings, and a setting's part among its values. Windows are tried with the
    whole text before a position, everything else with the last ``context`` tokens of it.

    Raises:
        DDTreeError: the answers are too short to compare anything.
    """
    depths = min(_DEPTHS, replica.drafter.shape.block_size - 1)
    anchors, longest = spread(answers, positions, depths), max(len(one.tokens) for one in answers)
    by_setting: dict[str, list[Alternative]] = {}
    for other in others:
        by_setting.setdefault(other.setting, []).append(other)
    few, shallow = [one[::_COARSE_STEP] for one in anchors], min(_COARSE_DEPTHS, depths)
    whole, quarter = _Look(anchors, depths, 1.0), _Look(few, depths, _BASE + (1 - _BASE) / _COARSE_STEP)
    glance = _Look(few, shallow, _BASE + (1 - _BASE) * shallow / depths / _COARSE_STEP)
    first_looks = {s: _first_look(len(v), quarter, glance) for s, v in by_setting.items()}
    cost = 2.0  # The config's own passes. What is dropped at the first look makes the rest shorter than that.
    for setting, values in by_setting.items():
        look = first_looks[setting]
        cost += (min(len(values), _FINALISTS) + len(values) * look.cost) if look else len(values)
    count = Progress(progress, f"trying {len(others)} other values of {len(by_setting)} settings", cost)

    @cache
    def given(look: _Look, seen: int | None) -> Drafts:
        count.add(look.cost)
        return draft(replica, answers, heads, look.anchors, look.depths, context=seen)

    def against(other: Alternative, look: _Look, seen: int | None) -> Comparison:
        found = compare(given(look, seen), draft(replica, answers, heads, look.anchors, look.depths, other, seen))
        count.add(look.cost)
        return found

    trials: list[Trial] = []
    for setting, values in by_setting.items():
        shares, look = len(values) * len(by_setting), first_looks[setting]
        seen = None if setting == "sliding_window" or longest <= context else context
        if look:
            first = [Trial(v, against(v, look, seen), shares, coarse=True) for v in values]
            first.sort(key=lambda trial: -trial.comparison.t_probability)
            kept = [trial for trial in first[:_FINALISTS] if trial.t > _HOPELESS]
            trials += [trial for trial in first if trial not in kept]
            count.add(min(len(values), _FINALISTS) - len(kept))
            values = [trial.alternative for trial in kept]
        trials += [Trial(v, against(v, whole, seen), shares) for v in values]
    for number, trial in enumerate(trials):
        half = half_window(trial.alternative, replica.windows)
        if trial.significant and half is not None:
            pair = [draft(replica, answers, heads, anchors, depths, v) for v in (half, trial.alternative)]
            found = compare(*pair)
            trials[number] = replace(trial, half_as_good=min(found.t_probability, found.t_log_prob) <= 0)
    count.end()
    return sorted(trials, key=lambda trial: (trial.coarse, trial.comparison.p))


@dataclass(frozen=True, eq=False)
class _Look:
    """Positions and depths that are compared, and what that costs."""

    anchors: Sequence[torch.Tensor]
    depths: int
    cost: float


def _first_look(values: int, quarter: _Look, glance: _Look) -> _Look | None:
    return glance if values > _MANY else quarter if values > _SEVERAL else None


def half_window(other: Alternative, given: Sequence[int | None]) -> Alternative | None:
    """A window alternative with half the window; None where there is none, or where that is the config's."""
    if other.windows is None or not any(other.windows):
        return None
    windows = tuple(window and window // 2 for window in other.windows)
    return None if windows == tuple(given) else Alternative(other.setting, "half", windows=windows)


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
    context: int | None = None,
) -> Drafts:
    """What the drafter gives at ``anchors`` with one setting changed (None: as the config has it).

    ``context``: no layer sees more positions than this, its own included (None: all that its window lets it see).
    """
    other = other or Alternative("", None)
    drafter, original = replica.drafter, replica.drafter.shape
    drafter.shape = shape = replace(original, **other.changes)
    windows = other.windows or replica.windows
    if context is not None:
        windows = tuple(min(window or context, context) for window in windows)
    replica.set_attention(other.causal or replica.causal, windows)
    depths = min(depths, shape.block_size - 1)
    blocks = heads.blocks if "mask_token_id" not in other.changes else heads.embed
    found, wanted, prompt = [], [], []
    try:
        for number, (one, where) in enumerate(zip(answers, anchors, strict=True)):
            if not len(where):
                continue
            taps = torch.cat([one.states[layer] for layer in shape.target_layer_ids], dim=-1)
            block = block_embeddings(blocks, one.tokens[where[None]].long(), shape)
            found.append(drafter(drafter.project(taps[None].float()), where[None], block, first_row=1)[0, :, :depths])
            wanted.append(one.tokens[where[:, None] + torch.arange(1, depths + 1)].long())
            prompt.append(torch.full((len(where),), number))
    finally:
        drafter.shape = original
        replica.set_attention(replica.causal, replica.windows)
    right, log_prob = _through_head(torch.cat(found), torch.cat(wanted), heads.head)
    return Drafts(right, log_prob, torch.cat(prompt))


def _through_head(hidden: torch.Tensor, wanted: torch.Tensor, head: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """hidden [n, depths, h], tokens [n, depths] -> whether each is the first choice, and its log-probability.

    Many rows at once, or reading the head takes longer than multiplying with it.
    """
    right, log_prob = [], []
    for rows, tokens in zip(hidden.flatten(0, 1).split(_ROWS), wanted.flatten().split(_ROWS), strict=True):
        logits = rows @ head.T
        right.append(logits.argmax(-1) == tokens)
        log_prob.append(logits.gather(-1, tokens[:, None])[:, 0] - logits.logsumexp(-1))
    return torch.cat(right).view_as(wanted), torch.cat(log_prob).view_as(wanted)
