"""The platform: a CPU that says it can launch Triton kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.platforms.cpu import CpuSRTPlatform
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import PlatformCapabilities


class InterpreterPlatform(CpuSRTPlatform):
    _enum = PlatformEnum.OOT
    device_name = "cpu"
    device_type = "cpu"
    supported_quantization: list[str] = []
    capabilities = PlatformCapabilities(supports_triton=True)

    def apply_server_args_defaults(self, server_args: Any) -> None:
        server_args.device = "cpu"
        server_args.disable_cuda_graph = True
        server_args.sleep_on_idle = True
        server_args.attention_backend = "triton"
        server_args.sampling_backend = "pytorch"
        server_args.mem_fraction_static = 0.5

    def get_device(self, device_id: int = 0) -> str:  # type: ignore[override]
        # SGLang's argument resolution splits this at ":" although the base class returns a torch.device.
        return "cpu"

    def get_default_attention_backend(self) -> str:
        return "triton"

    def get_default_speculative_draft_attention_backend(self, algorithm: str) -> str:
        return "triton"

    def supports_speculative_algorithm(self, algorithm: str) -> bool:
        return True

    def supports_speculative_draft_attention_backend(self, algorithm: str, backend: str) -> bool:
        return backend == "triton"

    def support_mamba_cache_extra_buffer(self) -> bool:
        return True

    def get_speculative_cache_locs_fn(self) -> Callable[..., torch.Tensor]:
        from ddtree_interpreter.serving import assign_extend_cache_locs

        return assign_extend_cache_locs

    def init_backend(self) -> None:
        from ddtree_interpreter import hybrid, serving

        serving.init_worker()
        hybrid.init_worker()
