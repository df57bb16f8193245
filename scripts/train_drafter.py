#!/usr/bin/env python
"""Train the DFlash drafter of the demo model from nothing but PyPI packages: one command.

  "$(scripts/env.sh)/bin/python" scripts/train_drafter.py --out drafters/smollm2-135m-dflash-b8

Stages, each of which goes on where it stopped: text by the target, training, measurement on the dev or held-out split.
"""

import sys

from sglang_ddtree.training.cli import main

if __name__ == "__main__":
    sys.exit(main())
