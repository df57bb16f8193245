"""The first drafted token under a grammar: SGLang's xgrammar objects over a small vocabulary."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import xgrammar
from sglang.srt.constrained.xgrammar_backend import XGrammarGrammar

from sglang_ddtree.grammar import keep_allowed, root_bitmask

#: Longer than one word of the mask, and not a multiple of 32.
VOCAB = [chr(ord("a") + i) for i in range(26)] + [chr(ord("A") + i) for i in range(26)] + ["</s>"]
END = len(VOCAB) - 1


def grammar(regex):
    info = xgrammar.TokenizerInfo(VOCAB, stop_token_ids=[END])
    compiled = xgrammar.GrammarCompiler(info, max_threads=1).compile_regex(regex)
    return XGrammarGrammar(xgrammar.GrammarMatcher(compiled, max_rollback_tokens=8), len(VOCAB), compiled, None)


def ids(text):
    return [VOCAB.index(letter) for letter in text]


def allowed(mask, row):
    return {token for token in range(len(VOCAB)) if int(mask[row, token // 32]) >> (token % 32) & 1}


def test_the_mask_is_that_of_the_committed_tokens():
    one, two = grammar("[a-cX]z"), grammar("[m-p]")
    reqs = [SimpleNamespace(grammar=one), SimpleNamespace(grammar=None), SimpleNamespace(grammar=two)]
    calls = []

    def barrier():
        calls.append(1)
        one.accept_token(ids("X")[0])

    mask = root_bitmask(reqs, len(VOCAB), "cpu", barrier)
    assert calls == [1]
    assert allowed(mask, 0) == set(ids("z"))
    assert allowed(mask, 1) == set(range(len(VOCAB)))
    assert allowed(mask, 2) == set(ids("mnop"))
    # Looking changed nothing.
    assert allowed(root_bitmask(reqs, len(VOCAB), "cpu", None), 2) == set(ids("mnop"))


def test_a_finished_grammar_forbids_nothing_here():
    done = grammar("a")
    done.accept_token(ids("a")[0])
    done.accept_token(END)
    assert done.is_terminated()
    assert allowed(root_bitmask([SimpleNamespace(grammar=done)], len(VOCAB), "cpu", None), 0) == set(range(len(VOCAB)))


def test_without_a_grammar_there_is_no_mask():
    assert root_bitmask([SimpleNamespace(grammar=None)], len(VOCAB), "cpu", None) is None


@pytest.mark.parametrize("top_k", [2, 4])
def test_only_allowed_candidates_lead(top_k):
    reqs = [SimpleNamespace(grammar=grammar("[bXYZ]a")), SimpleNamespace(grammar=None)]
    mask = root_bitmask(reqs, len(VOCAB), "cpu", None)
    token_ids = torch.tensor([[ids("abXcZd"), ids("fedcba")], [ids("abXcZd"), ids("zyxwvu")]])
    log_probs = torch.tensor([-0.5, -1.0, -2.0, -3.0, -4.0, -5.0]).expand(2, 2, 6).contiguous()
    before = log_probs.clone()
    kept, kept_ids = keep_allowed(log_probs, token_ids, mask, top_k)
    assert kept_ids[0, 0, : min(3, top_k)].tolist() == ids("bXZ")[:top_k]
    assert kept[0, 0].tolist() == [-1.0, -2.0, -4.0, -torch.inf][:top_k]
    # A request without a grammar and deeper positions keep what they had.
    assert kept_ids[1].equal(token_ids[1, :, :top_k])
    assert kept_ids[0, 1].equal(token_ids[0, 1, :top_k])
    assert kept[1].equal(before[1, :, :top_k])
    assert log_probs.equal(before), "the input was changed"


def test_where_no_candidate_is_allowed_none_is_drafted():
    from sglang_ddtree.tree.build import build_tree

    mask = root_bitmask([SimpleNamespace(grammar=grammar("Q"))], len(VOCAB), "cpu", None)
    log_probs, token_ids = torch.tensor([[[-0.1, -3.0], [-0.2, -2.0]]]), torch.tensor([[ids("ab"), ids("cd")]])
    tree = build_tree(*keep_allowed(log_probs, token_ids, mask, 2), torch.tensor([0]), 4)
    assert tree.num_nodes.tolist() == [1]
