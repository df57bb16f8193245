"""SGLang's KV pool without its Triton copy kernel."""

from __future__ import annotations

import torch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool


class TorchMHATokenToKVPool(MHATokenToKVPool):
    def _init_kv_copy_and_warmup(self) -> None:
        # The base class compiles and runs the Triton copy here.
        self._kv_copy_config = None

    def _move_kv_cache_impl(self, tgt_loc: torch.Tensor, src_loc: torch.Tensor) -> None:
        for buffer in (*self.k_buffer, *self.v_buffer):
            # index_select copies before anything is written: source and target slots overlap.
            buffer[tgt_loc] = buffer.index_select(0, src_loc)
