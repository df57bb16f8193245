"""FlashInfer's Python wrappers on a CPU, with the tree variant's compiled module replaced by torch.

Everything above the compiled module is FlashInfer's own: the wrapper's constructor, ``plan``, ``run`` and the arguments
that they hand down. ``TorchModule`` takes the place of what nvcc would make of ``flashinfer_tree.cuh``, and reads what
the kernel reads when the kernel reads it: index buffers and bits at the run, the schedule where the last plan put it.
For tests and for trying ``scripts/gpu_check.py`` out.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch

from sglang_ddtree.attention import flashinfer_tree
from sglang_ddtree.attention.tree_bits_reference import read_tree_bits
from sglang_ddtree.attention.tree_check import attend

_CUSTOM_MASK = 2
_NHD = 0


class TorchModule:
    """``plan`` and ``paged_run`` of one module; the arguments are FlashInfer 0.7.2's, in its order.

    Args:
        scalars: names of the variant's scalars, after its tensor ``tree_bits``.
    """

    def __init__(self, scalars: list[str]) -> None:
        self.scalars = scalars
        self.runs: list[tuple[Any, ...]] = []
        # A plan lies in the wrapper's integer workspace, where a captured kernel finds the next one.
        self._plans: dict[int, dict[str, Any]] = {}

    def plan(self, _float: Any, workspace: torch.Tensor, _pinned: Any, rows: torch.Tensor, starts: torch.Tensor,
             lens: torch.Tensor, most_rows: int, bs: int, heads: int, kv_heads: int, page_size: int, graph: bool,
             dim: int, _dim_vo: int, _causal: bool, window_left: int, *_rest: Any) -> list[int]:  # fmt: skip
        for tensor in (rows, starts, lens):
            if tensor.device.type != "cpu" or tensor.dtype != torch.int32:
                raise ValueError(f"a plan is made of int32 host tensors, got {tensor.dtype} on {tensor.device}")
        if int(rows[-1]) > most_rows or len(lens) != bs:
            raise ValueError("a plan has more rows than the graph was captured with, or another batch size")
        self._plans[workspace.data_ptr()] = {
            **{"rows": rows.clone(), "starts": starts.clone(), "lens": lens.clone(), "heads": (heads, kv_heads, dim)},
            **{"page_size": page_size, "window_left": window_left, "graph": graph},
        }
        return [bs]

    def paged_run(self, *arguments: Any) -> None:
        """Run now, and keep the arguments: :meth:`replay` runs them again as a CUDA graph would."""
        self.runs.append(arguments)
        self._run(*arguments)

    def replay(self, number: int = -1) -> torch.Tensor:
        """The output of a run, computed anew from what its buffers hold now."""
        self._run(*self.runs[number])
        out: torch.Tensor = self.runs[number][10]
        return out

    def _run(self, _float: Any, workspace: torch.Tensor, _info: Any, query: torch.Tensor, keys: torch.Tensor,
             values: torch.Tensor, row_indptr: torch.Tensor, page_indptr: torch.Tensor, pages: torch.Tensor,
             last_page_len: torch.Tensor, out: torch.Tensor, _lse: Any, mask_mode: int, layout: int, window_left: int,
             _pdl: bool, bits: torch.Tensor, *scalars: float) -> None:  # fmt: skip
        schedule = self._plans[workspace.data_ptr()]
        given = dict(zip(self.scalars, scalars, strict=True))
        if mask_mode != _CUSTOM_MASK or layout != _NHD or window_left != schedule["window_left"]:
            raise ValueError(f"mask mode {mask_mode}, layout {layout}, window {window_left} are not what was planned")
        rows, starts = row_indptr.tolist(), page_indptr.tolist()
        page_size = keys.shape[1]
        lens = [
            (end - begin - 1) * page_size + last for begin, end, last in zip(starts, starts[1:], last_page_len.tolist())
        ]
        if rows != schedule["rows"].tolist() or lens != schedule["lens"].tolist():
            raise ValueError(f"the schedule is for {schedule['lens'].tolist()} keys, the buffers hold {lens}")
        if (query.shape[1], keys.shape[2], query.shape[2]) != schedule["heads"] or page_size != schedule["page_size"]:
            raise ValueError("heads or page size are not those of the plan")
        if not (bits.dtype == torch.int32 and bits.is_contiguous()):
            raise ValueError(f"bits must be contiguous int32, got {bits.dtype}")
        window = given.get("tree_window", -1.0)
        for request, length in enumerate(lens):
            begin, end = rows[request], rows[request + 1]
            mine = pages[starts[request] : starts[request + 1]].long()
            mask = read_tree_bits(bits, rows, request, length, int(window) if window >= 0 else None)
            key, value = (part[mine].flatten(0, 1)[:length] for part in (keys, values))
            made = attend(query[begin:end], key, value, mask, given["sm_scale"], given.get("logits_soft_cap", 0.0))
            # A row without keys gives zeros in FlashInfer.
            out[begin:end] = made.nan_to_num(0.0).to(out.dtype)


class _Event:
    def synchronize(self) -> None:
        pass

    def record(self) -> None:
        pass


@contextlib.contextmanager
def flashinfer_on_cpu() -> Iterator[dict[str, TorchModule]]:
    """FlashInfer's paged prefill wrapper for the variant on CPU tensors; yields the modules by name, as they are made.

    Raises:
        ImportError: FlashInfer is not installed.
    """
    import flashinfer.prefill as prefill

    modules: dict[str, TorchModule] = {}

    def load(name: str, scalars: list[str]) -> TorchModule:
        return modules.setdefault(name, TorchModule(scalars))

    class Torch:
        """torch without pinned memory, which needs a driver."""

        def __getattr__(self, name: str) -> Any:
            return getattr(torch, name)

        def empty(self, *shape: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
            return torch.empty(*shape, **options)

    with (
        mock.patch.object(prefill, "torch", Torch()),
        # The backend comes before the jit_args, whose number 9 are the names of the scalars.
        mock.patch.object(prefill, "get_customize_batch_prefill_module", lambda *jit, **_: jit[10]),
        mock.patch.object(prefill, "get_batch_prefill_jit_module", load),
        mock.patch.object(torch.cuda, "Event", _Event),
    ):
        flashinfer_tree.tree_wrapper_class.cache_clear()
        try:
            yield modules
        finally:
            flashinfer_tree.tree_wrapper_class.cache_clear()
