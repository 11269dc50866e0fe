"""Measures tables larger than memory; does not know how memory came to be limited."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from .disk_rates import (
    PAGE_BYTES,
    random_read_rate,
    sequential_read_rate,
    write_sequentially,
)
from .embedding import DiskEmbedding
from .figures import Figures
from .references import MEMMAP_FIELDS, MemmapTable, train_step
from .workloads import DISTRIBUTIONS, RepeatedRows, batches, scattered_rows

_MEMMAP_BATCH = 2048  # a cold step of more may take minutes, and rows/s do not depend on it


@dataclass(frozen=True)
class Settings:
    """What to measure: see the options of ``bench cold``."""

    rows: int
    dim: int
    batch: int
    steps: int
    seconds: float
    cache_bytes: int
    seed: int

    @property
    def disk_seconds(self) -> float:
        """For each of the disk's rates, which do not move after a moment."""
        return min(3.0, self.seconds)

    @property
    def record_bytes(self) -> int:
        """A row with its moments and its version, float32."""
        return 4 * (3 * self.dim + 1)

    @property
    def pages_per_record(self) -> float:
        """How many 4 KiB pages a record that may begin anywhere lies on, on average."""
        return 1 + (self.record_bytes - 4) / PAGE_BYTES


def measure(settings: Settings, figures: Figures, folder: Path) -> None:
    """The disk, the np.memmap loop, then the table, one after the other, in ``folder``.

    Raises:
        OSError: the disk is too small, or refuses O_DIRECT.
    """
    _check_space(settings, folder)
    memmap_rates = _measure_memmap(settings, figures, folder)
    path = folder / "table.zarr"
    _import_table(settings, figures, path)
    _measure_cold_reads(settings, figures, path)
    for distribution in DISTRIBUTIONS:
        _measure_training(settings, figures, path, distribution, memmap_rates[distribution])


def _check_space(settings: Settings, folder: Path) -> None:
    # The table, the chunks that a merge writes anew, and the log it reads: at most half the rows.
    needed = int(1.1 * settings.rows * settings.record_bytes * 1.5)
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise OSError(
            f"{folder} has {free / 1e9:.1f} GB free, {settings.rows:,} rows x {settings.dim} need "
            f"{needed / 1e9:.1f} GB: use fewer --rows, or another --path"
        )


def _measure_memmap(settings: Settings, figures: Figures, folder: Path) -> dict[str, float]:
    files = [folder / field for field in MEMMAP_FIELDS]
    # Second moments are not negative, and zeros could be stored as holes: numbers from 0 to 1.
    content = np.random.default_rng(settings.seed).random(1 << 20, dtype=np.float32)
    written = [
        write_sequentially(file, content.view(np.uint8), 4 * settings.rows * settings.dim)
        for file in files
    ]
    figures.section("the disk itself (O_DIRECT)")
    figures.add("sequential write", "GB/s", [rate / 1e9 for rate in written])
    read = [sequential_read_rate([file], seconds=settings.disk_seconds) / 1e9 for file in files]
    figures.add("sequential read", "GB/s", read)
    figures.add(
        "random 4 KiB reads", "reads/s", [random_read_rate(files, seconds=settings.disk_seconds)]
    )

    figures.section(f"np.memmap x3, synchronous, batch {_MEMMAP_BATCH:,}")
    rates = {}
    table = MemmapTable(folder, settings.rows, settings.dim)
    target = torch.randn(_MEMMAP_BATCH, settings.dim)
    for distribution in DISTRIBUTIONS:
        _drop_from_page_cache(files)
        drawn = batches(distribution, settings.rows, _MEMMAP_BATCH, seed=settings.seed)
        timed = _Timed(table.step)
        while timed.seconds < settings.seconds:
            timed.step(next(drawn), target)
        rates[distribution] = figures.add(
            f"training, {distribution} ids",
            "rows/s",
            [timed.rows / timed.seconds],
            samples_per_s=timed.ids / timed.seconds,
        )
    del table, timed
    for file in files:
        file.unlink()
    return rates


def _import_table(settings: Settings, figures: Figures, path: Path) -> None:
    figures.section(f"DiskEmbedding, {settings.rows:,} x {settings.dim}")
    begin = time.perf_counter()
    DiskEmbedding(
        settings.rows,
        settings.dim,
        path=path,
        init=RepeatedRows(settings.rows, settings.dim, seed=settings.seed),
        cache_bytes=settings.cache_bytes,
    ).close()
    seconds = time.perf_counter() - begin
    figures.add("import of every row", "rows/s", [settings.rows / seconds], seconds=seconds)


