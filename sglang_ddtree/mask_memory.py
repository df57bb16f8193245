"""Memory that verifying trees takes beside weights and KV cache: masks, index buffers, plans, and logits in the graphs.

What SGLang 0.5.23 and FlashInfer 0.7.2 allocate, in integers, with no import of either. The unit tests hold the sums
against their own allocations. Read in ``flashinfer_backend.py``, ``triton_backend.py``, ``flashattention_backend.py``
(``init_cuda_graph_state``), ``eagle_info.py`` (``generate_attn_arg_prefill``), ``verify_mask.py``,
``runner_utils/buffers.py``, ``graph_shared_output.py``, ``kernels/ops/speculative/lilicorr.py``, and FlashInfer's
``prefill.py`` (the wrapper's constructor and ``plan``) and ``quantization/packbits.py``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

#: FlashInfer counts the elements of all requests' masks in int32: in ``plan`` (``_compute_page_mask_indptr``), and
#: SGLang's kernel that packs them for its host-side plan does too (``pack_verify_mask.py``).
MAX_MASK_ELEMENTS = 2**31 - 1

#: Of every FlashInfer prefill wrapper: its integer workspace, which it has again in pinned host memory, and the lengths
#: of the requests, int32 ``[32768]``.
WRAPPER_BYTES = 8 * 1024 * 1024 + 4 * 32768

INT32, INT64 = 4, 8

FlashInferMask = Literal["bytes", "bits", "tree"]


@dataclass(frozen=True)
class Shape:
    """What the sizes depend on.

    Attributes:
        requests: largest batch that is captured, ``--cuda-graph-max-bs-decode``; at most ``--max-running-requests``.
        width: verify width ``Q``, budget + 1.
        context: context length of the model, ``--context-length``.
        graphs: batch sizes that are captured.
        page_size: ``--page-size``; FlashInfer and Triton address single slots whatever it is.
        top_k: ``--speculative-eagle-topk``; FA3 and FA4 have tables for it.
        heads, value_dim: query heads on one GPU, and the size of a value.
        kv_splits: ``--triton-attention-num-kv-splits``.
        vocab: size of the vocabulary.
    """

    requests: int
    width: int
    context: int
    graphs: int = 1
    page_size: int = 1
    top_k: int = 8
    heads: int = 32
    value_dim: int = 128
    kv_splits: int = 8
    vocab: int = 151_936

    @property
    def rows(self) -> int:
        """Tokens of the largest verify pass, SGLang's ``max_num_tokens``."""
        return self.requests * self.width


@dataclass(frozen=True)
class Buffer:
    """One allocation, or a group of small ones.

    Attributes:
        name: what it is.
        layout: dtype and shape, in terms of bs, Q and ctx.
        bytes: its size.
        step: it comes and goes with every step; otherwise it is there from the start.
    """

    name: str
    layout: str
    bytes: int
    step: bool = False


def total(buffers: Iterable[Buffer]) -> int:
    """Bytes at the worst moment: a full batch at full context."""
    return sum(buffer.bytes for buffer in buffers)


def mask_elements(requests: int, width: int, context: int) -> int:
    """Elements of a full mask over prefix and tree, when every prefix is ``context`` long."""
    return requests * width * (context + width)


def stock_mask_fits(requests: int, width: int, context: int) -> bool:
    """Whether FlashInfer can address the masks of such a batch; beyond, its int32 index wraps without an error.

    The limit of the stock ``custom_mask``, packed by FlashInfer's ``plan`` or by SGLang's host-side one (patch 0004).
    Bit rows of the tree alone, and SGLang's other backends, have no such limit.

    Args:
        requests: largest batch of one verify pass.
        width: verify width ``Q``.
        context: longest prefix; the context length unless less is known.
    """
    return mask_elements(requests, width, context) <= MAX_MASK_ELEMENTS


def most_requests_with_stock_mask(width: int, context: int) -> int:
    """The largest batch for which :func:`stock_mask_fits`; 0 when there is none."""
    return MAX_MASK_ELEMENTS // mask_elements(1, width, context)


