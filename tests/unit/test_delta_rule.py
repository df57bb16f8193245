"""The gated delta rule over trees: a state per node, and the form without one, are the same sums."""

from __future__ import annotations

import pytest
import torch
from delta_rule_cases import Layer, random_layer
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_ddtree.tree.delta_rule import fold, path_decays, verify_with_deltas, verify_with_states

KINDS = ("tree", "deep", "chain", "star", "padded")
layers = st.builds(
    random_layer,
    seed=st.integers(0, 1 << 20),
    bs=st.integers(1, 3),
    width=st.integers(1, 65),
    key_heads=st.sampled_from((1, 2)),
    value_heads=st.sampled_from((2, 4)),
    key_dim=st.sampled_from((4, 16, 24)),
    value_dim=st.sampled_from((4, 8, 16)),
    kind=st.sampled_from(KINDS),
    # At 50 almost nothing of a state outlives a token; at 1e-3 almost everything does.
    strength=st.sampled_from((1e-3, 0.1, 1.0, 10.0, 50.0)),
)


def both_forms(layer: Layer, dtype: torch.dtype) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Pairs that must agree: the outputs, and the state after every node."""
    tokens, initial = layer.tokens(dtype), layer.initial.to(dtype)
    outputs, states = verify_with_states(tokens, layer.parents, initial)
    got, updates = verify_with_deltas(tokens, layer.parents, initial)
    pairs = [(got, outputs)]
    for node in range(layer.parents.shape[1]):
        last = torch.full((len(initial),), node)
        folded = fold(initial, tokens.key, updates, tokens.log_decay, layer.parents, last)
        pairs.append((folded, states[:, node]))
    return pairs


@settings(max_examples=40, deadline=None)
@given(layers)
def test_they_agree_in_float64(layer):
    for got, want in both_forms(layer, torch.float64):
        torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-12)


@settings(max_examples=40, deadline=None)
@given(layers)
def test_they_agree_in_float32(layer):
    for got, want in both_forms(layer, torch.float32):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("width", [1, 2, 17, 65])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_and_width(kind, width):
    layer = random_layer(width, width=width, kind=kind)
    for got, want in both_forms(layer, torch.float64):
        torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-12)


def test_a_strong_decay_does_not_blur_what_follows():
    """A difference of sums from the root would lose the small decays below a large one; these are summed apart."""
    log_decay = torch.tensor([[[-3000.0], [-0.01], [-0.02]]])
    decay = path_decays(log_decay, torch.tensor([[-1, 0, 1]]))
    assert decay[0, 2, 0, 0].item() == pytest.approx(-0.03, rel=1e-6)
    blurred = log_decay.cumsum(1)
    assert (blurred[0, 2] - blurred[0, 0]).item() != pytest.approx(-0.03, rel=1e-4)


def test_a_sibling_leaves_no_trace():
    """Another value in a node off the path changes neither the outputs on the path nor the folded state."""
    layer = random_layer(5, bs=1, width=4, kind="star")
    parents = torch.tensor([[-1, 0, 0, 1]])
    tokens = layer.tokens()
    outputs, updates = verify_with_deltas(tokens, parents, layer.initial)
    tokens.value[:, 2] += 100
    changed, changed_updates = verify_with_deltas(tokens, parents, layer.initial)
    assert not torch.equal(outputs[:, 2], changed[:, 2])
    assert torch.equal(outputs[:, [0, 1, 3]], changed[:, [0, 1, 3]])
    last = torch.tensor([3])
    states = [fold(layer.initial, tokens.key, u, tokens.log_decay, parents, last) for u in (updates, changed_updates)]
    assert torch.equal(*states)
