"""``sglang-ddtree drafter``: from one .safetensors file to a served drafter, here or on another machine."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sglang_ddtree.errors import DDTreeError, of_the_system


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 0, 1 when a check or a measurement finds something wrong, 2 for bad input."""
    options = _parser().parse_args(argv)
    try:
        return options.run(options)
    except DDTreeError as error:
        print(f"sglang-ddtree drafter {options.command}: error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"sglang-ddtree drafter {options.command}: error: {of_the_system(error)}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="sglang-ddtree drafter",
        description="From one .safetensors file to a served DFlash drafter. Guide: docs/drafters.md",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    one = commands.add_parser("inspect", help="what a drafter file or directory holds, from its header alone")
    one.add_argument("path", type=Path, metavar="FILE|DIR")
    one.add_argument("--target", metavar="DIR", help="target model (directory or hub id): does it fit, is it known")
    one.add_argument("--sha256", action="store_true", help="also read the whole file and print its sha256")
    one.add_argument("--json", action="store_true", help="print JSON")
    one.set_defaults(run=_inspect)

    one = commands.add_parser("prepare", help="make the model directory that SGLang loads from a bare file")
    one.add_argument("file", type=Path, metavar="FILE")
    one.add_argument("--target", required=True, metavar="DIR", help="target model (directory or hub id)")
    one.add_argument("--out", required=True, type=Path, metavar="DIR", help="directory to make; must not exist")
    one.add_argument(
        "--weights",
        choices=("auto", "hard", "symbolic", "copy"),
        default="auto",
        help="how the weights get there: hard link, symbolic link or copy (auto: hard, else symbolic)",
    )
    known = one.add_argument_group("fields the weights cannot tell (needed unless the drafter is a known one)")
    known.add_argument("--block-size", type=int, metavar="N")
    known.add_argument("--mask-token-id", type=int, metavar="ID")
    known.add_argument("--target-layer-ids", type=_layer_ids, metavar="1,9,17", help="or 'default' for SGLang's rule")
    known.add_argument("--layer-types", type=_words, metavar="full|sliding|LIST", help="one for all, or one per layer")
    known.add_argument("--sliding-window", type=int, metavar="N")
    known.add_argument("--is-causal", type=_causal, metavar="true|false|unset", default=argparse.SUPPRESS)
    known.add_argument("--rope-theta", type=float, metavar="BASE")
    known.add_argument("--rms-norm-eps", type=float, metavar="EPS")
    one.set_defaults(run=_prepare)

    one = commands.add_parser("convert-mask-embedding", help="make a mask_embedding.pt readable without unpickling")
    one.add_argument("path", type=Path, metavar="FILE|DIR", help="mask_embedding.pt, or the directory that holds it")
    one.add_argument("--mask-token-id", type=int, metavar="ID", help="only for a file that does not say it")
    one.set_defaults(run=_convert)

    one = commands.add_parser("check", help="everything in the files that would fail or silently hurt when serving")
    one.add_argument("dir", metavar="DIR", help="drafter (directory or hub id)")
    one.add_argument("--target", required=True, metavar="DIR", help="target model (directory or hub id)")
    one.add_argument("--json", action="store_true", help="print JSON")
    one.set_defaults(run=_check)

    one = commands.add_parser("verify", help="measure acceptance, and whether another setting would give a better one")
    one.add_argument("dir", metavar="DIR", help="drafter (directory or hub id)")
    one.add_argument("--target", required=True, metavar="DIR", help="target model (directory or hub id)")
    one.add_argument(
        "--prompts", required=True, type=Path, metavar="FILE", help="60 prompts or more, one a line; JSON in .jsonl"
    )
    one.add_argument("--max-tokens", type=int, default=64, metavar="N", help="longest answer in tokens (default 64)")
    one.add_argument("--device", default=None, help="torch device (default: cuda where there is one, else cpu)")
    one.add_argument("--dtype", default="auto", choices=("auto", "bfloat16", "float16", "float32"))
    one.add_argument(
        "--positions",
        type=int,
        default=1280,
        metavar="N",
        help="positions on which settings are compared (default 1280)",
    )
    one.add_argument(
        "--context",
        type=int,
        default=256,
        metavar="N",
        help="tokens before a position that count in the comparison, windows apart (default 256): the length of the "
        "texts that the drafter was trained on, where it is known",
    )
    one.add_argument("--no-alternatives", action="store_true", help="only measure the settings as they are")
    one.add_argument("--json", action="store_true", help="print JSON")
    one.set_defaults(run=_verify)

    one = commands.add_parser("push", help="copy a drafter to another machine over ssh, checked on arrival")
    one.add_argument("source", type=Path, metavar="DIR|FILE")
    one.add_argument("destination", metavar="HOST:PATH", help="PATH is the final name; PATH/ puts it under PATH")
    one.add_argument("--ssh", default="ssh", metavar="COMMAND", help="ssh command with options (default: ssh)")
    one.add_argument("--target", metavar="DIR", help="target model on that machine: run check there as well")
    one.add_argument("--dry-run", action="store_true", help="print the commands, run nothing")
    one.set_defaults(run=_push)
    return parser


def _inspect(options: argparse.Namespace) -> int:
    from sglang_ddtree.drafter.inspect import describe, inspect

    report = inspect(options.path, _model_dir(options.target), options.sha256)
    print(json.dumps(report, indent=2) if options.json else describe(report))
    return 0


def _prepare(options: argparse.Namespace) -> int:
    from sglang_ddtree.drafter.prepare import FLAGS, derive, write_directory

    target = _model_dir(options.target)
    assert target is not None
    given: dict[str, Any] = {name: getattr(options, name) for name in FLAGS if getattr(options, name, None) is not None}
    if hasattr(options, "is_causal"):
        given["is_causal"] = options.is_causal
    prepared = derive(options.file, target, given)
    how = write_directory(options.file, options.out, prepared, options.weights)
    width = max(len(field.name) for field in prepared.fields)
    for field in prepared.fields:
        print(f"{field.name:{width}}  {json.dumps(field.value)}  ({field.origin})")
    for note in prepared.notes:
        print(f"note: {note}")
    print(f"{options.out}: made ({'copy' if how == 'copy' else how + ' link'} of the weights)")
    return _report(options.out, target)


def _convert(options: argparse.Namespace) -> int:
    from sglang_ddtree.drafter.mask_embedding import convert

    print(f"{convert(options.path, options.mask_token_id)}: made; DDTREE uses it, DFLASH does not")
    return 0


def _check(options: argparse.Namespace) -> int:
    from sglang_ddtree.drafter.files import resolve_model_dir

    target = _model_dir(options.target)
    assert target is not None
    return _report(resolve_model_dir(options.dir, weights=True), target, as_json=options.json)


def _report(drafter: Path, target: Path, as_json: bool = False) -> int:
    from sglang_ddtree.drafter.check import findings

    found = findings(drafter, target)
    if as_json:
        print(json.dumps([vars(finding) for finding in found], indent=2))
    else:
        for finding in found:
            print(f"{finding.level}: {finding.text}")
        if not found:
            print(f"check: {drafter} fits {target}")
    return 1 if any(finding.level == "error" for finding in found) else 0


def _verify(options: argparse.Namespace) -> int:
    from sglang_ddtree.drafter.files import resolve_model_dir
    from sglang_ddtree.drafter.verify import describe, verify

    target = _model_dir(options.target)
    assert target is not None
    report = verify(
        resolve_model_dir(options.dir, weights=True),
        target,
        options.prompts,
        max_tokens=options.max_tokens,
        device=options.device,
        dtype=options.dtype,
        alternatives=not options.no_alternatives,
        positions=options.positions,
        context=options.context,
        progress=lambda text: print(f"[verify] {text}", file=sys.stderr, flush=True),
    )
    print(json.dumps(report.as_json(), indent=2) if options.json else describe(report))
    return 1 if report.faults else 0


def _push(options: argparse.Namespace) -> int:
    from sglang_ddtree.drafter.push import push

    return push(
        options.source,
        options.destination,
        ssh=options.ssh,
        remote_target=options.target,
        dry_run=options.dry_run,
        say=lambda text: print(text, flush=True),
    )


def _model_dir(path: str | None) -> Path | None:
    from sglang_ddtree.drafter.files import resolve_model_dir

    return None if path is None else resolve_model_dir(path)


def _layer_ids(text: str) -> list[int] | str:
    if text == "default":
        return text
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"layer numbers with commas between them, or 'default'; got {text!r}"
        ) from None


def _words(text: str) -> list[str] | str:
    words = text.split(",")
    return words if len(words) > 1 else words[0]


def _causal(text: str) -> bool | None:
    values = {"true": True, "false": False, "unset": None}
    if text not in values:
        raise argparse.ArgumentTypeError(f"one of {', '.join(values)}; got {text!r}")
    return values[text]
