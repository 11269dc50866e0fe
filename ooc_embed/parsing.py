"""Checks values that were read from JSON. Knows types and bounds; knows no meaning."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

_Value = TypeVar("_Value")


def integer(value: Any, low: int = 0) -> int:
    if type(value) is not int or not low <= value < 2**63:
        raise ValueError(f"{value!r} is no integer from {low} on")
    return value


def number(value: Any) -> float:
    if type(value) not in (int, float):
        raise ValueError(f"{value!r} is no number")
    return float(value)


def text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is no text")
    return value


def optional(parse: Callable[[Any], _Value], value: Any) -> _Value | None:
    return None if value is None else parse(value)
