"""Serving without a GPU: an out-of-tree SGLang platform.

SGLang's own CPU engine needs kernels that are not on PyPI. This platform serves plain decoding, DFLASH and DDTREE from
the PyPI wheel in torch, for development, tests and small models. It is selected with ``SGLANG_PLATFORM=ddtree_cpu``
(which ``sglang-ddtree serve`` sets on a machine without an accelerator) and changes nothing otherwise.
"""
