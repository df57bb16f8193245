"""Says at start what the CUDA graphs of a DDTREE server take, and refuses what does not fit, with what would.

The sums are those of ``mask_memory.py``; ``sglang-ddtree memory`` prints them for other sizes. Without these lines a
server that is too large ends in an out-of-memory error of the allocator, somewhere in the captures.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from sglang.srt.model_executor.runner.base_cuda_graph_runner import get_batch_sizes_to_capture
from sglang.srt.runtime_context import get_exec, get_parallel, get_spec
from sglang.srt.speculative.eagle_utils import TreeMaskMode
from sglang.srt.utils import get_available_gpu_memory

from sglang_ddtree import mask_memory
from sglang_ddtree.config import BUDGET_FLAG, DDTreeConfig
from sglang_ddtree.errors import DDTreeError
from sglang_ddtree.mask_memory import Buffer, FlashInferMask, Shape
from sglang_ddtree.memory_report import size
from sglang_ddtree.patching.installed import FLASHINFER_VERIFY, is_applied

logger = logging.getLogger(__name__)

GIB = 1 << 30


def free_bytes(device: torch.device | str) -> int | None:
    """What captures on ``device`` can still take; None where there are none.

    What torch holds and does not use counts as free: some of it is the graphs' pool. So nothing is refused that fits.
    """
    device = torch.device(device)
    if device.type != "cuda":
        return None
    index = torch.cuda.current_device() if device.index is None else device.index
    free = get_available_gpu_memory("cuda", index, empty_cache=False) * GIB
    return int(free) + torch.cuda.memory_reserved(index) - torch.cuda.memory_allocated(index)


def captured_sizes(runner: Any) -> list[int]:
    """The batch sizes that SGLang captures graphs of a ``ModelRunner`` for, ascending.

    Those of its configuration, which know nothing of how many requests can run together, cut to that number; as
    ``DecodeCudaGraphRunner`` asks for them.
    """
    sizes, _ = get_batch_sizes_to_capture(
        runner,
        runner.decode_num_tokens_per_req(),
        gathered_buffer_required=any(runner.decode_graph_gather_requirements()),
    )
    return list(sizes)


def shared_logits_bytes(runner: Any) -> int:
    """What the verify graphs' logits take already: graphs of the prefill, captured before, write to the same buffer."""
    shared = runner.graph_shared_output
    return 0 if shared is None else sum(each.nbytes for each in shared._logits_buffers.values())


def require_room(
    what: str, needed: Callable[[int], int], sizes: Sequence[int], free: int | None, ways: Sequence[str] = ()
) -> int:
    """What the largest of the captured batch ``sizes`` needs, in bytes.

    Args:
        what: subject of the sentence, with its verb.
        needed: bytes for a batch size, growing with it.
        free: bytes that can be had; None when that is not known.
        ways: what else would help.

    Raises:
        DDTreeError: it is more than ``free``; the largest size that fits is named.
    """
    most = needed(max(sizes))
    if free is None or most <= free:
        return most
    fitting = [f"--cuda-graph-max-bs-decode {max(fit)}"] if (fit := [bs for bs in sizes if needed(bs) <= free]) else []
    raise DDTreeError(
        f"{what} {size(most)} in the CUDA graphs for {max(sizes)} requests, and {size(max(free, 0))} are free: use "
        f"{', or '.join([*fitting, *ways, 'a lower --mem-fraction-static'])}."
    )


def check_draft_graph(
    lm_head: Any, config: DDTreeConfig, sizes: Sequence[int], device: torch.device | str, free: int | None = None
) -> int:
    """Bytes of the head's logits in the draft graph, for the largest of ``sizes``.

    Args:
        lm_head: the target's head, or this rank's part of it.
        free: bytes that can be had; asked of the device when not given.

    Raises:
        DDTreeError: they do not fit.
    """
    vocab, itemsize = head_logits(lm_head)

    def needed(bs: int) -> int:
        shape = Shape(bs, config.verify_width, context=1, top_k=config.top_k, vocab=vocab)
        return mask_memory.total(mask_memory.draft_logits(shape, config.depth, itemsize=itemsize))

    return require_room("the drafter's logits take", needed, sizes, free_bytes(device) if free is None else free)


