"""Does a drafter draft as it was trained to? A measurement, for the settings that no file can show to be wrong.

The target answers a few prompts; the drafter then proposes at every position of the answers, offline, which is what it
would do when serving. A wrong mask token, RoPE base, tap or causality costs acceptance without any error, so each of
them is also tried with other values on the same positions: one that is better beyond chance means that the config is
wrong. Whether there is anything to be wrong about (another target's drafter, damaged weights) shows a comparison that
needs no reference drafter: looking up what followed the same token earlier in the text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from sglang_ddtree.drafter.alternatives import other_settings, other_windows
from sglang_ddtree.drafter.answers import Answer, Heads, answer, read_prompts
from sglang_ddtree.drafter.check import read_target
from sglang_ddtree.drafter.compare import paired_t, t_tail
from sglang_ddtree.drafter.files import read_config
from sglang_ddtree.drafter.progress import Progress
from sglang_ddtree.drafter.replica import Replica, load_replica
from sglang_ddtree.drafter.trials import ALPHA, CONTEXT, Trial, try_all
from sglang_ddtree.errors import DDTreeError
from sglang_ddtree.training.corpus import Sequence as Text
from sglang_ddtree.training.measure import accepted_drafts, proposals, replay

#: Prompts below which the report says that they are few (docs/drafters.md has the measurement).
ENOUGH = 60


@dataclass
class Report:
    """What was measured.

    Attributes:
        positions: answer positions at which the drafter proposed.
        agreement: for each depth 1 .. B-1 the share of positions where its first choice is the target's token.
        histogram: how many positions have 0, 1, .. B-1 first choices right in a row.
        lengths: committed tokens per verify step for "chain" (DFLASH) and tree budgets (DDTREE).
        lookup: share of positions where the token that followed the same token last time is right: what drafting
            without a model gives at depth 1.
        lookup_p: p-value of "the drafter is no better than that" (paired by prompt; 1 with a single prompt).
        prompts: answers measured; longest: tokens of the longest one with its prompt.
        context: tokens before a position that counted when settings other than windows were compared.
        trials: the alternatives, most significant first.
        faults: what is wrong, a line each; empty for a healthy drafter.
    """

    positions: int
    agreement: list[float]
    histogram: list[int]
    lengths: dict[str, float]
    lookup: float
    lookup_p: float
    prompts: int
    longest: int
    context: int = 0
    trials: list[Trial] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        return {**vars(self), "trials": [trial.as_json() for trial in self.trials]}


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
    positions: int = 1280,
    context: int = CONTEXT,
    progress: Callable[[str], None] = lambda text: None,
) -> Report:
    """Measure a drafter directory on the prompts of a file; other settings on ``positions`` positions.

    Args:
        context: tokens before a position that count when settings other than windows are compared.

    Raises:
        DDTreeError: the pair does not fit, the target cannot be loaded, or nothing can be measured.
    """
    if not 8 <= max_tokens <= 4096:
        raise DDTreeError(f"--max-tokens must be between 8 and 4096, got {max_tokens}.")
    if positions < 32:
        raise DDTreeError(f"--positions must be 32 or more, got {positions}.")
    if context < 16:
        raise DDTreeError(f"--context must be 16 or more, got {context}.")
    where = _device(device)
    kind = _dtype(dtype, where)
    questions = read_prompts(prompts)
    replica = load_replica(draft_dir, target_dir)
    shape = replica.drafter.shape
    layers = read_target(read_config(target_dir), str(target_dir)).num_layers
    others = list(other_settings(replica, target_dir, layers)) if alternatives else []
    taps = {layer for other in others for layer in other.changes.get("target_layer_ids", ())}
    answers, heads = answer(
        target_dir,
        questions,
        sorted(taps | set(shape.target_layer_ids)),
        max_tokens=max_tokens,
        device=where,
        dtype=kind,
        progress=progress,
    )
    with torch.device(where):
        replica.drafter.to(where)
        if replica.mask_embedding is not None:
            heads.blocks = heads.embed.clone()
            heads.blocks[shape.mask_token_id] = replica.mask_embedding.to(where)
        report = _measure(replica, answers, heads, progress)
        if alternatives:
            others += other_windows(replica, report.longest)
            report.trials = try_all(replica, answers, heads, others, positions, progress, context)
        report.context = context
    report.faults = _faults(report)
    return report


def _device(given: str | None) -> str:
    if given is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.zeros(1, device=given).item()
    except Exception as error:  # RuntimeError, AssertionError, NotImplementedError...
        raise DDTreeError(f"--device {given} cannot be used: {' '.join(str(error).split())[:160]}.") from None
    return given


def _dtype(given: str, device: str) -> torch.dtype:
    if given == "auto":
        return torch.float32 if device == "cpu" else torch.bfloat16
    return getattr(torch, given)


def _measure(replica: Replica, answers: Sequence[Answer], heads: Heads, progress: Callable[[str], None]) -> Report:
    """The settings as they are, at every position and depth."""
    drafted = [len(one.tokens) - one.prompt - 1 for one in answers]
    count = Progress(progress, f"the drafter drafts at {sum(drafted)} positions", sum(drafted))
    drafter, depth = replica.drafter, replica.drafter.shape.block_size - 1
    right, valid = torch.zeros(depth), torch.zeros(depth)
    histogram = [0] * (depth + 1)
    steps: dict[str, int] = {}
    committed: dict[str, int] = {}
    gains, groups, looked = [], [], torch.zeros(0)
    for number, one in enumerate(answers):
        text = _text(one, drafter.shape.target_layer_ids)
        log_probs, ids = (part.cpu() for part in proposals(drafter, heads.blocks, text, heads.head))
        on_cpu = replace(text, tokens=one.tokens.cpu())
        with torch.device("cpu"):
            expected, known = _expected(on_cpu.tokens, one.prompt, depth)
            hit = (ids[:, :, 0] == expected) & known
            right, valid = right + hit.sum(0), valid + known.sum(0)
            found = lookup(on_cpu.tokens, one.prompt)
            looked = torch.cat([looked, found.float()])
            gains.append(hit[:, 0].float() - found.float())
            groups.append(torch.full((len(found),), number))
            for way, accepted in accepted_drafts(log_probs, ids, on_cpu).items():
                done, tokens = replay(accepted)
                steps[way], committed[way] = steps.get(way, 0) + done, committed.get(way, 0) + tokens
        # Only positions after which a whole block is known, or the end of the answer would look like a miss.
        for run in hit[known.all(1)].long().cumprod(1).sum(1).tolist():
            histogram[run] += 1
        count.add(drafted[number])
    with torch.device("cpu"):
        t, prompts = paired_t(torch.cat(gains), torch.cat(groups))
    return Report(
        positions=len(looked),
        agreement=[round(float(r / v), 4) if v else 0.0 for r, v in zip(right.cpu(), valid.cpu(), strict=True)],
        histogram=histogram,
        lengths={way: round(committed[way] / steps[way], 3) for way in steps},
        lookup=round(float(looked.mean()), 4),
        lookup_p=t_tail(t, prompts - 1),
        prompts=prompts,
        longest=max(len(one.tokens) for one in answers),
    )


def lookup(tokens: torch.Tensor, prompt: int) -> torch.Tensor:
    """Whether what followed the same token last time follows again [answer - 1], for each position of an answer.

    The simplest kind of prompt-lookup decoding (the last match of one token): a baseline that needs no model.
    """
    ids = tokens.tolist()
    followed: dict[int, int] = {}
    right = []
    for place in range(len(ids) - 1):
        if place >= prompt:
            right.append(followed.get(ids[place]) == ids[place + 1])
        followed[ids[place]] = ids[place + 1]
    return torch.tensor(right, dtype=torch.bool)


def _text(one: Answer, taps: Sequence[int]) -> Text:
    states = torch.cat([one.states[layer] for layer in taps], dim=-1)
    return Text(tokens=one.tokens, prompt=one.prompt, taps=states, final=states[:, :0])


def _expected(tokens: torch.Tensor, prompt: int, depth: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The tokens [answer - 1, depth] that follow each position of an answer, and which of them the answer has."""
    where = torch.arange(prompt, len(tokens) - 1)[:, None] + torch.arange(1, depth + 1)
    known = where < len(tokens)
    return tokens[where.clamp(max=len(tokens) - 1)].long(), known


