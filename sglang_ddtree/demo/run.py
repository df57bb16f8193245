"""The demo: a real model served with DDTREE, one streamed answer, and a comparison with AR and DFLASH.

``scripts/demo.sh`` prepares the environment and runs this.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import sys
import time
from collections.abc import Sequence

from openai import OpenAIError

from sglang_ddtree.bench import client, compare, machine, report, server
from sglang_ddtree.bench.arms import AR, DFLASH, DRAFTER, Arm, Stint
from sglang_ddtree.bench.prompts import SETS, Prompt, load_prompts
from sglang_ddtree.config import DEFAULT_BUDGET_CPU, MAX_BUDGET
from sglang_ddtree.demo.model import prepare_target
from sglang_ddtree.demo.packages import PackageError, cache_dir
from sglang_ddtree.doctor import check_port
from sglang_ddtree.errors import DDTreeError

QUESTION = "Write a Python function that returns the n-th Fibonacci number, and explain it in one sentence."

_BEGIN = time.monotonic()


def say(text: str) -> None:
    """One line of progress, with the seconds since the start."""
    print(f"[demo {time.monotonic() - _BEGIN:4.0f} s] {text}", file=sys.stderr, flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0; 1 when a part fails or, in fp32, when an answer differs from plain decoding's."""
    options = parse(argv)
    compare.stop_on_signals(say)
    try:
        return demo(options)
    except (server.ServerError, PackageError, DDTreeError, FileNotFoundError, OpenAIError) as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/demo.sh", description=__doc__.split("\n\n")[0])
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="default %(default)s")
    parser.add_argument("--budget", type=int, default=DEFAULT_BUDGET_CPU, help="tree nodes; default %(default)s")
    parser.add_argument("--prompts", type=int, default=6, metavar="N", help="to compare on; default %(default)s")
    parser.add_argument("--tokens", type=int, default=64, metavar="N", help="tokens per answer; default %(default)s")
    parser.add_argument("--port", type=int, help="of the DDTREE server; default: a free one")
    parser.add_argument(
        "--one-at-a-time", action="store_true", help="one server at a time; so by itself where memory is short"
    )
    parser.add_argument("--keep", action="store_true", help="leave the DDTREE server running and say how to use it")
    options = parser.parse_args(argv)
    if not 1 <= options.budget <= MAX_BUDGET:
        parser.error(f"--budget must be between 1 and {MAX_BUDGET}")
    if options.prompts < 1 or options.tokens < 2:
        parser.error("--prompts must be at least 1 and --tokens at least 2")
    if options.port is not None and not (port := check_port(options.port)).ok:
        parser.error(f"--port {port.detail}")
    return options


def demo(options: argparse.Namespace) -> int:
    if not (DRAFTER / "config.json").exists():
        raise FileNotFoundError(f"the drafter is missing: {DRAFTER}; the demo runs from a checkout of the repository")
    target = prepare_target(say)
    prompts = mixed_prompts(options.prompts)
    setting = compare.Setting(
        target=target,
        drafter=DRAFTER,
        dtype=options.dtype,
        threads=choose_threads(),
        max_tokens=options.tokens,
    )
    log_dir = cache_dir() / "logs" / "demo"
    ddtree = Arm("DDTREE", options.budget)
    say(f"server logs are in {log_dir}")
    together = not options.one_at_a_time and machine.servers_that_fit() >= 3
    turns: list[compare.Turn] = []
    loads: list[compare.Load] = []
    if not together:
        say("one server after the other" + ("" if options.one_at_a_time else ": there is no memory for three at once"))
        for arm in (AR, DFLASH):
            found, load = compare.run_stint(Stint((arm,), (0,), 0), setting, prompts, log_dir, say)
            turns += found
            loads.append(load)
    with contextlib.ExitStack() as stack:
        running = compare.start_arm(ddtree, setting, log_dir, say, options.port)
        stack.callback(running.stop)
        stream_answer(running.url, options.tokens)
        up = {ddtree: running}
        with contextlib.ExitStack() as others:
            for arm in (AR, DFLASH) if together else ():
                up[arm] = compare.start_arm(arm, setting, log_dir, say)
                others.callback(up[arm].stop)
            say(f"{', '.join(arm.label for arm in up)}: {len(prompts)} prompts x {options.tokens} tokens, in turns")
            found, load = compare.take_turns(up, setting, prompts, say)
            turns += found
            loads.append(load)
            say("stopping the servers")
        if options.keep:
            stack.pop_all()
    print_results(turns, loads, setting)
    differ = report_differences(turns, [DFLASH, ddtree], options.dtype)
    if options.keep:
        print_kept(running)
    return 1 if differ and options.dtype == "float32" else 0


