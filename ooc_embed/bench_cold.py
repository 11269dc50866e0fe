"""Measures tables larger than memory; does not know how memory came to be limited."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from .disk_rates import (
    PAGE_BYTES,
    check_space,
    data_files,
    drop_from_page_cache,
    random_floats,
    random_read_rate,
    random_write_rate,
    sequential_read_rate,
    write_sequentially,
)
from .embedding import DiskEmbedding
from .figures import Figures
from .lookahead import lookahead
from .references import MEMMAP_FIELDS, MappedTable, MemmapTable, train_step
from .timing import add_counters, import_table, seconds
from .workloads import DISTRIBUTIONS, Drawn, batches, record_bytes, scattered_rows

_MEMMAP_BATCH = 2048  # a cold step of more may take minutes, and rows/s do not depend on it


@dataclass(frozen=True)
class Settings:
    """What to measure: see the options of ``bench cold``."""

    rows: int = 10_000_000
    dim: int = 128
    batch: int = 16384
    distributions: tuple[str, ...] = DISTRIBUTIONS
    steps: int = 2500
    merges: int = 2
    commit_every: int = 100
    seconds: float = 20.0
    cache_bytes: int | None = None
    memory_limit: int = 4 << 30
    seed: int = 0

    @property
    def cache(self) -> int:
        """Bytes of the cache: a quarter of the memory, if nothing else is said."""
        return self.cache_bytes or self.memory_limit // 4

    @property
    def disk_seconds(self) -> float:
        """For each of the disk's rates, which do not move after a moment."""
        return min(3.0, self.seconds)

    @property
    def table_bytes(self) -> int:
        """Of all records."""
        return self.rows * record_bytes(self.dim)

    @property
    def pages_per_record(self) -> float:
        """How many 4 KiB pages a record that may begin anywhere lies on, on average."""
        return 1 + (record_bytes(self.dim) - 4) / PAGE_BYTES


# How fast others train on ids of a distribution, rows/s by the name of the ratio.
References = dict[str, float]


def measure(settings: Settings, figures: Figures, folder: Path) -> None:
    """The disk, the references, then the table, one after the other, in ``folder``.

    Raises:
        OSError: the disk is too small, or refuses O_DIRECT.
    """
    # The table, the chunks that a merge writes anew, and two logs of at most half the rows.
    check_space(folder, int(2.1 * settings.table_bytes))
    references: dict[str, References] = {name: {} for name in settings.distributions}
    _measure_memmap(settings, figures, folder, references)
    _measure_mapped(settings, figures, folder / "records", references)
    path = folder / "table.zarr"
    figures.section(f"DiskEmbedding, {settings.rows:,} x {settings.dim}")
    import_table(figures, path, settings.rows, settings.dim, settings.seed)
    _measure_cold_reads(settings, figures, path)
    for name, rates in references.items():
        drawn = Drawn.draw(name, settings.rows, settings.batch, settings.steps, seed=settings.seed)
        for ahead in (False, True):
            _measure_training(settings, figures, path, name, drawn, rates, ahead)


def _measure_memmap(
    settings: Settings, figures: Figures, folder: Path, references: dict[str, References]
) -> None:
    files = [folder / name for name in MEMMAP_FIELDS]
    content = random_floats(settings.seed)
    nbytes = 4 * settings.rows * settings.dim
    figures.section("the disk itself (O_DIRECT)")
    written = [write_sequentially(file, content, nbytes) / 1e9 for file in files]
    figures.add("sequential write", "GB/s", written)
    read = [sequential_read_rate([file], seconds=settings.disk_seconds) / 1e9 for file in files]
    figures.add("sequential read", "GB/s", read)
    reads = figures.add(
        "random 4 KiB reads", "reads/s", [random_read_rate(files, seconds=settings.disk_seconds)]
    )
    writes = figures.add(
        "random 4 KiB writes", "writes/s", [random_write_rate(files, seconds=settings.disk_seconds)]
    )
    x_disk = 1 / (settings.pages_per_record * (1 / reads + 1 / writes))
    figures.add("records read and written again in place", "rows/s", [x_disk])

    figures.section(f"np.memmap x3, synchronous, batch {_MEMMAP_BATCH:,}")
    table = MemmapTable(folder, settings.rows, settings.dim)
    for name, rates in references.items():
        drop_from_page_cache(files)
        rates["x_disk"] = x_disk
        ids = batches(name, settings.rows, _MEMMAP_BATCH, seed=settings.seed)
        timed = _Timed(table.step)
        target = torch.randn(_MEMMAP_BATCH, settings.dim)
        while timed.seconds < settings.seconds:
            timed.step(next(ids), target)
        rates["x_memmap"] = _add_rate(figures, f"training, {name} ids", timed)
    del table, timed
    for file in files:
        file.unlink()


