#!/usr/bin/env python
"""Compile the Triton kernels for sm_80, sm_86, sm_90, sm_100 and sm_120 without a GPU; print what each variant takes.

    $(scripts/env.sh)/bin/python scripts/compile_kernels.py
    $(scripts/env.sh)/bin/python scripts/compile_kernels.py --arch 90 --budgets 64 256

Exit status 1 when a variant does not compile or needs a stack (registers spill).
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", type=int, nargs="+", default=[80, 86, 90, 100, 120], metavar="SM")
    parser.add_argument("--budgets", type=int, nargs="+", default=[8, 16, 32, 64, 128, 256], metavar="N")
    options = parser.parse_args()
    if not all(1 <= budget <= 256 for budget in options.budgets):
        parser.error("--budgets must be between 1 and 256")
    if os.environ.get("TRITON_INTERPRET") == "1":
        parser.error("TRITON_INTERPRET=1 is set: the interpreter compiles nothing")
    try:
        from sglang_ddtree.gpu.compilation import compile_variant, variants
    except ImportError as error:
        parser.error(f"cannot import {error.name}: run this with $(scripts/env.sh)/bin/python")

    failed = 0
    print("| kernel | sm | registers | stack | shared | machine code |\n|---|---|---|---|---|---|")
    for variant in variants(tuple(options.budgets)):
        for arch in options.arch:
            try:
                done = compile_variant(variant, arch)
            except Exception as error:
                failed += 1
                reason = (str(error).splitlines() or [type(error).__name__])[-1]
                print(f"| {variant.name} {variant.constants} | {arch} | failed: {reason[:200]} | | | |", flush=True)
                continue
            failed += done.stack > 0
            print(
                f"| {done.name} | {arch} | {done.registers} | {done.stack} | {done.shared} | {done.cubin_bytes} |",
                flush=True,
            )
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