def _faults(report: Report) -> list[str]:
    faults = []
    best: dict[str, Trial] = {}
    for trial in report.trials:
        if trial.better:
            best.setdefault(trial.alternative.setting, trial)
    for name, trial in best.items():
        found = trial.comparison
        texts = "; it was trained with that window, or on texts no longer than it" if name == "sliding_window" else ""
        faults.append(
            f"{name} looks wrong: {trial.alternative.value} is better (p {trial.p:.1e} over {found.prompts} prompts, "
            f"corrected for all that was tried): "
            f"first choices right {found.agreement:.1%} instead of {found.given:.1%}, "
            f"{found.accepted:+.3f} accepted drafts per position, log-probability {found.log_prob:+.4f}{texts}"
        )
    if (report.prompts > 1 and report.lookup_p > ALPHA) or report.agreement[0] <= report.lookup:
        faults.append(
            f"the first choice at depth 1 is right at {report.agreement[0]:.1%} of the positions, which is not above "
            f"what looking up the same token earlier in the text gives ({report.lookup:.1%}, p {report.lookup_p:.2g}): "
            "a setting is wrong, or this is not the target's drafter"
        )
    return faults


def describe(report: Report) -> str:
    """The report as text."""
    lines = [f"{report.positions} positions of {report.prompts} prompts, the longest text has {report.longest} tokens"]
    lines.append("depth  rank-0 agreement")
    lines += [f"{d:5}  {a:6.1%} {'#' * round(40 * a)}" for d, a in enumerate(report.agreement, 1)]
    lines.append(f"looking up the same token earlier in the text: {report.lookup:.1%} at depth 1")
    total = max(1, sum(report.histogram))
    lines.append("drafts right in a row (chain)")
    lines += [f"{n:5}  {c / total:6.1%} {'#' * round(40 * c / total)}" for n, c in enumerate(report.histogram)]
    ways = ", ".join(f"{'chain' if w == 'chain' else 'budget ' + w} {v:.2f}" for w, v in report.lengths.items())
    lines.append(f"committed tokens per verify step: {ways}")
    lines += _table(report.trials)
    lines += [f"FAULT: {fault}" for fault in report.faults]
    if not report.faults:
        tried = ", ".join(dict.fromkeys(trial.alternative.setting for trial in report.trials))
        lines.append(f"healthy: no other value is better beyond chance (tried: {tried or 'nothing'})")
    return "\n".join([*lines, *(f"note: {note}" for note in _notes(report))])


