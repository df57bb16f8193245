"""Training of the drafter: distillation of the target's distribution at the positions of a block."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn import functional

from sglang_ddtree.training.corpus import Batch, Sequence, batches, make_batch
from sglang_ddtree.training.local_heads import start_local_heads
from sglang_ddtree.training.model import Drafter, DrafterShape, block_embeddings
from sglang_ddtree.training.target import Target


@dataclass(frozen=True)
class Recipe:
    """What a training run consists of. The defaults made the shipped drafter."""

    steps: int = 3000
    sequences: int = 4  # per step
    blocks: int = 40  # per sequence
    short_block: int = 4  # block size of the first part of the run: early positions matter most and cost less
    short_part: float = 0.75  # of the run
    learning_rate: float = 3e-3
    warmup: int = 60
    weight_decay: float = 0.1
    position_decay: float = 3.0  # weight of position k is exp(-(k - 1) / position_decay)
    distillation: float = 0.5  # share of the target's distribution in the loss, against the target's token alone
    cosine: float = 0.5  # weight of the distance to the target's final hidden state
    dropout: float = 0.1
    tap_noise: float = 0.15
    frequent: int = 2500  # head rows that are always in the loss
    sampled: int = 1000  # head rows drawn anew every step from the others
    average: float = 0.995  # decay of the running average of the weights
    seed: int = 1


class FrequentHead:
    """Loss over the frequent part of the vocabulary and a sample of the rest, instead of all 49,152 rows.

    The sampled rows stand for all the others: their logits are raised by log(others / sampled), which makes the
    partition sum right in expectation, so that no token's logit goes unchecked.
    """

    def __init__(self, embed: torch.Tensor, counts: torch.Tensor, frequent: int, sampled: int):
        order = counts.argsort(descending=True, stable=True)
        self.embed, self.frequent, self.others = embed, order[:frequent], order[frequent:]
        self.is_frequent = torch.zeros(len(counts), dtype=torch.bool)
        self.is_frequent[self.frequent] = True
        self.sampled = sampled
        self.frequent_rows = embed[self.frequent]
        self.coverage = float(counts[self.frequent].sum() / counts.sum())

    def losses(
        self, hidden: torch.Tensor, labels: torch.Tensor, teacher: torch.Tensor, generator: torch.Generator
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """hidden and teacher [n, h], labels [n] -> cross-entropy [n], distillation [n], hits [n] (top token right)."""
        chosen = self.others[torch.randint(len(self.others), (self.sampled,), generator=generator)]
        rows = torch.cat([self.frequent_rows, self.embed[chosen]])
        bias = torch.zeros(len(rows))
        bias[len(self.frequent) :] = torch.log(torch.tensor(len(self.others) / self.sampled))
        logits = hidden @ rows.T
        partition = torch.logsumexp(logits + bias, dim=-1)
        with torch.no_grad():
            wanted = (teacher @ rows.T + bias).softmax(-1)
        distillation = partition - (wanted * (logits + bias)).sum(-1)
        label_logits = (hidden * self.embed[labels]).sum(-1)
        # A label outside the frequent rows is in the partition sum by its own row.
        own = torch.where(self.is_frequent[labels], float("-inf"), label_logits)
        cross_entropy = torch.logaddexp(partition, own) - label_logits
        hits = label_logits >= logits.max(-1).values - 1e-4
        return cross_entropy, distillation, hits


def whitening(
    sequences: list[Sequence], taps: int, generator: torch.Generator, tokens: int = 40000
) -> tuple[torch.Tensor, torch.Tensor]:
    """Symmetric matrices A [taps, h, h] with E[(A x)(A x)^T] close to the identity for each tap, and their inverses.

    Some channels of the residual stream are a hundred times larger than others; an optimiser that sees the taps
    through A learns from all of them. fc has no bias, so the mean is not subtracted.
    """
    h = sequences[0].taps.shape[1] // taps
    second = torch.zeros(taps, h, h)
    seen = 0
    for index in torch.randperm(len(sequences), generator=generator).tolist():
        q = sequences[index]
        # Not the system turn: it is the same everywhere, and its first token is an outlier.
        x = q.taps[24:-1].float().view(-1, taps, h)
        second += torch.einsum("nti,ntj->tij", x, x)
        seen += len(x)
        if seen > tokens:
            break
    values, vectors = torch.linalg.eigh(second / seen)
    scale = (values + 0.05 * values.median(dim=-1, keepdim=True).values).rsqrt()
    whiteners = torch.einsum("tik,tk,tjk->tij", vectors, scale, vectors)
    return whiteners, torch.einsum("tik,tk,tjk->tij", vectors, 1 / scale, vectors)


def folded_fc(white: torch.Tensor, whiteners: torch.Tensor) -> torch.Tensor:
    """fc's weight [h, taps * h] from its form in whitened space [taps, h, h]."""
    return torch.cat(list(torch.bmm(white, whiteners)), dim=1)


