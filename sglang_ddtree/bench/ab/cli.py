"""``sglang-ddtree bench run|compare|report``: measure, compare two results, and draw one."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from sglang_ddtree.bench import machine
from sglang_ddtree.bench.ab import html, regress, store, table
from sglang_ddtree.bench.ab.config import (
    ConfigError,
    Settings,
    checked,
    default_arms,
    parse_arm,
    read_flags,
    read_toml,
)
from sglang_ddtree.bench.ab.files import read_prompts
from sglang_ddtree.bench.ab.findings import judge
from sglang_ddtree.bench.ab.grading import grade
from sglang_ddtree.bench.ab.run import head, measure, schedule
from sglang_ddtree.bench.ab.summary import rows
from sglang_ddtree.bench.arms import DRAFTER, common_flags
from sglang_ddtree.bench.compare import Say, stop_on_signals
from sglang_ddtree.bench.prompts import SETS, SPLITS, Prompt, load_prompts
from sglang_ddtree.bench.server import ServerError
from sglang_ddtree.config import parse_budget
from sglang_ddtree.demo.model import prepare_target
from sglang_ddtree.demo.packages import PackageError, cache_dir
from sglang_ddtree.drafter.files import resolve_model_dir
from sglang_ddtree.errors import DDTreeError, of_the_system

#: Exit codes beside 0: a regression or a run with something wrong; bad input.
WRONG, BAD_INPUT = 1, 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run one of the three commands; returns the exit code."""
    parser = build_parser()
    options = parser.parse_args(argv)
    try:
        if options.command == "run":
            return run(options, " ".join(shlex.quote(arg) for arg in (sys.argv[1:] if argv is None else argv)))
        if options.command == "report":
            return report(store.read(options.result), options.html or options.result.with_suffix(".html"))
        found = regress.compare(store.read(options.old), store.read(options.new), options.tolerance)
        print(regress.render(found), end="")
        return WRONG if found.regressed else 0
    except (DDTreeError, PackageError, OSError) as error:
        text = of_the_system(error) if isinstance(error, OSError) else " ".join(str(error).split())
        print(f"sglang-ddtree bench: error: {text}", file=sys.stderr)
        return BAD_INPUT


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="sglang-ddtree bench", description="A/B benchmark; see docs/benchmark.md.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _run_parser(commands.add_parser("run", help="measure arms in turns; writes OUT.json and OUT.html"))
    compare = commands.add_parser("compare", help="exit status 1 when NEW is worse than OLD beyond the noise")
    compare.add_argument("old", type=Path, metavar="OLD.json")
    compare.add_argument("new", type=Path, metavar="NEW.json")
    compare.add_argument(
        "--tolerance", type=_share, default=0.03, metavar="X", help="changes up to this share are none (default 0.03)"
    )
    page = commands.add_parser("report", help="print the tables of a result again and write its page")
    page.add_argument("result", type=Path, metavar="RESULT.json")
    page.add_argument("--html", type=Path, metavar="FILE", help="default: RESULT.html")
    return parser


def _run_parser(parser: argparse.ArgumentParser) -> None:
    defaults = Settings()

    def option(name: str, help: str, **how: Any) -> None:
        # None means "not given", so that a TOML file's value stays.
        default = getattr(defaults, name.removeprefix("--").replace("-", "_"), None)
        if default not in (None, (), "", 0) and "action" not in how:
            help += f" (default {' '.join(map(str, default)) if isinstance(default, tuple) else default})"
        parser.add_argument(name, default=None, help=help, **how)

    parser.add_argument("config", nargs="?", type=Path, metavar="CONFIG.toml", help="settings; flags override it")
    option("--arm", "NAME=URL[#MODEL] of a running server or NAME='SERVER FLAGS'; repeatable", action="append")
    option("--target", "model of the default arms (default: the demo's, from PyPI)", type=Path, metavar="DIR")
    option("--drafter", "DFlash drafter of the default arms (default: the demo's)", type=Path, metavar="DIR")
    option("--budgets", "DDTREE budgets of the default arms (default 8 16 32)", type=_budget, nargs="+", metavar="N")
    option("--common", "server flags of every arm started here, as one string: --common='--flag ...'", metavar="FLAGS")
    option("--dtype", "of the default arms (default float32)", metavar="DTYPE")
    option("--threads", "torch threads of servers on a CPU", type=int, metavar="N")
    option("--reference", "arm that the others are compared with (default: the first)", metavar="NAME")
    option("--concurrency", "requests at a time, one load each", type=int, nargs="*", metavar="N")
    option("--rates", "requests a second at random moments, one load each", type=float, nargs="*", metavar="X")
    option("--sets", "prompt sets from PyPI packages", nargs="*", choices=sorted(SETS), metavar="SET")
    option("--files", "prompt files (JSONL)", nargs="*", metavar="FILE")
    option("--split", "of the sets", choices=SPLITS)
    option("--prompts", "prompts of each set and file; 0 for all", type=int, metavar="N")
    option("--tokens", "tokens per answer at most", type=int, metavar="N")
    option("--fixed-length", "answers do not stop before that", action="store_true")
    option("--body", "further request fields as JSON, e.g. temperature", metavar="JSON")
    option("--repeats", "how often everything is measured", type=int, metavar="N")
    option("--together", "all servers up at once, arms in turns cell by cell", action="store_true")
    option("--run-code", "grade code answers (humaneval) by running them, with limits", action="store_true")
    option("--force", "print speedups of unequal arms, marked as forced", action="store_true")
    option("--seed", "of arrivals", type=int, metavar="N")
    parser.add_argument("--out", type=Path, default=Path("bench"), metavar="NAME", help="NAME.json and NAME.html")
    parser.add_argument("--overwrite", action="store_true", help="replace files that are there")


