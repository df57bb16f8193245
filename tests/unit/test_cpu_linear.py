"""Packed half-precision products: exact for what fp16 holds, never used for what it does not."""

from types import SimpleNamespace

import pytest
import torch

from sglang_ddtree.cpu import linear, linear_choice
from sglang_ddtree.cpu.platform import DDTreeCpuPlatform
from sglang_ddtree.errors import DDTreeError


def test_this_machine_packs():
    """Every machine the suite runs on has FBGEMM; elsewhere the server uses torch's product (``packed_is_wanted``)."""
    assert linear_choice.packed_is_available()


def test_bf16_weights_give_the_fp32_product():
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(160, 64, generator=generator).bfloat16()
    packed = linear.pack(weight)
    for rows in (1, 2, 5, 9, 33):
        x = torch.randn(rows, 64, generator=generator)
        torch.testing.assert_close(linear.packed_linear(x, packed, None), x @ weight.float().T, atol=2e-5, rtol=1e-5)


def test_a_row_does_not_depend_on_its_batch():
    generator = torch.Generator().manual_seed(1)
    packed = linear.pack(torch.randn(96, 64, generator=generator).bfloat16())
    x = torch.randn(17, 64, generator=generator)
    whole = linear.packed_linear(x, packed, None)
    for i in range(17):
        torch.testing.assert_close(linear.packed_linear(x[i : i + 1], packed, None)[0], whole[i], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("out", "inner"), [(576, 576), (192, 1536), (1000, 100)])
def test_filled_up_rows_are_the_same_bits_in_every_batch(out, inner):
    generator = torch.Generator().manual_seed(2)
    packed = linear.pack(torch.randn(out, inner, generator=generator).bfloat16())
    x = torch.randn(133, inner, generator=generator) * 3

    def alone_and_together(multiple):
        one = torch.cat([linear.packed_linear(row.unsqueeze(0), packed, None, multiple) for row in x])
        counts = (2, 3, 4, 5, 7, 8, 9, 17, 32, 33, 64, 65, 120, 121, 133)
        return [(linear.packed_linear(x[:n], packed, None, multiple), one[:n]) for n in counts]

    assert all(torch.equal(whole, rows) for whole, rows in alone_and_together(linear.row_multiple()))
    if linear.row_multiple() > 1:
        assert not all(torch.equal(whole, rows) for whole, rows in alone_and_together(1))


def test_a_product_of_three_dimensions():
    packed = linear.pack(torch.eye(8))
    x = torch.arange(80.0).view(2, 5, 8)
    assert torch.equal(linear.packed_linear(x, packed, None, 3), x)


def test_bias_and_dtype():
    weight, bias = torch.eye(8), torch.arange(8.0)
    packed = linear.pack(weight)
    out = linear.packed_linear(torch.ones(2, 8, dtype=torch.bfloat16), packed, bias)
    assert out.dtype == torch.bfloat16
    assert out.tolist() == [[1.0, 2, 3, 4, 5, 6, 7, 8]] * 2


@pytest.mark.parametrize("value", [1e5, float("inf"), 0.1234567])
def test_weights_that_fp16_would_change_are_left_alone(value):
    weight = torch.ones(4, 4)
    weight[1, 2] = value
    assert linear.pack(weight) is None


def test_small_bf16_weights_are_kept_to_fp16s_smallest_step():
    weight = torch.full((4, 4), 3e-7).bfloat16()
    packed = linear.pack(weight)
    assert packed is not None
    out = linear.packed_linear(torch.ones(1, 4), packed, None)
    assert (out - weight.float().sum(1)).abs().max() <= 4 * 2.0**-24


def test_plain_modules_of_a_model_are_packed():
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.LayerNorm(8))
    with torch.no_grad():
        model[0].weight.copy_(torch.randn(8, 8).bfloat16())
    x = torch.randn(3, 8)
    want = model(x)
    linear.pack_model(model)
    assert model[0].forward.func is linear._packed_forward
    torch.testing.assert_close(model(x), want, atol=1e-5, rtol=1e-5)


def test_the_choice_can_be_made_and_a_wrong_one_is_named(monkeypatch):
    monkeypatch.setenv(linear_choice.ENV, "Torch")
    assert not linear_choice.packed_is_wanted()
    monkeypatch.setenv(linear_choice.ENV, "")
    assert linear_choice.packed_is_wanted() == linear_choice.packed_is_available()
    monkeypatch.setenv(linear_choice.ENV, "fast")
    with pytest.raises(DDTreeError, match="packed or torch"):
        linear_choice.packed_is_wanted()
    # Before the workers start.
    with pytest.raises(DDTreeError, match="packed or torch"):
        DDTreeCpuPlatform().apply_server_args_defaults(SimpleNamespace())
