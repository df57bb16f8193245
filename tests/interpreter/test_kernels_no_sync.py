"""The decode step with the Triton kernels in it, where every synchronising call is an error."""

from __future__ import annotations

from types import SimpleNamespace

import decode_step
import pytest
from no_sync import NoSync, Synchronised
from sglang.srt.models import dflash
from sglang.srt.speculative.eagle_utils import TreeMaskMode
from triton.runtime import interpreter

from sglang_ddtree.tree import bits, build, mask, walk

STEPS = 20


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The functions choose as on a GPU. Which kernels were launched; what they do is the device's business."""
    for module in (bits, build, mask, walk):
        monkeypatch.setattr(module, "use_kernels", lambda *args, **limits: True)
    for module in (build, mask):
        monkeypatch.setattr(module, "on_host", lambda device: False)
    monkeypatch.setattr(dflash, "get_parallel", lambda: SimpleNamespace(tp_size=1))
    launched: list[str] = []
    launch = interpreter.GridExecutor.__call__

    def counted(executor: interpreter.GridExecutor, *args, **options):
        launched.append(executor.fn.__name__)
        with NoSync.paused():
            return launch(executor, *args, **options)

    monkeypatch.setattr(interpreter.GridExecutor, "__call__", counted)
    return launched


@pytest.mark.parametrize(("mode", "sum_is_known"), [(TreeMaskMode.FULL_MASK, True), (None, False)])
def test_twenty_steps(launches: list[str], mode: TreeMaskMode | None, sum_is_known: bool) -> None:
    attn_backend = decode_step.backend(mode)
    accepted = []
    for seed in range(1, STEPS + 1):
        inputs = decode_step.random_inputs(seed)
        prefix_lens_sum = int(inputs.prefix_lens.sum()) if sum_is_known else None
        with NoSync():
            outputs = decode_step.run_step(inputs, attn_backend, prefix_lens_sum)
        accepted.append(decode_step.check_outputs(inputs, outputs, mode))
    assert launches == ["build_kernel", "mask_kernel", "bits_kernel", "walk_kernel"] * STEPS
    assert sum(accepted) > STEPS and min(accepted) < 3 < max(accepted)


def test_a_step_that_reads_a_value_fails(launches: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = decode_step.random_inputs(2)
    monkeypatch.setattr(mask, "on_host", lambda device: True)
    with pytest.raises(Synchronised, match="_local_scalar_dense"), NoSync():
        decode_step.run_step(inputs, decode_step.backend(None), 10_000)
    assert launches == ["build_kernel"]