def _measure_cold_reads(settings: Settings, figures: Figures, path: Path) -> None:
    files = _files(path / "table")
    _drop_from_page_cache(files)
    disk = random_read_rate(files, seconds=settings.disk_seconds)
    rows = scattered_rows(
        settings.rows, settings.record_bytes, page_bytes=PAGE_BYTES, seed=settings.seed
    )
    rates = []
    begin = time.perf_counter()
    with DiskEmbedding.open(path, cache_bytes=settings.cache_bytes) as table, torch.no_grad():
        for start in range(0, len(rows), settings.batch):
            ids = rows[start : start + settings.batch]
            if time.perf_counter() - begin > settings.seconds:
                break
            before = time.perf_counter()
            table(ids)
            rates.append(len(ids) / (time.perf_counter() - before))
    figures.add("random 4 KiB reads of the disk, same files", "reads/s", [disk])
    figures.add(
        "lookups of uncached rows",
        "rows/s",
        rates,
        x_disk=float(np.median(rates)) / (disk / settings.pages_per_record),
    )


def _measure_training(
    settings: Settings, figures: Figures, path: Path, distribution: str, memmap_rate: float
) -> None:
    _drop_from_page_cache(_files(path))
    drawn = batches(distribution, settings.rows, settings.batch, seed=settings.seed)
    target = torch.randn(settings.batch, settings.dim)
    with DiskEmbedding.open(path, cache_bytes=settings.cache_bytes) as table:
        warmup, steps = (_Timed(partial(train_step, table)) for _ in range(2))
        unseen = np.ones(settings.rows, dtype=np.bool_)
        # Until evictions have begun; Zipf ids may never fill a cache, so not for ever.
        cached = settings.cache_bytes // settings.record_bytes
        while settings.rows - unseen.sum() < cached and warmup.seconds < 2 * settings.seconds:
            ids = next(drawn)
            unseen[ids.numpy()] = False
            warmup.step(ids, target)
        for _ in range(settings.steps):
            steps.step(next(drawn), target)
        commit = _seconds(table.commit)
        merge = _seconds(table.flush)
    figures.section(f"DiskEmbedding, batch {settings.batch:,}, {distribution} ids")
    figures.add(
        "training, between merges",
        "rows/s",
        [steps.rows / steps.seconds],
        samples_per_s=steps.ids / steps.seconds,
        x_memmap=steps.rows / steps.seconds / memmap_rate,
    )
    figures.add("a step", "ms", [1e3 * seconds for seconds in steps.each])
    figures.add("the commit after it", "s", [commit])
    figures.add("the merge after that (flush)", "s", [merge])
    total = warmup.seconds + steps.seconds + commit + merge
    rows = warmup.rows + steps.rows
    figures.add(
        "training with its commit and merge",
        "rows/s",
        [rows / total],
        steps=len(warmup.each) + len(steps.each),
    )


class _Timed:
    """Trains and adds up: the seconds, the ids, and the rows (an id that repeats counts once)."""

    def __init__(self, train: Callable[[Tensor, Tensor], None]) -> None:
        self._train = train
        self.each: list[float] = []
        self.ids = 0
        self.rows = 0

    @property
    def seconds(self) -> float:
        return sum(self.each)

    def step(self, ids: Tensor, target: Tensor) -> None:
        """One training step, timed."""
        begin = time.perf_counter()
        self._train(ids, target)
        self.each.append(time.perf_counter() - begin)
        self.ids += len(ids)
        self.rows += len(np.unique(ids.numpy()))


def _seconds(action: Callable[[], object]) -> float:
    begin = time.perf_counter()
    action()
    return time.perf_counter() - begin


def _files(folder: Path) -> list[Path]:
    """All data files below a folder of zarr arrays."""
    return [file for file in folder.rglob("*") if file.is_file() and file.name != "zarr.json"]


def _drop_from_page_cache(files: Sequence[Path]) -> None:
    """Makes the next read of closed files one from the disk; needs no root and disturbs nobody."""
    for file in files:
        fd = os.open(file, os.O_RDONLY)
        try:
            os.fsync(fd)  # only clean pages are dropped
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)
