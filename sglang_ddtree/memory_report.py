"""``sglang-ddtree memory``: the sizes of ``mask_memory`` and ``state_memory`` as tables, for one shape."""

from __future__ import annotations

import argparse
import bisect
from collections.abc import Sequence
from typing import Any

from sglang_ddtree import mask_memory, state_memory
from sglang_ddtree.arguments import whole_number
from sglang_ddtree.config import MAX_BLOCK_SIZE, MAX_BUDGET, MIN_BLOCK_SIZE
from sglang_ddtree.drafter.files import read_config, resolve_model_dir
from sglang_ddtree.errors import DDTreeError
from sglang_ddtree.mask_memory import Buffer, Shape
from sglang_ddtree.target import text_config

Rows = list[tuple[str, ...]]


def captured_sizes(largest: int) -> int:
    """How many batch sizes SGLang captures up to ``largest`` under speculative decoding, unless told otherwise.

    As ``arg_groups/cuda_graph_hook.py: generate_decode_cuda_graph_batch_sizes``.
    """
    steps = (range(1, 9), range(10, 33, 2), range(40, 65, 4), range(72, 257, 8), range(272, max(272, largest), 16))
    return sum(bisect.bisect_left(sizes, largest) for sizes in steps) + 1


def flashinfer_table(shape: Shape, block_size: int) -> tuple[tuple[str, ...], Rows]:
    """Head and rows: every buffer of the FlashInfer backend as released, with patch 0004, with tree attention."""
    columns = []
    for mask in ("bytes", "bits", "tree"):
        ours = mask_memory.trees(shape)
        columns.append(
            [
                *mask_memory.flashinfer(shape, mask),
                *mask_memory.verify_logits(shape),
                *ours,
                *mask_memory.flashinfer_drafter(shape, block_size, patched=mask == "bits"),
                *mask_memory.draft_logits(shape, _depth(shape, block_size)),
            ]
        )
    head = ("buffer", "dtype and shape", "there", "SGLang 0.5.23", "with patch 0004", "tree attention")
    return head, _side_by_side(columns)


def other_table(shape: Shape, block_size: int) -> tuple[tuple[str, ...], Rows]:
    """Head and rows: the Triton backend, and FA3 and FA4."""
    ours = [
        *mask_memory.verify_logits(shape),
        *mask_memory.trees(shape),
        *mask_memory.draft_logits(shape, _depth(shape, block_size)),
    ]
    columns = [[*mask_memory.triton(shape), *ours], [*mask_memory.flash_attention(shape), *ours]]
    return ("buffer", "dtype and shape", "there", "`triton`", "`fa3`, `fa4`"), _side_by_side(columns)


def limit_table(budgets: Sequence[int], contexts: Sequence[int]) -> tuple[tuple[str, ...], Rows]:
    """Head and rows: the largest batch whose stock masks FlashInfer can address."""
    rows = [
        (str(budget), *(str(mask_memory.most_requests_with_stock_mask(budget + 1, context)) for context in contexts))
        for budget in budgets
    ]
    return ("budget", *(f"context {context:,}" for context in contexts)), rows


def state_table(net: state_memory.DeltaNet, tp_size: int, width: int, requests: int) -> tuple[tuple[str, ...], Rows]:
    """Head and rows: what a Gated DeltaNet target's states take on one GPU, stored and as deltas."""
    rows: list[list[str]] = [
        ["one node of the verify pass"],
        [f"nodes: ({requests} + 1) x {width}"],
        [f"with slots, no prefix cache: {requests} + 1 states"],
        [f"with slots, extra_buffer: {requests} x {state_memory.SLOTS_EXTRA_BUFFER} + 1 states"],
    ]
    for deltas in (False, True):
        sizes = net.sizes(tp_size, deltas=deltas)
        cells = [sizes.node, state_memory.verify_bytes(sizes, width, requests)]
        cells += [
            state_memory.total_bytes(sizes, width, requests, slots)
            for slots in (state_memory.SLOTS_NO_CACHE, state_memory.SLOTS_EXTRA_BUFFER)
        ]
        for row, cell in zip(rows, cells, strict=True):
            row.append(size(cell))
    return ("states of the target", "stored", "deltas"), [tuple(row) for row in rows]


def read_delta_net(target: str, state_dtype: str | None) -> state_memory.DeltaNet:
    """The sizes of a target's states, from its ``config.json``.

    Raises:
        DDTreeError: there is none, or it is not a Gated DeltaNet's.
    """
    text = text_config(read_config(resolve_model_dir(target)))
    try:
        return state_memory.DeltaNet.of_config(text, state_dtype)
    except KeyError as error:
        raise DDTreeError(
            f"{target} is not a Gated DeltaNet target: its config.json has no {error.args[0]}: leave --target out."
        ) from None
    except DDTreeError as error:
        raise DDTreeError(f"{target}/config.json: {error}") from None


