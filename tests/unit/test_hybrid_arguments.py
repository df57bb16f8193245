"""Arguments that only a hybrid target has: what cannot follow a tree is refused before any model loads.

SGLang refuses the same flags on a CPU for reasons of its own, so the checks are asked directly, with SGLang's defaults.
"""

from __future__ import annotations

import pytest
from sglang.srt.server_args import ServerArgs

from sglang_ddtree.algorithm import _refuse_unsupported, _require_track_interval
from sglang_ddtree.errors import DDTreeError


def arguments(**changes):
    """SGLang's defaults, and some changes."""
    return ServerArgs(model_path="target", **changes)


def test_defaults_are_accepted():
    _refuse_unsupported(arguments())
    _require_track_interval(arguments(), 257)


def test_flashinfers_mamba_is_refused():
    with pytest.raises(DDTreeError, match="does not support --mamba-backend flashinfer: use --mamba-backend triton"):
        _refuse_unsupported(arguments(mamba_backend="flashinfer"))
    _refuse_unsupported(arguments(mamba_backend="triton"))


@pytest.mark.parametrize("strategy", ["extra_buffer", "extra_buffer_lazy"])
def test_a_verify_width_above_the_track_interval_is_refused(strategy):
    args = arguments(mamba_radix_cache_strategy=strategy, mamba_track_interval=16)
    _require_track_interval(args, 16)
    with pytest.raises(DDTreeError, match="got 16: use --speculative-ddtree-budget 15 or less"):
        _require_track_interval(args, 17)


def test_without_tracked_states_the_interval_does_not_matter():
    _require_track_interval(arguments(mamba_radix_cache_strategy="no_buffer", mamba_track_interval=16), 257)
