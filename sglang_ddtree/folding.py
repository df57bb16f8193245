"""The tree as the tail of the draft model's CUDA graph, where DFLASH has its argmax.

SGLang calls what ``DFlashWorkerV2._maybe_build_draft_sampler`` returns inside the capture, with the captured pass's
hidden states and input ids. A replay then leaves the trees in the sampler's own memory, and the host launches nothing
between the drafter and the verify pass but the mask and the positions. A step that needs other candidates than the
captured ones (a grammar at the root), and a batch without a graph, takes the same functions outside of it.
"""

from __future__ import annotations

import logging

import torch
from sglang.srt.environ import Envs

from sglang_ddtree.config import DDTreeConfig
from sglang_ddtree.drafting import draft_tree
from sglang_ddtree.graph_memory import check_draft_graph
from sglang_ddtree.memory_report import size
from sglang_ddtree.tree.draft_tree import DraftTree, empty_tree

logger = logging.getLogger(__name__)


class TreeSampler:
    """Head projection, top-K and tree over the first rows of fixed buffers; for all captured batch sizes.

    Attributes:
        trees: ``max_bs`` trees. A replay overwrites those of the captured batch size, rows of padding included; what
            is beyond them is older or undefined.
    """

    def __init__(self, lm_head: torch.nn.Module, config: DDTreeConfig, max_bs: int, device: torch.device | str):
        self._lm_head = lm_head
        self._config = config
        self.trees = empty_tree(max_bs, config.verify_width, device)

    def __call__(self, hidden_states: torch.Tensor, input_ids: torch.Tensor) -> None:
        """Write the trees of a batch; nothing here depends on the values.

        Args:
            hidden_states: ``[bs * B, hidden]`` of the draft pass.
            input_ids: int64 ``[bs * B]``, the draft blocks; each begins with its tree's root.
        """
        block_size = self._config.block_size
        hidden = hidden_states.view(-1, block_size, hidden_states.shape[-1])
        roots = input_ids.view(-1, block_size)[:, 0]
        draft_tree(hidden, roots, self._lm_head, self._config, out=self.trees.first(len(roots)))

    def first(self, bs: int) -> DraftTree:
        """The trees of the last replay's ``bs`` requests. They share the memory that the next replay writes."""
        return self.trees.first(bs)


def make_tree_sampler(
    lm_head: torch.nn.Module, config: DDTreeConfig, batch_sizes: list[int], device: torch.device | str
) -> TreeSampler | None:
    """The sampler to capture for ``batch_sizes``; None where SGLang's own switch says to keep draft graphs bare.

    Raises:
        DDTreeError: the logits of the head do not fit the device.
    """
    if Envs.SGLANG_DFLASH_EAGER_DRAFT_SAMPLER.get():
        logger.info("DDTREE: trees are built outside of the draft graph (SGLANG_DFLASH_EAGER_DRAFT_SAMPLER=1).")
        return None
    logits = check_draft_graph(lm_head, config, batch_sizes, device)
    sampler = TreeSampler(lm_head, config, max(batch_sizes), device)
    logger.info(
        "DDTREE: the draft graph has head, top-K and tree in it; of %d requests the logits take %s, the trees %s.",
        max(batch_sizes),
        size(logits),
        size(sampler.trees.nbytes),
    )
    return sampler