def size(count: int) -> str:
    """Bytes as text."""
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if count >= unit:
            return f"{count / unit:.2f} {name}" if count < 10 * unit else f"{count / unit:.0f} {name}"
    return f"{count} B"


def _depth(shape: Shape, block_size: int) -> int:
    return min(block_size - 1, shape.width - 1)


def _side_by_side(columns: Sequence[Sequence[Buffer]]) -> Rows:
    """One row per buffer and the sums; the target's first, and what is there from the start before what is not."""
    found_kinds = dict.fromkeys((each.name, each.layout, each.step) for column in columns for each in column)
    kinds = sorted(found_kinds, key=lambda kind: (kind[0].startswith("drafter"), kind[2]))
    rows: Rows = []
    for name, layout, step in kinds:
        cells = []
        for column in columns:
            found = [each.bytes for each in column if (each.name, each.layout, each.step) == (name, layout, step)]
            cells.append(size(sum(found)) if found else "-")
        rows.append((name, layout, "step" if step else "start", *cells))
    for step, name in ((False, "from the start"), (True, "in a step, besides")):
        sums = [mask_memory.total(each for each in column if each.step == step) for column in columns]
        rows.append((f"**{name}**", "", "", *(f"**{size(count)}**" for count in sums)))
    return rows


def add_parser(commands: Any) -> None:
    """``memory`` on the command line of ``sglang-ddtree``."""
    parser = commands.add_parser("memory", help="memory of masks, indices and plans for a batch, width and context")

    def number(name: str, default: int, help: str, low: int = 1, high: int | None = None) -> None:
        kind = whole_number(low, high)
        parser.add_argument(name, type=kind, default=default, metavar="N", help=f"{help} (%(default)s)")

    number("--requests", 48, "largest captured batch")
    number("--budget", 64, "tree nodes below the root", high=MAX_BUDGET)
    number("--context", 40960, "context length")
    number("--page-size", 1, "SGLang's")
    number("--block-size", 16, "the drafter's", MIN_BLOCK_SIZE, MAX_BLOCK_SIZE)
    number("--vocab", 151936, "size of the vocabulary")
    number("--heads", 32, "query heads on one GPU")
    number("--head-dim", 128, "size of a value")
    parser.add_argument("--target", metavar="DIR", help="a Gated DeltaNet target: its states too, stored and as deltas")
    number("--tp-size", 1, "GPUs that share its states")
    parser.add_argument(
        "--mamba-ssm-dtype", choices=("float32", "bfloat16", "float16"), help="type of its states (config.json's)"
    )


def run(options: argparse.Namespace) -> int:
    """Print the tables as Markdown; 0.

    Raises:
        DDTreeError: ``--target`` is no Gated DeltaNet target, or ``--tp-size`` does not divide it.
    """
    net = None
    if options.target is not None:
        net = read_delta_net(options.target, options.mamba_ssm_dtype)
        if net.key_heads % options.tp_size or net.value_heads % options.tp_size:
            raise DDTreeError(
                f"--tp-size {options.tp_size} does not divide the {net.key_heads} key and {net.value_heads} value "
                f"heads of {options.target}: give one that does."
            )
    shape = Shape(
        requests=options.requests,
        width=options.budget + 1,
        context=options.context,
        graphs=captured_sizes(options.requests),
        page_size=options.page_size,
        heads=options.heads,
        value_dim=options.head_dim,
        vocab=options.vocab,
    )
    print(f"bs {shape.requests}, Q {shape.width}, ctx {shape.context:,}; {shape.graphs} captured batch sizes.")
    for name, (head, rows) in (
        ("flashinfer", flashinfer_table(shape, options.block_size)),
        ("triton, fa3, fa4", other_table(shape, options.block_size)),
    ):
        print(f"\n{name}:\n\n{table(head, rows)}")
    if net is not None:
        print(f"\n{table(*state_table(net, options.tp_size, shape.width, shape.requests))}")
    most = mask_memory.most_requests_with_stock_mask(shape.width, shape.context)
    fits = mask_memory.stock_mask_fits(shape.requests, shape.width, shape.context)
    verdict = "fits" if fits else "DOES NOT FIT: wrong masks without an error"
    print(f"\nFlashInfer's stock mask {verdict}; at this width and context it does up to {most} requests.")
    return 0


def table(head: tuple[str, ...], rows: Rows) -> str:
    """A Markdown table."""
    lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in (head, *rows)]
    return "\n".join([lines[0], "|" + "---|" * len(head), *lines[1:]])
