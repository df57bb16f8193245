"""Penalties at every node against SGLang's own penalizers, fed with the answer so far and the node's path."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang.srt.sampling.penaltylib import (
    BatchedFrequencyPenalizer,
    BatchedMinNewTokensPenalizer,
    BatchedPenalizerOrchestrator,
    BatchedPresencePenalizer,
    BatchedRepetitionPenalizer,
)

from sglang_ddtree.penalties import PenaltyTable, apply_penalties
from sglang_ddtree.tree.build import build_tree_reference
from sglang_ddtree.tree.paths import path_tokens

VOCAB = 12
ALL = {
    BatchedFrequencyPenalizer,
    BatchedMinNewTokensPenalizer,
    BatchedPresencePenalizer,
    BatchedRepetitionPenalizer,
}
quick = settings(deadline=None, derandomize=True, database=None, max_examples=60)


def req(frequency=0.0, presence=0.0, repetition=1.0, minimum=0, stops=(), eos=(), tokenizer_eos=2, earlier=()):
    return SimpleNamespace(
        sampling_params=SimpleNamespace(
            frequency_penalty=frequency,
            presence_penalty=presence,
            repetition_penalty=repetition,
            min_new_tokens=minimum,
            stop_token_ids=set(stops),
        ),
        eos_token_ids=set(eos),
        output_ids=list(earlier),
        tokenizer=SimpleNamespace(additional_stop_token_ids=None, eos_token_id=tokenizer_eos),
    )


def plain(request, generated, logits):
    """Logits [vocab] as plain decoding adjusts them after ``generated`` tokens."""

    class Batch:
        pass

    batch = Batch()
    batch.reqs, batch.device = [request], "cpu"
    orchestrator = BatchedPenalizerOrchestrator(VOCAB, batch, ALL)
    for token in generated:
        orchestrator.cumulate_output_tokens(torch.tensor([token]))
    result = logits.clone().unsqueeze(0)
    additive = torch.zeros_like(result)
    orchestrator.accumulate_additive_penalties(additive)
    result.add_(additive)
    scaling = orchestrator.accumulate_scaling_penalties()
    if scaling is not None:
        result = torch.where(result < 0, result * scaling, result / scaling)
    return result[0]


@st.composite
def cases(draw):
    requests, answers = [], []
    for _ in range(draw(st.integers(1, 3))):
        requests.append(
            req(
                frequency=draw(st.sampled_from([0.0, 0.7, -0.4])),
                presence=draw(st.sampled_from([0.0, 0.9])),
                repetition=draw(st.sampled_from([1.0, 1.0, 1.3, 0.8])),
                minimum=draw(st.sampled_from([0, 0, 3, 6])),
                stops=draw(st.sets(st.integers(0, VOCAB - 1), max_size=2)),
                tokenizer_eos=draw(st.sampled_from([None, 2])),
            )
        )
        answers.append(draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=5)))
    return requests, answers, draw(st.integers(1, 4)), draw(st.integers(1, 12)), draw(st.integers(0, 2**16))


def a_tree(answers, depth, budget, rng):
    """Trees whose siblings differ and whose paths repeat tokens often."""
    log_probs, ids = torch.randn(len(answers), depth, 5, generator=rng).log_softmax(-1).topk(3, -1)
    return build_tree_reference(log_probs, ids, torch.tensor([a[-1] for a in answers]), budget)


@quick
@given(cases())
def test_every_node_has_plain_decodings_penalties(case):
    requests, answers, depth, budget, seed = case
    rng = torch.Generator().manual_seed(seed)
    tree = a_tree(answers, depth, budget, rng)
    table = PenaltyTable(7, VOCAB, "cpu")
    slots = torch.randperm(7, generator=rng)[: len(answers)]
    for request, answer in zip(requests, answers, strict=True):
        request.output_ids = answer[:-1]
    # What the slots held before must not matter; some rows come alone, with other numbers of stop tokens.
    table.start(torch.arange(7), [req(1.0, 1.0, 2.0, 9, (1,), earlier=(3,))] * 7, torch.arange(7))
    last = torch.tensor([a[-1] for a in answers], dtype=torch.int32)
    table.start(slots[:1], requests[:1], last[:1])
    if len(answers) > 1:
        table.start(slots[1:], requests[1:], last[1:])
    logits = torch.randn(len(answers), tree.width, VOCAB, generator=rng) * 2
    before = logits.clone()
    apply_penalties(logits, *table.of(slots), path_tokens(tree, depth), tree.depths)
    for row, (request, answer) in enumerate(zip(requests, answers, strict=True)):
        for node in range(int(tree.num_nodes[row])):
            path, at = [], node
            while at:
                path.insert(0, int(tree.tokens[row, at]))
                at = int(tree.parents[row, at])
            torch.testing.assert_close(
                logits[row, node], plain(request, answer + path, before[row, node]), atol=1e-5, rtol=1e-5
            )


@quick
@given(
    st.lists(st.tuples(st.integers(0, 3), st.lists(st.integers(0, VOCAB - 1), max_size=4)), max_size=12),
    st.integers(0, 2**16),
)
def test_history_is_what_was_started_and_committed(events, seed):
    table = PenaltyTable(4, VOCAB, "cpu")
    known = {slot: [] for slot in range(4)}
    for slot, tokens in events:
        if len(tokens) > 2:  # a new request in this slot, with some earlier tokens
            table.start(torch.tensor([slot]), [req(earlier=tokens[:-1])], torch.tensor([tokens[-1]]))
            known[slot] = tokens
        else:
            padded = torch.full((1, 3), -1)
            padded[0, : len(tokens)] = torch.tensor(tokens, dtype=torch.int64)
            table.commit(torch.tensor([slot]), padded)
            known[slot] = known[slot] + tokens
    order = torch.randperm(4, generator=torch.Generator().manual_seed(seed))
    _, history = table.of(order)
    for row, slot in enumerate(order.tolist()):
        assert int(history.lengths[row]) == len(known[slot])
        expected = torch.bincount(torch.tensor(known[slot], dtype=torch.int64), minlength=VOCAB)
        assert history.counts[row].tolist() == expected.tolist()


def test_requests_older_than_the_table_have_no_penalties():
    table = PenaltyTable(3, VOCAB, "cpu")
    table.start(torch.tensor([1]), [req(1.0, 1.0, 2.0, 9)], torch.tensor([4]))
    logits = torch.randn(1, 1, VOCAB)
    before = logits.clone()
    apply_penalties(
        logits, *table.of(torch.tensor([2])), torch.tensor([[[4, -1]]]), torch.ones(1, 1, dtype=torch.int64)
    )
    assert logits.equal(before)


def test_a_minimum_without_any_stop_token_forbids_nothing():
    requests = [req(minimum=5, tokenizer_eos=None), req(minimum=5, tokenizer_eos=3)]
    logits = torch.zeros(2, 1, VOCAB)
    table = PenaltyTable(2, VOCAB, "cpu")
    slots = torch.tensor([0, 1])
    table.start(slots, requests, torch.tensor([1, 1]))
    apply_penalties(logits, *table.of(slots), torch.full((2, 1, 3), -1), torch.zeros(2, 1, dtype=torch.int64))
    assert not logits[0].isinf().any()
    assert logits[1, 0].isinf().nonzero().flatten().tolist() == [3]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_logits(dtype):
    logits = torch.randn(1, 1, VOCAB, dtype=dtype)
    table = PenaltyTable(1, VOCAB, "cpu")
    slots = torch.tensor([0])
    request = req(frequency=0.5, presence=0.25, repetition=2.0, minimum=9)
    table.start(slots, [request], torch.tensor([4]))
    expected = plain(request, [4], logits[0, 0].float())
    apply_penalties(logits, *table.of(slots), torch.full((1, 1, 2), -1), torch.zeros(1, 1, dtype=torch.int64))
    assert logits.dtype == dtype
    torch.testing.assert_close(logits[0, 0].float(), expected, atol=0.05, rtol=0.05)
