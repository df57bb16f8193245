"""The statistics of ``drafter verify``: right p-values, and no verdict where there is nothing to see."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from scipy import stats

from sglang_ddtree.drafter.alternatives import Alternative, other_windows
from sglang_ddtree.drafter.answers import Answer, Heads
from sglang_ddtree.drafter.compare import Drafts, compare, paired_t, t_tail
from sglang_ddtree.drafter.replica import Replica
from sglang_ddtree.drafter.trials import ALPHA, Trial, draft, half_window, spread, try_all
from sglang_ddtree.drafter.verify import Report, describe, lookup
from sglang_ddtree.training.model import Drafter, DrafterShape, block_embeddings

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


# All alternatives, on a small drafter whose own words are the text: the settings it spoke with are the right ones

LENGTH, SPOKEN, BLOCK = 100, 40, 5


def small() -> tuple[Replica, Heads]:
    torch.manual_seed(5)
    shape = DrafterShape(
        hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=8, vocab_size=50, block_size=BLOCK, target_layer_ids=(0, 1), mask_token_id=1,
    )  # fmt: skip
    embed = torch.randn(50, 32)
    # Small embeddings, so that attention decides what is said.
    return Replica(Drafter(shape).eval(), (False, False), (None, None)), Heads(embed / 100, embed)


@torch.inference_mode()
def spoken(replica: Replica, heads: Heads, windows: tuple[int | None, ...], prompts: int = 24) -> list[Answer]:
    """Answers of blocks side by side, drawn from the drafter with some windows; states and prompts are noise."""
    generator = torch.Generator().manual_seed(1)
    found = []
    replica.set_attention(replica.causal, windows)
    for _ in range(prompts):
        states = {layer: torch.randn(LENGTH, 32, generator=generator) for layer in (0, 1)}
        tokens = torch.randint(2, 50, (LENGTH,), generator=generator)
        where = torch.arange(LENGTH - SPOKEN, LENGTH, BLOCK)
        context = replica.drafter.project(torch.cat([states[0], states[1]], -1)[None])
        blocks = block_embeddings(heads.blocks, tokens[where][None], replica.drafter.shape)
        logits = replica.drafter(context, where[None], blocks, first_row=1)[0] @ heads.head.T
        drawn = torch.multinomial(logits.flatten(0, 1).softmax(-1), 1, generator=generator).view(-1, BLOCK - 1)
        for row, at in zip(drawn, where.tolist(), strict=True):
            tokens[at + 1 : at + BLOCK] = row
        found.append(Answer(tokens, LENGTH - SPOKEN, states))
    replica.set_attention(replica.causal, replica.windows)
    return found


@torch.inference_mode()
def tried(replica: Replica, heads: Heads, answers: list[Answer], others: list[Alternative], context: int = LENGTH):
    said: list[str] = []
    # As many positions as there are blocks: those that begin one.
    found = try_all(replica, answers, heads, others, len(answers) * SPOKEN // BLOCK, said.append, context)
    assert "done in" in said[-1]
    return {trial.alternative.value: trial for trial in found}


def window(size: int) -> Alternative:
    return Alternative("sliding_window", size, windows=(size, size))


def test_a_window_that_the_drafter_speaks_with_is_found():
    replica, heads = small()
    trials = tried(replica, heads, spoken(replica, heads, (16, 16)), [window(16), window(32)])
    assert trials[16].better and not trials[16].half_as_good


def test_a_window_is_no_fault_where_half_of_it_is_as_good():
    """What texts longer than those of the training look like: the less the drafter sees, the better."""
    replica, heads = small()
    trials = tried(replica, heads, spoken(replica, heads, (8, 8)), [window(16), window(32)])
    assert trials[16].significant and trials[16].half_as_good and not trials[16].better
    assert not trials[32].better


def test_the_windows_of_the_config_are_halved_on_their_layers_only():
    assert half_window(Alternative("", 1, windows=(64, None)), (None, None)).windows == (32, None)
    assert half_window(Alternative("", 1, windows=(64, None)), (32, None)) is None
    assert half_window(Alternative("", "none", windows=(None, None)), (32, None)) is None
    assert half_window(Alternative("", 1e4, {"rope_theta": 1e4}), (None, None)) is None


def test_what_lies_before_the_context_does_not_count():
    replica, heads = small()
    answers = spoken(replica, heads, (None, None), prompts=2)
    where = [torch.arange(70, 90, 5)] * 2
    far = [replace(one, states={k: torch.cat([-v[:40], v[40:]]) for k, v in one.states.items()}) for one in answers]
    with torch.inference_mode():
        near, whole = (
            [draft(replica, texts, heads, where, 4, context=seen).log_prob for texts in (answers, far)]
            for seen in (20, None)
        )
    assert torch.equal(*near) and not torch.allclose(*whole)


def test_hopeless_values_are_dropped_at_the_first_look():
    replica, heads = small()
    answers = spoken(replica, heads, (None, None))
    bases = [Alternative("rope_theta", base, {"rope_theta": base}) for base in (2.0, 3.0, 1e4 + 1)]
    trials = tried(replica, heads, answers, bases, context=30)
    assert trials[2.0].coarse and trials[3.0].coarse and not trials[1e4 + 1].coarse
    assert not any(trial.better for trial in trials.values())


def test_the_report_says_what_it_does_not_cover():
    found = compare(drafts(1), drafts(2, 0.03))
    half = Trial(window(256), found, 4, half_as_good=True)
    report = Report(100, [0.5], [1, 1], {"chain": 1.5}, 0.1, 0.0, 20, 900, context=256, trials=[half])
    text = describe(report)
    assert "only 20 prompts" in text and "with the last 256 tokens" in text and "not counted as a fault" in text
    report = replace(report, prompts=100, longest=200, trials=[Trial(window(64), found, 4)])
    assert [line for line in describe(report).splitlines() if line.startswith("note")] == []
