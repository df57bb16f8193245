"""What ``scripts/gpu_check.py`` and ``scripts/compile_kernels.py`` do; nothing of it runs in a server."""
