#!/usr/bin/env python3
"""Write the parts of docs/ that are made from code: docs/flags.md, and the tables of other pages.

tests/unit/test_docs.py fails when they are not current. --check writes nothing and says so too.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from sglang_ddtree import flags, hooks, mask_memory, memory_report, state_memory
from sglang_ddtree.cli import build_parser
from sglang_ddtree.memory_report import Rows, table
from sglang_ddtree.patching import series

ROOT = Path(__file__).parents[1]


def flag_rows(of: tuple[flags.Flag, ...], join: str) -> Rows:
    return [(f"`{flag.name}{join}{flag.value}`", flag.meaning, flag.default) for flag in of]


def commands(parser: argparse.ArgumentParser, name: str = "sglang-ddtree") -> Rows:
    """Every command with its arguments, one row for each."""
    rows: Rows = []
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for word, sub in action.choices.items():
                (text,) = (each.help or "" for each in action._choices_actions if each.dest == word)
                rows.append((f"`{name} {word}`", "", text))
                rows += commands(sub, f"{name} {word}")
        elif not isinstance(action, argparse._HelpAction):
            written = ", ".join(action.option_strings) or str(action.metavar)
            value = (
                "" if action.nargs == 0 or not action.option_strings else f" {action.metavar or action.dest.upper()}"
            )
            rows.append(("", f"`{written}{value}`", (action.help or "").replace("%(default)s", str(action.default))))
    return rows


def flags_page() -> str:
    return f"""# Flags

