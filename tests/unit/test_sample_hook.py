"""Which batches the package samples itself, and which go to SGLang's ``eagle_sample``."""

from types import SimpleNamespace

import pytest
import torch

from sglang_ddtree.hooks import _sample
from sglang_ddtree.verify import DDTreeVerifyInput


class Tree(DDTreeVerifyInput):
    def __init__(self):
        pass

    def sample(self, batch, *args, **kwargs):
        return "ours"


def batch(greedy, processor=False, idle=False, additive=None, scaling=None):
    info = SimpleNamespace(
        is_all_greedy=greedy,
        has_custom_logit_processor=processor,
        acc_additive_penalties=additive,
        acc_scaling_penalties=scaling,
    )
    return SimpleNamespace(forward_mode=SimpleNamespace(is_idle=lambda: idle), sampling_info=info)


@pytest.mark.parametrize(
    ("verify_input", "running", "whose"),
    [
        (Tree(), batch(greedy=True), "SGLang's"),
        (Tree(), batch(greedy=False), "ours"),
        # eagle_sample leaves custom processors out, also where every request is greedy.
        (Tree(), batch(greedy=True, processor=True), "ours"),
        # and its penalties are the same for all nodes of a step.
        (Tree(), batch(greedy=True, additive=torch.zeros(1, 4)), "ours"),
        (Tree(), batch(greedy=True, scaling=torch.ones(1, 4)), "ours"),
        (Tree(), batch(greedy=False, idle=True), "SGLang's"),
        (object(), batch(greedy=False), "SGLang's"),
    ],
)
def test_who_samples(verify_input, running, whose):
    assert _sample(lambda *args, **kwargs: "SGLang's", verify_input, running) == whose
