"""The hot rows' records in RAM, and where every other row is. Knows no disk and no optimizer.

`where` has one integer per row: 0, the row is in the table; s + 1, in slot s of the cache;
-(p + 1), at position p of the logs. Each slot keeps its row's `home`, which is what `where` becomes
when the row leaves: 0 or -(p + 1).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from .cgroups import usable_memory
from .memory import huge_zeros

# Beside its record a slot has: row (8 bytes), home (8), used (4), free (4), dirty (1).
SLOT_BYTES = 25
_SAMPLE = 4096
_UNUSED = 2**31 - 1
# So many dirty slots are sorted at once; of more, the map is walked through in blocks of rows.
_SORTED_SLOTS = 1 << 22
_BLOCK_ROWS = 1 << 20
_INT32_POSITIONS = 2**31 - 1
# The part of the memory a process may use that a cache takes by default.
AUTO_SHARE = 4


def slots_for(cache_bytes: int | str, num_rows: int, record_bytes: int) -> int:
    """How many slots fit into ``cache_bytes``; never more than the table has rows.

    ``"auto"`` is a quarter of the memory that this process may use.
    """
    if isinstance(cache_bytes, str):
        cache_bytes = usable_memory() // AUTO_SHARE
    return max(1, min(cache_bytes // (record_bytes + SLOT_BYTES), num_rows))


def map_dtype(places: int) -> torch.dtype:
    """The element type of a map of rows to so many places."""
    return torch.int32 if places < _INT32_POSITIONS else torch.int64


class RowCache:
    """Slots for records, and the map from rows to places.

    Args:
        num_rows: rows of the table.
        slots: records that the cache can hold.
        width: columns of a record.
        dtype: element type.
        positions: positions that the logs have together.

    Attributes:
        records: ``(slots, W)``; memory is taken as slots are first used.
        where: ``(num_rows,)``, see the module.
        departures: how often rows have left the cache; until then all keep their slots.
    """

    def __init__(
        self, num_rows: int, slots: int, width: int, dtype: torch.dtype, positions: int
    ) -> None:
        self.slots = slots
        self.records = huge_zeros((slots, width), dtype)
        self.where = self.empty_map(num_rows, max(positions, slots))
        index = self.where.dtype
        self.row = torch.zeros(slots, dtype=torch.int64, device="cpu")
        self.home = torch.zeros(slots, dtype=index, device="cpu")
        self.dirty = torch.zeros(slots, dtype=torch.bool, device="cpu")
        self._used = torch.full((slots,), _UNUSED, dtype=torch.int32, device="cpu")
        self._free = torch.arange(slots - 1, -1, -1, dtype=torch.int32, device="cpu")
        self._num_free = slots
        self.departures = 0
        self._tick = 0
        # Choices of victims must not disturb the user's random numbers.
        self._generator = torch.Generator(device="cpu")
        self._generator.manual_seed(0)

    @staticmethod
    def empty_map(num_rows: int, places: int) -> torch.Tensor:
        """A map of rows to so many places: zeros, all are in the table.

        Raises:
            OSError: there is no memory for it.
        """
        return huge_zeros((num_rows,), map_dtype(places))

    def close(self) -> None:
        """Let go of the memory, though somebody may still have the cache: it has no rows then."""
        self.records = self.records.new_empty(0, self.records.shape[1])
        self.where = self.where.new_empty(0)

    @property
    def num_free(self) -> int:
        return self._num_free

    def find(self, rows: torch.Tensor) -> torch.Tensor:
        """Where each of ``(n,) int64`` rows is."""
        return self.where.index_select(0, rows)

    def begin_batch(self, slots: torch.Tensor) -> None:
        """Start a batch that uses these slots already: they are no victims."""
        self._tick += 1
        self._used.index_fill_(0, slots, self._tick)

    @property
    def tick(self) -> int:
        """The number of the last batch."""
        return self._tick

    def unused_since(self, slots: torch.Tensor, tick: int) -> torch.Tensor:
        """Which of these slots no batch after that one has used: ``(n,) bool``."""
        return self._used.index_select(0, slots) <= tick

    def victims(self, count: int) -> torch.Tensor:
        """Choose ``count`` slots that the batch does not use, as far as there are, longest unused
        first.

        Returns:
            ``(n,) int64`` slots in the order of their rows.

        The age from which slots go is estimated from a sample: exact would be a sort of the cache.
        """
        drawn = torch.randint(self.slots, (_SAMPLE,), generator=self._generator, device="cpu")
        ages = self._used.index_select(0, drawn)
        ages = ages[ages < self._tick].sort().values
        share = count / (self.slots - self._num_free)
        old = torch.empty(0, dtype=torch.int64, device="cpu")
        if share < 1 and len(ages):
            old = (self._used <= ages[int(share * len(ages))]).nonzero().squeeze(1)
        if len(old) < count:
            old = (self._used < self._tick).nonzero().squeeze(1)
            old = old[self._used.index_select(0, old).argsort(stable=True)]
        return self._by_row(old[:count])

    def _by_row(self, slots: torch.Tensor) -> torch.Tensor:
        return slots.index_select(0, self.row.index_select(0, slots).argsort())

    def occupied(self) -> torch.Tensor:
        """Which slots hold a row: ``(slots,) bool``."""
        return self._used != _UNUSED

    def release(self, slots: torch.Tensor) -> None:
        """Let the rows of these slots go to their homes; the slots are free then."""
        self.where[self.row.index_select(0, slots)] = self.home.index_select(0, slots)
        self._set_free(slots)

    def rehome(self, rows: torch.Tensor, position: int) -> None:
        """The newest records of these rows, in this order, are in the logs from ``position`` on.

        Those that are in the cache leave it.
        """
        places = self.find(rows)
        self._set_free(places[places > 0].to(torch.int64) - 1)
        self.where[rows] = self._homes(position, len(rows))

    def _set_free(self, slots: torch.Tensor) -> None:
        self.departures += 1
        self.dirty.index_fill_(0, slots, False)
        self._used.index_fill_(0, slots, _UNUSED)
        self._free[self._num_free : self._num_free + len(slots)] = slots.to(torch.int32)
        self._num_free += len(slots)

    def _homes(self, position: int, count: int) -> torch.Tensor:
        return -torch.arange(
            position + 1, position + 1 + count, dtype=self.where.dtype, device="cpu"
        )

    def free_slots(self, count: int) -> torch.Tensor:
        """``(count,) int64`` free slots; they stay free until `insert`."""
        return self._free[self._num_free - count : self._num_free].to(torch.int64)

    def insert(self, slots: torch.Tensor, rows: torch.Tensor, homes: torch.Tensor) -> None:
        """Give the slots that `free_slots` named to these rows, whose records are there now."""
        self.row[slots] = rows
        self.home[slots] = homes
        self._used.index_fill_(0, slots, self._tick)
        self.where[rows] = (slots + 1).to(self.where.dtype)
        self._num_free -= len(slots)

    def mark_dirty(self, slots: torch.Tensor) -> None:
        """The records of these slots are newer than any stored ones."""
        self.dirty.index_fill_(0, slots, True)

    @property
    def dirty_parts(self) -> int:
        """How many parts `dirty_slots` yields at most."""
        return 1 + len(self.where) // _BLOCK_ROWS

    def dirty_slots(self) -> Iterator[torch.Tensor]:
        """Yield slots whose records are newer than any stored one, in the order of their rows."""
        if int(self.dirty.count_nonzero()) <= _SORTED_SLOTS:
            yield self._by_row(self.dirty.nonzero().squeeze(1))
            return
        for start in range(0, len(self.where), _BLOCK_ROWS):
            part = self.where[start : start + _BLOCK_ROWS]
            slots = part[part > 0].to(torch.int64) - 1
            yield slots[self.dirty.index_select(0, slots)]

    def stored(self, slots: torch.Tensor, position: int, valid: torch.Tensor | None = None) -> None:
        """The records of these slots, in this order, are in the logs from ``position`` on.

        Args:
            slots: ``(n,) int64``.
            position: of the first.
            valid: ``(n,) bool``, those of which it is true; None is all.
        """
        homes = self._homes(position, len(slots))
        if valid is not None:
            slots, homes = slots[valid], homes[valid]
        self.home[slots] = homes
        self.dirty.index_fill_(0, slots, False)

    def stored_at(self, rows: slice, low: int, high: int) -> torch.Tensor:
        """Those of the rows that are not in the cache, and are at positions ``low`` to ``high``."""
        where, start = self.where[rows], int(rows.start)
        return ((where < -low) & (where >= -high)).nonzero().squeeze(1) + start

    def mark_dirty_at(self, low: int, high: int) -> None:
        """Rows in the cache whose newest record is at these positions must be stored again."""
        self.dirty |= (self.home < -low) & (self.home >= -high) & self.occupied()

    def moved(self, rows: slice, low: int, high: int) -> None:
        """Rows whose newest stored record is at positions ``low`` to ``high`` are in the table."""
        where = self.where[rows]
        where[(where < -low) & (where >= -high)] = 0
        slots = where[where > 0].to(torch.int64) - 1
        homes = self.home.index_select(0, slots)
        self.home[slots[(homes < -low) & (homes >= -high)]] = 0
