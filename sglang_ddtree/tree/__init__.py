"""Draft trees: construction, masks and acceptance on batched tensors.

Torch and numpy only. SGLang and FlashInfer must not be imported here, so that trees can be tested, fuzzed and
benchmarked alone; ``tests/unit/test_tree_imports.py`` catches it.
"""
