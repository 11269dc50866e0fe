"""Times actions and imports, and reads a table's counters; does not know what is compared."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from pathlib import Path

import torch
from torch import Tensor

from .embedding import DiskEmbedding
from .figures import Figures
from .workloads import RepeatedRows

# Trains on ids (n,) with the gradient (n, D).
Step = Callable[[Tensor, Tensor], None]
Rounds = list[list[Tensor]]


def seconds(action: Callable[[], object]) -> float:
    """How long ``action`` takes."""
    begin = time.perf_counter()
    action()
    return time.perf_counter() - begin


def touch_every_row(steps: Iterable[Step], rows: int, dim: int) -> None:
    """Trains every row once, so that none is cold."""
    for start in range(0, rows, 16384):
        ids = torch.arange(start, min(start + 16384, rows))
        for step in steps:
            step(ids, torch.ones(len(ids), dim))


def interleaved(
    contestants: Mapping[str, Step], rounds: Rounds, dim: int
) -> dict[str, list[float]]:
    """Seconds a step, one figure a round; in each round all contestants take the same batches one
    after the other, so that the machine's noise hits all alike. The first round only warms up."""
    target = torch.randn(len(rounds[0][0]), dim)
    taken: dict[str, list[float]] = {name: [] for name in contestants}
    for drawn in rounds:
        for name, step in contestants.items():
            begin = time.perf_counter()
            for ids in drawn:
                step(ids, target)
            taken[name].append((time.perf_counter() - begin) / len(drawn))
    return {name: own[1:] for name, own in taken.items()}


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
