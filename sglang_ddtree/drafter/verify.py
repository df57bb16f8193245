"""Does a drafter draft as it was trained to? A measurement, for the settings that no file can show to be wrong.

The target answers a few prompts; the drafter then proposes at every position of the answers, offline, which is what it
would do when serving. A wrong mask token, RoPE base, tap or causality costs acceptance without any error, so each of
them is also tried with other values on the same positions: one that is clearly better means that the config is wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from sglang_ddtree.drafter.alternatives import Alternative, other_settings
from sglang_ddtree.drafter.answers import Answer, Heads, answer, read_prompts
from sglang_ddtree.drafter.check import read_target
from sglang_ddtree.drafter.files import read_config
from sglang_ddtree.drafter.replica import Replica, load_replica
from sglang_ddtree.errors import DDTreeError
from sglang_ddtree.training.corpus import Sequence as Text
from sglang_ddtree.training.measure import accepted_drafts, proposals, replay
from sglang_ddtree.training.model import block_embeddings

#: Depth-1 agreement below this is taken for a fault by itself. A rule of thumb: the small drafter shipped here has more
#: than 0.35 on held-out prompts (tests/engine/test_bare_drafter.py). Wrong settings are found by comparing with others.
HEALTHY = 0.25
#: Positions on which alternatives are compared, and the depths that are looked at.
_POSITIONS, _DEPTHS = 320, 2
#: An alternative is clearly better when it is right this much more often, and by this many standard deviations.
_GAIN, _SIGMAS = 0.02, 4.0


@dataclass(frozen=True)
class Trial:
    """One alternative on the common positions: its agreement, that of the config, and the difference in sigmas."""

    alternative: Alternative
    agreement: float
    given: float
    sigmas: float

    @property
    def better(self) -> bool:
        return self.agreement - self.given >= _GAIN and self.sigmas >= _SIGMAS


@dataclass
class Report:
    """What was measured.

    Attributes:
        positions: answer positions at which the drafter proposed.
        agreement: for each depth 1 .. B-1 the share of positions where its first choice is the target's token.
        histogram: how many positions have 0, 1, .. B-1 first choices right in a row.
        lengths: committed tokens per verify step for "chain" (DFLASH) and tree budgets (DDTREE).
        trials: the alternatives, best first.
        faults: what is wrong, a line each; empty for a healthy drafter.
    """

    positions: int
    agreement: list[float]
    histogram: list[int]
    lengths: dict[str, float]
    trials: list[Trial] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        trials = [
            {
                "setting": trial.alternative.setting,
                "value": trial.alternative.value,
                "agreement": trial.agreement,
                "given": trial.given,
                "sigmas": trial.sigmas,
                "better": trial.better,
            }
            for trial in self.trials
        ]
        return {**vars(self), "trials": trials}


@torch.inference_mode()
def verify(
    draft_dir: Path,
    target_dir: Path,
    prompts: Path,
    *,
    max_tokens: int = 64,
    device: str | None = None,
    dtype: str = "auto",
    alternatives: bool = True,
    progress: Callable[[str], None] = lambda text: None,
) -> Report:
    """Measure a drafter directory on the prompts of a file (one a line).

    Raises:
        DDTreeError: the pair does not fit, the target cannot be loaded, or nothing can be measured.
    """
    if not 8 <= max_tokens <= 4096:
        raise DDTreeError(f"--max-tokens must be between 8 and 4096, got {max_tokens}.")
    questions = read_prompts(prompts)
    replica = load_replica(draft_dir, target_dir)
    shape = replica.drafter.shape
    layers = read_target(read_config(target_dir), str(target_dir)).num_layers
    others = list(other_settings(replica, target_dir, layers)) if alternatives else []
    taps = {layer for other in others for layer in other.changes.get("target_layer_ids", ())}
    where, kind = _device(device), _dtype(dtype, device)
    answers, heads = answer(
        target_dir,
        questions,
        sorted(taps | set(shape.target_layer_ids)),
        max_tokens=max_tokens,
        max_length=replica.window,
        device=where,
        dtype=kind,
        progress=progress,
    )
    with torch.device(where):
        replica.drafter.to(where)
        progress(f"measuring {sum(len(one.tokens) - one.prompt - 1 for one in answers)} positions")
        report = _measure(replica, answers, heads)
        if others:
            report.trials = _try_all(replica, answers, heads, others, progress)
    report.faults = _faults(report)
    return report


def _device(given: str | None) -> str:
    return given or ("cuda" if torch.cuda.is_available() else "cpu")


def _dtype(given: str, device: str | None) -> torch.dtype:
    if given == "auto":
        return torch.float32 if _device(device) == "cpu" else torch.bfloat16
    return getattr(torch, given)


def _measure(replica: Replica, answers: Sequence[Answer], heads: Heads) -> Report:
    """The settings as they are, at every position and depth."""
    drafter, depth = replica.drafter, replica.drafter.shape.block_size - 1
    right, valid = torch.zeros(depth), torch.zeros(depth)
    histogram = [0] * (depth + 1)
    steps: dict[str, int] = {}
    committed: dict[str, int] = {}
    for one in answers:
        text = _text(one, drafter.shape.target_layer_ids)
        log_probs, ids = (part.cpu() for part in proposals(drafter, heads.embed, text, heads.head))
        on_cpu = replace(text, tokens=one.tokens.cpu())
        with torch.device("cpu"):
            expected, known = _expected(on_cpu.tokens, one.prompt, depth)
            hit = (ids[:, :, 0] == expected) & known
            right, valid = right + hit.sum(0), valid + known.sum(0)
            for way, accepted in accepted_drafts(log_probs, ids, on_cpu).items():
                done, tokens = replay(accepted)
                steps[way], committed[way] = steps.get(way, 0) + done, committed.get(way, 0) + tokens
        # Only positions after which a whole block is known, or the end of the answer would look like a miss.
        for run in hit[known.all(1)].long().cumprod(1).sum(1).tolist():
            histogram[run] += 1
    return Report(
        positions=sum(len(one.tokens) - one.prompt - 1 for one in answers),
        agreement=[round(float(r / v), 4) if v else 0.0 for r, v in zip(right.cpu(), valid.cpu(), strict=True)],
        histogram=histogram,
        lengths={way: round(committed[way] / steps[way], 3) for way in steps},
    )


def _text(one: Answer, taps: Sequence[int]) -> Text:
    states = torch.cat([one.states[layer] for layer in taps], dim=-1)
    return Text(tokens=one.tokens, prompt=one.prompt, taps=states, final=states[:, :0])


def _expected(tokens: torch.Tensor, prompt: int, depth: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The tokens [answer - 1, depth] that follow each position of an answer, and which of them the answer has."""
    where = torch.arange(prompt, len(tokens) - 1)[:, None] + torch.arange(1, depth + 1)
    known = where < len(tokens)
    return tokens[where.clamp(max=len(tokens) - 1)].long(), known


