"""The SGLang platform behind ``SGLANG_PLATFORM=ddtree_cpu``."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.platforms.cpu import CpuSRTPlatform
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import PlatformCapabilities

from sglang_ddtree.cpu.plugin import ATTENTION_BACKEND

logger = logging.getLogger(__name__)

ALGORITHMS = ("DFLASH", "DDTREE")


class DDTreeCpuPlatform(CpuSRTPlatform):
    """Torch-only serving on a CPU, from the PyPI wheel of SGLang.

    The attention backend answers to the name ``torch_native``: parts of SGLang choose their torch code paths by that
    name (``mem_cache/allocation.py: get_last_loc``).
    """

    _enum = PlatformEnum.OOT
    device_name = "cpu"
    device_type = "cpu"
    supported_quantization: list[str] = []
    capabilities = PlatformCapabilities(supports_triton=False, graph_capture=False)

    def apply_server_args_defaults(self, server_args: Any) -> None:
        from sglang_ddtree.cpu import setup

        setup.extend_choices()
        setup.check_linear()
        setup.fix_threads()
        server_args.device = "cpu"
        server_args.disable_cuda_graph = True
        server_args.sleep_on_idle = True  # SGLang polls otherwise, which takes a whole core
        server_args.disable_hybrid_swa_memory = True
        if server_args.sampling_backend is None:
            server_args.sampling_backend = "pytorch"
        # SGLang has put its own CPU build's backend here by now if there was none; the PyPI wheel does not carry it.
        if server_args.attention_backend in (None, "intel_amx"):
            server_args.attention_backend = ATTENTION_BACKEND
        if server_args.mem_fraction_static is None:
            server_args.mem_fraction_static = 0.5
        if server_args.max_total_tokens is None:
            server_args.max_total_tokens = 32768

    def get_device(self, device_id: int = 0) -> str:  # type: ignore[override]
        # SGLang's argument resolution splits this at ":" although the base class returns a torch.device.
        return "cpu"

    def get_default_attention_backend(self) -> str:
        return ATTENTION_BACKEND

    def get_default_speculative_draft_attention_backend(self, algorithm: str) -> str:
        return ATTENTION_BACKEND

    def supports_speculative_algorithm(self, algorithm: str) -> bool:
        return algorithm in ALGORITHMS

    def supports_speculative_draft_attention_backend(self, algorithm: str, backend: str) -> bool:
        return algorithm in ALGORITHMS and backend == ATTENTION_BACKEND

    def get_speculative_cache_locs_fn(self) -> Callable[..., torch.Tensor]:
        from sglang_ddtree.cpu.ops import assign_extend_cache_locs

        return assign_extend_cache_locs

    def get_kv_pool_cls(self, *, kind: str) -> type | None:
        if kind != "mha":
            return None
        from sglang_ddtree.cpu.kv_pool import TorchMHATokenToKVPool

        return TorchMHATokenToKVPool

    def get_dispatch_key_name(self) -> str:
        return "native"

    def init_backend(self) -> None:
        from sglang_ddtree.cpu import setup

        setup.init_worker()

    def post_load_model(self, model: torch.nn.Module) -> None:
        from sglang.srt.runtime_context import get_exec

        from sglang_ddtree.cpu import setup
        from sglang_ddtree.cpu.linear import pack_model

        setup.use_threads()
        setup.init_layers()
        pack_model(model, batch_invariant=get_exec().deterministic.enable_deterministic_inference)
