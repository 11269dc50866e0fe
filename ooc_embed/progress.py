"""Shows how far something long has come, where tqdm is installed. Knows nothing of what it is."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import TypeVar

try:
    with warnings.catch_warnings():
        # In a notebook without ipywidgets it warns, and shows bars of text.
        warnings.simplefilter("ignore")
        from tqdm.auto import tqdm
except ImportError:  # an extra: without it there is no progress to see
    tqdm = None

_Item = TypeVar("_Item")


def progress(
    items: Iterable[_Item], text: str, unit: str, total: int | None = None
) -> Iterable[_Item]:
    """Show progress over ``items``, if it takes a moment; ``total`` where they have no length."""
    if tqdm is None:
        return items
    shown: Iterable[_Item] = tqdm(items, desc=text, unit=unit, total=total, delay=2, leave=False)
    return shown
