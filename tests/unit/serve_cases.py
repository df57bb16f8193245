"""Child process of test_bad_input.py: run ``sglang-ddtree serve`` for several argument lists, without any server.

Reads ``{"version": str | null, "cases": [{"argv": [...], "env": {...}}], "doctor": [[model, drafter], ...]}`` on stdin.
Writes ``{"cases": [{"code", "stderr", "fields"}], "doctor": [[check, ...], ...]}`` on stdout.

Arguments take their real way through SGLang; only the step after their resolution, which would load the models, is
left out. One process for all of them, because importing SGLang takes half a minute.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import io
import json
import os
import sys
from dataclasses import asdict

FIELDS = (
    "device",
    "attention_backend",
    "speculative_draft_attention_backend",
    "speculative_num_draft_tokens",
    "speculative_dflash_block_size",
    "speculative_eagle_topk",
    "speculative_num_steps",
    "max_running_requests",
)


def main() -> None:
    job = json.load(sys.stdin)
    if job["version"]:
        installed = importlib.metadata.version
        importlib.metadata.version = lambda name: job["version"] if name == "sglang" else installed(name)
    with contextlib.redirect_stdout(sys.stderr):
        cases = [run(case["argv"], case["env"]) for case in job["cases"]]
        reports = [doctor(model, drafter) for model, drafter in job["doctor"]]
    json.dump({"cases": cases, "doctor": reports}, sys.stdout)


def run(argv: list[str], environ: dict[str, str]) -> dict[str, object]:
    import sglang.launch_server
    from sglang.srt.arg_groups.overrides import resolving_view

    from sglang_ddtree import cli

    fields: dict[str, object] = {}

    def resolve_only(server_args) -> None:
        server_args.resolve_once()
        args = resolving_view(server_args)
        fields.update({name: getattr(args, name) for name in FIELDS})

    before = dict(os.environ)
    os.environ.update(environ)
    sglang.launch_server.run_server = resolve_only
    stderr = io.StringIO()
    try:
        with contextlib.redirect_stderr(stderr):
            code = cli.main(["serve", *argv])
    finally:
        os.environ.clear()
        os.environ.update(before)
    return {"code": code, "stderr": stderr.getvalue(), "fields": fields}


def doctor(model: str, drafter: str) -> list[dict[str, object]]:
    from sglang_ddtree.doctor import all_checks

    return [asdict(check) for check in all_checks(model, drafter)]


if __name__ == "__main__":
    # Before SGLang is imported, as the console script does it.
    from sglang_ddtree.cli import pick_platform

    pick_platform(os.environ)
    main()