def _try_all(
    replica: Replica,
    answers: Sequence[Answer],
    heads: Heads,
    others: Sequence[Alternative],
    progress: Callable[[str], None],
) -> list[Trial]:
    """Every alternative against the config on the same positions, best first."""
    share = max(1, _POSITIONS // len(answers))
    given = _hits(replica, answers, heads, share, Alternative("", None))
    trials = []
    for number, other in enumerate(others):
        if number % 16 == 0:
            progress(f"trying other settings: {number} of {len(others)}")
        hits = _hits(replica, answers, heads, share, other)
        gained, lost = int((hits & ~given).sum()), int((given & ~hits).sum())
        # Of the positions where only one of the two is right, equally good settings would share half each.
        sigmas = (gained - lost) / max(1.0, (gained + lost) ** 0.5)
        trials.append(
            Trial(other, round(float(hits.float().mean()), 4), round(float(given.float().mean()), 4), round(sigmas, 2))
        )
    return sorted(trials, key=lambda trial: -trial.agreement)


def _hits(replica: Replica, answers: Sequence[Answer], heads: Heads, share: int, other: Alternative) -> torch.Tensor:
    """Whether the first choice is right [positions, depths], flat, with one setting changed."""
    drafter, original = replica.drafter, replica.drafter.shape
    drafter.shape = shape = replace(original, **other.changes)
    replica.set_causal(other.causal or replica.causal)
    found = []
    try:
        for one in answers:
            last = len(one.tokens) - 1 - _DEPTHS
            if last < one.prompt:
                continue
            anchors = torch.linspace(one.prompt, last, min(share, last - one.prompt + 1)).long().unique()[None]
            context = drafter.project(_text(one, shape.target_layer_ids).taps[None].float())
            block = block_embeddings(heads.embed, one.tokens[anchors], shape)
            hidden = drafter(context, anchors, block, first_row=1)[0, :, :_DEPTHS]
            best = (hidden @ heads.head.T).argmax(-1)
            found.append(best == one.tokens[anchors[0][:, None] + torch.arange(1, _DEPTHS + 1)])
    finally:
        drafter.shape = original
        replica.set_causal(replica.causal)
    if not found:
        raise DDTreeError("the answers are too short to compare settings: give other prompts, or more --max-tokens.")
    return torch.cat(found).flatten()


def _faults(report: Report) -> list[str]:
    faults = []
    seen: set[str] = set()
    for trial in report.trials:
        if trial.better and trial.alternative.setting not in seen:
            seen.add(trial.alternative.setting)
            faults.append(
                f"{trial.alternative.setting} looks wrong: with {trial.alternative.value} the first choice is right at "
                f"{trial.agreement:.1%} of the positions instead of {trial.given:.1%} ({trial.sigmas:.0f} sigma)"
            )
    if report.agreement[0] < HEALTHY:
        faults.append(
            f"rank-0 agreement at depth 1 is {report.agreement[0]:.1%}, a trained drafter's is above {HEALTHY:.0%}: "
            "a setting is wrong, or this is not the target's drafter"
        )
    return faults


def describe(report: Report) -> str:
    """The report as text."""
    lines = [f"{report.positions} positions"]
    lines.append("depth  rank-0 agreement")
    lines += [f"{d:5}  {a:6.1%} {'#' * round(40 * a)}" for d, a in enumerate(report.agreement, 1)]
    total = max(1, sum(report.histogram))
    lines.append("drafts right in a row (chain)")
    lines += [f"{n:5}  {c / total:6.1%} {'#' * round(40 * c / total)}" for n, c in enumerate(report.histogram)]
    ways = ", ".join(f"{'chain' if w == 'chain' else 'budget ' + w} {v:.2f}" for w, v in report.lengths.items())
    lines.append(f"committed tokens per verify step: {ways}")
    if report.trials:
        best: dict[str, Trial] = {}
        for trial in report.trials:
            best.setdefault(trial.alternative.setting, trial)
        lines.append(f"best other value of each setting (config: {report.trials[0].given:.1%} right at depths 1 and 2)")
        lines += [
            f"  {name} {t.alternative.value}: {t.agreement:.1%} ({t.sigmas:+.1f} sigma)" for name, t in best.items()
        ]
    lines += [f"FAULT: {fault}" for fault in report.faults] or ["healthy: no other setting is clearly better"]
    return "\n".join(lines)
