"""A CUDA graph's stand-in on CPU tensors: what one call launches, run again on the same memory.

A graph keeps which kernels ran, with which numbers, and the addresses that they read and wrote; nothing of the Python
around them runs again. :class:`Captured` keeps the same of a call: torch operators, launches in Triton's interpreter,
and functions that stand for a kernel (:func:`kernel`). A replay gives other results only where that memory holds other
values, so that whatever Python took from the inputs at the capture shows as a stale output.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from no_sync import NoSync
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten
from triton.runtime import interpreter

aten = torch.ops.aten

#: They launch nothing: their memory keeps what it holds.
_EMPTY = {aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided}


class FromHost(Exception):
    """The call reads a tensor that no launch has made and that was not there before: a copy from host memory, which a
    graph cannot hold or would repeat from wherever that memory is by then."""


@dataclass(frozen=True)
class _Launch:
    run: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    #: Memory that the results go to; None where the launch writes into its arguments itself.
    results: list[torch.Tensor] | None


def _tensors(*values: Any) -> list[torch.Tensor]:
    return [value for value in tree_flatten(values)[0] if isinstance(value, torch.Tensor)]


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class _Recording(TorchDispatchMode):
    """What is launched while it is entered.

    Attributes:
        launches: in order.
        read: storages that nothing recorded has made, by address. The tensors are kept, and with them the addresses.
        made: results of the launches.
    """

    active: _Recording | None = None

    def __init__(self) -> None:
        super().__init__()
        self.launches: list[_Launch] = []
        self.read: dict[int, torch.Tensor] = {}
        self.made: dict[int, torch.Tensor] = {}
        self._paused = False

    def __enter__(self) -> _Recording:
        _Recording.active = self
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        _Recording.active = None

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        self._paused = True
        try:
            with NoSync.paused():
                yield
        finally:
            self._paused = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._paused:
            return func(*args, **kwargs)
        self._look_at(args, kwargs)
        out = func(*args, **kwargs)
        schema = func._schema
        if schema.is_mutable:
            self.launches.append(_Launch(func, args, kwargs, None))
        elif any(returned.alias_info is not None for returned in schema.returns):
            pass  # a view
        elif func.overloadpacket in _EMPTY:
            self._keep(_tensors(out))
        else:
            self.add(func, args, kwargs, out)
        return out

    def add(self, run: Callable[..., Any], args: Any, kwargs: Any, out: Any) -> None:
        """A launch whose results are new memory."""
        results = _tensors(out)
        self._keep(results)
        self.launches.append(_Launch(run, args, kwargs, results))

    def launch(self, run: Callable[..., Any], args: Any, kwargs: Any) -> None:
        """A launch that writes into its arguments."""
        self._look_at(args, kwargs)
        self.launches.append(_Launch(run, args, kwargs, None))

    def _keep(self, tensors: list[torch.Tensor]) -> None:
        self.made.update({_address(tensor): tensor for tensor in tensors})

    def _look_at(self, args: Any, kwargs: Any) -> None:
        # A tensor without dimensions is a number, which a launch carries with it.
        for tensor in _tensors(args, kwargs):
            if tensor.dim() > 0 and _address(tensor) not in self.made:
                self.read.setdefault(_address(tensor), tensor)


def kernel(function: Callable[..., torch.Tensor | None]) -> Callable[..., Any]:
    """``function`` as one launch: it may read values and return new memory, or write into its arguments and return
    None."""

    def call(*args: Any, **kwargs: Any) -> Any:
        recording = _Recording.active
        if recording is None:
            return function(*args, **kwargs)
        recording._look_at(args, kwargs)
        with recording.paused():
            out = function(*args, **kwargs)
        if out is None:
            recording.launches.append(_Launch(function, args, kwargs, None))
        else:
            recording.add(function, args, kwargs, out)
        return out

    return call


class Captured:
    """``call`` captured after one warm-up, as SGLang's graph runner does it.

    Args:
        watched: a call that would wait for the device, which ends a capture, is an error. Without it such a value is
            baked in, and the replays have to show it.

    Attributes:
        outputs: what the captured call returned; a replay overwrites it.

    Raises:
        Synchronised: the call waits for the device.
        FromHost: the call takes a tensor from the host.
    """

    _launch = interpreter.GridExecutor.__call__

    def __init__(self, call: Callable[[], Any], *, watched: bool = True) -> None:
        warm_up, self._recording = _Recording(), _Recording()
        with mock.patch.object(interpreter.GridExecutor, "__call__", _recorded_launch):
            with warm_up:
                call()
            with NoSync() if watched else contextlib.nullcontext(), self._recording:
                self.outputs = call()
        new = self._recording.read.keys() - warm_up.read.keys() - warm_up.made.keys()
        if new:
            shapes = [tuple(self._recording.read[address].shape) for address in new]
            raise FromHost(f"tensors of shape {shapes} are not from the device")

    @property
    def operators(self) -> int:
        return len(self._recording.launches)

    @property
    def kernels(self) -> list[str]:
        """Names of the Triton kernels, in order."""
        return [step.run.fn.__name__ for step in self._recording.launches if isinstance(step.run, _Interpreted)]

    def replay(self) -> Any:
        """Run what was launched again; memory that nothing writes is garbage. Returns ``outputs``."""
        for tensor in self._recording.made.values():
            _spoil(tensor)
        for launch in self._recording.launches:
            out = launch.run(*launch.args, **launch.kwargs)
            if launch.results is not None:
                for memory, result in zip(launch.results, _tensors(out), strict=True):
                    assert memory.shape == result.shape, f"{launch.run}: {memory.shape} became {result.shape}"
                    memory.copy_(result)
        return self.outputs


class _Interpreted:
    """A launch in Triton's interpreter."""

    def __init__(self, executor: interpreter.GridExecutor) -> None:
        self._executor, self.fn = executor, executor.fn

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        Captured._launch(self._executor, *args, **kwargs)


def _recorded_launch(executor: interpreter.GridExecutor, *args: Any, **kwargs: Any) -> None:
    run, recording = _Interpreted(executor), _Recording.active
    assert recording is not None
    recording.launch(run, args, kwargs)
    with recording.paused():
        run(*args, **kwargs)


def _spoil(tensor: torch.Tensor) -> None:
    if tensor.dtype == torch.bool:
        tensor.logical_not_()
    elif tensor.is_floating_point():
        tensor.fill_(torch.nan)
    else:
        tensor.fill_(-77)
