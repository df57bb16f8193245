"""Check DDTREE on a GPU: kernels, CUDA graphs, time, and a served model.

    python scripts/gpu_check.py                          # everything; serve starts ten servers
    python scripts/gpu_check.py --minutes 10             # and starts nothing new after ten minutes
    python scripts/gpu_check.py --parts kernels replay   # needs torch and Triton only, no network
    python scripts/gpu_check.py --parts serve --model DIR --drafter DIR

kernels: every Triton kernel against its reference on the CPU, bit for bit, on random trees of budgets 1 to 256.
replay:  build, masks and walk captured in one CUDA graph and replayed on changing inputs; a call that waits for the
         host is an error.
fold:    head, top-K and tree captured as the draft graph has them, all batch sizes over one piece of memory, against
         the same functions called in a step; and the time of both. Needs SGLang.
states:  the delta rule over trees (SGLANG_DDTREE_STATES=deltas) against its reference, with Qwen3.6-27B's heads; and
         one layer's verify and commit from a CUDA graph, beside SGLang's kernels that store states if it is installed.
attention: FlashInfer's tree variant against plain attention, replayed from a CUDA graph, and timed beside FlashInfer
         without a mask and with its own. Compiles five modules first. Needs FlashInfer 0.7.2 and nvcc.
timing:  each kernel and the torch function it replaces, eager and from a CUDA graph, by CUDA events; and, with SGLang,
         the tree's kernel beside SGLang's own builder, UNO's, after a check that both build the same trees.
serve:   DDTREE against plain decoding with the triton and flashinfer backends, eager and with CUDA graphs; FlashInfer
         with the tree's bits against its stock mask; tokens per second of each. In float32 the tokens must be the same;
         in bfloat16 they may part at near-ties only. Without --model this is the demo model, which comes from PyPI.
         Needs SGLang and this package installed.

Writes NAME.json and NAME.md into the output directory, anew after every part: what is done stays when the rest is cut
off. A part that cannot run is named with its reason. Exit status 1 when a part fails, 2 when nothing can be checked.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

PARTS = ("kernels", "replay", "fold", "states", "attention", "timing", "serve")
ROOT = Path(__file__).resolve().parents[2]
DRAFTER = ROOT / "drafters/smollm2-135m-dflash-b8"

Result = dict[str, Any]


class NotRun(Exception):
    """This part cannot run here; the text says why."""


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/gpu_check.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART")
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="cpu tries this script out; kernels are interpreted"
    )
    parser.add_argument("--trees", type=int, default=2000, metavar="N", help="for every budget up to 16 (%(default)s)")
    parser.add_argument("--replays", type=int, default=20, metavar="N", help="of each captured size (%(default)s)")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 8, 32, 64], metavar="N")
    parser.add_argument(
        "--budgets",
        type=int,
        nargs="+",
        default=[16, 64, 128, 256],
        metavar="N",
        help="kernels goes up to the largest of them",
    )
    parser.add_argument(
        "--contexts", type=int, nargs="+", default=[1024, 10240, 102400], metavar="N", help="timed in attention"
    )
    parser.add_argument("--repeats", type=int, default=50, metavar="N", help="timed calls (%(default)s)")
    parser.add_argument("--model", type=Path, metavar="DIR", help="served target (default: the demo model)")
    parser.add_argument("--drafter", type=Path, default=DRAFTER, metavar="DIR", help="its DFlash drafter")
    parser.add_argument("--serve-budget", type=int, default=32, metavar="N", help="DDTREE's budget (%(default)s)")
    parser.add_argument("--prompts", type=int, default=8, metavar="N", help="asked of each server (%(default)s)")
    parser.add_argument("--tokens", type=int, default=64, metavar="N", help="per answer (%(default)s)")
    parser.add_argument(
        "--minutes", type=float, metavar="N", help="start no part and no server after this; one that runs is let end"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "docs/results", metavar="DIR")
    parser.add_argument("--name", metavar="NAME", help="of the files (default: gpu-NAME_OF_THE_GPU-DATE)")
    options = parser.parse_args(argv)
    if options.minutes is not None and options.minutes <= 0:
        parser.error("--minutes must be above 0")
    options.until = math.inf if options.minutes is None else time.monotonic() + 60 * options.minutes
    numbers = [options.trees, options.replays, options.repeats, options.prompts, options.tokens, *options.batch_sizes]
    if min(numbers) < 1:
        parser.error("counts and batch sizes must be at least 1")
    if not all(1 <= budget <= 256 for budget in (*options.budgets, options.serve_budget)):
        parser.error("budgets must be between 1 and 256")
    if options.model is not None and not (options.model / "config.json").is_file():
        parser.error(f"--model {options.model} is no model directory: it has no config.json")
    if "serve" in options.parts and not (options.drafter / "config.json").is_file():
        parser.error(f"--drafter {options.drafter} is no drafter directory: it has no config.json")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    for needed in ("torch", "triton"):
        if importlib.util.find_spec(needed) is None:
            return refuse(f"{needed} is not installed for {sys.executable}")
    import torch

    if options.device == "cuda" and not torch.cuda.is_available():
        return refuse("torch finds no CUDA device (--device cpu tries the script out without one)")
    from sglang_ddtree.gpu import report

    runners = {
        "kernels": check_kernels,
        "replay": check_replay,
        "fold": check_fold,
        "states": check_states,
        "attention": check_attention,
        "timing": take_times,
        "serve": check_serve,
    }
    found: Result = {
        "command": " ".join(["scripts/gpu_check.py", *(argv or sys.argv[1:])]),
        "machine": report.facts(options),
    }
    found["parts"] = {}
    for part in (part for part in PARTS if part in options.parts):
        found["parts"][part] = run_part(runners[part], part, options)
        path = report.write(found, options.out, options.name)
    print(report.markdown(found))
    say(f"written: {path} and {path.with_suffix('.md').name}")
    states = [result["status"] for result in found["parts"].values()]
    return 1 if "failed" in states else 0 if "passed" in states else 2


def run_part(run: Callable[[argparse.Namespace], Result], name: str, options: argparse.Namespace) -> Result:
    """The part's result with ``status`` and ``seconds``; what goes wrong in one part does not stop the others."""
    say(f"{name} ...")
    begin = time.monotonic()
    try:
        if begin > options.until:
            raise NotRun(f"the {options.minutes:g} minutes were over")
        result = run(options)
    except NotRun as error:
        result = {"status": "not run", "reason": str(error)}
    except Exception as error:
        result = {"status": "failed", "reason": reason(error)}
    result["seconds"] = round(time.monotonic() - begin, 1)
    say(f"{name}: {result['status']} {result.get('reason', '')}")
    return result


