#!/usr/bin/env python3
"""Check the GPU path on a host with a GPU; see --help. Run it with the Python that has torch and Triton."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from sglang_ddtree.gpu.checks import main

if __name__ == "__main__":
    raise SystemExit(main())
