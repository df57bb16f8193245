#!/usr/bin/env python3
"""The A/B benchmark (docs/benchmark.md): scripts/bench_ab.py run|compare|report. Any Python 3.11 may start it."""

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parents[1]

if __name__ == "__main__":
    env = subprocess.run([HERE / "scripts" / "env.sh"], stdout=subprocess.PIPE, text=True)
    if env.returncode != 0:
        sys.exit(env.returncode)
    python = f"{env.stdout.strip()}/bin/python"
    os.execv(python, [python, "-m", "sglang_ddtree.bench.ab.cli", *sys.argv[1:]])
