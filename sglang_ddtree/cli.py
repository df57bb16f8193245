"""``sglang-ddtree``: start SGLang with DDTREE, find out why it would not start, and patch SGLang.

``serve`` adds nothing to SGLang but the choice of a platform on machines without an accelerator and one-line errors;
every flag goes to SGLang as it is.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Iterator, MutableMapping, Sequence
from typing import NoReturn

from sglang_ddtree import __version__, flags, memory_report
from sglang_ddtree.errors import DDTreeError, of_the_system
from sglang_ddtree.patching import cli as patching

CPU_PLATFORM = "ddtree_cpu"

SERVE_HELP = f"""\
usage: sglang-ddtree serve MODEL --speculative-algorithm DDTREE --speculative-draft-model-path DRAFTER [SGLang flags]

Start an SGLang server; every flag goes to SGLang unchanged. Those that matter to DDTREE [defaults]:
{flags.as_text(flags.SERVE)}

Without a GPU the server runs on the CPU (SGLANG_PLATFORM=ddtree_cpu). If it does not start: sglang-ddtree doctor
All other flags: sglang serve --help
"""

#: What SGLang and transformers raise for arguments they cannot accept; anything else is a fault and shows a traceback.
_INPUT_ERRORS = (ValueError, OSError, RuntimeError, AssertionError)


def main(argv: Sequence[str] | None = None) -> int:
    """Console entry point; returns the exit code (0, or 2 for bad input)."""
    args = list(sys.argv[1:] if argv is None else argv)
    # `serve` is not parsed here: its flags are SGLang's.
    if args[:1] == ["serve"]:
        return serve(args[1:])
    if args[:1] == ["drafter"]:
        from sglang_ddtree.drafter.cli import main as drafter_main

        return drafter_main(args[1:])
    if args[:1] == ["bench"]:
        from sglang_ddtree.bench.ab.cli import main as bench

        return bench(args[1:])
    parser = build_parser()
    options = parser.parse_args(args)
    if options.command in ("patch", "memory"):
        try:
            return patching.run(options) if options.command == "patch" else memory_report.run(options)
        except (DDTreeError, OSError) as error:
            text = of_the_system(error) if isinstance(error, OSError) else one_line(error)
            print(f"sglang-ddtree {options.command}: error: {text}", file=sys.stderr)
            return 2
    if (options.model is None) != (options.drafter is None):
        parser.error("give --model and --drafter together")

    from sglang_ddtree.doctor import run_doctor

    pick_platform(os.environ)
    return run_doctor(options.model, options.drafter, options.port, as_json=options.json)


def build_parser() -> argparse.ArgumentParser:
    """The command line; ``serve`` is in it for its help only."""
    parser = argparse.ArgumentParser(prog="sglang-ddtree", description="DDTree speculative decoding for SGLang.")
    parser.add_argument("--version", action="version", version=f"sglang-ddtree {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser("serve", add_help=False, help="start an SGLang server (see serve --help)")
    commands.add_parser("drafter", add_help=False, help="inspect, prepare, check, verify or push a DFlash drafter")
    commands.add_parser("bench", add_help=False, help="compare decoding algorithms and servers (see bench --help)")
    doctor = commands.add_parser("doctor", help="say whether DDTREE would start here, and if not, what to do")
    doctor.add_argument("--model", metavar="DIR", help="target model (directory or hub id)")
    doctor.add_argument("--drafter", metavar="DIR", help="DFlash drafter (directory or hub id)")
    doctor.add_argument("--port", type=int, default=30000, help="the port to serve on (default %(default)s)")
    doctor.add_argument("--json", action="store_true", help="print the checks as JSON")
    patching.add_parser(commands)
    memory_report.add_parser(commands)
    return parser


def serve(argv: Sequence[str]) -> int:
    """Run SGLang's server with ``argv``, as ``python -m sglang.launch_server`` does."""
    if not argv or any(arg in ("-h", "--help") for arg in argv):
        print(SERVE_HELP, end="")
        return 0 if argv else 2
    argv = list(argv) if argv[0].startswith("-") else ["--model-path", *argv]

    from sglang_ddtree import compat

    # Another version may serve everything but DDTREE, which refuses with the reason; no version serves nothing.
    if importlib.util.find_spec("sglang") is None:
        print(f"sglang-ddtree: error: {compat.NOT_INSTALLED}", file=sys.stderr)
        return 2

    pick_platform(os.environ)
    try:
        from sglang.launch_server import run_server
    except RuntimeError as error:
        # SGLang chooses its platform while it is imported.
        if "SGLANG_PLATFORM" not in str(error):
            raise
        print(f"sglang-ddtree: error: {one_line(error)}", file=sys.stderr)
        return 2
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    load_plugins()
    server_args, refusal = None, None
    try:
        with argument_errors_as_exceptions():
            server_args = prepare_server_args(argv)
        run_server(server_args)
    except _INPUT_ERRORS as error:
        bad_arguments = server_args is None or getattr(server_args, "_resolution_failed", False)
        if not bad_arguments and not isinstance(error, DDTreeError):
            raise
        refusal = one_line(error)
    finally:
        # It logs, and the error is to be the last line.
        kill_process_tree(os.getpid(), include_parent=False)
    if refusal is not None:
        print(f"sglang-ddtree: error: {refusal}", file=sys.stderr)
        return 2
    return 0


def one_line(error: BaseException) -> str:
    """An error's message on one line; SGLang's and transformers' may span several.

    Some of SGLang's checks of its arguments are bare assertions: the line that failed then names the fields.
    """
    if message := " ".join(str(error).split()):
        return message
    frames = traceback.extract_tb(error.__traceback__)
    failed = frames[-1].line if frames and isinstance(error, AssertionError) else None
    return failed or type(error).__name__


@contextlib.contextmanager
def argument_errors_as_exceptions() -> Iterator[None]:
    """Let argparse raise instead of printing SGLang's usage, which is several hundred lines long."""

    def error(self: argparse.ArgumentParser, message: str) -> NoReturn:
        raise DDTreeError(f"{message} (all flags: sglang serve --help)")

    original = argparse.ArgumentParser.error
    argparse.ArgumentParser.error = error  # type: ignore[method-assign]
    try:
        yield
    finally:
        argparse.ArgumentParser.error = original  # type: ignore[method-assign]


def pick_platform(environ: MutableMapping[str, str]) -> str | None:
    """Select our CPU platform where SGLang would find no device at all; returns the platform that is set.

    A platform or SGLang's own CPU engine that the user has chosen stays.
    """
    chosen = environ.get("SGLANG_PLATFORM")
    if chosen or environ.get("SGLANG_USE_CPU_ENGINE", "0") == "1":
        return chosen
    if accelerator() is not None:
        return None
    environ["SGLANG_PLATFORM"] = CPU_PLATFORM
    return CPU_PLATFORM


def accelerator() -> str | None:
    """The kind of device SGLang would use, or None when there is only the CPU."""
    import torch

    if torch.cuda.is_available():
        return "rocm" if torch.version.hip else "cuda"
    if torch.xpu.is_available():
        return "xpu"
    if torch.backends.mps.is_available():
        return "mps"
    # These extend torch only once they are imported, which is SGLang's business; being installed is enough here.
    for module, kind in (("torch_npu", "npu"), ("torch_musa", "musa")):
        if importlib.util.find_spec(module) is not None:
            return kind
    return None


if __name__ == "__main__":
    sys.exit(main())
