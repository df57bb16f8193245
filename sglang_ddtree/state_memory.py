"""Memory for the recurrent states of a hybrid target: one set per request slot, and one per tree node during a verify.

A linear-attention layer has no KV cache to fall back on: the state after every node is kept until the path is known.
SGLang 0.5.23 allocates all of it at start, in ``mem_cache/memory_pool.py: MambaPool``:

- persistent states for ``slots + 1`` slots (a request takes several when its prefix is to be cached),
- states of the verify pass for ``(requests + 1) * width`` nodes, recurrent state and convolution window alike, since a
  tree cannot share overlapping windows as a chain does,

and chooses ``slots`` in ``mem_cache/kv_cache_configurator.py: _handle_max_mamba_cache``. The same sums, in integers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

GIB = 1 << 30
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

#: Slots per running request that SGLang keeps when prefixes are cached: the request's own and two that the cache may
#: hold; ``extra_buffer`` adds two (one without overlap scheduling). One when the prefix cache is off.
SLOTS_NO_BUFFER, SLOTS_EXTRA_BUFFER, SLOTS_NO_CACHE = 3, 5, 1
#: ``--mamba-full-memory-ratio``: memory for states over memory for keys and values.
DEFAULT_RATIO = 0.9


@dataclass(frozen=True)
class DeltaNet:
    """The states of a Gated DeltaNet model, for one request.

    Attributes:
        layers: linear-attention layers.
        key_heads, value_heads, key_dim, value_dim: of one such layer, before tensor parallelism.
        kernel: taps of the convolution; its window holds one less.
        state_bytes, window_bytes: per number, of the recurrent state and of the window.
    """

    layers: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int
    state_bytes: int = 4
    window_bytes: int = 2

    @classmethod
    def of_config(cls, text: dict[str, Any], state_dtype: str | None = None) -> DeltaNet:
        """From the text part of a ``config.json``; ``state_dtype`` is ``--mamba-ssm-dtype``.

        Raises:
            KeyError: it is not the config of a Gated DeltaNet model.
        """
        kinds = text.get("layer_types")
        layers = text["num_hidden_layers"]
        linear = kinds.count("linear_attention") if kinds else layers - layers // text["full_attention_interval"]
        return cls(
            layers=linear,
            key_heads=text["linear_num_key_heads"],
            value_heads=text["linear_num_value_heads"],
            key_dim=text["linear_key_head_dim"],
            value_dim=text["linear_value_head_dim"],
            kernel=text["linear_conv_kernel_dim"],
            state_bytes=_BYTES[state_dtype or text.get("mamba_ssm_dtype") or "float32"],
        )

    def bytes(self, tp_size: int = 1) -> int:
        """One set of states on one GPU: SGLang's ``mamba_cache_per_req``."""
        recurrent = self.value_heads * self.value_dim * self.key_dim * self.state_bytes
        channels = 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim
        window = channels * (self.kernel - 1) * self.window_bytes
        return self.layers * (recurrent + window) // tp_size


def verify_bytes(state: int, width: int, requests: int) -> int:
    """What a verify pass keeps: a state of ``state`` bytes for each of ``width`` nodes of ``requests`` requests.

    One more request is SGLang's padding.
    """
    return state * width * (requests + 1)


def total_bytes(state: int, width: int, requests: int, slots_per_request: int) -> int:
    """Everything that SGLang allocates for the states of ``requests`` running requests."""
    return verify_bytes(state, width, requests) + state * (requests * slots_per_request + 1)


def requests_that_fit(free: int, state: int, width: int, slots_per_request: int) -> int:
    """How many requests can run together when ``free`` bytes are for states; 0 when none can."""
    # total_bytes is linear in requests.
    fixed = state * (width + 1)
    return max(0, (free - fixed) // (state * (width + slots_per_request)))


def widest_that_fits(free: int, state: int, requests: int, slots_per_request: int) -> int:
    """The largest verify width with which ``requests`` requests can run together; below 2 there is no tree."""
    fixed = state * (requests * slots_per_request + 1)
    return max(0, (free - fixed) // (state * (requests + 1)))


def share_for_states(free: int, ratio: float = DEFAULT_RATIO) -> int:
    """How much of ``free`` bytes SGLang gives to states when it divides the memory itself."""
    return int(free * ratio / (1 + ratio))