def reason(error: Exception) -> str:
    """The end of an error's text on one line."""
    text = re.sub(r"\s+", " ", str(error))
    return f"{type(error).__name__}: {text[-600:]}"


def check_kernels(options: argparse.Namespace) -> Result:
    from sglang_ddtree.gpu import cases, equality

    device = kernel_device(options)
    sizes = cases.sizes(options.trees, max(1, options.trees // 10), max(options.budgets))
    return {"status": "passed", "trees": equality.check_sizes(sizes, device), "sizes": len(sizes)}


def check_replay(options: argparse.Namespace) -> Result:
    import torch

    from sglang_ddtree.gpu.cases import Size
    from sglang_ddtree.gpu.replay import check_replays

    device = torch.device(options.device)
    sizes = [
        Size(bs, budget, depth, 8) for bs in options.batch_sizes for budget in options.budgets for depth in (7, 15)
    ]
    replays = sum(check_replays(size, device, options.replays) for size in sizes)
    return {"status": "passed", "sizes": len(sizes), "replays": replays, "graphs": options.device == "cuda"}


def check_fold(options: argparse.Namespace) -> Result:
    import torch

    if importlib.util.find_spec("sglang") is None:
        raise NotRun("SGLang is not installed")
    from sglang_ddtree.gpu.fold import check_folds

    device = torch.device(options.device)
    rows = check_folds(device, options.batch_sizes, options.budgets, options.replays, options.repeats)
    replays = sum(row["replays"] for row in rows)
    return {"status": "passed", "rows": rows, "folded": replays, "graphs": options.device == "cuda"}


def check_states(options: argparse.Namespace) -> Result:
    from sglang_ddtree.gpu import states

    device = kernel_device(options)
    net, batch_sizes, widths, layers = states.small_or_real(device)
    cases = [(bs, width) for bs in batch_sizes for width in widths]
    worst = max(states.check(net, bs, width, device, seed) for seed, (bs, width) in enumerate(cases))
    rows = states.measure(net, device, batch_sizes, widths, layers, options.repeats)
    return {"status": "passed", "compared": len(cases), "worst": worst, "rows": rows}


def check_attention(options: argparse.Namespace) -> Result:
    import contextlib

    import torch

    if importlib.util.find_spec("flashinfer") is None:
        raise NotRun("FlashInfer is not installed")
    from sglang_ddtree.attention.flashinfer_choice import against_host
    from sglang_ddtree.gpu import attention, flashinfer_stand_in

    device = torch.device(options.device)
    on_gpu = options.device == "cuda"
    if on_gpu and (against := against_host()):
        raise NotRun(against)
    with contextlib.nullcontext() if on_gpu else flashinfer_stand_in.flashinfer_on_cpu():
        widths = (2, 17, 33, 65, 257) if on_gpu else (17, 33)
        prefixes = ((0, 1, 37, 700), (5, 1024), (100_000,)) if on_gpu else ((0, 1, 37),)
        rows = []
        for variant in attention.VARIANTS if on_gpu else attention.VARIANTS[:4:3]:
            rows.append(attention.check_variant(variant, device, widths, prefixes))
            say(f"{rows[-1]['variant']}: {rows[-1]['cases']} cases, worst {rows[-1]['worst']:.3g}")
        replays = attention.check_replays(device, 65 if on_gpu else 17, 3000 if on_gpu else 40, options.replays)
        times = []
        if on_gpu:
            times = attention.measure(device, options.batch_sizes, options.budgets, options.contexts, options.repeats)
    return {"status": "passed", "rows": rows, "replayed": replays, "times": times, "stand_in": not on_gpu}


def take_times(options: argparse.Namespace) -> Result:
    from sglang_ddtree.gpu import timing, uno

    device = kernel_device(options)
    rows = timing.measure(device, options.batch_sizes, options.budgets, repeats=options.repeats)
    beside: list[Result] = []
    # UNO's module imports FlashInfer.
    if importlib.util.find_spec("sglang") is not None and importlib.util.find_spec("flashinfer") is not None:
        beside = uno.measure(device, options.batch_sizes, options.budgets, repeats=options.repeats)
    return {"status": "passed", "rows": rows, "uno": beside}


def check_serve(options: argparse.Namespace) -> Result:
    if importlib.util.find_spec("sglang") is None:
        raise NotRun("SGLang is not installed")
    from sglang_ddtree.bench.compare import stop_on_signals
    from sglang_ddtree.gpu.serve import OutOfTime, check_served

    stop_on_signals(say)
    model = options.model
    if model is None:
        from sglang_ddtree.demo.model import prepare_target

        model = prepare_target()
    rows: list[Result] = []
    ended: Result = {}
    try:
        for row in check_served(
            model,
            options.drafter,
            device=options.device,
            budget=options.serve_budget,
            prompts=options.prompts,
            tokens=options.tokens,
            logs=Path(tempfile.gettempdir()) / f"gpu-checks-{os.getpid()}",
            say=say,
            until=options.until,
        ):
            rows.append(row)
            say(f"{row['setting']}: {row['identical']} of {row['answers']} identical, {row['differences']}")
    except OutOfTime:
        ended = {
            "status": "not finished",
            "reason": f"the {options.minutes:g} minutes were over after {len(rows)} rows",
        }
    except Exception as error:
        # The settings before it have been checked.
        ended = {"status": "failed", "reason": reason(error)}
    passed = all(row["passed"] for row in rows)
    return {**(ended or {"status": "passed"}), **({} if passed else {"status": "failed"}), "rows": rows}


def kernel_device(options: argparse.Namespace) -> Any:
    """The device for direct kernel calls, which on a CPU only the interpreter takes."""
    import torch

    if options.device == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        raise NotRun("kernels run on a CPU only under TRITON_INTERPRET=1")
    return torch.device(options.device)


def refuse(why: str) -> int:
    print(f"gpu_check.py: {why}", file=sys.stderr)
    return 2


def say(text: str) -> None:
    print(f"[gpu-checks] {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
