"""Whether JSON values have the types that a dataclass says."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping
from typing import Any


def check(cls: type, values: Mapping[str, Any]) -> None:
    """Look at the values that are there; what is missing or unknown is told by the constructor.

    Raises:
        TypeError: one is of another type than its field.
    """
    hints = typing.get_type_hints(cls)
    for each in dataclasses.fields(cls):
        if each.name in values and not fits(values[each.name], hints[each.name]):
            raise TypeError(f"{each.name} of a {cls.__name__} is {str(values[each.name])[:80]!r}")


def fits(value: Any, hint: Any) -> bool:
    """Whether ``value`` is of type ``hint``: a class, a list, a dict with text keys, or one of several."""
    if hint is Any:
        return True
    of, inner = typing.get_origin(hint), typing.get_args(hint)
    if of in (types.UnionType, typing.Union):
        return any(fits(value, one) for one in inner)
    if of is list:
        return isinstance(value, list) and all(fits(item, inner[0]) for item in value)
    if of is dict:
        return isinstance(value, dict) and all(fits(item, inner[1]) for item in value.values())
    if hint is float:  # 1.0 is written as 1 by some
        return isinstance(value, int | float) and not isinstance(value, bool)
    if dataclasses.is_dataclass(hint):
        return isinstance(value, hint)  # type: ignore[arg-type]
    return isinstance(value, hint) and (hint is bool or not isinstance(value, bool))
