"""What a GPU would have to wait for is an error here: :class:`NoSync`, for code that runs on CPU tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten

#: On a CUDA device these give the host a value, or a tensor whose size depends on values. ``multinomial`` checks its
#: rows on the host.
_SYNCING = {
    *(
        aten._local_scalar_dense,
        aten.is_nonzero,
        aten.equal,
        aten.allclose,
        aten.nonzero,
        aten.argwhere,
        aten.masked_select,
    ),
    *(aten._unique, aten._unique2, aten.unique_dim, aten.unique_consecutive, aten.unique_dim_consecutive),
    *(aten.bincount, aten.multinomial),
}
_INDEXING = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_, aten._unsafe_index}
_MASKS = (torch.bool, torch.uint8)

#: Reading a CPU tensor's memory is no operator that a dispatch mode would see; neither is making a tensor of Python
#: numbers, on a GPU a blocking copy.
_METHODS = ("tolist", "numpy", "cpu", "item", "new_tensor")
_FUNCTIONS = ("tensor", "as_tensor", "from_numpy")


class Synchronised(Exception):
    """The code under test would have waited for the device."""


class NoSync(TorchDispatchMode):
    """While it is entered, a call that would synchronise a CUDA device with the host raises :class:`Synchronised`.

    The tensors are on the CPU, so what counts is the call, not the device: ``x.to("cpu")`` is one as well, because the
    device of the code under test has that name here.
    """

    _watching = True

    def __init__(self) -> None:
        super().__init__()
        self.operators = 0
        self._patches = contextlib.ExitStack()

    def __enter__(self) -> NoSync:
        for owner, names in ((torch.Tensor, _METHODS), (torch, _FUNCTIONS)):
            for name in names:
                self._patches.enter_context(mock.patch.object(owner, name, self._refusing(getattr(owner, name))))
        self._patches.enter_context(mock.patch.object(torch.Tensor, "to", self._to()))
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._patches.close()

    @classmethod
    @contextlib.contextmanager
    def paused(cls) -> Iterator[None]:
        """What runs in here stands for a kernel on the device: it may read what it likes."""
        cls._watching = False
        try:
            yield
        finally:
            cls._watching = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._watching:
            self.operators += 1
            packet = func.overloadpacket
            if packet in _SYNCING:
                raise Synchronised(str(func))
            if packet in _INDEXING and any(index is not None and index.dtype in _MASKS for index in args[1]):
                raise Synchronised(f"{func} by a mask")
            if packet is aten.lift_fresh and args[0].dim() > 0:  # a number that is assigned is filled in by a kernel
                raise Synchronised("a list as an index")
            if func is aten.repeat_interleave.Tensor and kwargs.get("output_size") is None:
                raise Synchronised(f"{func} without output_size")
        return func(*args, **kwargs)

    def _refusing(self, original: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            if self._watching:
                raise Synchronised(original.__name__)
            return original(*args, **options)

        return call

    def _to(self) -> Any:
        original = torch.Tensor.to

        def to(tensor: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
            device = options.get("device", args[0] if args else None)
            moves = isinstance(device, (str, torch.device))
            if self._watching and moves and not options.get("non_blocking", False):
                raise Synchronised(f"Tensor.to({device!r}) without non_blocking")
            return original(tensor, *args, **options)

        return to