def longest_context_with_stock_mask(requests: int, width: int) -> int:
    """The longest prefix for which :func:`stock_mask_fits`; below 1 when there is none."""
    return MAX_MASK_ELEMENTS // (requests * width) - width


def flashinfer(shape: Shape, mask: FlashInferMask) -> list[Buffer]:
    """SGLang's FlashInfer backend for the target.

    Args:
        mask: ``bytes``: as released. ``bits``: with patch 0004. ``tree``: bit rows of the tree alone, for FlashInfer
            attention that sees every prefix; it has the KV indices that a step needs, not Q times as many.
    """
    full = mask_elements(shape.requests, shape.width, shape.context)
    packed = shape.requests * _ceil(shape.width * (shape.context + shape.width), 8)
    step_masks = [
        Buffer("mask of a step", "bool [bs * Q * (ctx + Q)]", full, step=True),
        Buffer("its copy, when a batch is padded to a captured size", "the same", full, step=True),
    ]
    runner_mask = Buffer(
        "mask that captures are shown", "bool [(bs + bs * Q) * Q]", (shape.requests + shape.rows) * shape.width
    )
    masks = {
        "bytes": [
            Buffer("mask in the graphs, bytes", "uint8 [bs * Q * ctx]", shape.rows * shape.context),
            runner_mask,
            *step_masks,
            Buffer("packed mask of a step", "uint8 [bs * ceil(Q * (ctx + Q) / 8)]", packed, step=True),
        ],
        "bits": [
            Buffer(
                "mask in the graphs, bits",
                "uint8 [bs * Q * ceil((ctx + Q) / 8)]",
                shape.rows * _ceil(shape.context + shape.width, 8),
            ),
            runner_mask,
            *step_masks,
        ],
        "tree": [
            Buffer(
                "bit rows in the graphs", "int32 [bs * Q, ceil(Q / 32)]", shape.rows * _ceil(shape.width, 32) * INT32
            ),
            runner_mask,
        ],
    }
    return [*masks[mask], *_flashinfer_indices(shape, needed=mask == "tree"), *flashinfer_plans(shape)]


def flashinfer_drafter(shape: Shape, block_size: int, *, patched: bool) -> list[Buffer]:
    """SGLang's FlashInfer backend for the drafter, which has no tree and reads no mask but gets the buffer for one.

    Args:
        shape: the target's; the drafter's context length is taken to be the same.
        patched: with patch 0004.
    """
    drafter = replace(shape, width=block_size)
    row = _ceil(drafter.context + block_size, 8) if patched else drafter.context
    return [
        Buffer("drafter: mask in the graphs", "as above, Q = B; never read", drafter.rows * row),
        *(replace(each, name=f"drafter: {each.name}") for each in _flashinfer_indices(drafter)),
        *(replace(each, name=f"drafter: {each.name}") for each in flashinfer_plans(drafter)),
    ]


def _flashinfer_indices(shape: Shape, *, needed: bool = False) -> list[Buffer]:
    pointers = shape.requests + 1
    of_a_step = shape.requests * (shape.context + shape.width) * INT32
    of_the_graphs = of_a_step if needed else shape.rows * shape.context * INT32
    return [
        Buffer("KV indices in the graphs", "int32 [bs * Q * ctx]; needed: [bs * (ctx + Q)]", of_the_graphs),
        Buffer("KV indices of a step", "int32 [bs * (ctx + Q)]", of_a_step, step=True),
        # kv, qo, and the graphs' copies of qk and qo; last page lengths; a step's own qo and kv.
        Buffer("index pointers", "int32 [bs + 1], several", (4 * pointers + shape.requests + 2 * pointers) * INT32),
    ]


def flashinfer_plans(shape: Shape) -> list[Buffer]:
    """The workspaces of the captured wrappers and the eager one. The float workspace is one for all of a process's
    wrappers and has a fixed size (384 MiB, 512 MiB for some models); it is not in here."""
    return [Buffer("plans", "8.1 MiB a captured batch size, one eager", (shape.graphs + 1) * WRAPPER_BYTES)]


