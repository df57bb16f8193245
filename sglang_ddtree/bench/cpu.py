"""AR, DFLASH and DDTREE on the CPU: tokens/s, acceptance length and identical output, in rounds.

Serves the demo's target and drafter and sends held-out prompts, which scripts/train_drafter.py never reads, to every
arm in turns. Writes NAME.md and NAME.json into the output directory. The exit status is 1 when a float32 answer differs
from plain decoding's.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sglang_ddtree.arguments import in_one_line, whole_number
from sglang_ddtree.bench import compare, machine, report
from sglang_ddtree.bench.arms import DRAFTER, common_flags, make_arms, plan
from sglang_ddtree.bench.prompts import SETS, load_prompts
from sglang_ddtree.bench.server import ServerError
from sglang_ddtree.config import DEFAULT_TOP_K, MAX_BUDGET
from sglang_ddtree.cpu.threads import choose
from sglang_ddtree.demo.model import prepare_target
from sglang_ddtree.demo.packages import PackageError, cache_dir
from sglang_ddtree.drafter.files import resolve_model_dir

ROOT = Path(__file__).parents[2]

_DTYPES = ("float32", "bfloat16")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/bench_cpu.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )

    def option(name: str, default: Any, help: str, **how: Any) -> None:
        if default is not None:
            help += f" (default {' '.join(map(str, default)) if isinstance(default, list) else default})"
        parser.add_argument(name, default=default, help=help, **how)

    option("--budgets", [4, 8, 16, 32, 64], "DDTREE budgets", type=whole_number(1, MAX_BUDGET), nargs="+", metavar="N")
    option("--dtypes", list(_DTYPES), "measured one after the other", nargs="+", choices=_DTYPES, metavar="DTYPE")
    option("--sets", list(SETS), "prompt sets", nargs="+", choices=SETS, metavar="SET")
    option("--split", "heldout", "of the prompt sets; heldout is for reported figures", choices=("heldout", "dev"))
    option("--prompts", 6, "prompts of each set", type=whole_number(1), metavar="N")
    option("--tokens", 96, "tokens per answer at most", type=whole_number(2), metavar="N")
    option("--rounds", 3, "how often each prompt is asked of each arm", type=whole_number(1), metavar="N")
    option("--concurrency", 1, "prompts sent at once to the same arm", type=whole_number(1), metavar="N")
    option(
        "--threads",
        None,
        "torch threads, the same for all arms (default: as many as cores are free)",
        type=whole_number(1),
        metavar="N",
    )
    option(
        "--servers", None, "servers up at once (default: as many as fit into memory)", type=whole_number(1), metavar="N"
    )
    option("--drafter", DRAFTER, "drafter directory", type=Path, metavar="DIR")
    option("--out", ROOT / "docs" / "results", "output directory", type=Path, metavar="DIR")
    option("--name", "cpu", "of the output files", metavar="NAME")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 1 when a float32 answer differs, 2 for bad input and servers that do not start."""
    options = parse(argv)
    return in_one_line("scripts/bench_cpu.py", lambda: run(options, argv), ServerError, PackageError)


def run(options: argparse.Namespace, argv: Sequence[str] | None) -> int:
    """Measure, print and write."""
    begin = time.monotonic()

    def say(text: str) -> None:
        print(f"[bench {time.monotonic() - begin:5.0f} s] {text}", file=sys.stderr, flush=True)

    compare.stop_on_signals(say)
    resolve_model_dir(str(options.drafter))
    # Hours later is too late to find that nothing can be written there.
    options.out.mkdir(parents=True, exist_ok=True)
    target = prepare_target(say)
    prompts = compare.interleaved([load_prompts(name, options.split, options.prompts) for name in options.sets])
    arms = make_arms(options.budgets)
    threads = options.threads or choose().count
    servers = options.servers or machine.servers_that_fit()
    log_dir = cache_dir() / "logs" / "bench"
    say(f"{len(prompts)} prompts, {threads} torch thread(s), at most {servers} servers at once, logs in {log_dir}")

    turns: dict[str, list[compare.Turn]] = {}
    loads: dict[str, list[compare.Load]] = {}
    for dtype in options.dtypes:
        setting = compare.Setting(target, options.drafter, dtype, threads, options.tokens, options.concurrency)
        turns[dtype], loads[dtype] = [], []
        for stint in plan(arms, options.rounds, servers):
            say(f"{dtype}: {', '.join(arm.label for arm in stint.arms)}")
            found, load = compare.run_stint(stint, setting, prompts, log_dir, say)
            turns[dtype] += found
            loads[dtype].append(load)
    head = {
        "command": "scripts/bench_cpu.py " + " ".join(sys.argv[1:] if argv is None else argv),
        "minutes": round((time.monotonic() - begin) / 60, 1),
        "machine": machine.facts(threads),
        "settings": {name: machine.portable(value) for name, value in vars(options).items()},
        "servers_at_once": servers,
        "flags": {
            arm.label: [
                machine.portable(flag) for flag in (*common_flags(target, "DTYPE"), *arm.flags(options.drafter))
            ]
            for arm in arms
        },
        "top_k": DEFAULT_TOP_K,
        "load": {dtype: [vars(load) for load in found] for dtype, found in loads.items()},
    }
    report.write_json(options.out / f"{options.name}.json", head, turns)
    text = report.markdown(head, turns)
    (options.out / f"{options.name}.md").write_text(text, encoding="utf-8")
    print(text)
    say(f"written: {options.out / options.name}.md and .json")
    wrong = [row.arm for row in report.rows(turns.get("float32", [])) if row.identical < row.prompts]
    if wrong:
        say(f"float32 answers differ from AR's: {', '.join(wrong)}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
