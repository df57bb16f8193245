#!/usr/bin/env python
"""Check on a CPU that DDTREE's and DFLASH's tokens equal plain decoding's, over the whole matrix of settings.

Serves the demo model in fp32 once per setting: AR for the reference, DFLASH and DDTREE (budgets 7 and 32) with overlap
scheduling on and off and page sizes 1 and 16. Each server answers the same real prompts in three phases: eight at a
time; a second turn of each conversation, whose cached prefix includes what the server itself generated; and one at a
time, the prefix cache emptied before. Every answer is compared with AR's, token by token and with its finish reason;
AR's own answers one at a time are compared with those eight at a time. With --seeded AR answers one at a time only:
plain SGLang's seeded draws depend on the neighbours in the batch, and what a seed means is what it gives alone.

    $(scripts/env.sh)/bin/python scripts/check_lossless.py                     # everything
    $(scripts/env.sh)/bin/python scripts/check_lossless.py --only 'DDTREE 7'   # a part (a regular expression)
    $(scripts/env.sh)/bin/python scripts/check_lossless.py --phases 1,2        # not one at a time, which is slow
    $(scripts/env.sh)/bin/python scripts/check_lossless.py --resume            # what an earlier run has not done
    $(scripts/env.sh)/bin/python scripts/check_lossless.py --seeded            # sampled answers, DDTREE only

Writes docs/results/NAME.json and NAME.md after every setting. Exit status 1 on any difference.
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sglang_ddtree.arguments import in_one_line, whole_number
from sglang_ddtree.bench import compare, lossless, machine
from sglang_ddtree.bench.lossless import Output, Question
from sglang_ddtree.bench.server import Server, ServerError, running
from sglang_ddtree.cpu import threads
from sglang_ddtree.demo.model import prepare_target
from sglang_ddtree.demo.packages import PackageError
from sglang_ddtree.drafter.files import resolve_model_dir

ROOT = Path(__file__).resolve().parents[1]
PHASES = {"1": "eight at once", "2": "second turn, eight at once", "3": "one at a time"}
LOGS = Path(tempfile.gettempdir()) / "check-lossless"


@dataclass(frozen=True)
class Setting:
    """One server of the matrix."""

    algorithm: str
    budget: int | None = None
    overlap: bool = True
    page: int = 1

    @property
    def name(self) -> str:
        if self.algorithm == "AR":
            return "AR"
        budget = "" if self.budget is None else f" {self.budget}"
        return f"{self.algorithm}{budget}, overlap {'on' if self.overlap else 'off'}, page {self.page}"

    def flags(self, model: Path, drafter: Path, seeded: bool) -> list[str]:
        flags = ["--model-path", str(model), "--dtype", "float32", "--max-total-tokens", "8192"]
        flags += ["--page-size", str(self.page), "--random-seed", "1"]
        if seeded:
            flags.append("--enable-deterministic-inference")
        if self.algorithm != "AR":
            flags += ["--speculative-algorithm", self.algorithm, "--speculative-draft-model-path", str(drafter)]
        if self.budget is not None:
            flags += ["--speculative-ddtree-budget", str(self.budget)]
        return flags if self.overlap else [*flags, "--disable-overlap-schedule"]


REFERENCE = Setting("AR")
# With --seeded without DFLASH, which answers sampled requests greedily on a CPU.
MATRIX = [
    Setting(algorithm, budget, overlap, page)
    for overlap, page in ((True, 1), (False, 16), (True, 16), (False, 1))
    for algorithm, budget in (("DDTREE", 7), ("DDTREE", 32), ("DFLASH", None))
]


@dataclass
class Job:
    """What one call of the script asks, and the report that it fills.

    Attributes:
        asked: the questions of each phase; those of the second turn need AR's answers first.
        expected: AR's answers to them, eight at once; with ``--seeded`` one at a time.
    """

    options: argparse.Namespace
    model: Path
    drafter: Path
    asked: dict[str, list[Question]]
    expected: dict[str, list[Output]]
    report: dict[str, Any]

    @property
    def tokens(self) -> dict[str, int]:
        tokens = self.options.tokens
        return {"1": tokens, "2": max(8, tokens // 3), "3": tokens}


def main() -> int:
    compare.stop_on_signals(say)
    options = parse_options()
    resolve_model_dir(str(options.drafter))
    model = prepare_target()
    tokenizer = lossless.load_tokenizer(model)
    asked = lossless.questions(tokenizer, options.prompts)
    if options.seeded:
        asked = lossless.seeded(asked)
    report = {
        "command": " ".join(["scripts/check_lossless.py", *sys.argv[1:]]),
        "machine": machine.facts(threads.choose().count),
        "drafter": machine.portable(options.drafter),
        "prompts": len(asked),
        "tokens": options.tokens,
        "seeded": options.seeded,
        "settings": {},
    }
    if options.resume and options.out.exists():
        earlier = json.loads(options.out.read_text(encoding="utf-8"))
        before = (earlier["prompts"], earlier["tokens"], earlier.get("seeded", False))
        if before != (len(asked), options.tokens, options.seeded):
            raise SystemExit(f"{options.out} is of other prompts, tokens or sampling: give another --out")
        report["settings"] = earlier["settings"]
    job = Job(options, model, options.drafter.resolve(), {"1": asked, "3": asked}, {}, report)

    phases = [phase for phase in PHASES if phase in options.phases.split(",")]
    run_setting(job, REFERENCE, sorted({"1", *phases} - ({"3"} if options.seeded else set())), tokenizer)
    for setting in MATRIX:
        if re.search(options.only, setting.name) and not (options.seeded and setting.algorithm == "DFLASH"):
            run_setting(job, setting, phases, tokenizer)
    measure_gaps(job)
    save(job)
    print(table(report))
    return 1 if any(result["differences"] for entry in report["settings"].values() for result in entry.values()) else 0


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=whole_number(1), default=24)
    parser.add_argument(
        "--tokens", type=whole_number(2), default=96, help="of each answer; the second turn has a third as many"
    )
    parser.add_argument("--only", default="", metavar="REGEX", help="settings to run, by name (AR always runs)")
    parser.add_argument("--phases", default="1,2,3", help="; ".join(f"{k}: {v}" for k, v in PHASES.items()))
    parser.add_argument("--list", action="store_true", help="print the settings and stop")
    parser.add_argument("--resume", action="store_true", help="keep what the output file already has")
    parser.add_argument("--drafter", type=Path, default=ROOT / "drafters/smollm2-135m-dflash-b8")
    parser.add_argument("--seeded", action="store_true", help="sampled answers, a seed each, instead of greedy ones")
    parser.add_argument("--out", type=Path, help="default: docs/results/lossless[-seeded]-cpu-DATE.json")
    options = parser.parse_args()
    if unknown := set(options.phases.split(",")) - set(PHASES):
        parser.error(f"--phases: there are {', '.join(PHASES)}, got {', '.join(sorted(unknown))!r}")
    try:
        re.compile(options.only)
    except re.error as error:
        parser.error(f"--only {options.only!r} is not a regular expression: {error}")
    if options.out is None:
        today = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d")
        kind = "lossless-seeded" if options.seeded else "lossless"
        options.out = ROOT / f"docs/results/{kind}-cpu-{today}.json"
    if options.list:
        print("\n".join(setting.name for setting in (REFERENCE, *MATRIX)))
        raise SystemExit(0)
    return options


def run_setting(job: Job, setting: Setting, phases: list[str], tokenizer: Any) -> None:
    """Serve one setting and run those of its phases that the report lacks."""
    entry = job.report["settings"].setdefault(setting.name, {})
    if setting == REFERENCE:
        job.expected = {
            phase: [Output(**o) for o in result["outputs"]] for phase, result in entry.items() if "outputs" in result
        }
    missing = [phase for phase in phases if phase not in entry]
    if missing:
        log = LOGS / f"{re.sub('[^A-Za-z0-9]+', '-', setting.name)}.log"
        say(f"{setting.name}: starting, log {log}")
        with running(setting.flags(job.model, job.drafter, job.options.seeded), log=log, timeout=1200) as server:
            say(f"{setting.name}: answers after {server.start_seconds:.0f} s")
            for phase in missing:
                run_phase(job, setting, server, phase, tokenizer)
                save(job)
    if setting == REFERENCE and "2" in phases:
        job.asked["2"] = second_turn(job, tokenizer)


def second_turn(job: Job, tokenizer: Any) -> list[Question]:
    return lossless.follow_ups(tokenizer, job.asked["1"], job.expected["1"])


def run_phase(job: Job, setting: Setting, server: Server, phase: str, tokenizer: Any) -> None:
    if phase == "3":
        lossless.flush_cache(server)
    if phase == "2" and setting == REFERENCE:
        job.asked["2"] = second_turn(job, tokenizer)
    asked = job.asked[phase]
    begin = time.monotonic()
    # Plain SGLang draws a seeded request without filters differently beside neighbours that have some, so what a seed
    # means is what it gives alone. DDTREE's draws do not depend on neighbours.
    alone = phase == "3" or (setting == REFERENCE and job.options.seeded)
    outputs = lossless.generate_all(server, asked, job.tokens[phase], 1 if alone else 8)
    seconds = time.monotonic() - begin
    if setting == REFERENCE and phase != "3":
        job.expected[phase] = outputs
    expected = job.expected["2" if phase == "2" else "1"]
    result = {
        "differences": differences(asked, expected, outputs),
        "tokens": sum(len(output.ids) for output in outputs),
        "acceptance": lossless.acceptance_length(outputs),
        "cached": sum(output.cached_tokens for output in outputs),
        "seconds": seconds,
    }
    if setting == REFERENCE and phase != "3":  # for a resumed run
        result["outputs"] = [asdict(output) for output in outputs]
    job.report["settings"][setting.name][phase] = result
    say(
        f"{setting.name}, {PHASES[phase]}: {len(asked) - len(result['differences'])} of {len(asked)} identical, "
        f"{result['tokens']} tokens, {result['cached']} cached, {seconds:.0f} s"
    )


def differences(asked: list[Question], expected: list[Output], outputs: list[Output]) -> list[dict[str, Any]]:
    """The answers that are not AR's: where they part (None: only the finish reason differs)."""
    found = []
    for question, want, got in zip(asked, expected, outputs, strict=True):
        first = lossless.first_difference(want, got)
        if first is not None or want.finish != got.finish:
            found.append(
                {"prompt": question.id, "first": first, "expected": asdict(want), "got": asdict(got)},
            )
    return found


