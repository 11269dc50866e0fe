"""Copies stored records from wherever they are. Knows places; changes nothing, knows no cache."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from .log import RecordLog
from .mapped import MappedRows
from .stats import Counters


class StoredRecords:
    """The records in the table's chunks and in the logs.

    Args:
        chunks: the table, as far as it is written.
        logs: both of them, whichever is active.
        counters: where reads are counted.
    """

    def __init__(
        self, chunks: MappedRows, logs: tuple[RecordLog, RecordLog], counters: Counters
    ) -> None:
        self._chunks = chunks
        self._logs = logs
        self._counters = counters

    def read(self, rows: torch.Tensor, homes: torch.Tensor) -> torch.Tensor:
        """Copy the stored records of rows; zeros where nothing is stored.

        Args:
            rows: ``(n,) int64``.
            homes: ``(n,)``, where each is stored: 0 or -(p + 1).

        Returns:
            ``(n, W)``.
        """
        self._counters.bytes_read += len(rows) * self._chunks.row_bytes
        if not (homes < 0).any():
            return self._chunks.gather(rows)
        out = self._chunks.empty(len(rows))
        for source, chosen, indices in self._by_source(rows, homes):
            out[chosen] = source.gather(indices)
        return out

    def has_chunk(self, index: int) -> bool:
        """Whether a chunk of the table has a file; its rows are in the logs at most where not."""
        return self._chunks.has_file(index)

    def in_chunks(self, rows: torch.Tensor) -> torch.Tensor:
        """Copy what the chunk files have of ``(n,) int64`` rows, which counts as no read.

        Returns:
            ``(n, W)``.
        """
        return self._chunks.gather(rows)

    def announce(self, rows: torch.Tensor, homes: torch.Tensor) -> None:
        """Have the stored records of rows, as in `read`, read ahead into the page cache.

        Any thread may call it at any time, without the table's lock: what moves meanwhile is
        announced for nothing, or not at all. Logs and maps are replaced, never taken away, indices
        stay within them whatever ``homes`` say, and a map's memory stays while it is announced.
        """
        for source, _, indices in self._by_source(rows, homes):
            source.announce(indices)

    def _by_source(
        self, rows: torch.Tensor, homes: torch.Tensor
    ) -> Iterator[tuple[MappedRows | RecordLog, torch.Tensor, torch.Tensor]]:
        """Yield each array that stores some of the rows, which ones, and where in it they are."""
        positions = -(homes.to(torch.int64) + 1)
        sources: list[tuple[MappedRows | RecordLog, torch.Tensor, torch.Tensor]] = [
            (self._chunks, homes >= 0, rows)
        ]
        for log in self._logs:
            local = positions - log.base
            sources.append((log, (local >= 0) & (local < log.shape.capacity), local))
        for source, wanted, indices in sources:
            chosen = wanted.nonzero().squeeze(1)
            if len(chosen):
                yield source, chosen, indices.index_select(0, chosen)
