#!/usr/bin/env python3
"""Milliseconds of one model pass's matrix products on this CPU, by rows and kind of product.

Rows are tokens: 1 is plain decoding, 5 to 65 a tree. CPU time of one thread, so that other programs disturb it little;
the smallest of several runs. Shapes are SmolLM2-135M's (30 layers and the LM head).

    $(scripts/env.sh)/bin/python scripts/bench_cpu_linear.py
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch

LAYERS, HIDDEN, INNER, QKV, VOCAB = 30, 576, 1536, 960, 49152
SHAPES = ((QKV, HIDDEN), (HIDDEN, HIDDEN), (2 * INNER, HIDDEN), (HIDDEN, INNER))


def smallest(run: Callable[[], object], repeats: int) -> float:
    """Milliseconds of CPU time of the fastest of ``repeats`` runs, after one to warm up."""
    run()
    best = float("inf")
    for _ in range(repeats):
        start = time.thread_time()
        run()
        best = min(best, time.thread_time() - start)
    return best * 1e3


def products(kind: str, weight: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """A function that multiplies by ``weight.T`` the way ``kind`` says."""
    if kind == "packed":
        packed = torch.ops.quantized.linear_prepack_fp16(weight, None)
        return lambda x: torch.ops.quantized.linear_dynamic_fp16.default(x, packed)
    typed = weight.to(torch.bfloat16 if kind == "bf16" else torch.float32)
    return lambda x: torch.nn.functional.linear(x.to(typed.dtype), typed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 5, 8, 9, 17, 33, 65])
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    layers = [torch.randn(*shape, generator=generator) * 0.05 for _ in range(LAYERS) for shape in SHAPES]
    head = torch.randn(VOCAB, HIDDEN, generator=generator) * 0.05
    print("| rows | " + " | ".join(f"{kind} layers | {kind} head" for kind in ("fp32", "bf16", "packed")) + " |")
    print("|---|" + "---|" * 6)
    with torch.inference_mode():
        cells: dict[int, list[str]] = {rows: [] for rows in options.rows}
        for kind in ("fp32", "bf16", "packed"):
            apply = [products(kind, weight) for weight in layers]
            apply_head = products(kind, head)
            for rows in options.rows:
                inputs = {width: torch.randn(rows, width, generator=generator) for width in (HIDDEN, INNER)}
                widths = [weight.shape[1] for weight in layers]

                def run(apply=apply, inputs=inputs, widths=widths) -> None:
                    for function, width in zip(apply, widths, strict=True):
                        function(inputs[width])

                cells[rows].append(f"{smallest(run, options.repeats):.1f}")
                hidden = inputs[HIDDEN]
                cells[rows].append(f"{smallest(lambda f=apply_head, x=hidden: f(x), options.repeats):.1f}")
    for rows, values in cells.items():
        print(f"| {rows} | " + " | ".join(values) + " |")


if __name__ == "__main__":
    main()
