"""The sampled walk draws from the target's distribution; acceptance with min(1, p/q) does not, and the test sees it."""

from __future__ import annotations

import itertools

import pytest
import torch
from scipy.stats import power_divergence

from sglang_ddtree.tree.build import build_tree, build_tree_reference
from sglang_ddtree.tree.paths import path_tokens
from sglang_ddtree.tree.walk import Walk, walk_sampled

VOCAB, TOKENS, DRAWS = 5, 3, 24_000
#: P(next token | last token, its place in the answer): the target. The drafter knows only the place, as DFlash does.
TABLE = (torch.randn(TOKENS, VOCAB, VOCAB, generator=torch.Generator().manual_seed(3)) * 1.3).softmax(-1)


def exact() -> torch.Tensor:
    """Joint probabilities of the first three tokens after token 0, [VOCAB ** 3]."""
    first, second, third = TABLE[0, 0], TABLE[1], TABLE[2]
    return torch.einsum("a,ab,bc->abc", first, second, third).flatten()


def target_probs(tree, done, depth):
    """Target's distribution after every node, [bs, Q, VOCAB], for requests that have ``done`` [bs] tokens."""
    paths = path_tokens(tree, depth)
    last = torch.where(
        tree.depths > 0,
        paths.gather(2, (tree.depths - 1).clamp(min=0).unsqueeze(2)).squeeze(2),
        tree.tokens[:, :1],
    )
    place = (done.unsqueeze(1) + tree.depths).clamp(max=TOKENS - 1)
    return TABLE[place, last]


def biased_walk(tree, probs, max_depth, generator=None):
    """Leviathan's acceptance with the drafter's probabilities on a tree that was not sampled from them."""
    weights = (tree.log_weights - tree.log_weights.gather(1, tree.parents.clamp(min=0))).exp()
    rows = []
    uniforms = torch.rand(tree.tokens.shape, generator=generator)
    for row in range(tree.batch_size):
        path, node = [0], 0
        while True:
            left = probs[row, node].clone()
            child = int(tree.next_child[row, node])
            while child != -1:
                token, q = int(tree.tokens[row, child]), float(weights[row, child])
                p = float(left[token] / left.sum())
                if float(uniforms[row, child]) < min(1.0, p / q):
                    break
                left[token] = max(p - q, 0.0) * float(left.sum())
                child = int(tree.next_sibling[row, child])
            if child == -1:
                break
            path.append(child)
            node = child
        rows.append((path, int(torch.multinomial(left, 1, generator=generator))))
    accepted = torch.tensor([path + [-1] * (max_depth + 1 - len(path)) for path, _ in rows])
    return Walk(accepted, torch.tensor([len(p) - 1 for p, _ in rows]), torch.tensor([bonus for _, bonus in rows]))


def draw(walk, budget, depth, draws, seed):
    """The first three tokens of ``draws`` answers, [draws, 3], each from as many steps as it takes."""
    generator = torch.Generator().manual_seed(seed)
    answers = torch.zeros(draws, TOKENS + depth + 1, dtype=torch.int64)
    last, done = torch.zeros(draws, dtype=torch.int64), torch.zeros(draws, dtype=torch.int64)
    while int(done.min()) < TOKENS:
        open_rows = (done < TOKENS).nonzero().flatten()
        marginals = torch.stack([TABLE[(done[open_rows] + d).clamp(max=TOKENS - 1)].mean(1) for d in range(depth)], 1)
        log_probs, ids = (marginals.log() * 1.5).log_softmax(-1).topk(3, -1)
        tree = build_tree(log_probs, ids, last[open_rows], budget)
        step = walk(tree, target_probs(tree, done[open_rows], depth), depth, generator=generator)
        tokens = tree.tokens.gather(1, step.accepted.clamp(min=0))
        for at in range(1, depth + 1):
            rows = open_rows[step.num_accepted >= at]
            answers[rows, done[rows] + at - 1] = tokens[step.num_accepted >= at, at]
        done[open_rows] += step.num_accepted + 1
        answers[open_rows, done[open_rows] - 1] = step.bonus
        last[open_rows] = step.bonus
    return answers[:, :TOKENS]


def p_value(answers):
    """Of a G-test of the joint counts against the exact probabilities."""
    cells = (answers * torch.tensor([VOCAB**2, VOCAB, 1])).sum(1)
    counts = torch.bincount(cells, minlength=VOCAB**TOKENS).double()
    expected = exact().double() / exact().double().sum() * len(answers)
    # Rare cells are one cell: the test's distribution holds for expected counts of about five and more.
    rare = expected < 5
    counts, expected = (torch.cat([x[~rare], x[rare].sum().clamp(min=1e-9).view(1)]) for x in (counts, expected))
    return float(power_divergence(counts.numpy(), expected.numpy(), lambda_="log-likelihood").pvalue)


@pytest.mark.parametrize(("budget", "depth"), [(6, 3), (2, 2), (12, 4), (3, 1)])
def test_first_tokens_have_the_targets_distribution(budget, depth):
    assert p_value(draw(walk_sampled, budget, depth, DRAWS, seed=1)) > 1e-3


def test_the_test_has_power():
    assert p_value(draw(biased_walk, 6, 3, 3000, seed=1)) < 1e-9


def test_a_draw_that_a_child_carries_is_followed():
    log_probs, ids = torch.log(torch.tensor([[[0.6, 0.4], [0.7, 0.3]]])), torch.tensor([[[1, 2], [3, 4]]])
    tree = build_tree_reference(log_probs, ids, torch.tensor([0]), 6)
    probs = torch.zeros(1, tree.width, VOCAB)
    for node, token in itertools.product(range(tree.width), (2,)):
        probs[0, node, token] = 1.0
    walk = walk_sampled(tree, probs, 2)
    assert tree.tokens[0, walk.accepted[0, 1]] == 2
    assert (int(walk.num_accepted[0]), int(walk.bonus[0])) == (1, 2)


def test_rows_of_padding_may_hold_anything():
    log_probs = torch.tensor([[[0.0, -torch.inf]]])
    tree = build_tree_reference(log_probs, torch.tensor([[[1, 2]]]), torch.tensor([0]), 4)
    probs = torch.full((1, tree.width, VOCAB), torch.nan)
    probs[0, :2] = torch.tensor([0.0, 1.0, 0.0, 0.0, 0.0])
    assert int(walk_sampled(tree, probs, 1).num_accepted[0]) == 1


@pytest.mark.parametrize(
    "probs", [torch.zeros(1, 4, VOCAB), torch.zeros(1, 5), torch.zeros(1, 5, VOCAB, dtype=torch.int64)]
)
def test_a_wrong_shape_or_dtype_is_refused(probs):
    tree = build_tree_reference(torch.zeros(1, 1, 1), torch.zeros(1, 1, 1, dtype=torch.int64), torch.tensor([0]), 4)
    with pytest.raises(ValueError, match="probs"):
        walk_sampled(tree, probs, 1)