def head_logits(lm_head: Any) -> tuple[int, int]:
    """Logits of one row on this rank, and their bytes each, as ``models/dflash.py: candidate_topk`` computes them."""
    is_whole = get_parallel().tp_size == 1
    vocab = int(lm_head.org_vocab_size if is_whole else lm_head.shard_indices.num_org_elements)
    weight = getattr(lm_head, "weight", None)
    # A quantized head gives 16-bit logits.
    if weight is None or weight.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return vocab, 2
    return vocab, weight.dtype.itemsize


def verify_buffers(backend: str, mask: FlashInferMask, shape: Shape) -> list[Buffer]:
    """What the target's verify graphs hold from the start, with attention backend ``backend``."""
    if backend == "flashinfer":
        found = mask_memory.flashinfer(shape, mask)
    elif backend == "triton":
        found = mask_memory.triton(shape)
    elif backend in ("fa3", "fa4"):
        found = mask_memory.flash_attention(shape)
    else:
        found = []
    return [each for each in (*found, *mask_memory.verify_logits(shape)) if not each.step]


def check_verify_graphs(runner: Any, config: DDTreeConfig, free: int | None = None) -> int:
    """Log what the target's verify graphs take, before they take it; the bytes.

    Args:
        runner: the target's ``ModelRunner``, its attention backend made, its graphs not.
        free: bytes that can be had; asked of the device when not given.

    Raises:
        DDTreeError: they do not fit.
    """
    model = runner.model_config
    sizes = captured_sizes(runner)
    # Of a split pair the prefill backend verifies, unless the user says decode.
    by_decode = get_spec().speculative_attention_mode == "decode"
    backend = runner.decode_attention_backend_str if by_decode else runner.prefill_attention_backend_str
    mask = flashinfer_mask(runner.attn_backend)
    if free is None and (free := free_bytes(runner.device)) is not None:
        free += shared_logits_bytes(runner)

    def buffers(bs: int) -> list[Buffer]:
        shape = Shape(
            requests=bs,
            width=config.verify_width,
            context=model.context_len,
            graphs=len([each for each in sizes if each <= bs]),
            page_size=runner.page_size,
            top_k=config.top_k,
            heads=model.num_attention_heads // get_parallel().attn_tp_size,
            value_dim=model.v_head_dim or model.head_dim,
            kv_splits=get_exec().kernel.triton_attention_num_kv_splits,
            vocab=model.vocab_size,
        )
        return verify_buffers(backend, mask, shape)

    taken = require_room(
        "masks, index buffers and logits of the verify pass take",
        lambda bs: mask_memory.total(buffers(bs)),
        sizes,
        free,
        ways=["a smaller " + BUDGET_FLAG, "a smaller --context-length"],
    )
    largest = sorted(buffers(max(sizes)), key=lambda each: -each.bytes)[:3]
    logger.info(
        "DDTREE: verify graphs of %d requests at width %d and context %d take %s beside the model's own (%s).",
        max(sizes),
        config.verify_width,
        model.context_len,
        size(taken),
        ", ".join(f"{each.name} {size(each.bytes)}" for each in largest),
    )
    return taken


def flashinfer_mask(attn_backend: Any) -> FlashInferMask:
    """Which mask the target's FlashInfer backend verifies with."""
    verify_mask = getattr(attn_backend, "verify_mask", None)
    if verify_mask is not None and verify_mask.mode == TreeMaskMode.QLEN_ONLY_BITPACKING:
        return "tree"
    return "bits" if is_applied(FLASHINFER_VERIFY) else "bytes"
