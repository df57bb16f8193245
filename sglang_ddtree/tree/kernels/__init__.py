"""Triton versions of the tree's construction, masks and walk, for GPUs; ``dispatch.py`` says when they are used.

Every kernel gives exactly what its torch counterpart gives. None reads anything back to the host, none allocates by
what the data says, and no launch loops over requests or nodes, so that all of them can be captured in a CUDA graph
(after one call outside of it, which compiles). A program handles a block of requests or of node rows: small blocks on a
GPU, large ones in Triton's interpreter, where every program costs milliseconds.
"""