def position_weights(size: int, decay: float) -> torch.Tensor:
    """[size - 1] weights of the positions of a block."""
    return torch.exp(-torch.arange(size - 1) / decay)


def block_losses(
    drafter: Drafter, fc: torch.Tensor, batch: Batch, head: FrequentHead, recipe: Recipe, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss of a batch and hits [b, a, B - 1], with fc's weight given apart because training holds it whitened."""
    size = batch.labels.shape[-1] + 1
    projected = functional.linear(batch.taps, fc)
    if drafter.training and recipe.tap_noise:
        # Noise of relative size tap_noise; drawn after the projection, where it is five times cheaper.
        spread = projected.detach().pow(2).mean(-1, keepdim=True).sqrt()
        projected = projected + recipe.tap_noise * spread * torch.randn(projected.shape, generator=generator)
    context = drafter.hidden_norm(projected)
    block = block_embeddings(head.embed, batch.first, drafter.shape, size)
    hidden = drafter(context, batch.anchors, block, first_row=1, dropout=recipe.dropout)
    valid = batch.valid
    hidden, teacher, labels = hidden[valid], batch.final[valid], batch.labels[valid]
    cross_entropy, distillation, hit = head.losses(hidden, labels, teacher, generator)
    loss = (1 - recipe.distillation) * cross_entropy + recipe.distillation * distillation
    loss = loss + recipe.cosine * (1 - functional.cosine_similarity(hidden, teacher, dim=-1))
    weight = position_weights(size, recipe.position_decay).expand(valid.shape)[valid]
    hits = torch.zeros(valid.shape, dtype=torch.bool)
    hits[valid] = hit
    return (loss * weight).sum() / weight.sum(), hits


def token_counts(sequences: list[Sequence], vocab: int) -> torch.Tensor:
    """How often each token occurs in the answers, [vocab]."""
    answers = torch.cat([q.tokens[q.prompt :] for q in sequences]).long()
    return torch.bincount(answers, minlength=vocab)


def initial_drafter(
    shape: DrafterShape, target: Target, sequences: list[Sequence], whiteners: torch.Tensor, seed: int
) -> Drafter:
    """Random weights, small on the way back to the residual stream, with local attention heads.

    fc is random in whitened space, so that all tapped layers and channels have a say. The final norm begins as the
    target's, reduced: with its full weight random hidden states would make very confident guesses.
    """
    generator = torch.Generator().manual_seed(seed)
    drafter = Drafter(shape)
    for name, parameter in drafter.named_parameters():
        if parameter.ndim == 2:
            torch.nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5, generator=generator)
            if "o_proj" in name or "down_proj" in name:
                parameter.data.mul_((2 * shape.num_hidden_layers) ** -0.5)
    taps, h = len(shape.target_layer_ids), shape.hidden_size
    white = torch.randn(taps, h, h, generator=generator) * (taps * h) ** -0.5
    drafter.fc.weight.data.copy_(folded_fc(white, whiteners))
    drafter.norm.weight.data.copy_(target.norm * 0.4)
    start_local_heads(drafter, target.embed, sequences)
    return drafter


