"""Moves records that no commit has from one log to the other. Knows the map from rows to places."""

from __future__ import annotations

import torch

from .cache import RowCache
from .log import RecordLog
from .stats import Counters

# Rows whose places are looked at together where a whole log may have to move.
_ROWS = 1 << 20


class Tail:
    """The records behind a log's last commit, on their way into another log.

    Args:
        old: the log.
        new: an empty one.
        cache: holds the map.
    """

    def __init__(self, old: RecordLog, new: RecordLog, cache: RowCache) -> None:
        self._old = old
        self._new = new
        self._cache = cache
        self._low, self._high = old.base + old.committed.records, old.base + old.end
        self._moved: list[tuple[slice, int]] = []

    def copy(self, counters: Counters) -> None:
        """Append them to the other log: those that are their row's newest outside of the cache.

        Raises:
            OSError: the disk is full, or failed; the map is as it was.
        """
        old, new = self._old, self._new
        record_bytes = old.shape.width * old.shape.dtype.itemsize
        for start in range(0, len(self._cache.where), _ROWS):
            block = slice(start, start + _ROWS)
            rows = self._cache.stored_at(block, self._low, self._high)
            if len(rows):
                positions = -(self._cache.find(rows).to(torch.int64) + 1) - old.base
                new.accept(new.write(rows.numpy(), old.copier(positions)))
                counters.appended(len(rows), record_bytes)
                self._moved.append((block, new.base + new.end - len(rows)))

    def enter(self) -> None:
        """Have the map name the copies; memory only, and all of it or nothing may be seen."""
        for block, position in self._moved:
            rows = self._cache.stored_at(block, self._low, self._high)
            self._cache.rehome(rows, position)
        # Rows in the cache whose newest record stays behind must be stored again.
        self._cache.mark_dirty_at(self._low, self._high)
