"""Measures whether a step takes longer because the table is larger; varies nothing else."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from .cache import SLOT_BYTES
from .disk_rates import PAGE_BYTES, check_space, data_files, drop_from_page_cache
from .embedding import DiskEmbedding
from .figures import Figures
from .references import train_step
from .timing import import_table, seconds
from .workloads import record_bytes, scattered_rows

# Rows in batches. A hot row is drawn every other step, so that it is never the longest unused one.
_HOT_BATCHES = 2
_CACHED_BATCHES = 3


@dataclass(frozen=True)
class Settings:
    """What to measure: see the options of ``bench growth``."""

    rows: tuple[int, ...] = (1_000_000, 10_000_000, 30_000_000)
    dim: int = 128
    batch: int = 16384
    hit_rate: float = 0.9
    rounds: int = 5
    steps: int = 20
    seed: int = 0


def measure(settings: Settings, figures: Figures, folder: Path) -> None:
    """The same steps on tables of several sizes, one after the other."""
    base = 0.0
    for rows in settings.rows:
        figures.section(f"{rows:,} x {settings.dim}, batch {settings.batch:,}")
        try:
            check_space(folder, int(1.1 * rows * record_bytes(settings.dim)))
        except OSError as error:
            figures.skip("training", str(error))
            continue
        base = _measure_size(settings, figures, folder / "table.zarr", rows, base)


def _measure_size(
    settings: Settings, figures: Figures, path: Path, rows: int, base: float
) -> float:
    """One size; the rate of the first one measured."""
    hot, cold = _hot_and_cold(settings, rows)
    misses = max(1, round((1 - settings.hit_rate) * settings.batch))
    warmup = 2 + (_CACHED_BATCHES - _HOT_BATCHES) * settings.batch // misses  # then it evicts
    needed = misses * (warmup + settings.rounds * settings.steps)
    if len(cold) < needed:
        least = -(-needed * rows // max(len(cold), 1))
        figures.skip("training", f"that many steps on new rows need {least:,} --rows")
        return base
    import_table(figures, path, rows, settings.dim, settings.seed)
    drop_from_page_cache(data_files(path))
    slot_bytes = record_bytes(settings.dim) + SLOT_BYTES
    cache_bytes = _CACHED_BATCHES * settings.batch * slot_bytes
    drawn = _batches(settings, hot, cold, misses)
    target = torch.randn(settings.batch, settings.dim)
    with DiskEmbedding.open(path, cache_bytes=cache_bytes) as table:
        for ids in (*hot.split(settings.batch), *islice(drawn, warmup)):
            train_step(table, ids, torch.ones(len(ids), settings.dim))
        before = table.stats()
        rates = []
        for _ in range(settings.rounds):
            batches = list(islice(drawn, settings.steps))
            begin = time.perf_counter()
            for ids in batches:
                train_step(table, ids, target)
            rates.append(settings.steps * settings.batch / (time.perf_counter() - begin))
        after = table.stats()
        base = base or median(rates)
        figures.add("training", "rows/s", rates, x_first=median(rates) / base)
        hits, missed = after.hits - before.hits, after.misses - before.misses
        figures.add("hit rate", "", [hits / max(1, hits + missed)])
        figures.add("a commit after it", "s", [seconds(table.commit)])
    shutil.rmtree(path)
    return base


def _hot_and_cold(settings: Settings, rows: int) -> tuple[Tensor, Tensor]:
    """Rows that stay in the cache, and rows in random order to be used once each.

    No two of all of them are on one page: whatever the size of the table, a miss is one read.
    """
    scattered = scattered_rows(
        rows, record_bytes(settings.dim), page_bytes=PAGE_BYTES, seed=settings.seed
    )
    hot = _HOT_BATCHES * settings.batch
    return scattered[:hot], scattered[hot:]


def _batches(settings: Settings, hot: Tensor, cold: Tensor, misses: int) -> Iterator[Tensor]:
    """Batches without repetitions: hot rows, and ``misses`` that were in none before."""
    generator = torch.Generator().manual_seed(settings.seed)
    for new in cold.split(misses):
        chosen = torch.randperm(len(hot), generator=generator)[: settings.batch - misses]
        yield torch.cat([hot[chosen], new])
