"""The statistics of ``drafter verify``: right p-values, and no verdict where there is nothing to see."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from scipy import stats

from sglang_ddtree.drafter.alternatives import Alternative, other_windows
from sglang_ddtree.drafter.compare import Drafts, compare, paired_t, t_tail
from sglang_ddtree.drafter.trials import ALPHA, Trial, spread
from sglang_ddtree.drafter.verify import lookup
from sglang_ddtree.training.model import Drafter, DrafterShape

PROMPTS, EACH, DEPTHS = 20, 12, 3


@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 7, 19, 30, 109])
def test_the_tail_is_that_of_students_distribution(freedom):
    for t in (-3.0, -0.4, 0.0, 0.7, 2.0, 4.0, 8.0):
        assert t_tail(t, freedom) == pytest.approx(stats.t.sf(t, freedom), rel=1e-6, abs=1e-14)


def test_a_prompt_is_one_sample():
    generator = torch.Generator().manual_seed(1)
    difference = torch.randn(200, generator=generator)
    prompt = torch.arange(200) // 10 + 5
    t, count = paired_t(difference, prompt)
    assert (t, count) == (pytest.approx(stats.ttest_1samp(difference.view(20, 10).sum(1).double(), 0).statistic), 20)
    assert paired_t(torch.zeros(4), torch.tensor([0, 0, 1, 1])) == (0.0, 2)
    assert paired_t(torch.ones(4), torch.zeros(4, dtype=torch.long)) == (0.0, 1)


def drafts(seed: int, gain: float = 0.0) -> Drafts:
    """Log-probabilities of about -2: the same noise for every ``gain``, so that two of them make pairs."""
    base = torch.randn(PROMPTS * EACH, DEPTHS, generator=torch.Generator().manual_seed(0)) * 0.5 - 2.5
    noise = torch.randn(PROMPTS * EACH, DEPTHS, generator=torch.Generator().manual_seed(seed)) * 0.05
    log_prob = base + noise + gain
    return Drafts(log_prob > -2, log_prob, torch.arange(PROMPTS * EACH) // EACH)


def test_a_small_gain_everywhere_is_found_and_has_a_direction():
    found = compare(drafts(1), drafts(2, 0.03))
    assert found.better(1e-4) and found.log_prob == pytest.approx(0.03, abs=0.01) and found.prompts == PROMPTS
    assert not compare(drafts(2, 0.03), drafts(1)).better(0.5)
    assert compare(drafts(1), drafts(1)).p == 1.0


def test_false_alarms_are_as_rare_as_promised():
    alarms = sum(compare(drafts(2 * i + 1), drafts(2 * i + 2)).better(0.1) for i in range(300))
    # Bonferroni for two dependent measures: at most 30 expected, 3 sigma above that is 46.
    assert 3 <= alarms <= 46


def test_a_measure_that_says_the_opposite_vetoes():
    given, other = drafts(1), drafts(2, 0.02)
    # Good at what is improbable anyway, bad where it counts.
    likely = given.log_prob > -2
    log_prob = torch.where(likely, given.log_prob - 0.6, other.log_prob)
    found = compare(given, Drafts(log_prob > -2, log_prob, given.prompt))
    assert found.t_probability < -2 and not found.better(0.5)


def test_blocks_of_other_sizes_are_compared_where_both_draft():
    short = Drafts(*(part[:, :1] if part.dim() == 2 else part for part in vars(drafts(2)).values()))
    assert compare(drafts(1), short).p <= 1 and compare(short, drafts(1)).prompts == PROMPTS


def test_the_share_of_alpha():
    found = compare(drafts(1), drafts(2, 0.01))
    assert Trial(Alternative("a", 1), found, 1).better == (found.p <= ALPHA)
    assert not Trial(Alternative("a", 1), compare(drafts(1), drafts(2, 0.03)), 1, coarse=True).better
    assert not Trial(Alternative("a", 1), found, 10**12).better


def test_positions_are_spread_over_the_answers():
    answers = [SimpleNamespace(tokens=torch.zeros(n), prompt=4) for n in (5, 12, 100)]
    none, few, many = spread(answers, 30, depths=7)
    assert not len(none) and few.tolist() == [4] and len(many.unique()) == 10
    assert many.min() == 4 and many.max() == 100 - 1 - 7


def test_lookup_counts_only_the_past():
    tokens = torch.tensor([1, 2, 1, 2, 3, 1, 2, 3, 9])
    # 2 was followed by 1 first, then by 3.
    assert lookup(tokens, 3).tolist() == [False, False, True, True, False]


@pytest.mark.parametrize(
    ("windows", "longest", "values"),
    [
        ((None, None), 300, {"256": (256, 256)}),
        ((None, None), 200, {}),
        ((2048, None), 2000, {"256": (256, None), "512": (512, None), "1024": (1024, None)}),
        ((64, None), 200, {"none": (None, None), "32": (32, None), "128": (128, None)}),
    ],
)
def test_windows_that_the_text_can_tell_apart(windows, longest, values):
    found = {str(one.value): one.windows for one in other_windows(SimpleNamespace(windows=windows), longest)}
    assert found == values


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [3, 6, 40])
def test_a_window_hides_what_lies_before_it(window, causal):
    """Against attention over the whole text with SGLang's rule: a key is seen when it is less than ``window`` back."""
    torch.manual_seed(3)
    shape = DrafterShape(
        hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
        head_dim=8, vocab_size=50, block_size=5, target_layer_ids=(0,), mask_token_id=1,
    )  # fmt: skip
    drafter = Drafter(shape).eval()
    attention = drafter.layers[0].self_attn
    attention.window, attention.causal = window, causal
    anchors, context, x = torch.tensor([[9, 14]]), torch.randn(1, 20, 32), torch.randn(1, 2, 5, 32)
    table = torch.randn(2, 40, 8)
    rows = anchors[..., None] + torch.arange(5)
    rotary = ((table[0][:20], table[1][:20]), (table[0][rows], table[1][rows]))
    got = attention(x, context, *rotary, anchors[..., None] - torch.arange(20), 1)
    attention.window, attention.causal = None, False
    for number, anchor in enumerate(anchors[0].tolist()):
        for row in range(1, 5):
            at = anchor + row
            seen = [p for p in range(anchor) if at - p < window]
            block = [r for r in range(5) if row - r < window and not (causal and r > row)]
            # Only what is seen is there at all; the row itself is the last of the block.
            order = [r for r in block if r != row] + [row]
            seen_rotary = (table[0][seen], table[1][seen])
            block_rotary = tuple(t[rows][:, number : number + 1][:, :, order] for t in table)
            alone = attention(
                x[:, number : number + 1, order], context[:, seen], seen_rotary, block_rotary,
                torch.ones(1, 1, len(seen)), len(order) - 1,
            )  # fmt: skip
            torch.testing.assert_close(got[:, number, row - 1], alone[:, 0, 0])
