"""Tests of the Triton kernels in Triton's interpreter.

The interpreter is chosen by TRITON_INTERPRET=1 before Triton is imported, for the whole process. So these run in a
process of their own, which ``tests/unit/test_kernels_interpreted.py`` starts; a plain pytest run does not collect them.
"""

import os

if os.environ.get("TRITON_INTERPRET") != "1":
    collect_ignore_glob = ["test_*.py"]
