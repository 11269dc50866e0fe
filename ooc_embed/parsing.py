"""Checks values read from JSON, and names of chunk files. Knows types and bounds; no meaning."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, TypeVar

_Value = TypeVar("_Value")


def json_object(data: bytes) -> dict[str, Any]:
    """The object that a JSON text holds.

    Raises:
        ValueError: it is damaged, or holds something else.
    """
    try:
        value = json.loads(data)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError(f"it holds {value!r:.80} where an object was expected")
    return value


def integer(value: Any, low: int = 0, end: int = 1 << 62) -> int:
    """An integer that 64 bits hold; by default one that can be counted on from, too."""
    if type(value) is not int or not low <= value < end:
        raise ValueError(f"{value!r:.80} is no integer from {low} on, below {end}")
    return value


def number(value: Any, low: float, high: float) -> float:
    if type(value) not in (int, float) or not low <= value < high:
        raise ValueError(f"{value!r:.80} is no number from {low} to {high}")
    return float(value)


def text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r:.80} is no text")
    return value


def optional(parse: Callable[[Any], _Value], value: Any) -> _Value | None:
    return None if value is None else parse(value)


def chunk_index(name: str, dimensions: int) -> int:
    """Which chunk along the first dimension a file has by its name; -1 if it is no chunk file."""
    found = re.fullmatch(r"c\.(0|[1-9]\d*)" + r"\.0" * (dimensions - 1), name)
    return int(found[1]) if found else -1