Made by `scripts/make_docs.py` from the code. How to choose values: [serving.md](serving.md). What is refused, and why:
[README](../README.md#what-is-refused-and-why).

## `sglang serve`

{table(("flag", "meaning", "default"), flag_rows(flags.SERVE, " "))}

## Environment variables

{table(("variable", "meaning", "default"), flag_rows(flags.VARIABLES, "="))}

## `sglang-ddtree`

Exit code 0: done, or DDTREE would start. 1: `doctor` or `patch status` found something wrong. 2: bad input, told in
one line.

{table(("command", "argument", "meaning"), commands(build_parser()))}
"""


def hook_table() -> str:
    groups = (
        ("every process", hooks.COMMAND_LINE),
        ("DDTREE's workers", hooks.ENGINE),
        ("workers with `SGLANG_DDTREE_STATES=deltas`", hooks.STATES),
        ("CPU platform", hooks.CPU),
    )
    rows: Rows = []
    for where, group in groups:
        for hook in group:
            target = hook.target.removeprefix("sglang.").removeprefix("srt.")
            rows.append((where, f"`{target}`", hook.kind, hook.reason, hook.patch[:4] or "no"))
    return table(
        ("registered in", "SGLang function", "kind", "why, and what happens without it", "away with patch"), rows
    )


def patch_table() -> str:
    rows: Rows = [
        (patch.name[:4], patch.subject, ", ".join(f"`{file.path}`" for file in patch.files)) for patch in series.load()
    ]
    return table(("patch", "subject", "files in `sglang/`"), rows)


QWEN36 = state_memory.QWEN36_27B
#: GPUs, memory of each in GiB, and the bf16 weights of target and drafter together.
MACHINES = (("2x A6000 48 GB", 2, 47.5), ("PRO 6000 96 GB", 1, 95.0), ("H200 141 GB", 1, 140.0))
WEIGHTS = 57.5e9
WIDTHS, BATCHES = (5, 9, 17, 33, 65), (1, 2, 4, 8, 16)
#: Keys and values of one token: 16 layers of the target with 4 heads of 256, 5 of the drafter with 8 heads of 128.
KV_TOKEN = 2 * 2 * (16 * 4 * 256 + 5 * 8 * 128)


def state_table() -> str:
    """GiB of states on one GPU, stored and as deltas, over verify width and requests, without a prefix cache."""
    forms, slots = (QWEN36.sizes(), QWEN36.sizes(deltas=True)), state_memory.SLOTS_NO_CACHE
    rows: Rows = []
    for width in WIDTHS:
        cells = [
            " / ".join(
                f"{state_memory.total_bytes(sizes, width, requests, slots) / state_memory.GIB:.1f}" for sizes in forms
            )
            for requests in BATCHES
        ]
        rows.append((f"{width} (budget {width - 1})", *cells))
    return table(("verify width", *(f"{requests} request{'s'[: requests > 1]}" for requests in BATCHES)), rows)


def free_bytes(gpus: int, memory: float) -> int:
    """On each GPU beside the weights, with 90% of its memory in use."""
    return int(0.9 * memory * state_memory.GIB - WEIGHTS / gpus)


def state_fit_table() -> str:
    """Running requests that fit, over machine and width: SGLang's own division, and without a prefix cache."""
    rows: Rows = []
    for name, gpus, memory in MACHINES:
        free = free_bytes(gpus, memory)
        shared = state_memory.share_for_states(free)
        alone = free - 4 * state_memory.GIB
        for dtype, size in (("float32", 4), ("bfloat16", 2)):
            for deltas in (False, True):
                sizes = dataclasses.replace(QWEN36, state_bytes=size).sizes(gpus, deltas=deltas)
                cells = [
                    f"{state_memory.requests_that_fit(shared, sizes, width, state_memory.SLOTS_EXTRA_BUFFER)}"
                    f" / {state_memory.requests_that_fit(alone, sizes, width, state_memory.SLOTS_NO_CACHE)}"
                    for width in WIDTHS
                ]
                form = "deltas" if deltas else "stored"
                rows.append((name, dtype, form, f"{free / state_memory.GIB:.1f}", *cells))
    head = ("machine", "states in", "verify pass", "GiB free a GPU", *(f"width {width}" for width in WIDTHS))
    return table(head, rows)


def state_sum_table() -> str:
    """Width 33 at batch 16 on one card of 96 GB, written out."""
    width, requests, slots = 33, 16, state_memory.SLOTS_EXTRA_BUFFER
    _, gpus, memory = MACHINES[1]
    free = free_bytes(gpus, memory)
    rows: list[list[str]] = [
        [f"free: 0.9 x {memory:.0f} GiB - {WEIGHTS / 1e9:.1f} GB of weights"],
        ["one node of the verify pass"],
        [f"nodes: ({requests} + 1) x {width}"],
        [f"slots: {requests} x {slots} + 1 states"],
        ["states together"],
        ["left for keys and values"],
        [f"tokens of them, {KV_TOKEN >> 10} KiB each for target and drafter"],
    ]
    for deltas in (False, True):
        sizes = QWEN36.sizes(gpus, deltas=deltas)
        nodes = state_memory.verify_bytes(sizes, width, requests)
        total = state_memory.total_bytes(sizes, width, requests, slots)
        left = free - total
        cells = [gib(free), memory_report.size(sizes.node), gib(nodes), gib(total - nodes), gib(total)]
        cells += [gib(left), f"{left // KV_TOKEN:,}"] if left > 0 else ["it does not fit", "-"]
        for row, cell in zip(rows, cells, strict=True):
            row.append(cell)
    return table(("", "stored", "deltas"), [tuple(row) for row in rows])


def gib(size: int) -> str:
    return f"{size / state_memory.GIB:.1f} GiB"


#: The sizes that docs/gpu.md is about; heads of a dense 8B model.
LARGE = mask_memory.Shape(requests=48, width=65, context=262144, graphs=memory_report.captured_sizes(48))


def mask_table() -> str:
    return table(*memory_report.flashinfer_table(LARGE, block_size=16))


def other_mask_table() -> str:
    return table(*memory_report.other_table(LARGE, block_size=16))


def mask_limit_table() -> str:
    return table(*memory_report.limit_table((16, 32, 64, 128, 256), (40960, 131072, 262144)))


def with_tables(text: str) -> str:
    """A page with the tables between its ``<!-- made: NAME -->`` and ``<!-- end -->`` lines renewed."""
    makers = {"hooks": hook_table, "patches": patch_table, "states": state_table, "states_fit": state_fit_table}
    makers |= {"states_sum": state_sum_table}
    makers |= {"masks": mask_table, "other_masks": other_mask_table, "mask_limit": mask_limit_table}
    return re.sub(
        r"(<!-- made: (\w+) -->\n).*?(\n<!-- end -->)",
        lambda found: found[1] + makers[found[2]]() + found[3],
        text,
        flags=re.DOTALL,
    )


def pages() -> dict[Path, str]:
    """What the pages that are made from code should contain."""
    wanted = {ROOT / "docs" / "flags.md": flags_page()}
    for page in (ROOT / "docs").glob("*.md"):
        text = page.read_text(encoding="utf-8")
        if "<!-- made: " in text:
            wanted[page] = with_tables(text)
    return wanted


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 where a page is not current")
    options = parser.parse_args()
    stale = [page for page, text in pages().items() if not page.exists() or page.read_text(encoding="utf-8") != text]
    for page in stale:
        print(f"{'not current' if options.check else 'written'}: {page.relative_to(ROOT)}")
        if not options.check:
            page.write_text(pages()[page], encoding="utf-8")
    return 1 if stale and options.check else 0


if __name__ == "__main__":
    sys.exit(main())
