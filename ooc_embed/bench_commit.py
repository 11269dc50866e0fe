"""Measures commits beside the disk's own sequential writes; does not measure training."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch

from .cache import SLOT_BYTES
from .disk_rates import check_space, random_floats, write_sequentially
from .embedding import DiskEmbedding
from .figures import Figures
from .references import train_step
from .timing import add_counters, seconds
from .workloads import record_bytes


@dataclass(frozen=True)
class Settings:
    """What to measure: see the options of ``bench commit``."""

    rows: int = 10_000_000
    dim: int = 128
    dirty: int = 1_000_000
    batch: int = 16384
    rounds: int = 4
    seed: int = 0


def measure(settings: Settings, figures: Figures, folder: Path) -> None:
    """In turn a file written by the disk's best means and a commit of as many bytes.

    The rows are never imported, and those that are dirty fit into the cache: nothing is read. The
    log is not full as long as all rounds together are at most half of the table's rows.
    """
    nbytes = settings.dirty * record_bytes(settings.dim)
    check_space(folder, (settings.rounds + 2) * nbytes)
    generator = torch.Generator().manual_seed(settings.seed)
    rows = torch.randperm(settings.rows, generator=generator)[: settings.dirty]
    content = random_floats(settings.seed)
    disk, commits = [], []
    with DiskEmbedding(
        settings.rows,
        settings.dim,
        path=folder / "table.zarr",
        cache_bytes=(settings.dirty + settings.batch) * (record_bytes(settings.dim) + SLOT_BYTES),
    ) as table:
        for _ in range(settings.rounds):
            file = folder / "sequential"
            disk.append(write_sequentially(file, content, nbytes) / 1e9)
            file.unlink()
            for ids in rows.split(settings.batch):
                train_step(table, ids, torch.ones(len(ids), settings.dim))
            commits.append(seconds(table.commit))
        figures.section(f"{settings.dirty:,} of {settings.rows:,} rows x {settings.dim}")
        figures.add("sequential write of the disk (O_DIRECT)", "GB/s", disk)
        rates = [nbytes / taken / 1e9 for taken in commits]
        x_disk = median(rate / best for rate, best in zip(rates, disk, strict=True))
        figures.add("commit of dirty rows", "GB/s", rates, x_disk=x_disk)
        figures.add("the same", "s", commits)
        add_counters(figures, table)
