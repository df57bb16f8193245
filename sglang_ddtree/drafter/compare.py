"""Two ways of drafting compared on the same positions: which is better, by how much, and how sure is that?

Greedy output does not depend on the drafter, so any number of settings can draft for one recorded text and be compared
position by position. Accepted tokens are a coarse measure: a setting that moves every probability a little changes
few first choices. So two finer ones are tested:

* the probability that the drafter gives to the target's token, averaged over the depths: what acceptance is made of;
* its logarithm, each difference cut at +-0.5: many small differences of one sign, wherever they are.

Positions of one answer are not independent, so a prompt is one sample: a paired t-test over the prompts' sums.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

#: Largest log-probability difference at one position and depth; beyond it a few hopeless tokens would decide.
_CUT = 0.5
#: One measure finds an alternative better; the other one may not say the opposite with more than this t.
_AGAINST = -2.0


@dataclass(frozen=True)
class Drafts:
    """What one setting drafted. ``right`` [n, depths] bool: the first choice is the target's token; ``log_prob``
    [n, depths]: of the target's token; ``prompt`` [n]: number of the prompt that each position belongs to."""

    right: torch.Tensor
    log_prob: torch.Tensor
    prompt: torch.Tensor


@dataclass(frozen=True)
class Comparison:
    """An alternative against the setting of the config, at the depths both have.

    Attributes:
        agreement, given: share of first choices that are right, of the alternative and of the config's setting.
        accepted: drafts accepted in a row more (or less) per position.
        probability, log_prob: mean differences of the two measures.
        t_probability, t_log_prob: their t statistics.
        p: one-sided p-value that the alternative is better, for both measures together (Bonferroni).
        prompts: samples of the test.
    """

    agreement: float
    given: float
    accepted: float
    probability: float
    log_prob: float
    t_probability: float
    t_log_prob: float
    p: float
    prompts: int

    def better(self, alpha: float) -> bool:
        """Whether the alternative is better with at most ``alpha`` chance of a false alarm, and by no measure worse."""
        return self.p <= alpha and min(self.t_probability, self.t_log_prob) > _AGAINST


def compare(given: Drafts, other: Drafts) -> Comparison:
    """``other`` against ``given``; both must hold the same positions."""
    depths = min(given.right.shape[1], other.right.shape[1])
    right, base = other.right[:, :depths], given.right[:, :depths]
    before, after = given.log_prob[:, :depths].double(), other.log_prob[:, :depths].double()
    probability = (after.exp() - before.exp()).mean(1)
    log_prob = (after - before).clamp(-_CUT, _CUT).mean(1)
    t_probability, prompts = paired_t(probability, given.prompt)
    t_log_prob, _ = paired_t(log_prob, given.prompt)
    runs = right.long().cumprod(1).sum(1) - base.long().cumprod(1).sum(1)
    p = 2 * t_tail(max(t_probability, t_log_prob), prompts - 1)
    return Comparison(
        agreement=round(float(right.float().mean()), 4),
        given=round(float(base.float().mean()), 4),
        accepted=round(float(runs.float().mean()), 4),
        probability=round(float(probability.mean()), 5),
        log_prob=round(float((after - before).mean()), 5),
        t_probability=round(t_probability, 2),
        t_log_prob=round(t_log_prob, 2),
        p=min(1.0, p),
        prompts=prompts,
    )


def paired_t(difference: torch.Tensor, prompt: torch.Tensor) -> tuple[float, int]:
    """The t statistic of the prompts' sums of ``difference`` [n], and the number of prompts.

    0 where there is no difference at all, or only one prompt.
    """
    _, group = prompt.unique(return_inverse=True)
    sums = torch.zeros(int(group.max()) + 1, dtype=torch.float64).index_add_(0, group.cpu(), difference.double().cpu())
    count = len(sums)
    spread = float(sums.std()) if count > 1 else 0.0
    return (float(sums.mean()) / (spread / math.sqrt(count)) if spread > 0 else 0.0), count


def t_tail(t: float, freedom: int) -> float:
    """P(T > t) of Student's distribution with ``freedom`` degrees; 1 where there are none.

    The finite series of Abramowitz and Stegun, 26.7.3 and 26.7.4.
    """
    if freedom < 1:
        return 1.0
    angle = math.atan2(abs(t), math.sqrt(freedom))
    cos, sin = math.cos(angle), math.sin(angle)
    odd = freedom % 2
    term, total = (cos, 0.0) if odd else (1.0, 0.0)
    for k in range(1 + odd, freedom, 2):
        total += term
        term *= cos * cos * k / (k + 1)
    inside = 2 / math.pi * (angle + sin * total) if odd else sin * total
    tail = max(0.0, (1 - inside) / 2)
    return tail if t >= 0 else 1 - tail
