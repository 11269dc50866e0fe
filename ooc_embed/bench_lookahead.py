"""Measures how far reading ahead hides reads behind compute; does not measure evictions."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from .cache import SLOT_BYTES
from .disk_rates import PAGE_BYTES, check_space, data_files, drop_from_page_cache
from .embedding import DiskEmbedding
from .figures import Figures
from .lookahead import lookahead
from .timing import import_table, seconds
from .workloads import record_bytes, scattered_rows

_WIDTH = 512  # of the square matrices that the compute multiplies
_PARTS = 3  # each on rows of its own: those of an earlier part lie together in the log


@dataclass(frozen=True)
class Settings:
    """What to measure: see the options of ``bench lookahead``."""

    rows: int = 4_000_000
    dim: int = 128
    batch: int = 16384
    steps: int = 20
    seed: int = 0


def measure(settings: Settings, figures: Figures, folder: Path) -> None:
    """Reads alone, compute alone that takes as long, then both, without and with reading ahead.

    Every row is looked up cold once, no two on the same page, so that each is a read from the disk.
    The cache holds the rows of a part: nothing is evicted.
    """
    check_space(folder, int(1.5 * settings.rows * record_bytes(settings.dim)))
    path = folder / "table.zarr"
    figures.section(f"{settings.rows:,} x {settings.dim}, batch {settings.batch:,}")
    rows = scattered_rows(
        settings.rows, record_bytes(settings.dim), page_bytes=PAGE_BYTES, seed=settings.seed
    )
    part = settings.steps * settings.batch
    if len(rows) < _PARTS * part:
        least = -(-_PARTS * part * settings.rows // len(rows))
        figures.skip("look-ahead", f"it needs {least:,} --rows, or fewer --steps")
        return
    first, second, third = (ids.split(settings.batch) for ids in rows.split(part)[:_PARTS])
    import_table(figures, path, settings.rows, settings.dim, settings.seed)
    target = torch.randn(settings.batch, settings.dim)

    def opened() -> DiskEmbedding:
        drop_from_page_cache(data_files(path))
        cache_bytes = part * (record_bytes(settings.dim) + SLOT_BYTES)
        return DiskEmbedding.open(path, cache_bytes=cache_bytes)

    with opened() as table:
        reads = _each_step(first, table)
        hot = _each_step(first, _training(table, target, repeats=0))
        repeats = _repeats(median(reads) - median(hot))
        alone = _each_step(first, _training(table, target, repeats))
    with opened() as table:
        plain = _each_step(second, _training(table, target, repeats))
    with opened() as table:
        ahead = _each_step(lookahead(third, table), _training(table, target, repeats))
    longer = max(median(reads), median(alone))
    for label, taken in (
        ("reads alone: lookups of cold rows", reads),
        ("compute alone: steps on hot rows", alone),
        ("both, no look-ahead", plain),
        ("both, with look-ahead", ahead),
    ):
        figures.add(label, "ms/step", [1e3 * s for s in taken], x_longer=median(taken) / longer)


def _each_step(batches: Iterable[Tensor], step: Callable[[Tensor], object]) -> list[float]:
    """Seconds of each step, waiting for its batch included."""
    taken = []
    last = time.perf_counter()
    for ids in batches:
        step(ids)
        now = time.perf_counter()
        taken.append(now - last)
        last = now
    return taken


def _training(table: DiskEmbedding, target: Tensor, repeats: int) -> Callable[[Tensor], None]:
    """A step with a model's worth of compute between the lookup and its backward."""
    left, right = torch.randn(2, _WIDTH, _WIDTH)
    out = torch.empty(_WIDTH, _WIDTH)

    def step(ids: Tensor) -> None:
        rows = table(ids)
        for _ in range(repeats):
            torch.mm(left, right, out=out)
        rows.mul(target).sum().backward()

    return step


def _repeats(wanted: float) -> int:
    """How many products take ``wanted`` seconds; the second of two trials counts."""
    left, right = torch.randn(2, _WIDTH, _WIDTH)
    for _ in range(2):
        taken = seconds(lambda: [torch.mm(left, right) for _ in range(10)]) / 10
    return max(1, round(wanted / taken))
