"""The stored records of a table: its logs, its chunk files, and the commit protocol over both.

Knows the map from rows to places, which it keeps right while records move; does not know why rows
enter or leave the cache, and no optimizer.

The order of writes is what makes a crash harmless. A commit appends to the active log, syncs it,
and replaces the manifest: that rename is the commit. A merge rewrites chunks from the sealed log,
syncs them, names a manifest without that log, and only then deletes it. Its threads only change
files: what they have finished is entered here, by whoever changes the table next.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch

from .cache import RowCache
from .errors import CorruptStoreError, StoreError
from .interrupts import uninterrupted
from .log import ALIGNMENT, SKIPPED, FillRecords, LogState, RecordLog
from .manifest import Commit, Manifest
from .mapped import MappedRows
from .merging import Merge
from .places import StoredRecords
from .progress import progress
from .stats import Counters
from .store import Store

# Rows whose places are looked at together where a whole log may have to move.
_MOVED_ROWS = 1 << 20


@dataclass(frozen=True)
class Run:
    """A run that is written behind the active log's end, and no part of it yet.

    Args:
        rows: ``(n,) int64``, sorted and unique.
        state: the log's state with it.
    """

    rows: torch.Tensor
    state: LogState


class Storage:
    """Where records are stored, and how that changes.

    Args:
        store: an open store.
        cache: holds the map from rows to places, which this fills.
        counters: where reads and writes are counted.

    Attributes:
        stored: reads records.
        manifest: the newest commit.

    Raises:
        CorruptStoreError: a file is missing, short, or fails its checksum.
    """

    def __init__(self, store: Store, cache: RowCache, counters: Counters) -> None:
        self.store = store
        self.manifest: Manifest = store.manifest
        self._cache = cache
        self._counters = counters
        self._failed: str | None = None
        self._merge: Merge | None = None
        # Chunks that have the sealed log's records, and are mapped so.
        self._merged: dict[int, int] = {}
        # Chunk files whose content is known. Of an unfinished merge they have either content.
        sealed = len(self.manifest.commit.logs) == 2
        self._known_crc32 = {} if sealed else dict(self.manifest.checksums)
        layout = store.layout
        store.check_chunk_sizes()
        self._chunks = MappedRows(layout.num_chunks, layout.chunk_rows, layout.width, layout.dtype)
        for index in self.manifest.checksums:
            self._chunks.map_file(index, store.chunk_path(index))
        logs = [self._open_log(state) for state in self.manifest.commit.logs]
        for log in logs:
            log.check_rows()
            self._find_records(log)
        self._active = logs[-1]
        # The log that takes no appends: sealed and waiting for its merge, or empty.
        self._other = logs[0]
        self._sealed = len(logs) == 2
        if not self._sealed:
            self._other = self._open_log(LogState(self._active.state.generation + 1))
        self.stored = StoredRecords(self._chunks, (self._active, self._other), counters)

    def _open_log(self, state: LogState) -> RecordLog:
        return RecordLog(self.store.log_folder(state.generation), self.store.layout.log, state)

    def _find_records(self, log: RecordLog) -> None:
        """Enter a log's rows into the map; the last record of a row wins."""
        where = self._cache.where.numpy()
        for start, rows in log.blocks(log.committed.records):
            kept = np.flatnonzero(rows != SKIPPED)
            rows = rows[kept]
            if len(rows) and not 0 <= rows.min() <= rows.max() < len(where):
                raise CorruptStoreError(
                    f"{log.folder / 'rows'} names rows {rows.min()} to {rows.max()}, the table has "
                    f"{len(where)}"
                )
            where[rows] = -(kept + (start + log.base + 1))

    def recover(self) -> None:
        """Remove what a killed writer left; `begin_merge` goes on with its merge."""
        self._active.drop_tail()
        if not self._sealed:
            self._other.drop_tail()
        self.store.drop_leftovers()

    # Appending

    def make_room(self, count: int) -> None:
        """See that a run of ``count`` records fits into the active log.

        Slots of the cache may become dirty by it: choose those to append afterwards.
        """
        if self._ensure_room(count):
            self.begin_merge()

    def has_room(self, count: int) -> bool:
        """Whether a run of ``count`` records fits into the active log as it is."""
        log = self._active
        return not log.suspect and log.end_after(count) <= log.shape.capacity

    def _ensure_room(self, count: int) -> bool:
        """Whether what was appended had to move to the other log for it."""
        self.check()
        fits = self.has_room(count)
        if not fits:
            self._roll_over()
        return not fits

    def write(self, rows: torch.Tensor, fill: FillRecords) -> Run:
        """Write the records of sorted unique rows behind the active log's end.

        Raises:
            OSError: the disk is full, or failed. The log is as it was.
        """
        return Run(rows, self._active.write(rows.numpy(), fill))

    def read_back(self, run: Run, *, wait: bool) -> None:
        """Have a run read into the page cache, which it was written past; perhaps wait for it."""
        end = run.state.records
        self._active.read_back(end - len(run.rows), end, wait=wait)

    def accept(self, run: Run) -> int:
        """Make a run a part of the log; return the global position of its first record."""
        self._active.accept(run.state)
        self._counters.appended(len(run.rows), self.store.layout.record_bytes)
        return self._active.base + run.state.records - len(run.rows)

    def append_slots(self, slots: torch.Tensor) -> Run:
        """Append the cache's records at ``slots``, which are in the order of their rows."""
        cache = self._cache

        def fill(start: int, stop: int, out: torch.Tensor) -> None:
            torch.index_select(cache.records, 0, slots[start:stop], out=out)

        run = self.write(cache.row.index_select(0, slots), fill)
        with uninterrupted():
            cache.stored(slots, self.accept(run))
        return run

    def _append_dirty(self) -> None:
        for slots in self._cache.dirty_slots():
            if len(slots):
                self.append_slots(slots)

    # Committing

    def commit(self, commit: Commit, *, flush: bool, closing: bool = False) -> None:
        """Make all records durable, and with ``flush`` bring them into the table's chunks.

        Args:
            commit: what to commit beside the records; its number and logs are set here. It is
                skipped if nothing has changed.
            flush: wait for a merge of all.
            closing: only warn of a merge that failed, since opening goes on with it.

        Raises:
            OSError: the disk is full, or failed, here or in a merge since the last call. Nothing is
                lost, and a later call may succeed.
            CorruptStoreError: a merge found a damaged chunk file.
        """
        begin = time.perf_counter()
        dirty = int(self._cache.dirty.count_nonzero())
        self._ensure_room(dirty + ALIGNMENT * self._cache.dirty_parts)
        self._append_dirty()
        last = self.manifest.commit
        if self._active.state != self._active.committed or (commit.step, commit.param_groups) != (
            last.step,
            last.param_groups,
        ):
            self._sync()
            self._name_commit(commit, seal=flush or self._full)
            self._counters.committed(begin)
        self._conclude_merge(forgiving=closing and not flush)
        if self._active.end and not self._sealed and (flush or self._full):
            self._seal(commit)
        while flush and self._sealed:
            self._finish_merge(shown=True)
            if self._active.end:
                self._seal(commit)

    def _seal(self, commit: Commit) -> None:
        begin = time.perf_counter()
        self._name_commit(commit, seal=True)
        self._counters.committed(begin)

    @property
    def _full(self) -> bool:
        return self._active.end > self.store.layout.log_limit

    def _sync(self) -> None:
        """Make the active log durable; where the disk failed, in new files."""
        try:
            self._active.sync()
            return
        except OSError:
            if not self._active.suspect:
                raise
        try:
            self._roll_over()
            self._append_dirty()
            self._active.sync()
        except OSError as error:
            self._failed = f"the disk failed twice to keep the log ({error}): open the store again"
            raise

    def _name_commit(self, commit: Commit, *, seal: bool) -> None:
        state = self._active.state
        logs: tuple[LogState, ...] = (state,)
        if self._sealed:
            logs = (self._other.committed, state)
        elif seal and state.records:
            logs = (state, LogState(state.generation + 1))
        number = self.manifest.commit.number + 1
        self._name(replace(self.manifest, commit=replace(commit, number=number, logs=logs)))

    def _name(self, manifest: Manifest, then: Callable[[], None] = lambda: None) -> None:
        """Replace the manifest; memory follows what the disk says, even if the call fails late."""
        with uninterrupted():
            try:
                self.store.write_manifest(manifest)
            finally:
                if self.store.manifest is manifest:
                    self._follow(manifest)
                    then()

    def _follow(self, manifest: Manifest) -> None:
        self.manifest = manifest
        logs = manifest.commit.logs
        if logs[-1].generation != self._active.state.generation:  # the active log was sealed
            self._active, self._other = self._other, self._active
            self._other.state = self._other.committed = logs[0]
        self._active.committed = logs[-1]
        if self._sealed and len(logs) == 1:
            self._other.restart(logs[-1].generation + 1)
            self._known_crc32 = dict(manifest.checksums)
            self._merged = {}
        self._sealed = len(logs) == 2

    # Moving records

    def _roll_over(self) -> None:
        """Seal the active log at its last commit, and move what lies behind into the other log.

        Nothing becomes a commit by it: the manifest names other logs for the same state.
        """
        self._finish_merge()
        old, new = self._active, self._other
        if old.suspect:
            try:
                old.check_tail()
            except CorruptStoreError as error:
                self._failed = f"the disk lost what was appended ({error}): open the store again"
                raise
        low, high = old.base + old.committed.records, old.base + old.end
        moved = []
        try:
            for start in range(0, len(self._cache.where), _MOVED_ROWS):
                block = slice(start, start + _MOVED_ROWS)
                rows = self._cache.stored_at(block, low, high)
                if len(rows):
                    positions = -(self._cache.find(rows).to(torch.int64) + 1) - old.base
                    new.accept(new.write(rows.numpy(), old.copier(positions)))
                    self._counters.appended(len(rows), self.store.layout.record_bytes)
                    moved.append((block, new.base + new.end - len(rows)))
            commit = replace(
                self.manifest.commit, logs=(old.committed, LogState(new.state.generation))
            )
            self._name(
                replace(self.manifest, commit=commit), lambda: self._rehome(moved, low, high)
            )
        finally:
            if self._active is old:
                with uninterrupted():
                    new.restart(new.state.generation)
                    new.drop_tail()

    def _rehome(self, moved: list[tuple[slice, int]], low: int, high: int) -> None:
        for block, position in moved:
            self._cache.rehome(self._cache.stored_at(block, low, high), position)
        # Rows in the cache whose newest record stays behind must be stored again.
        homes = self._cache.home
        self._cache.dirty |= (homes < -low) & (homes >= -high) & self._cache.occupied()

    # Merging

    def begin_merge(self) -> Merge | None:
        """Have the sealed log, if there is one, merged in the background."""
        with uninterrupted():
            if self._sealed and self._merge is None:
                self._merge = Merge(self.store, self._other, self._known_crc32, self._merged)
            return self._merge

    def settle(self) -> None:
        """Use the chunks that a merge has finished; it costs nothing where there are none."""
        while self._merge is not None and self._merge.finished:
            self._settle_one(self._merge)

    def _settle_one(self, merge: Merge) -> None:
        with uninterrupted():
            index, crc = merge.finished[0]
            log, rows = self._other, self.store.layout.chunk_rows
            try:
                self._chunks.map_file(index, self.store.chunk_path(index))
            except (OSError, CorruptStoreError) as error:
                merge.fail(error)
            else:
                block = slice(index * rows, (index + 1) * rows)
                self._cache.moved(block, log.base, log.base + log.shape.capacity)
                self._merged[index] = crc
                self._counters.bytes_written += self.store.layout.chunk_bytes
            merge.settled()

    def stop_merge(self) -> None:
        """Let the merge end after the chunks that are in flight; `begin_merge` goes on with it."""
        if self._merge is not None:
            self._merge.stop()
            self.settle()
            self._merge.close()
            self._merge = None

    def _finish_merge(self, *, shown: bool = False) -> None:
        """Wait until no log is sealed. An interrupted wait leaves the merge going on."""
        if self._merge is not None and self._merge.stopping:
            self.stop_merge()
        merge = self.begin_merge()
        if merge is not None:
            chunks = merge.wait()
            for _ in progress(chunks, "merging", "chunk", merge.left) if shown else chunks:
                self._settle_one(merge)
            self._conclude_merge()

    def _conclude_merge(self, *, forgiving: bool = False) -> None:
        """Name the state without the sealed log if its merge is over; raise what made it fail."""
        self.settle()
        merge = self._merge
        if merge is None:
            return
        if merge.stopping:
            self.stop_merge()
            merge.tell_failure(as_warning=forgiving)
        elif merge.complete:
            self.stop_merge()
            self.store.sync_table()
            log = self._other
            commit = replace(self.manifest.commit, logs=(self._active.committed,))
            checksums = self.manifest.checksums | self._merged
            self._name(replace(self.manifest, commit=commit, checksums=checksums))
            log.drop_tail()
            self._counters.merged(merge.seconds)

    # Life

    @property
    def failed(self) -> bool:
        """Whether the disk has failed for good."""
        return self._failed is not None

    def check(self) -> None:
        """Raise if the disk has failed for good."""
        if self._failed is not None:
            raise StoreError(f"{self.store.path}: {self._failed}")

    def close(self) -> None:
        """Let go of maps and files; `stop_merge` comes before."""
        self._active.close()
        self._other.close()
        self._chunks.close()