def triton(shape: Shape) -> list[Buffer]:
    """SGLang's Triton backend, but for buffers that grow with none of batch, width and context."""
    partial = shape.rows * shape.heads * shape.kv_splits
    return [
        Buffer("mask", "uint8 [bs * Q * (ctx + Q)]", mask_elements(shape.requests, shape.width, shape.context)),
        Buffer("KV indices in the graphs", "int64 [bs * Q * ctx]", shape.rows * shape.context * INT64),
        Buffer(
            "partial results of plain decoding",
            "float32 [bs * Q, heads, splits, head size + 1], int32 [bs * Q]",
            partial * (shape.value_dim + 1) * 4 + shape.rows * INT32,
        ),
    ]


def flash_attention(shape: Shape) -> list[Buffer]:
    """SGLang's FA3 and FA4 backend at top-k above 1, without sliding windows."""
    bs, rows, top_k = shape.requests, shape.rows, shape.top_k
    pages = _ceil(shape.context, shape.page_size)
    # Lengths, and index pointers of queries and keys, of five sets of tables: plain decoding, EAGLE's draft, the two
    # verify ones and the draft's extend pass.
    lengths = 5 * (bs + 2 * (bs + 1)) * INT32
    expand = (3 * rows + 2 + 3 * bs * top_k + 2) * INT32
    return [
        Buffer("mask", "bool [bs * Q * (ctx + Q)]", mask_elements(shape.requests, shape.width, shape.context)),
        Buffer(
            "page tables of verify passes",
            "int32 [bs, ctx / page], [bs, ctx], [bs * Q, Q]",
            (bs * pages + bs * shape.context + rows * shape.width) * INT32,
        ),
        Buffer(
            "page tables of passes that DDTREE does not make",
            "int32 [bs, ctx / page] three times, [bs, ctx], [bs * K, 2]",
            (3 * bs * pages + bs * shape.context + 2 * bs * top_k) * INT32,
        ),
        Buffer("index pointers", "int32; int64 [ctx / page] three times", lengths + expand + 3 * pages * INT64),
        Buffer("slots of a step", "int32 [bs, ctx]", bs * shape.context * INT32, step=True),
    ]


def verify_logits(shape: Shape) -> list[Buffer]:
    """Of the target's verify graphs, on any backend: one buffer for all batch sizes, as wide as the vocabulary."""
    return [Buffer("logits of the verify graphs", "float32 [bs * Q, vocab]", shape.rows * shape.vocab * 4)]


def draft_logits(shape: Shape, depth: int, *, itemsize: int = 2) -> list[Buffer]:
    """Of the head in the draft graph; the batch sizes share it, because a capture gives it back to the graphs' pool.

    Args:
        shape: its ``vocab`` is what one rank holds of the vocabulary.
        depth: drafted positions.
        itemsize: bytes of a logit, in the head's dtype.
    """
    # SGLang's top-K kernels take a K that is a power of two; another K goes through torch, which makes two more of it.
    kept = min(shape.top_k, _ceil(shape.vocab, 1024))
    copies = 1 if kept & (kept - 1) == 0 else 3
    name = "drafter: logits in the draft graph"
    size = copies * shape.requests * depth * shape.vocab * itemsize
    return [Buffer(name, "the head's dtype [bs * depth, vocab]; three times unless K is a power of two", size)]


def trees(shape: Shape) -> list[Buffer]:
    """This package's trees of a step, on any backend: ``DraftTree`` with its links, positions, the order of rows."""
    # Five int64 fields and a float32 one per node, two more int64 for SGLang, one int64 per request.
    size = shape.rows * (5 * INT64 + 4 + 2 * INT64) + shape.requests * INT64
    return [Buffer("trees, links, positions", "int64 [bs, Q], seven; float32 [bs, Q]", size, step=True)]


def _ceil(count: int, unit: int) -> int:
    return -(-count // unit)
