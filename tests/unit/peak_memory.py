"""How much memory a piece of torch code holds at its worst moment."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten


class Peak(TorchDispatchMode):
    """The most bytes that the results of the operators hold at one time."""

    def __init__(self) -> None:
        super().__init__()
        self.held = self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {each.untyped_storage().data_ptr() for each in tree_flatten((args, kwargs))[0] if torch.is_tensor(each)}
        for tensor in tree_flatten(out)[0]:
            if torch.is_tensor(tensor) and tensor.untyped_storage().data_ptr() not in given:
                self._add(tensor.nbytes)
                weakref.finalize(tensor, self._add, -tensor.nbytes)
        return out

    def _add(self, count: int) -> None:
        self.held += count
        self.most = max(self.most, self.held)