def mixed_prompts(count: int) -> list[Prompt]:
    """Held-out prompts, the sets in turn: code, maths, chat, code, ..."""
    say("reading the held-out prompts (HumanEval, GSM8K, MT-bench)")
    return compare.interleaved([load_prompts(name, "heldout") for name in SETS])[:count]


def choose_threads() -> int:
    from sglang_ddtree.cpu.threads import choose

    threads = choose()
    say(f"torch threads: {threads.count} ({threads.reason})")
    return threads.count


def stream_answer(url: str, tokens: int) -> None:
    """One chat completion, printed as it arrives."""

    async def run() -> client.Answer:
        async with client.connect(url) as openai_client:
            messages = [{"role": "user", "content": QUESTION}]
            return await client.ask_streaming(openai_client, messages, max(tokens, 96), _print_now)

    print(f"\nUser: {QUESTION}\n\nDDTREE: ", end="", flush=True)
    answer = asyncio.run(run())
    length = f"{answer.acceptance_length:.2f}" if answer.acceptance_length else "-"
    print(
        f"\n\n[{len(answer.token_ids)} tokens in {answer.verify_steps} verify steps ({length} tokens per step), "
        f"first token after {answer.first_token_seconds or 0:.2f} s, {answer.seconds:.1f} s in all]\n",
        flush=True,
    )


def _print_now(piece: str) -> None:
    print(piece, end="", flush=True)


def print_results(turns: Sequence[compare.Turn], loads: Sequence[compare.Load], setting: compare.Setting) -> None:
    """The table; ratios only where the arms took turns, since minutes later the machine may be another."""
    in_turns = len(loads) == 1
    head = f"{'':12}{'tokens/s':>10}{'x AR':>8}{'acceptance length':>20}{'steps':>8}{'identical output':>19}"
    print(f"\n{setting.dtype}, {setting.threads} torch thread(s), greedy, one request at a time\n{head}")
    for row in report.rows(turns):
        ratio = f"{row.over_ar.median:.2f}" if in_turns else "-"
        length = "-" if row.acceptance_length is None else f"{row.acceptance_length:.2f}"
        same = "(reference)" if row.arm == AR.label else f"{'yes' if row.identical == row.prompts else 'NO'}"
        same += "" if row.arm == AR.label else f" ({row.identical}/{row.prompts})"
        print(
            f"{row.arm:12}{row.tokens_per_second.median:>10.2f}{ratio:>8}{length:>20}{row.verify_steps:>8.0f}{same:>19}"
        )
    print(
        "\nSteps are verify steps (for AR: one per token). Acceptance length: tokens after the first per verify step.\n"
        f"One round on {machine.cpu_name()}; other programs kept "
        f"{', '.join(f'{load.other_cores:.1f}' for load in loads)} cores busy meanwhile.\n"
        + ("" if in_turns else "The arms ran minutes apart, so their tokens/s compare only on a quiet machine.\n")
        + "scripts/bench_cpu.py measures in several rounds and gives the spread.",
        flush=True,
    )


def report_differences(turns: Sequence[compare.Turn], arms: Sequence[Arm], dtype: str) -> bool:
    """Whether any arm's tokens differ from AR's; says where."""
    expected = report.reference_tokens(turns)
    any_differs = False
    for arm in arms:
        for prompt, position in report.differing(turns, arm, expected).items():
            any_differs = True
            print(f"{arm.label} differs from AR on {prompt} at token {position}", file=sys.stderr)
    if any_differs and dtype == "bfloat16":
        print("In bfloat16 a verify pass of another shape may flip a near-tie; float32 must be identical.")
    return any_differs


def print_kept(running: server.Server) -> None:
    body = {"model": "default", "messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 64}
    print(
        f"\nThe DDTREE server goes on at {running.url} (log: {running.log}). Try it:\n\n"
        f"curl -s {running.url}/v1/chat/completions -H 'Content-Type: application/json' -d '{json.dumps(body)}'\n\n"
        f"Stop it with: kill -TERM -- -{os.getpgid(running.process.pid)}",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
