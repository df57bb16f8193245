#!/usr/bin/env python
"""Compile the Triton kernels for sm_80, sm_86, sm_90, sm_100 and sm_120, and the FlashInfer variant for sm_86, sm_90a
and sm_120, without a GPU; print what each takes.

    $(scripts/env.sh)/bin/python scripts/compile_kernels.py
    $(scripts/env.sh)/bin/python scripts/compile_kernels.py --arch 90 --budgets 64 256
    $(scripts/env.sh)/bin/python scripts/compile_kernels.py --parts flashinfer --arch 90     # minutes: nvcc is slow

Exit status 1 when a variant does not compile, or a Triton kernel needs a stack (registers spill).
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


#: Triton's LLVM ends the process, without an exception, on a number that it does not know. These have been tried.
KNOWN = (80, 86, 87, 89, 90, 100, 103, 120, 121)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", type=int, nargs="+", default=[80, 86, 90, 100, 120], metavar="SM")
    parser.add_argument("--budgets", type=int, nargs="+", default=[8, 16, 32, 64, 128, 256], metavar="N")
    parser.add_argument("--parts", nargs="+", choices=("triton", "flashinfer"), default=["triton", "flashinfer"])
    options = parser.parse_args()
    unknown = sorted(set(options.arch) - set(KNOWN))
    if unknown:
        parser.error(f"--arch {unknown[0]} is none of {', '.join(map(str, KNOWN))}")
    if not all(1 <= budget <= 256 for budget in options.budgets):
        parser.error("--budgets must be between 1 and 256")
    if os.environ.get("TRITON_INTERPRET") == "1":
        parser.error("TRITON_INTERPRET=1 is set: the interpreter compiles nothing")
    failed = 0
    try:
        if "triton" in options.parts:
            failed += compile_triton(options.arch, tuple(options.budgets))
        if "flashinfer" in options.parts:
            failed += compile_flashinfer(options.arch)
    except ImportError as error:
        parser.error(f"cannot import {error.name}: run this with $(scripts/env.sh)/bin/python")
    return 1 if failed else 0


def compile_triton(architectures: list[int], budgets: tuple[int, ...]) -> int:
    """Print one row per kernel and architecture; how many failed."""
    from sglang_ddtree.gpu.compilation import compile_variant, delta_variants, variants

    failed = 0
    print("| kernel | sm | registers | stack | shared | machine code |\n|---|---|---|---|---|---|")
    for variant in (*variants(budgets), *delta_variants()):
        for arch in architectures:
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
    return failed


def compile_flashinfer(architectures: list[int]) -> int:
    """Print one row per variant and architecture, of those that it has been compiled for before; how many failed."""
    from sglang_ddtree.gpu.flashinfer_build import ARCHITECTURES, VARIANTS, build

    failed = 0
    wanted = [arch for arch in ARCHITECTURES if int(arch.rstrip("a")) in architectures]
    print("\n| FlashInfer variant | sm | machine code |\n|---|---|---|" if wanted else "", flush=True)
    for variant in VARIANTS:
        for arch in wanted:
            with tempfile.TemporaryDirectory() as directory:
                try:
                    size = str(build(variant, arch, Path(directory)).cubin_bytes)
                except (RuntimeError, FileNotFoundError) as error:
                    failed += 1
                    size = f"failed: {error}"
            print(f"| {variant.name} | {arch} | {size} |", flush=True)
    return failed


if __name__ == "__main__":
    raise SystemExit(main())
