"""Brings rows from where they are to a batch, or into the cache. Knows no rule and no lock."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from . import initializers
from .cache import RowCache
from .evictor import Evictor
from .interrupts import uninterrupted
from .stats import Counters
from .storage import Storage

# Whole records that go through memory at once, where many rows are read.
_PIECE_BYTES = 32 << 20
_FEWEST_ROWS = 1024


class RowFetcher:
    """Reads rows from cache, logs and table.

    Args:
        cache: the hot rows, and where all others are.
        storage: the stored records.
        evictor: makes room in the cache.
        weight: columns of the weight in a record.
        version: column of the version.
        state: columns of new rows that do not begin as zeros, and as what.
        confine: what becomes of the weights of new rows.
        counters: where hits and misses are counted.

    Attributes:
        piece: so many whole records go through memory at once.
    """

    def __init__(
        self,
        cache: RowCache,
        storage: Storage,
        evictor: Evictor,
        weight: slice,
        version: int,
        state: Sequence[tuple[slice, float]],
        confine: Callable[[torch.Tensor], torch.Tensor],
        counters: Counters,
    ) -> None:
        layout = storage.store.layout
        self.piece = max(_PIECE_BYTES // layout.record_bytes, _FEWEST_ROWS)
        self._cache = cache
        self._storage = storage
        self._evictor = evictor
        self._weight = weight
        self._version = version
        self._counters = counters
        self._state = state
        self._confine = confine
        self._init = initializers.from_json(storage.manifest.init)
        # Of the last `fetch`: the rows, their slots, and the cache's departures by then.
        self._fetched = (no_rows := torch.empty(0, dtype=torch.int64, device="cpu"), no_rows, 0)

    def prefetch(self, rows: torch.Tensor) -> None:
        """Have those of ``(n,) int64`` rows that are not in the cache read ahead.

        Any thread may call it at any time: a row that has moved since is announced for nothing, or
        its lookup reads it, and a map that was closed meanwhile has no rows.
        """
        where = self._cache.where
        rows = rows.unique()
        rows = rows[rows < len(where)]
        homes = where.index_select(0, rows)
        cold = homes <= 0
        self._storage.stored.announce(rows[cold], homes[cold])

    def read(self, rows: torch.Tensor, span: slice, *, counted: bool = False) -> torch.Tensor:
        """Columns of rows in any order; neither cache nor disk change.

        Args:
            rows: ``(n,) int64``.
            span: the columns.
            counted: whether hits and misses count.

        Returns:
            ``(n, columns)``.
        """
        places = self._cache.find(rows).to(torch.int64)
        missing = (places <= 0).nonzero().squeeze(1)
        if counted:
            self._counters.looked_up(len(rows), len(missing))
        if not len(missing):
            return self._cache.records[:, span].index_select(0, places - 1)
        out = torch.empty(
            len(rows), span.stop - span.start, dtype=self._cache.records.dtype, device="cpu"
        )
        for part in range(0, len(rows), self.piece):
            block = slice(part, part + self.piece)
            out[block] = self.records_of(rows[block])[:, span]
        return out

    def records_of(self, rows: torch.Tensor) -> torch.Tensor:
        """The newest records of rows, wherever they are: ``(n, W)``."""
        places = self._cache.find(rows)
        hits = (places > 0).nonzero().squeeze(1)
        if not len(hits):
            return self._stored(rows, places)
        misses = (places <= 0).nonzero().squeeze(1)
        out = torch.empty(
            len(rows), self._cache.records.shape[1], dtype=self._cache.records.dtype, device="cpu"
        )
        out[hits] = self._cache.records.index_select(0, places[hits].to(torch.int64) - 1)
        if len(misses):
            out[misses] = self._stored(rows[misses], places[misses])
        return out

    def _stored(self, rows: torch.Tensor, homes: torch.Tensor) -> torch.Tensor:
        """Records from disk, with initial values where there is none: ``(n, W)``."""
        records = self._storage.stored.read(rows, homes)
        fresh = (records[:, self._version] == 0).nonzero().squeeze(1)
        if len(fresh):
            new = rows.index_select(0, fresh)
            manifest = self._storage.manifest
            values = self._init.rows(
                new, manifest.embedding_dim, manifest.seed, self._cache.records.dtype
            )
            values = self._confine(values)
            if manifest.padding_idx is not None:
                values[new == manifest.padding_idx] = 0
            records[fresh, self._weight] = values
            for span, value in self._state:
                records[fresh, span] = value
        return records

    def fetch(self, rows: torch.Tensor, *, counted: bool = False) -> torch.Tensor:
        """Bring sorted unique rows, no more than slots, into the cache: ``(n,)`` slots.

        A step on the rows of the last lookup, which is what most steps are, finds them at once.
        """
        known, slots, departures = self._fetched
        # The same memory, which cannot have been given to other rows: this still holds it.
        same = rows.data_ptr() == known.data_ptr() and len(rows) == len(known)
        if same and not counted and departures == self._cache.departures:
            return slots
        slots = self._fetch(rows, counted=counted)
        self._fetched = rows, slots, self._cache.departures
        return slots

    def _fetch(self, rows: torch.Tensor, *, counted: bool) -> torch.Tensor:
        self._evictor.settle()
        places = self._cache.find(rows).to(torch.int64)
        missing = (places <= 0).nonzero().squeeze(1)
        if counted:
            self._counters.looked_up(len(rows), len(missing))
        if not len(missing):
            self._cache.begin_batch(places - 1)
            return places - 1
        self._cache.begin_batch(places[places > 0] - 1)
        self._evictor.make_room(len(missing))
        for part in missing.split(self.piece):
            wanted = rows.index_select(0, part)
            homes = self._cache.find(wanted)
            records = self._stored(wanted, homes)
            slots = self._cache.free_slots(len(part))
            with uninterrupted():
                self._cache.records[slots] = records
                self._cache.insert(slots, wanted, homes)
            places[part] = slots + 1
        self._evictor.begin_ahead()
        return places - 1