def _measure_mapped(
    settings: Settings, figures: Figures, path: Path, references: dict[str, References]
) -> None:
    write_sequentially(path, random_floats(settings.seed), settings.table_bytes)
    figures.section(f"mapped in place, announced, no cache, batch {settings.batch:,}")
    target = torch.randn(settings.batch, settings.dim)
    for name, rates in references.items():
        drop_from_page_cache([path])
        ids = batches(name, settings.rows, settings.batch, seed=settings.seed)
        table = MappedTable(path, settings.rows, settings.dim)
        warmup, timed = _Timed(table.step), _Timed(table.step)
        while warmup.seconds < settings.seconds:  # fills the page cache
            warmup.step(next(ids), target)
        # What is timed pays for its own writes, all of them, and for nobody else's.
        table.flush()
        while timed.seconds < 2 * settings.seconds:
            timed.step(next(ids), target)
        timed.seconds += seconds(table.flush)
        rates["x_mapped"] = _add_rate(figures, f"training, {name} ids", timed)
        table.close()
    path.unlink()


def _add_rate(figures: Figures, label: str, timed: _Timed) -> float:
    rate, ids = timed.rows / timed.seconds, timed.ids / timed.seconds
    return figures.add(label, "rows/s", [rate], samples_per_s=ids)


def _measure_cold_reads(settings: Settings, figures: Figures, path: Path) -> None:
    files = data_files(path / "table")
    drop_from_page_cache(files)
    disk = random_read_rate(files, seconds=settings.disk_seconds)
    rows = scattered_rows(
        settings.rows, record_bytes(settings.dim), page_bytes=PAGE_BYTES, seed=settings.seed
    )
    rates = []
    begin = time.perf_counter()
    with DiskEmbedding.open(path, cache_bytes=settings.cache) as table, torch.no_grad():
        for ids in rows.split(settings.batch):
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
    settings: Settings,
    figures: Figures,
    path: Path,
    distribution: str,
    drawn: Drawn,
    references: References,
    ahead: bool,
) -> None:
    drop_from_page_cache(data_files(path))
    how = "look-ahead" if ahead else "no look-ahead"
    figures.section(f"DiskEmbedding, batch {settings.batch:,}, {distribution} ids, {how}")
    with DiskEmbedding.open(path, cache_bytes=settings.cache) as table:
        run = _train(settings, table, drawn, ahead)

        def add(label: str, steps: slice, taken: float) -> None:
            rate = float(drawn.rows[steps].sum()) / taken
            ratios = {name: rate / other for name, other in references.items()}
            number = len(drawn.rows[steps])
            samples = number * settings.batch / taken
            figures.add(label, "rows/s", [rate], steps=number, samples_per_s=samples, **ratios)

        add("training, its steps alone", slice(len(run.steps)), sum(run.steps))
        if len(run.merged) > 1:
            (first, begin), (last, end) = run.merged[0], run.merged[-1]
            add("training, from merge to merge", slice(first, last), end - begin)
        add("training, with commits, merges, flush", slice(len(run.steps)), run.seconds)
        figures.add("a step", "ms", [1e3 * taken for taken in run.steps])
        if run.commits:
            figures.add("a commit", "s", run.commits)
        figures.add("the flush at the end", "s", [run.flush])
        add_counters(figures, table)


@dataclass
class _Run:
    """A long training run.

    Attributes:
        steps, commits: seconds of each.
        merged: after how many steps, and at which second, each merge was seen to have ended.
        flush: seconds of the flush at the end.
        seconds: of everything.
    """

    steps: list[float] = field(default_factory=list)
    commits: list[float] = field(default_factory=list)
    merged: list[tuple[int, float]] = field(default_factory=list)
    flush: float = 0.0
    seconds: float = 0.0


def _train(settings: Settings, table: DiskEmbedding, drawn: Drawn, ahead: bool) -> _Run:
    """Takes steps until ``settings.merges`` merges have ended or there are no more batches."""
    run = _Run()
    target = torch.randn(settings.batch, settings.dim)
    begin = last = time.perf_counter()
    for ids in lookahead(drawn, table) if ahead else drawn:
        train_step(table, ids, target)
        run.steps.append(time.perf_counter() - last)
        if len(run.steps) % settings.commit_every == 0:
            run.commits.append(seconds(table.commit))
        last = time.perf_counter()
        if table.stats().merges > len(run.merged):
            run.merged.append((len(run.steps), last - begin))
            if len(run.merged) == settings.merges:
                break
    run.flush = seconds(table.flush)
    run.seconds = time.perf_counter() - begin
    return run


class _Timed:
    """Trains and adds up: the seconds, the ids, and the rows (an id that repeats counts once)."""

    def __init__(self, train: Callable[[Tensor, Tensor], None]) -> None:
        self._train = train
        self.seconds = 0.0
        self.ids = 0
        self.rows = 0

    def step(self, ids: Tensor, target: Tensor) -> None:
        """One training step, timed."""
        self.seconds += seconds(lambda: self._train(ids, target))
        self.ids += len(ids)
        self.rows += len(np.unique(ids.numpy()))
