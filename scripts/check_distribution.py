#!/usr/bin/env python
"""Check on a CPU that DDTREE's sampled answers have the target's distribution, on the demo model.

Serves plain decoding for the exact probabilities of every possible answer of three tokens (filters leave few), then
DDTREE, which answers the same prompt thousands of times without a seed. A G-test compares counts and probabilities, for
the whole answers and for the first, second and third token; against a slightly wrong temperature it must fail, or it
would show nothing. The first token comes from the prefill, the others from draft trees.

    $(scripts/env.sh)/bin/python scripts/check_distribution.py

Writes docs/results/distribution-cpu-DATE.json and .md. Exit status 1 if a p-value is below 1e-4, or that of the
wrong temperature is not.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from sglang_ddtree.arguments import in_one_line, whole_number
from sglang_ddtree.bench import compare, lossless, machine
from sglang_ddtree.bench.distribution import Target, draw, exact, marginal, p_value
from sglang_ddtree.bench.server import ServerError, running
from sglang_ddtree.config import MAX_BUDGET
from sglang_ddtree.cpu import threads
from sglang_ddtree.demo.model import prepare_target
from sglang_ddtree.demo.packages import PackageError
from sglang_ddtree.drafter.files import resolve_model_dir

ROOT = Path(__file__).resolve().parents[1]
LOGS = Path(tempfile.gettempdir()) / "check-distribution"
TOKENS = 3
SAMPLINGS = ({"temperature": 0.7, "top_k": 4}, {"temperature": 1.0, "top_k": 6, "top_p": 0.9})
#: Added to the temperature, the test must see it.
WRONG_BY = 0.15
LEAST = 1e-4


def main() -> int:
    compare.stop_on_signals(say)
    options = parse()
    resolve_model_dir(str(options.drafter))
    model = prepare_target(say)
    tokenizer = lossless.load_tokenizer(model)
    asked = lossless.questions(tokenizer, options.prompts)
    flags = ["--model-path", str(model), "--dtype", "float32", "--random-seed", str(options.seed)]
    tree = ["--speculative-algorithm", "DDTREE", "--speculative-draft-model-path", str(options.drafter.resolve())]
    tree += ["--speculative-ddtree-budget", str(options.budget)]

    say("plain decoding: exact probabilities")
    expected = {}
    with running(flags, log=LOGS / "plain.log", progress=say) as server:
        for question in asked:
            target = Target(server, question.input_ids, len(tokenizer))
            for number, sampling in enumerate(SAMPLINGS):
                wrong = {**sampling, "temperature": sampling["temperature"] + WRONG_BY}
                expected[question.id, number] = exact(target, sampling, TOKENS), exact(target, wrong, TOKENS)

    say(f"DDTREE {options.budget}: {options.draws} draws of each prompt and kind of sampling")
    rows: list[dict[str, Any]] = []
    with running([*flags, *tree], log=LOGS / "ddtree.log", progress=say) as server:
        for question in asked:
            for number, sampling in enumerate(SAMPLINGS):
                counts, accepted = draw(server, question.input_ids, sampling, TOKENS, options.draws)
                right, wrong = expected[question.id, number]
                rows.append(
                    {
                        "prompt": question.id,
                        "sampling": sampling,
                        "draws": sum(counts.values()),
                        "possible": len(right),
                        "accepted": accepted,
                        "p": p_value(counts, right),
                        "p_by_token": [p_value(marginal(counts, i), marginal(right, i)) for i in range(TOKENS)],
                        "p_wrong_temperature": p_value(counts, wrong),
                    }
                )
                say(json.dumps(rows[-1]))
    save(options, rows)
    wrong = any(min(row["p"], *row["p_by_token"]) < LEAST for row in rows)
    blind = any(row["p_wrong_temperature"] >= LEAST for row in rows)
    return 1 if wrong or blind else 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    today = f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}"
    parser.add_argument("--prompts", type=whole_number(1), default=2)
    parser.add_argument("--draws", type=whole_number(1), default=4000)
    parser.add_argument("--budget", type=whole_number(1, MAX_BUDGET), default=8)
    parser.add_argument("--seed", type=int, default=1, help="of the server's generator")
    parser.add_argument("--drafter", type=Path, default=ROOT / "drafters/smollm2-135m-dflash-b8")
    parser.add_argument("--out", type=Path, default=ROOT / f"docs/results/distribution-cpu-{today}.json")
    return parser.parse_args()


def save(options: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    facts = machine.facts(threads.choose().count)
    command = " ".join(["scripts/check_distribution.py", *sys.argv[1:]])
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps({"command": command, "machine": facts, "rows": rows}) + "\n", encoding="utf-8")
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    lines = [
        "# Sampled answers of DDTREE against plain decoding's exact probabilities, demo model, fp32, CPU",
        "",
        f"`{command}`, {facts['date']}, commit {facts['commit']}; {versions}.",
        "",
        f"Answers of {TOKENS} tokens, budget {options.budget}. p: of a G-test, for whole answers and for each token "
        f"alone. Wrong: the same counts against a temperature that is {WRONG_BY} too high, where the test must fail.",
        "",
        "| prompt | sampling | draws | possible answers | tokens per step | p | p by token | p, wrong |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        sampling = ", ".join(f"{name} {value}" for name, value in row["sampling"].items())
        by_token = " / ".join(f"{p:.3f}" for p in row["p_by_token"])
        lines.append(
            f"| {row['prompt']} | {sampling} | {row['draws']} | {row['possible']} | {row['accepted']:.2f} "
            f"| {row['p']:.3f} | {by_token} | {row['p_wrong_temperature']:.1e} |"
        )
    text = "\n".join(lines) + "\n"
    options.out.with_suffix(".md").write_text(text, encoding="utf-8")
    print(text)


def say(text: str) -> None:
    print(f"[{datetime.datetime.now():%H:%M:%S}] {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    raise SystemExit(in_one_line("check_distribution.py", main, ServerError, PackageError))
