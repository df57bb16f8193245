"""A converted mask embedding in the worker: its blocks are those of the mask token whose row the vector is."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest
import torch
from tiny_models import DRAFTER, HIDDEN, VOCAB, write_drafter

pytest.importorskip("sglang")

from sglang_ddtree import worker
from sglang_ddtree.drafter.cli import main

MASK, OTHER, BLOCK = 255, 0, 8
ROOTS = torch.tensor([7, MASK, OTHER])


@pytest.fixture
def embedding():
    torch.manual_seed(2)
    return torch.nn.Embedding(VOCAB, HIDDEN).requires_grad_(False)


@pytest.fixture
def fed(embedding, monkeypatch):
    """What the drafter is fed with for a directory and a mask token; everything around that is left out."""
    monkeypatch.setattr(worker, "resolving_view", lambda args: args)
    monkeypatch.setattr(worker, "_resolve_dflash_embedding_module", lambda draft, target: embedding)
    monkeypatch.setattr(worker, "ForwardBatch", SimpleNamespace)
    monkeypatch.setattr(worker, "enable_num_token_non_padded", lambda: False)
    monkeypatch.setattr(worker, "draft_tp_context", lambda layout: contextlib.nullcontext())

    def feed(directory, mask: int, full: bool = False) -> torch.Tensor:
        seen = []

        def forward(batch):
            seen.append(batch.input_embeds)
            hidden = torch.zeros(len(ROOTS) * BLOCK, HIDDEN)
            return SimpleNamespace(logits_output=SimpleNamespace(hidden_states=hidden), can_run_graph=False)

        server = SimpleNamespace(
            server_args=SimpleNamespace(
                speculative_draft_model_path=str(directory), speculative_draft_model_revision=None
            ),
            device="cpu",
            tree_config=SimpleNamespace(block_size=BLOCK),
            target_worker=SimpleNamespace(model_runner=SimpleNamespace(model=None)),
            draft_model=None,
            draft_model_runner=SimpleNamespace(forward=forward, kv_index_translator=None),
            draft_parallel_layout=None,
            use_compact_draft_cache=False,
            _full_embed_gpu=embedding.weight if full else None,
            _noise_embed_scale=1.0,
            _draft_block_spec_info=None,
            _draft_lens=lambda *args: (None, None, None),
        )
        worker.DDTreeWorker._maybe_merge_trained_mask_embedding(server)
        ids = torch.full((len(ROOTS), BLOCK), mask)
        ids[:, 0] = ROOTS
        batch = SimpleNamespace(req_pool_indices=None, can_run_decode_cuda_graph=False)
        plan = SimpleNamespace(bind=lambda *args, **kwargs: None)
        nothing = torch.zeros(len(ROOTS), BLOCK, dtype=torch.long)
        worker.DDTreeWorker._draft_block(server, batch, None, plan, nothing, nothing, ids)
        return seen[0].view(len(ROOTS), BLOCK, HIDDEN)

    return feed


@pytest.mark.parametrize("full", [False, True])
def test_the_row_of_a_mask_token_as_a_mask_embedding(tmp_path, fed, embedding, full):
    before = embedding.weight.clone()
    plain = write_drafter(tmp_path / "plain")
    own = write_drafter(tmp_path / "own", dflash_config={**DRAFTER["dflash_config"], "mask_token_id": OTHER})
    torch.save({"embedding": embedding.weight[MASK], "mask_token_id": OTHER}, own / "mask_embedding.pt")
    assert main(["convert-mask-embedding", str(own)]) == 0
    # Token by token the same, roots included, which are never masked, even where they are the mask token.
    assert torch.equal(fed(own, OTHER, full), fed(plain, MASK, full))
    assert not torch.equal(fed(plain, OTHER, full), fed(plain, MASK, full))
    assert torch.equal(embedding.weight, before)  # DFLASH would change the target's here