def _notes(report: Report) -> list[str]:
    """What the verdict does not cover."""
    if not report.trials:
        return []
    notes = []
    if report.prompts < ENOUGH:
        notes.append(
            f"only {report.prompts} prompts: small faults stay unseen; give {ENOUGH} or more, 100 where causality or a "
            "window is in doubt"
        )
    if report.longest > report.context:
        notes.append(
            f"texts of up to {report.longest} tokens: settings other than windows were compared with the last "
            f"{report.context} tokens before each position; give --context N for a drafter trained on texts of N tokens"
        )
    windows = [trial for trial in report.trials if trial.alternative.setting == "sliding_window"]
    if not windows:
        notes.append("the attention windows were not tested: no text is longer than one that is to be told apart")
    if not any(trial.better for trial in windows):
        notes += [
            f"with a sliding_window of {trial.alternative.value} drafts are better on these texts (p {trial.p:.1e}), "
            "and with half of it they are no worse: the texts are longer than those of the drafter's training, or of "
            "another kind; not counted as a fault"
            for trial in windows
            if trial.half_as_good
        ][:1]
    return notes


def _table(trials: Sequence[Trial]) -> list[str]:
    """For each setting the other value that comes closest to being better, or is."""
    if not trials:
        return []
    best: dict[str, Trial] = {}
    for trial in sorted(trials, key=lambda trial: -trial.t):
        best.setdefault(trial.alternative.setting, trial)
    rows = [f"best other value of each setting, against the config's ({trials[0].comparison.prompts} prompts)"]
    rows.append(f"  {'setting':16} {'value':>24}  right at all depths  log-probability      t  corrected p")
    for name, trial in best.items():
        one = trial.comparison
        value = str(trial.alternative.value)
        right = f"{one.agreement:6.1%} ({one.agreement - one.given:+6.1%})"
        row = f"  {name:16} {value:>24}  {right:>19}  {one.log_prob:+15.4f}  {trial.t:+5.1f}  {trial.p:11.2g}"
        rows.append(row + ("  (first look only)" if trial.coarse else ""))
    return rows