def train(
    drafter: Drafter,
    embed: torch.Tensor,
    whitened: tuple[torch.Tensor, torch.Tensor],
    load: Callable[[], list[Sequence]],
    dev: list[Sequence],
    recipe: Recipe,
    checkpoint: Path,
    progress: Callable[[str], None] = print,
    every: int = 50,
    minutes: float = float("inf"),
    again: bool = False,
) -> Drafter:
    """Train in place and return the drafter with averaged weights; resumes from ``checkpoint`` if it exists.

    ``whitened`` are the matrices of whitening(), in which fc is trained. ``load`` is called at the start of every pass
    over the data, so that text which is still being generated joins in.
    ``again`` takes up a finished run: the schedule begins anew from the checkpoint's weights, for recipe.steps more.
    With a limit in ``minutes`` the schedule runs by the clock and ends in time, whatever number of steps that makes.
    """
    sequences = load()
    generator = torch.Generator().manual_seed(recipe.seed)
    torch.manual_seed(recipe.seed)
    taps = len(drafter.shape.target_layer_ids)
    head = FrequentHead(embed, token_counts(sequences, len(embed)), recipe.frequent, recipe.sampled)
    progress(f"training: {len(sequences)} sequences, frequent rows cover {head.coverage:.1%} of the answers")

    h = drafter.shape.hidden_size
    whiteners, inverses = whitened
    initial = torch.bmm(drafter.fc.weight.data.view(h, taps, h).transpose(0, 1), inverses)
    white = torch.nn.Parameter(initial)
    rest = [p for name, p in drafter.named_parameters() if name != "fc.weight"]
    parameters = [white, *rest]
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in parameters if p.ndim > 1], "weight_decay": recipe.weight_decay},
            {"params": [p for p in parameters if p.ndim == 1], "weight_decay": 0.0},
        ],
        lr=recipe.learning_rate,
        betas=(0.9, 0.95),
    )

    average = [p.detach().clone() for p in parameters]
    first, saved_part = 0, 0.0
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        first, saved_part = saved["step"], 0.0 if again else saved["part"]
        for p, a, value, mean in zip(parameters, average, saved["parameters"], saved["average"]):
            p.data.copy_(value)
            a.copy_(mean)
        optimizer.load_state_dict(saved["optimizer"])
        whiteners = saved["whiteners"]
        progress(f"training: resumed at step {first}")

    # A run that goes on must not draw the same batches again.
    generator.manual_seed(recipe.seed + first)
    stream = batches(load, recipe.sequences, generator)
    began, hits_sum, losses = time.time(), [], []
    # Where the schedule began, and how much of it earlier runs have used up by the clock.
    origin, clock_part = (first, 0.0) if again else (0, 0.0 if minutes == float("inf") else saved_part)
    step, part = first, saved_part
    drafter.train()
    while part < 1:
        size = recipe.short_block if part < recipe.short_part else drafter.shape.block_size
        batch = make_batch(next(stream), recipe.blocks, size, generator)
        for group in optimizer.param_groups:
            group["lr"] = recipe.learning_rate * min((step + 1) / recipe.warmup, 1 - part)
        loss, hits = block_losses(drafter, folded_fc(white, whiteners), batch, head, recipe, generator)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        # Early on the average would be held back by the random start.
        decay = min(recipe.average, (1 + step) / (10 + step))
        torch._foreach_lerp_(average, [p.detach() for p in parameters], 1 - decay)
        losses.append(float(loss.detach()))
        hits_sum.append(hits[..., :3].float().cumprod(-1).mean((0, 1)))
        step += 1
        spent = time.time() - began
        earlier = clock_part + spent / 60 / minutes
        part = max((step - origin) / recipe.steps, earlier)
        if step % every == 0 or part >= 1:
            chain = " ".join(f"{x:.3f}" for x in torch.stack(hits_sum[-every:]).mean(0).tolist())
            left = min(spent / (step - first) * (recipe.steps - step + origin), (1 - earlier) * minutes * 60)
            mean = sum(losses[-every:]) / len(losses[-every:])
            progress(
                f"training: step {step}, {part:.0%}, block {size}, loss {mean:.3f}, "
                f"accepted at 1..3: {chain}, {spent / (step - first):.2f} s a step, {left / 60:.1f} min left"
            )
        if step % (4 * every) == 0 or part >= 1:
            if dev:
                accepted = evaluate(
                    drafter, folded_fc(average[0], whiteners), average[1:], rest, embed, dev, recipe.seed
                )
                progress(f"training: step {step}, dev: accepted at 1..7: {accepted}")
            state = {"step": step, "part": part, "parameters": [p.detach() for p in parameters], "average": average}
            state["whiteners"] = whiteners
            save_state({**state, "optimizer": optimizer.state_dict()}, checkpoint)
    for p, mean in zip(rest, average[1:]):
        p.data.copy_(mean)
    drafter.fc.weight.data.copy_(folded_fc(average[0], whiteners))
    return drafter.eval()


def save_state(state: dict, path: Path) -> None:
    """torch.save under a temporary name, then rename."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    torch.save(state, temporary)
    temporary.rename(path)


@torch.no_grad()
def evaluate(
    drafter: Drafter,
    fc: torch.Tensor,
    average: list[torch.Tensor],
    rest: list[torch.nn.Parameter],
    embed: torch.Tensor,
    dev: list[Sequence],
    seed: int,
    blocks: int = 12,
) -> str:
    """Share of dev blocks whose first 1 .. B-1 tokens are all right, with the averaged weights and the full head."""
    generator = torch.Generator().manual_seed(seed)
    current = [p.data.clone() for p in rest]
    for p, mean in zip(rest, average):
        p.data.copy_(mean)
    drafter.eval()
    found = []
    for low in range(0, len(dev), 8):
        batch = make_batch(dev[low : low + 8], blocks, drafter.shape.block_size, generator)
        context = drafter.hidden_norm(functional.linear(batch.taps, fc))
        block = block_embeddings(embed, batch.first, drafter.shape)
        hidden = drafter(context, batch.anchors, block, first_row=1)
        guess = (hidden.reshape(-1, hidden.shape[-1]) @ embed.T).argmax(-1).view(batch.labels.shape)
        found.append(((guess == batch.labels) & batch.valid).float().cumprod(-1).mean((0, 1)))
    for p, value in zip(rest, current):
        p.data.copy_(value)
    drafter.train()
    accepted = torch.stack(found).mean(0)
    return " ".join(f"{x:.3f}" for x in accepted.tolist()) + f" (chain {1 + float(accepted.sum()):.3f})"


def save_times(path: Path, **seconds: float) -> None:
    """Add stage times to a JSON file, so that a resumed run keeps those of its earlier parts."""
    known = json.loads(path.read_text()) if path.exists() else {}
    for stage, value in seconds.items():
        known[stage] = round(known.get(stage, 0.0) + value, 1)
    path.write_text(json.dumps(known, indent=2) + "\n")
