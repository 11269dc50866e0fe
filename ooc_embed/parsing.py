"""Checks values read from JSON, and names of chunk files. Knows types and bounds; no meaning."""

from __future__ import annotations

import re
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


def chunk_index(name: str, dimensions: int) -> int:
    """Which chunk along the first dimension a file has by its name; -1 if it is no chunk file."""
    found = re.fullmatch(r"c\.(0|[1-9]\d*)" + r"\.0" * (dimensions - 1), name)
    return int(found[1]) if found else -1
