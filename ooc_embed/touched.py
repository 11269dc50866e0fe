"""How many rows of each part of a table were ever written, counted or from a sample.

Knows the cache, the map from rows to places and the chunk files; changes none of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from .cache import RowCache
from .manifest import Layout
from .places import StoredRecords

_MOST_PARTS = 60
# Records that are read from chunk files in all. Where there are more, a sample of so many is.
_READ_BYTES = 64 << 20


@dataclass(frozen=True)
class Touched:
    """Rows of a table, whole chunks of it, and how many of them were ever written.

    Attributes:
        start, stop: the rows.
        written: how many have a version above 0.
        exact: whether all were looked at; else ``written`` is an estimate from a sample.
    """

    start: int
    stop: int
    written: int
    exact: bool

    @property
    def share(self) -> float:
        return self.written / (self.stop - self.start)


def count_touched(
    cache: RowCache, stored: StoredRecords, layout: Layout, version: int
) -> tuple[Touched, ...]:
    """Count the written rows of a table by its chunks, of which at most 60 parts are made.

    Rows in the cache and in the logs are counted in memory. Of the others those in chunk files are
    read, all or a sample of each file; a chunk that has no file yet costs nothing.

    Args:
        cache: the hot rows, and where all others are.
        stored: the stored records.
        layout: sizes.
        version: column of the version.
    """
    files = sum(map(stored.has_chunk, range(layout.num_chunks)))
    most = max(_READ_BYTES // layout.record_bytes // max(files, 1), 1)
    step = -(-layout.num_chunks // _MOST_PARTS)
    return tuple(
        _count(cache, stored, layout, version, range(layout.num_chunks)[first : first + step], most)
        for first in range(0, layout.num_chunks, step)
    )


def _count(
    cache: RowCache,
    stored: StoredRecords,
    layout: Layout,
    version: int,
    chunks: range,
    most: int,
) -> Touched:
    """Count one part, reading at most ``most`` rows of each of its chunks."""
    start = chunks.start * layout.chunk_rows
    stop = min(chunks.stop * layout.chunk_rows, layout.num_embeddings)
    versions = cache.records.numpy()[:, version]
    written, exact = 0.0, True
    drawn, weights = [], []
    # Of its own, for the user's random numbers; the same each time, for equal cards.
    random = np.random.default_rng(start)
    for index in chunks:
        first = index * layout.chunk_rows
        where = cache.where.numpy()[first : min(first + layout.chunk_rows, stop)]
        written += np.count_nonzero(where < 0)  # only rows that were written are logged
        written += np.count_nonzero(versions[where[where > 0] - 1])
        if not stored.has_chunk(index):
            continue
        unread = np.flatnonzero(where == 0)
        rows = unread
        if len(unread) > most:
            rows, exact = np.sort(random.choice(unread, most, replace=False)), False
        drawn.append(rows + first)
        weights.append(np.full(len(rows), len(unread) / max(len(rows), 1)))
    if drawn:
        found = stored.in_chunks(torch.from_numpy(np.concatenate(drawn))).numpy()[:, version]
        written += np.concatenate(weights)[found > 0].sum()
    return Touched(start, stop, round(written), exact)