def measure_gaps(job: Job) -> None:
    """For every difference, how far apart the target's two best logits are just there."""
    open_ones = [
        (phase, difference)
        for entry in job.report["settings"].values()
        for phase, result in entry.items()
        for difference in result["differences"]
        if difference["first"] is not None and "gap" not in difference
    ]
    if not open_ones:
        return
    with running(REFERENCE.flags(job.model, job.drafter, job.options.seeded), log=LOGS / "gaps.log") as server:
        for phase, difference in open_ones:
            prompt = next(q for q in job.asked[phase] if q.id == difference["prompt"]).input_ids
            body = {
                "input_ids": prompt + difference["expected"]["ids"][: difference["first"]],
                "sampling_params": {"temperature": 0, "max_new_tokens": 1},
                "return_logprob": True,
                "top_logprobs_num": 2,
            }
            best, second = server.post("/generate", body)["meta_info"]["output_top_logprobs"][0]
            difference.update(gap=best[0] - second[0], best_two=[best[1], second[1]])


def save(job: Job) -> None:
    report, path = job.report, job.options.out
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report) + "\n", encoding="utf-8")
    facts = report["machine"]
    kind = "seeded draws" if report["seeded"] else "greedy tokens"
    reference = "one request" if report["seeded"] else "eight requests"
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    path.with_suffix(".md").write_text(
        f"# DDTREE and DFLASH against plain decoding: {kind}, fp32, CPU\n\n"
        f"`{report['command']}`, {facts['date']}, commit {facts['commit']}, drafter {report['drafter']}\n\n"
        f"{facts['cpu']}, {facts['usable_cores']} cores, {facts['torch_threads']} torch threads; {versions}.\n\n"
        f"{report['prompts']} held-out prompts x {report['tokens']} tokens at most, in three phases: "
        f"{'; '.join(PHASES.values())}. The second turn of each conversation has a third as many tokens, and its "
        "cached prefix includes what the server generated. *Identical*: token ids and finish reason are those of plain "
        f"decoding, {reference} at a time. *Cached*: prompt tokens that came from the prefix cache. Seconds are those "
        "of a machine with other work: not a benchmark.\n\n" + table(report) + "\n",
        encoding="utf-8",
    )


