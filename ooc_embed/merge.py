"""Which sealed records a merge puts into which chunk. Knows one log; knows no cache and no store.

A log is a series of sorted runs with many records of one row; the last one wins. Per position this
keeps two bytes in memory, not the row ids.
"""

from __future__ import annotations

import numpy as np

from .log import RecordLog

_SEGMENT = 1 << 16


class NewestRecords:
    """The newest committed record of each row in a log, chunk by chunk of the table.

    Args:
        log: a log that takes no appends any more.
        chunk_rows, num_chunks: how the table is cut.
    """

    def __init__(self, log: RecordLog, chunk_rows: int, num_chunks: int) -> None:
        self._log = log
        self._chunk_rows = chunk_rows
        self._orders: list[np.ndarray] = []
        bounds = [np.zeros((0, num_chunks + 1), dtype=np.int32)]
        starts = np.arange(num_chunks + 1) * chunk_rows
        for _, rows in log.blocks(log.committed.records, _SEGMENT):
            order = np.argsort(rows, kind="stable").astype(np.uint16)
            self._orders.append(order)
            bounds.append(np.searchsorted(rows[order], starts)[None].astype(np.int32))
        self._bounds = np.concatenate(bounds)

    def chunks(self) -> list[int]:
        """Chunks that hold rows of the log, in order."""
        touched = (self._bounds[:, 1:] > self._bounds[:, :-1]).any(axis=0)
        return [int(index) for index in np.flatnonzero(touched)]

    def put(self, index: int, chunk: np.ndarray) -> None:
        """Put them into a chunk's ``(chunk_rows, W)`` records."""
        rows, positions = self._of_chunk(index)
        self._log.copy(positions, chunk, rows)

    def _of_chunk(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Rows within the chunk, unique, and the positions of their records, which ascend.

        Returns:
            Two ``(n,) int64`` arrays.
        """
        parts = [
            order[low:high].astype(np.int64) + segment * _SEGMENT
            for segment, (order, (low, high)) in enumerate(
                zip(self._orders, self._bounds[:, index : index + 2].tolist(), strict=True)
            )
            if high > low
        ]
        positions = np.sort(np.concatenate(parts))
        rows = self._log.rows(positions) - index * self._chunk_rows
        # Of repeated indices numpy keeps the last value.
        newest = np.empty(self._chunk_rows, dtype=np.int64)
        newest[rows] = positions
        kept = newest[rows] == positions
        return rows[kept], positions[kept]
