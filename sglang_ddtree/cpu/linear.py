"""Linear layers with weights packed in half precision, for CPUs.

Decoding on a CPU reads every weight once per step, so bytes decide: FBGEMM's packed fp16 weights with fp32
accumulation read half of what fp32 does and, unlike torch's bf16 product on a CPU without bf16 instructions, cost
little more for the 5 to 65 rows of a tree than for one (``scripts/bench_cpu_linear.py`` measures it). A weight whose
values fp16 cannot hold to within 2**-24 (fp16's subnormal step; any bf16 checkpoint's weights below 65504 pass) keeps
torch's product, so that no checkpoint is silently rounded.
"""

from __future__ import annotations

import logging
from functools import cache, partial

import torch
from sglang.srt.layers.linear import LinearBase
from sglang.srt.layers.quantization.unquant import UnquantizedEmbeddingMethod, UnquantizedLinearMethod
from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding

from sglang_ddtree.cpu.linear_choice import ENV, packed_is_wanted

logger = logging.getLogger(__name__)

_TOLERANCE = 2.0**-24


def pack(weight: torch.Tensor) -> object | None:
    """FBGEMM's packing of ``weight`` ``[out, in]``, or None when fp16 cannot hold its values."""
    full = weight.detach().float()
    half = full.half()
    if not torch.isfinite(half).all() or (half.float() - full).abs().max() > _TOLERANCE:
        return None
    return torch.ops.quantized.linear_prepack_fp16(full, None)


def packed_linear(x: torch.Tensor, packed: object, bias: torch.Tensor | None, multiple: int = 1) -> torch.Tensor:
    """``x @ weight.T + bias`` for ``x`` ``[..., in]``, in ``x``'s dtype, accumulated in fp32.

    The rows are filled up to a multiple of ``multiple``, for a sum that does not depend on how many they are
    (``row_multiple``).
    """
    full = x.float().reshape(-1, x.shape[-1])
    rows = full.shape[0]
    if rows % multiple:
        full = torch.nn.functional.pad(full, (0, 0, 0, multiple - rows % multiple))
    out = torch.ops.quantized.linear_dynamic_fp16.default(full, packed)[:rows]
    if bias is not None:
        out = out + bias.float()
    return out.to(x.dtype).view(*x.shape[:-1], -1)


@cache
def row_multiple() -> int:
    """The number to whose multiples rows must be filled up so that a row's product is the same bits in every batch.

    FBGEMM cuts the rows into tiles, and its kernels for some tile heights, one row among them, sum in another order.
    Which ones depends on the processor, so this tries them.

    Raises:
        RuntimeError: no multiple up to 16 does it.
    """
    generator = torch.Generator().manual_seed(0)
    packed = pack(torch.randn(48, 640, generator=generator).half())
    x = torch.randn(259, 640, generator=generator)
    for multiple in (1, *range(3, 17)):
        product = partial(packed_linear, packed=packed, bias=None, multiple=multiple)
        alone = product(x[:1])
        rest = torch.cat([product(row.unsqueeze(0)) for row in x[1:]])
        whole = torch.cat([alone, rest])
        if all(torch.equal(product(x[:rows]), whole[:rows]) for rows in range(2, len(x) + 1)):
            return multiple
    raise RuntimeError(f"rows of FBGEMM's product depend on their number here: set {ENV}=torch")


class PackedLinearMethod(UnquantizedLinearMethod):
    def __init__(self, packed: object, multiple: int):
        super().__init__()
        self.packed = packed
        self.multiple = multiple

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return packed_linear(x, self.packed, bias, self.multiple)


class PackedHeadMethod(UnquantizedEmbeddingMethod):
    """For the LM head; the embedding table it may share is read as it is."""

    def __init__(self, packed: object, multiple: int):
        super().__init__()
        self.packed = packed
        self.multiple = multiple

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return packed_linear(x, self.packed, bias, self.multiple)


def pack_model(model: torch.nn.Module, batch_invariant: bool = False) -> None:
    """Swap the unquantized linear layers and the LM head of a loaded SGLang model for packed ones, in place.

    Args:
        batch_invariant: rows of a product do not depend on how many there are; costs up to a third for single rows.
    """
    if not packed_is_wanted():
        if batch_invariant:
            logger.warning("%s=torch: products depend on the number of rows in the last place.", ENV)
        return
    multiple = row_multiple() if batch_invariant else 1
    head = getattr(model, "lm_head", None)
    packed = kept = 0
    for module in model.modules():
        if not _is_plain_linear(module, is_head=module is head):
            continue
        weight = pack(module.weight)
        if weight is None:
            kept += 1
            continue
        packed += 1
        if isinstance(module, LinearBase):
            module.quant_method = PackedLinearMethod(weight, multiple)
        elif isinstance(module, VocabParallelEmbedding):
            module.quant_method = PackedHeadMethod(weight, multiple)
        else:
            module.forward = partial(_packed_forward, module, weight, multiple)  # type: ignore[method-assign]
    logger.info("CPU linear layers: %d packed in half precision, %d kept as loaded", packed, kept)


def _is_plain_linear(module: torch.nn.Module, is_head: bool) -> bool:
    method = type(getattr(module, "quant_method", None))
    if isinstance(module, LinearBase):
        return method is UnquantizedLinearMethod
    if isinstance(module, VocabParallelEmbedding):
        return is_head and method is UnquantizedEmbeddingMethod
    return type(module) is torch.nn.Linear


def _packed_forward(module: torch.nn.Linear, weight: object, multiple: int, x: torch.Tensor) -> torch.Tensor:
    return packed_linear(x, weight, module.bias, multiple)
