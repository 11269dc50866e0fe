"""Times actions and imports, and reads a table's counters; does not know what is compared."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

from .embedding import DiskEmbedding
from .figures import Figures
from .workloads import RepeatedRows


def seconds(action: Callable[[], object]) -> float:
    """How long ``action`` takes."""
    begin = time.perf_counter()
    action()
    return time.perf_counter() - begin


def import_table(figures: Figures, path: Path, rows: int, dim: int, seed: int) -> None:
    """Makes a table whose rows have all been written, since others cost no read."""
    init = RepeatedRows(rows, dim, seed=seed)
    taken = seconds(lambda: DiskEmbedding(rows, dim, path=path, init=init, cache_bytes=1).close())
    figures.add("import of every row", "rows/s", [rows / taken], seconds=taken)


def add_counters(figures: Figures, table: DiskEmbedding) -> None:
    """Adds what the table counted since it was opened."""
    stats = table.stats()
    for field in fields(stats):
        value = getattr(stats, field.name)
        label = field.name.replace("_", " ")
        if field.name.startswith("bytes"):
            figures.add(label, "GB", [value / 1e9])
        else:
            figures.add(label, "s" if field.name.endswith("seconds") else "", [value])
    if stats.hits + stats.misses:
        figures.add("hit rate", "", [stats.hit_rate])
