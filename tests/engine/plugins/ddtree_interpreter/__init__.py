"""A test-only SGLang platform: the GPU's code paths on CPU tensors, every Triton kernel in Triton's interpreter.

SGLang's Triton attention backend, its KV copy and the slot kernels run as on a GPU, and so do the kernels of
``sglang_ddtree/tree/kernels``. What cannot run here is replaced in this package, one file per reason. Chosen by
``SGLANG_PLATFORM=ddtree_interpreter`` with ``TRITON_INTERPRET=1``; ``tests/engine/interpreted.py`` sets both.
"""


def activate() -> str:
    return "ddtree_interpreter.platform.InterpreterPlatform"


def register() -> None:
    from ddtree_interpreter import hybrid, serving

    serving.register()
    hybrid.register()
