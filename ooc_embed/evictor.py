"""Empties slots of the cache, longest unused first. Knows cache and logs; knows no batch, no rule.

Where many slots go at once, they go ahead of need: a thread copies their records to the log while
steps go on, and those that no batch has used meanwhile leave the cache then. A record that is
stepped while it is copied is worth nothing in the log; but its slot stays, dirty, and so a newer
one follows before the next commit.
"""

from __future__ import annotations

from contextlib import suppress

import numpy as np
import torch

from .cache import RowCache
from .errors import StoreError
from .interrupts import uninterrupted
from .merging import Worker
from .stats import Counters
from .storage import Run, Storage

# Parts of the cache: what is emptied when a batch needs room, and what ahead of that.
_SHARE = 8
_SHARE_AHEAD = 32
# Fewer slots are not worth a thread.
_FEWEST_AHEAD = 8192


class Evictor:
    """Keeps slots of the cache free.

    Args:
        cache: the cache.
        storage: where dirty records go.
        counters: where evictions are counted.
    """

    def __init__(self, cache: RowCache, storage: Storage, counters: Counters) -> None:
        ahead = cache.slots // _SHARE_AHEAD
        self._ahead = ahead if ahead >= _FEWEST_AHEAD else 0
        self._cache = cache
        self._storage = storage
        self._counters = counters
        self._copy: _Copy | None = None

    def make_room(self, count: int) -> None:
        """Evict until ``count`` slots are free; dirty rows go to the log as one sorted run.

        Raises:
            OSError: the disk is full, or failed; nothing has left the cache.
        """
        if count > self._cache.num_free:
            self.finish()
        missing = count - self._cache.num_free
        if missing <= 0:
            return
        self._storage.make_room(self._cache.slots)
        victims = self._cache.victims(max(missing, self._cache.slots // _SHARE))
        dirty = victims[self._cache.dirty[victims]]
        if len(dirty):
            # They are the likeliest to be wanted next, and lie close together now.
            self._storage.read_back(self._storage.append_slots(dirty), wait=False)
        with uninterrupted():
            self._release(victims)

    def begin_ahead(self) -> None:
        """Have slots that the last batch does not use emptied in a thread, where few are free."""
        cache = self._cache
        if self._copy is not None or cache.num_free >= self._ahead:
            return
        victims = cache.victims(self._ahead)
        dirty = cache.dirty[victims]
        with uninterrupted():
            self._release(victims[~dirty])
        if dirty.any() and self._storage.has_room(len(victims)):
            copy = _Copy(self._storage, self._cache, victims[dirty])
            with uninterrupted():
                self._copy = copy
                copy.begin()

    def settle(self) -> None:
        """Enter what a thread has copied, if it is done."""
        if self._copy is not None and self._copy.done:
            self.finish()

    def finish(self) -> None:
        """Wait for the thread, if there is one: nothing else may be appended beside it."""
        copy = self._copy
        if copy is None:
            return
        copy.wait()
        with uninterrupted():
            self._copy = None
            if copy.run is not None:
                position = self._storage.accept(copy.run)
                unused = self._cache.unused_since(copy.slots, copy.tick)
                self._cache.stored(copy.slots, position, unused)
                self._release(copy.slots[unused])

    def _release(self, slots: torch.Tensor) -> None:
        self._cache.release(slots)
        self._counters.evictions += len(slots)


class _Copy:
    """Copies the records of dirty slots to the log, in a thread.

    Attributes:
        slots: ``(n,) int64``, in the order of their rows.
        tick: the cache's batch at the beginning.
        run: what is written, once it is.
    """

    def __init__(self, storage: Storage, cache: RowCache, slots: torch.Tensor) -> None:
        self.slots = slots
        self.tick = cache.tick
        self.run: Run | None = None
        self._storage = storage
        self._records = cache.records.numpy()
        self._rows = cache.row.index_select(0, slots)
        self._thread = Worker(target=self._work, daemon=True)

    def begin(self) -> None:
        # None begins while the interpreter ends: then nothing is copied ahead.
        with suppress(RuntimeError):
            self._thread.start()

    @property
    def done(self) -> bool:
        return not self._thread.is_alive()

    def wait(self) -> None:
        if not self.done:
            self._thread.join()

    def _work(self) -> None:
        # What fails is told by `make_room`, which tries again once a batch cannot do without.
        with suppress(OSError, StoreError, MemoryError):
            run = self._storage.write(self._rows, self._fill)
            self._storage.read_back(run, wait=True)
            self.run = run

    def _fill(self, start: int, stop: int, out: torch.Tensor) -> None:
        # By numpy: torch would start a team of threads for this one.
        slots = self.slots[start:stop].numpy()
        np.take(self._records, slots, axis=0, out=out.numpy(), mode="clip")
