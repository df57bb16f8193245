"""Memory for the recurrent states of a hybrid target: one set per request slot, and one per tree node during a verify.

A linear-attention layer has no KV cache to fall back on: the state after every node is kept until the path is known.
SGLang 0.5.23 allocates all of it at start, in ``mem_cache/memory_pool.py: MambaPool``:

- persistent states for ``slots + 1`` slots (a request takes several when its prefix is to be cached),
- states of the verify pass for ``(requests + 1) * width`` nodes, recurrent state and convolution window alike, since a
  tree cannot share overlapping windows as a chain does; with deltas (``state_form.py``) a node has, instead of its
  recurrent state, what that is made of,

and chooses ``slots`` in ``mem_cache/kv_cache_configurator.py: _handle_max_mamba_cache``. The same sums, in integers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sglang_ddtree.errors import DDTreeError

GIB = 1 << 30
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

#: Slots per running request that SGLang keeps when prefixes are cached: the request's own and two that the cache may
#: hold; ``extra_buffer`` adds two (one without overlap scheduling). One when the prefix cache is off.
SLOTS_NO_BUFFER, SLOTS_EXTRA_BUFFER, SLOTS_NO_CACHE = 3, 5, 1
#: ``--mamba-full-memory-ratio``: memory for states over memory for keys and values.
DEFAULT_RATIO = 0.9


@dataclass(frozen=True)
class StateSizes:
    """Bytes on one GPU.

    Attributes:
        state: one set of states, of all layers: SGLang's ``mamba_cache_per_req``.
        node: what a verify pass keeps of one node: as much where states are stored, less where deltas are.
    """

    state: int
    node: int

    @classmethod
    def stored(cls, state: int) -> StateSizes:
        return cls(state, state)


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
            DDTreeError: it is, with a value that cannot be.
        """
        layers, kinds = _count(text, "num_hidden_layers"), text.get("layer_types")
        if not isinstance(kinds, list | None):
            raise DDTreeError(f"layer_types must be a list, got {kinds!r}.")
        linear = (
            kinds.count("linear_attention") if kinds else layers - layers // _count(text, "full_attention_interval")
        )
        dtype = state_dtype or text.get("mamba_ssm_dtype") or "float32"
        if not isinstance(dtype, str) or dtype not in _BYTES:
            raise DDTreeError(f"mamba_ssm_dtype must be one of {', '.join(_BYTES)}, got {dtype!r}.")
        return cls(
            layers=linear,
            key_heads=_count(text, "linear_num_key_heads"),
            value_heads=_count(text, "linear_num_value_heads"),
            key_dim=_count(text, "linear_key_head_dim"),
            value_dim=_count(text, "linear_value_head_dim"),
            kernel=_count(text, "linear_conv_kernel_dim"),
            state_bytes=_BYTES[dtype],
        )

    def sizes(self, tp_size: int = 1, *, deltas: bool = False) -> StateSizes:
        """On one of ``tp_size`` GPUs, for the verify pass that stores states or the one that keeps deltas."""
        recurrent = self.value_heads * self.value_dim * self.key_dim * self.state_bytes
        channels = 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim
        window = channels * (self.kernel - 1) * self.window_bytes
        state = self.layers * (recurrent + window) // tp_size
        if not deltas:
            return StateSizes.stored(state)
        heads = self.key_heads // tp_size, self.value_heads // tp_size
        delta = delta_bytes(self.layers, *heads, self.key_dim, self.value_dim)
        return StateSizes(state, self.layers * window // tp_size + delta)


def _count(text: dict[str, Any], name: str) -> int:
    value = text[name]
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise DDTreeError(f"{name} must be a whole number of at least 1, got {value!r}.")
    return value


#: As its config.json is believed to be (docs/qwen3.6-27b.md says so).
QWEN36_27B = DeltaNet(layers=48, key_heads=16, value_heads=48, key_dim=128, value_dim=128, kernel=4)


def delta_bytes(layers: int, key_heads: int, value_heads: int, key_dim: int, value_dim: int) -> int:
    """One node in ``tree/kernels/delta_rule.py: Deltas``: each layer's key, update and decay in float32, a parent."""
    return layers * 4 * (key_heads * key_dim + value_heads * (value_dim + 1)) + 4


def verify_bytes(sizes: StateSizes, width: int, requests: int) -> int:
    """What a verify pass keeps of ``width`` nodes of each of ``requests`` requests.

    One more request is SGLang's padding.
    """
    return sizes.node * width * (requests + 1)


def total_bytes(sizes: StateSizes, width: int, requests: int, slots_per_request: int) -> int:
    """Everything that is allocated for the states of ``requests`` running requests."""
    return verify_bytes(sizes, width, requests) + sizes.state * (requests * slots_per_request + 1)


def requests_that_fit(free: int, sizes: StateSizes, width: int, slots_per_request: int) -> int:
    """How many requests can run together when ``free`` bytes are for states; 0 when none can."""
    # total_bytes is linear in requests.
    fixed = sizes.state + sizes.node * width
    return max(0, (free - fixed) // (sizes.node * width + sizes.state * slots_per_request))


def widest_that_fits(free: int, sizes: StateSizes, requests: int, slots_per_request: int) -> int:
    """The largest verify width with which ``requests`` requests can run together; below 2 there is no tree."""
    fixed = sizes.state * (requests * slots_per_request + 1)
    return max(0, (free - fixed) // (sizes.node * (requests + 1)))


def share_for_states(free: int, ratio: float = DEFAULT_RATIO) -> int:
    """How much of ``free`` bytes SGLang gives to states when it divides the memory itself."""
    return int(free * ratio / (1 + ratio))
