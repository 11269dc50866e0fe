"""Measures what a prediction needs: a folder's disk, and the steps of a small table there."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np
import torch
from torch import Tensor

from .cache import SLOT_BYTES
from .disk_rates import (
    PAGE_BYTES,
    check_space,
    data_files,
    drop_from_page_cache,
    mixed_rate,
    random_floats,
    sequential_read_rate,
    write_sequentially,
)
from .embedding import DiskEmbedding
from .manifest import record_fields
from .prediction import Rates
from .references import train_step
from .rule import Rule
from .timing import seconds
from .workloads import DISTRIBUTIONS, RepeatedRows, scattered_rows

SCRATCH_BYTES = 1 << 30
# Near the origin, where any rule admits them, and not zeros, which a disk might not store.
_ROW_SCALE = 1e-6
_LOOKUPS, _FEWEST_LOOKUPS = 8, 4
_STEPS = 12
_WARM_UP = 3


def measure(
    folder: Path,
    num_rows: int,
    dim: int,
    rule: Rule,
    dtype: torch.dtype,
    batch: int,
) -> Rates:
    """Writes files into a new folder in ``folder``, times what is done with them, removes them.

    The small table has the planned one's rule, dtype and dim. Its lookups are of rows on pages of
    their own, and its steps are on ids that repeat as often as the planned one's do.

    Args:
        folder: on the disk to measure.
        num_rows, dim, rule, dtype: of the table that is planned.
        batch: ids of a step.

    Raises:
        OSError: too little space, or a disk that refuses O_DIRECT.
    """
    record = sum(record_fields(dim, rule).values()) * dtype.itemsize
    rows = max(SCRATCH_BYTES // record, 2 * batch)
    check_space(folder, 2 * max(SCRATCH_BYTES, rows * record))
    with tempfile.TemporaryDirectory(dir=folder, prefix="ooc-embed-plan-") as scratch:
        write, read, mixed = _measure_blocks(Path(scratch))
        path = Path(scratch) / "table.zarr"
        init = RepeatedRows(rows, dim, scale=_ROW_SCALE)
        DiskEmbedding(
            rows, dim, path=path, optimizer=rule, dtype=dtype, init=init, cache_bytes=1
        ).close()
        reads, cached_reads = _measure_lookups(path, rows, record, batch)
        hot = min(rows, 8 * batch)
        steps = _measure_steps(path, hot * (record + SLOT_BYTES), hot, num_rows, batch)
    return Rates(record, batch, write, read, mixed, reads, cached_reads, steps)


def _measure_blocks(folder: Path) -> tuple[float, float, float]:
    """Bytes a second of writes, of reads, and of both at once."""
    file, copy = folder / "blocks", folder / "copy"
    write = write_sequentially(file, random_floats(0), SCRATCH_BYTES)
    read = sequential_read_rate([file])
    mixed = mixed_rate([file], copy, nbytes=SCRATCH_BYTES)
    file.unlink()
    copy.unlink()
    return write, read, mixed


def _measure_lookups(path: Path, rows: int, record: int, batch: int) -> tuple[float, float]:
    """Rows a second, beyond the time of rows in the cache: from the disk, from the page cache."""
    drop_from_page_cache(data_files(path / "table"))
    scattered = scattered_rows(rows, record, page_bytes=PAGE_BYTES, seed=0)
    count = min(batch, len(scattered) // _FEWEST_LOOKUPS)
    parts = scattered.split(count)[: min(_LOOKUPS, len(scattered) // count)]
    # Room for two of them, so that each has left the cache when its turn comes again.
    with (
        DiskEmbedding.open(path, cache_bytes=2 * count * (record + SLOT_BYTES)) as table,
        torch.no_grad(),
    ):
        cold = [seconds(partial(table, ids)) for ids in parts]
        warm = [seconds(partial(table, ids)) for ids in parts]
        hot = [seconds(partial(table, parts[-1])) for _ in parts]
    return _rate(count, cold, hot), _rate(count, warm, hot)


def _rate(rows: int, taken: Sequence[float], in_cache: Sequence[float]) -> float:
    """Rows a second of what lookups took longer than those of rows in the cache."""
    longer = median(taken) - median(in_cache)
    # On a busy machine noise may exceed what little a copy out of the page cache takes.
    return rows / longer if longer > 0 else math.inf


def _measure_steps(
    path: Path, cache_bytes: int, hot: int, num_rows: int, batch: int
) -> dict[str, float]:
    """Seconds of a step whose rows are all cached, by the distribution of its ids."""
    rng = np.random.default_rng(0)
    with DiskEmbedding.open(path, cache_bytes=cache_bytes) as table:
        target = torch.randn(batch, table.embedding_dim, dtype=table.weight.dtype)
        with torch.no_grad():
            for ids in torch.arange(hot).split(batch):
                table(ids)
        return {
            name: _step_seconds(
                table, [_ids(name, num_rows, batch, hot, rng) for _ in range(_STEPS)], target
            )
            for name in DISTRIBUTIONS
        }


def _step_seconds(table: DiskEmbedding, batches: Sequence[Tensor], target: Tensor) -> float:
    taken = [seconds(partial(train_step, table, ids, target)) for ids in batches]
    return median(taken[_WARM_UP:])


def _ids(name: str, num_rows: int, batch: int, hot: int, rng: np.random.Generator) -> Tensor:
    """A batch that repeats its ids as one of the large table does, out of the first rows."""
    if name == "uniform":
        ranks = rng.integers(num_rows, size=batch)
    else:  # by the inverse of a distribution that has 1/k nearly, in no memory
        ranks = np.rint(0.5 * (2 * num_rows + 1) ** rng.random(batch)).astype(np.int64)
    unique, inverse = np.unique(ranks, return_inverse=True)
    return torch.from_numpy(rng.choice(hot, len(unique), replace=False)[inverse])