def settings_from(options: argparse.Namespace, say: Say) -> Settings:
    """The file's settings, overridden by the flags; default arms where neither names any.

    Raises:
        ConfigError: they do not describe a run.
    """
    given = read_toml(options.config) if options.config else {}
    names = "threads reference concurrency rates sets files split prompts tokens fixed_length repeats together"
    names += " run_code force seed"
    for name in names.split():
        value = getattr(options, name)
        if value is not None:
            given[name] = tuple(value) if isinstance(value, list) else value
    if options.common is not None:
        given["common"] = read_flags(options.common, "--common")
    if options.body is not None:
        try:
            given["body"] = json.loads(options.body)
        except ValueError as error:
            raise ConfigError(f"--body: {error}") from error
        if not isinstance(given["body"], dict):
            raise ConfigError("--body: give a JSON object")
    if options.arm:
        given["arms"] = tuple(parse_arm(text) for text in options.arm)
    if given.get("arms"):
        if options.target or options.drafter or options.budgets or options.dtype:
            raise ConfigError("--target, --drafter, --budgets and --dtype are for the default arms; arms are given")
        return checked(Settings(**given))
    arms = default_arms(options.drafter or DRAFTER, options.budgets or (8, 16, 32))
    settings = checked(Settings(**{**given, "arms": arms}))
    for path in (options.target, options.drafter):
        if path is not None:  # told now, not by a server's log
            resolve_model_dir(str(path))
    target = options.target or prepare_target(say)
    # One limit of running requests for all: SGLang's own default is 48 for speculative arms only.
    limit = max(settings.concurrency, default=48)
    flags = common_flags(target, options.dtype or "float32", 2048 + 1024 * limit)
    return replace(settings, common=(*flags, "--max-running-requests", str(limit), *settings.common))


def run(options: argparse.Namespace, command: str) -> int:
    """Measure, print, and write the result and its page."""
    if not options.out.name:
        raise ConfigError("--out needs a name")
    out = options.out.with_name(options.out.name + ".json")
    if out.exists() and not options.overwrite:
        raise ConfigError(f"{out} is there already: give another --out, or --overwrite")
    out.parent.mkdir(parents=True, exist_ok=True)

    def say(text: str) -> None:
        tqdm.write(f"[bench] {text}", file=sys.stderr)

    stop_on_signals(say)
    settings = settings_from(options, say)
    prompts = read_all(settings)
    result = store.Result(head(settings, f"sglang-ddtree bench {command}", machine.host()))
    cells = sum(1 for _ in schedule(settings, list(prompts)))
    status = 0
    with tqdm(total=cells, file=sys.stderr, unit="cell", disable=None) as bar:
        started = False

        def progress(text: str) -> None:
            nonlocal started
            bar.update(int(started))
            started = True
            bar.set_postfix_str(text)

        try:
            measure(settings, prompts, result, out, cache_dir() / "logs" / "bench-ab", say, progress)
            grade(result, settings.run_code)
            store.write(out, result)
        except ServerError as error:
            say(str(error))
            status = WRONG
        finally:
            # Also when a signal ends the run: the finished part is on disk already, its page follows.
            page = out.with_suffix(".html")
            if not result.cells and not result.complete:
                out.unlink(missing_ok=True)  # so that the corrected command does not find it in the way
            elif result.cells:
                page.write_text(html.page(result), encoding="utf-8")
                say(f"written: {out} and {page}")
    return max(status, show(result))


def read_all(settings: Settings) -> dict[str, list[Prompt]]:
    """The prompts by set or file, at most ``settings.prompts`` of each."""
    limit = settings.prompts or None
    found = {name: load_prompts(name, settings.split, limit) for name in settings.sets}
    for name in settings.files:
        label = Path(name).stem
        if label in found:
            raise ConfigError(f"two prompt sets are called {label}")
        found[label] = read_prompts(Path(name))[:limit]
    return found


def report(result: store.Result, page: Path) -> int:
    """Print the tables and write the page."""
    page.write_text(html.page(result), encoding="utf-8")
    return show(result)


def show(result: store.Result) -> int:
    found = judge(result)
    print(table.render(result, found, rows(result, found.refused)), end="")
    return 0 if found.ok else WRONG


def _budget(text: str) -> int:
    try:
        return parse_budget(text, "it")
    except DDTreeError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _share(text: str) -> float:
    value = float(text)
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError("must be at least 0 and below 1")
    return value


if __name__ == "__main__":
    sys.exit(main())