def table(report: dict[str, Any]) -> str:
    rows = [
        f"| setting | identical of {report['prompts']} | first difference | tokens | acceptance | cached | seconds |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, entry in report["settings"].items():
        identical = slashed(entry, lambda result: str(report["prompts"] - len(result["differences"])))
        tokens = slashed(entry, lambda result: str(result["tokens"]))
        acceptance = slashed(entry, lambda result: f"{result['acceptance']:.2f}" if result["acceptance"] else "-")
        cached = slashed(entry, lambda result: str(result["cached"]))
        seconds = slashed(entry, lambda result: f"{result['seconds']:.0f}")
        rows.append(f"| {name} | {identical} | {earliest(entry)} | {tokens} | {acceptance} | {cached} | {seconds} |")
    return "\n".join(rows)


def earliest(entry: dict[str, Any]) -> str:
    """The difference nearest to the start of an answer, in words."""
    every = [(d["first"] or 0, phase, d) for phase, result in entry.items() for d in result["differences"]]
    if not every:
        return "none"
    first, phase, difference = min(every, key=lambda item: item[:2])
    gap = f", logit gap {difference['gap']:.2e}" if "gap" in difference else ""
    return f"{difference['prompt']} at {first} ({PHASES[phase]}){gap}"


def slashed(entry: dict[str, Any], show: Any) -> str:
    return " / ".join(show(entry[phase]) if phase in entry else "-" for phase in PHASES)


def say(text: str) -> None:
    print(f"[{datetime.datetime.now():%H:%M:%S}] {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    raise SystemExit(in_one_line("check_lossless.py", main, ServerError, PackageError))
