"""Measures a merge beside what the disk can read and write at once, and what a log costs before it.

Does not measure training.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import torch

from .disk_rates import check_space, data_files, drop_from_page_cache, mixed_rate
from .embedding import DiskEmbedding
from .figures import Figures
from .references import train_step
from .timing import add_counters, import_table, seconds
from .workloads import record_bytes


@dataclass(frozen=True)
class Settings:
    """What to measure: see the options of ``bench merge``."""

    rows: int = 10_000_000
    dim: int = 128
    touched: int = 4_000_000
    batch: int = 16384
    cache_bytes: int | None = None
    memory_limit: int = 4 << 30
    seed: int = 0

    @property
    def cache(self) -> int:
        """Bytes of the cache: a quarter of the memory, if nothing else is said."""
        return self.cache_bytes or self.memory_limit // 4


def measure(settings: Settings, figures: Figures, folder: Path) -> None:
    """Steps on random rows, each once, a commit, and the flush that merges them.

    The merge reads the table's chunks and the log, and writes the chunks anew. It cannot be faster
    than reading both at the rate that the disk has while it writes as much. Before that, with all
    records in the log, a snapshot is made, and the table returns to its commit.
    """
    check_space(folder, int(2.8 * settings.rows * record_bytes(settings.dim)))
    path, scratch = folder / "table.zarr", folder / "mixed"
    figures.section(f"{settings.touched:,} of {settings.rows:,} rows x {settings.dim}")
    import_table(figures, path, settings.rows, settings.dim, settings.seed)
    with DiskEmbedding.open(path, cache_bytes=settings.cache) as table:
        generator = torch.Generator().manual_seed(settings.seed)
        rows = torch.randperm(settings.rows, generator=generator)[: settings.touched]
        for ids in rows.split(settings.batch):
            train_step(table, ids, torch.ones(len(ids), settings.dim))
    rates = []

    def measure_disk() -> None:
        rates.append(mixed_rate(data_files(path / "table"), scratch))
        scratch.unlink()

    measure_disk()
    drop_from_page_cache(data_files(path))
    with DiskEmbedding.open(path, cache_bytes=settings.cache) as table:
        copy = folder / "snapshot.zarr"
        figures.add("snapshot by second names", "s", [seconds(lambda: table.snapshot(copy))])
        shutil.rmtree(copy)
        figures.add("rollback", "s", [seconds(table.rollback)])
        # Without the part of the files that is reserved and not written.
        nbytes = (settings.rows + settings.touched) * record_bytes(settings.dim)
        taken = seconds(table.flush)
        measure_disk()
        disk = figures.add(
            "sequential read while writing as much", "GB/s", [rate / 1e9 for rate in rates]
        )
        figures.add("merge", "s", [taken], x_disk=taken / (nbytes / 1e9 / disk))
        add_counters(figures, table)
