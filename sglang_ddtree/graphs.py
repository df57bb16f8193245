"""Stand-in verify inputs for warm-up and CUDA graph capture: a tree with its mask where SGLang would make a chain."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
from sglang.srt.runtime_context import get_spec

from sglang_ddtree.config import DDTreeConfig
from sglang_ddtree.graph_memory import check_verify_graphs
from sglang_ddtree.verify import DDTreeVerifyInput


def capture_input(custom_mask: torch.Tensor) -> DDTreeVerifyInput:
    """The tree verify input that shapes a capture: sizes and a mask buffer, no data."""
    config = DDTreeConfig.from_spec(get_spec())
    return DDTreeVerifyInput(
        draft_token=None,
        custom_mask=custom_mask,
        positions=None,
        retrieve_index=None,
        retrieve_next_token=None,
        retrieve_next_sibling=None,
        retrieve_cum_len=None,
        spec_steps=config.depth,
        topk=config.top_k,
        draft_token_num=config.verify_width,
        capture_hidden_mode=CaptureHiddenMode.FULL,
        seq_lens_sum=None,
        seq_lens_cpu=None,
    )


def dummy_verify_input(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """``create_dummy_verify_input`` for DDTREE: the draft side is DFLASH's, the target side a tree."""
    names = ("spec_algorithm", "custom_mask", "num_tokens_per_req", "is_draft_worker")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    if given["is_draft_worker"]:
        return original(*args, **kwargs)
    return capture_input(given["custom_mask"])


def tree_graph_runner_class(base: type) -> type:
    """``base``, SGLang's ``DecodeCudaGraphRunner``, with the verify graph captured for a tree.

    Making one raises DDTreeError when what the graphs hold does not fit the device.
    """

    class TreeGraphRunner(base):  # type: ignore[misc,valid-type]
        def __init__(self, model_runner: Any, *args: Any, **kwargs: Any) -> None:
            check_verify_graphs(model_runner, DDTreeConfig.from_spec(get_spec()))
            super().__init__(model_runner, *args, **kwargs)

        def get_spec_info(self, num_tokens: int) -> DDTreeVerifyInput:
            return capture_input(self.buffers.custom_mask)

    return TreeGraphRunner
