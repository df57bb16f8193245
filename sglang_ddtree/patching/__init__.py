"""The patches for SGLang itself: what is in a tree, and putting patches in and taking them out again.

Imports neither torch nor SGLang: the tool must work where SGLang does not.
"""
