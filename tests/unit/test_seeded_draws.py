"""A request's seeded draw is the one it makes alone, whatever filters its neighbours in the batch have."""

from types import SimpleNamespace

import pytest
import torch
from sglang.srt.layers import sampler as sglang_sampler
from sglang.srt.sampling.sampling_params import TOP_K_ALL

from sglang_ddtree import hooks
from sglang_ddtree.cpu import ops

VOCAB = 40


@pytest.fixture
def draw(monkeypatch):
    """SGLang's sampler over rows of (seed, top_k, top_p), with our hook or without."""
    monkeypatch.setattr(sglang_sampler, "murmur_hash32", ops.murmur_hash32)
    execution = SimpleNamespace(kernel=SimpleNamespace(sampling_backend="pytorch"))
    monkeypatch.setattr(sglang_sampler, "get_exec", lambda: execution)
    sampler = object.__new__(sglang_sampler.Sampler)
    original = sglang_sampler.Sampler._sample_from_probs

    def drawn(rows, probs, running=True):
        monkeypatch.setattr(hooks, "_ddtree_is_running", lambda: running)
        info = SimpleNamespace(
            sampling_seed=torch.tensor([seed for seed, _, _ in rows]),
            top_ks=torch.tensor([k for _, k, _ in rows], dtype=torch.int32),
            top_ps=torch.tensor([p for _, _, p in rows]),
            min_ps=torch.zeros(len(rows)),
            need_top_k_sampling=any(k < TOP_K_ALL for _, k, _ in rows),
            need_top_p_sampling=any(p < 1 for _, _, p in rows),
            need_min_p_sampling=False,
            max_top_k=None,
            sampling_mask_batch_indices=None,
        )
        simple = not (info.need_top_k_sampling or info.need_top_p_sampling)
        positions = torch.arange(len(rows)) * 0 + 7
        ids, _ = hooks._seeded_draws_alone(original, sampler, probs.clone(), info, positions, simple)
        return ids.tolist()

    return drawn


ROWS = [(5, TOP_K_ALL, 1.0), (6, 3, 1.0), (7, TOP_K_ALL, 1.0), (8, TOP_K_ALL, 0.5), (9, 1, 1.0)]


def test_each_row_draws_as_it_does_alone(draw):
    probs = torch.randn(len(ROWS), VOCAB, generator=torch.Generator().manual_seed(0)).softmax(-1)
    alone = [draw([row], probs[i : i + 1])[0] for i, row in enumerate(ROWS)]
    assert draw(ROWS, probs) == alone
    # SGLang without the hook: otherwise there would be nothing to mend.
    assert draw(ROWS, probs, running=False) != alone
