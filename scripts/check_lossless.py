#!/usr/bin/env python
"""Check on a CPU that DDTREE's and DFLASH's greedy tokens equal plain decoding's, over the whole matrix of settings.

Serves the demo model in fp32 once per setting: AR for the reference, DFLASH and DDTREE (budgets 7 and 32) with overlap
scheduling on and off and page sizes 1 and 16. Each server answers the same real prompts one at a time, then eight at a
time with its prefix cache emptied in between, then a second turn of each conversation, whose cached prefix includes
what the server itself generated. Every answer is compared with AR's, token by token and with its finish reason.

    $(scripts/env.sh)/bin/python scripts/check_lossless.py                     # everything
    $(scripts/env.sh)/bin/python scripts/check_lossless.py --only 'DDTREE 7'   # a part (a regular expression)
    $(scripts/env.sh)/bin/python scripts/check_lossless.py --resume            # what an earlier run has not done

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

from sglang_ddtree.bench import lossless, machine
from sglang_ddtree.bench.lossless import Output, Question
from sglang_ddtree.bench.server import Server, running
from sglang_ddtree.cpu import threads
from sglang_ddtree.demo.model import prepare_target

ROOT = Path(__file__).resolve().parents[1]
PHASES = ("one at a time", "eight at once", "second turn, eight at once")


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

    def flags(self, model: Path, drafter: Path) -> list[str]:
        flags = ["--model-path", str(model), "--dtype", "float32", "--max-total-tokens", "8192"]
        flags += ["--page-size", str(self.page), "--random-seed", "1"]
        if self.algorithm != "AR":
            flags += ["--speculative-algorithm", self.algorithm, "--speculative-draft-model-path", str(drafter)]
        if self.budget is not None:
            flags += ["--speculative-ddtree-budget", str(self.budget)]
        return flags if self.overlap else [*flags, "--disable-overlap-schedule"]


REFERENCE = Setting("AR")
MATRIX = [
    Setting(algorithm, budget, overlap, page)
    for algorithm, budget in (("DDTREE", 7), ("DDTREE", 32), ("DFLASH", None))
    for overlap, page in ((True, 1), (False, 16), (True, 16), (False, 1))
]


def main() -> int:
    options = parse_options()
    model = prepare_target()
    drafter = options.drafter.resolve()
    tokenizer = lossless.load_tokenizer(model)
    asked = lossless.questions(tokenizer, options.prompts)
    chosen = [setting for setting in MATRIX if re.search(options.only, setting.name)]
    done = load(options.out) if options.resume else {}
    report: dict[str, Any] = {
        "command": " ".join(["scripts/check_lossless.py", *sys.argv[1:]]),
        "machine": machine.facts(threads.choose().count),
        "drafter": str(options.drafter),
        "prompts": len(asked),
        "tokens": options.tokens,
        "settings": dict(done),
    }
    say(f"{len(asked)} prompts x {options.tokens} tokens, {len(chosen)} settings and the AR reference")

    reference = reusable(done, REFERENCE.name, asked, options.tokens)
    if reference is None:
        reference = measure(REFERENCE, options, model, drafter, tokenizer, asked, None)
        report["settings"] = {}
    turn_two = lossless.follow_ups(tokenizer, asked, reference[0])
    add(report, REFERENCE, reference, reference, [asked, asked, turn_two], None)
    save(report, options.out)
    for setting in chosen:
        if setting.name in report["settings"]:
            say(f"{setting.name}: done before")
            continue
        begin = time.monotonic()
        outputs = measure(setting, options, model, drafter, tokenizer, asked, turn_two)
        add(report, setting, reference, outputs, [asked, asked, turn_two], time.monotonic() - begin)
        save(report, options.out)
        say(f"{setting.name}: {summary(report['settings'][setting.name])}")

    different = [d for entry in report["settings"].values() for d in entry["differences"]]
    if different and not all("gap" in d for d in different):
        measure_gaps(report, options, model, drafter, [asked, asked, turn_two], reference)
        save(report, options.out)
    print(table(report))
    return 1 if different else 0


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=96, help="of each answer; the second turn has a third as many")
    parser.add_argument("--only", default="", metavar="REGEX", help="settings to run, by name (AR always runs)")
    parser.add_argument("--list", action="store_true", help="print the settings and stop")
    parser.add_argument("--resume", action="store_true", help="keep what the output file already has")
    parser.add_argument("--drafter", type=Path, default=ROOT / "drafters/smollm2-135m-dflash-b8")
    today = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d")
    parser.add_argument("--out", type=Path, default=ROOT / f"docs/results/lossless-cpu-{today}.json")
    options = parser.parse_args()
    if options.list:
        print("\n".join(setting.name for setting in (REFERENCE, *MATRIX)))
        raise SystemExit(0)
    return options


def measure(
    setting: Setting,
    options: argparse.Namespace,
    model: Path,
    drafter: Path,
    tokenizer: Any,
    asked: list[Question],
    turn_two: list[Question] | None,
) -> list[list[Output]]:
    """The outputs of one server's three phases; AR, which comes first, makes its own second turn."""
    log = Path(tempfile.gettempdir()) / "check-lossless" / f"{re.sub('[^A-Za-z0-9]+', '-', setting.name)}.log"
    say(f"{setting.name}: starting, log {log}")
    with running(setting.flags(model, drafter), log=log) as server:
        say(f"{setting.name}: answers after {server.start_seconds:.0f} s")
        phases = [timed(server, asked, options.tokens, 1)]
        server.post("/flush_cache", {})
        phases.append(timed(server, asked, options.tokens, 8))
        turn_two = turn_two or lossless.follow_ups(tokenizer, asked, phases[0])
        phases.append(timed(server, turn_two, max(8, options.tokens // 3), 8))
    return phases


def timed(server: Server, asked: list[Question], tokens: int, concurrency: int) -> list[Output]:
    begin = time.monotonic()
    outputs = lossless.generate_all(server, asked, tokens, concurrency)
    total = sum(len(output.ids) for output in outputs)
    say(f"  {total} tokens at concurrency {concurrency} in {time.monotonic() - begin:.0f} s")
    return outputs


def add(
    report: dict[str, Any],
    setting: Setting,
    reference: list[list[Output]],
    outputs: list[list[Output]],
    asked: list[list[Question]],
    seconds: float | None,
) -> None:
    """Compare with AR one at a time (the second turn with AR's own)."""
    expected = [reference[0], reference[0], reference[2]]
    differences = []
    identical = []
    for phase, (want, got) in enumerate(zip(expected, outputs, strict=True)):
        parts = [lossless.first_difference(a, b) for a, b in zip(want, got, strict=True)]
        same = [p is None and a.finish == b.finish for p, a, b in zip(parts, want, got, strict=True)]
        identical.append(sum(same))
        differences += [
            {
                "phase": phase,
                "prompt": asked[phase][i].id,
                "index": i,
                "first": parts[i],
                "finish": [a.finish, b.finish],
            }
            for i, (a, b) in enumerate(zip(want, got, strict=True))
            if not same[i]
        ]
    report["settings"][setting.name] = {
        "identical": identical,
        "tokens": [sum(len(o.ids) for o in phase) for phase in outputs],
        "acceptance": lossless.acceptance_length([o for phase in outputs for o in phase]),
        "cached": [sum(o.cached_tokens for o in phase) for phase in outputs],
        "hits": [sum(o.cached_tokens > 0 for o in phase) for phase in outputs],
        "seconds": seconds,
        "differences": differences,
    }
    if setting == REFERENCE:  # for a resumed run
        report["settings"][setting.name]["outputs"] = [[asdict(o) for o in phase] for phase in outputs]


def measure_gaps(
    report: dict[str, Any],
    options: argparse.Namespace,
    model: Path,
    drafter: Path,
    asked: list[list[Question]],
    reference: list[list[Output]],
) -> None:
    """For every difference, how far apart the target's two best logits are just there."""
    log = Path(tempfile.gettempdir()) / "check-lossless" / "gaps.log"
    with running(REFERENCE.flags(model, drafter), log=log) as server:
        for entry in report["settings"].values():
            for difference in entry["differences"]:
                if difference["first"] is None:
                    difference["gap"] = None
                    continue
                phase, index = difference["phase"], difference["index"]
                answer = reference[2 if phase == 2 else 0][index].ids[: difference["first"]]
                body = {
                    "input_ids": asked[phase][index].input_ids + answer,
                    "sampling_params": {"temperature": 0, "max_new_tokens": 1},
                    "return_logprob": True,
                    "top_logprobs_num": 2,
                }
                best, second = server.post("/generate", body)["meta_info"]["output_top_logprobs"][0]
                difference["gap"] = best[0] - second[0]
                difference["best_two"] = [best[1], second[1]]


def reusable(done: dict[str, Any], name: str, asked: list[Question], tokens: int) -> list[list[Output]] | None:
    """The outputs of an earlier run with the same prompts and length."""
    if name not in done:
        return None
    outputs = [[Output(**o) for o in phase] for phase in done[name]["outputs"]]
    return outputs if len(outputs[0]) == len(asked) else None


def load(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))["settings"] if path.exists() else {}


def save(report: dict[str, Any], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report) + "\n", encoding="utf-8")
    facts = report["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    path.with_suffix(".md").write_text(
        "# DDTREE and DFLASH against plain decoding: greedy tokens, fp32, CPU\n\n"
        f"`{report['command']}`, {facts['date']}, commit {facts['commit']}\n\n"
        f"{facts['cpu']}, {facts['usable_cores']} cores, {facts['torch_threads']} torch threads; {versions}.\n\n"
        f"{report['prompts']} held-out prompts x {report['tokens']} tokens at most; the second turn of each "
        "conversation has a third as many, and its cached prefix includes what the server generated. *Identical*: "
        f"equal token ids and finish reason, in the three phases ({'; '.join(PHASES)}). *Cached*: prompt tokens that "
        "came from the prefix cache. Seconds are of the whole setting, on a machine with other work: not a benchmark.\n\n"
        + table(report)
        + "\n",
        encoding="utf-8",
    )


def table(report: dict[str, Any]) -> str:
    rows = [
        "| setting | identical | first difference | tokens | acceptance | cached | seconds |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, entry in report["settings"].items():
        first = min(entry["differences"], key=lambda d: d["first"] or 0, default=None)
        shown = "none"
        if first is not None:
            gap = f", logit gap {first['gap']:.2e}" if first.get("gap") is not None else ""
            shown = f"{first['prompt']} at {first['first']} ({PHASES[first['phase']]}){gap}"
        acceptance = "-" if entry["acceptance"] is None else f"{entry['acceptance']:.2f}"
        seconds = "-" if entry["seconds"] is None else f"{entry['seconds']:.0f}"
        identical, tokens, cached = (slashed(entry[key]) for key in ("identical", "tokens", "cached"))
        identical += f" of {report['prompts']}"
        rows.append(f"| {name} | {identical} | {shown} | {tokens} | {acceptance} | {cached} | {seconds} |")
    return "\n".join(rows)


def slashed(numbers: list[int]) -> str:
    return " / ".join(map(str, numbers))


def summary(entry: dict[str, Any]) -> str:
    return f"identical {entry['identical']}, acceptance {entry['acceptance'] or 0:.2f}, cached {entry['cached']}"


def say(text: str) -> None:
    print(f"[{datetime.datetime.now():%H:%M:%S}] {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
