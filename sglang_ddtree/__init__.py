"""DDTree (Diffusion Draft Tree) speculative decoding for SGLang.

Installed beside SGLang, this package registers the speculative algorithm ``DDTREE`` through SGLang's plugin entry
points. Nothing here imports SGLang until SGLang itself loads the plugin.
"""

__version__ = "0.1.0"
