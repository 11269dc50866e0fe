"""The stored records of a table: its logs, its chunk files, and the commit protocol over both.

Knows the map from rows to places, which it keeps right while records move; does not know why rows
enter or leave the cache, and no optimizer.

The order of writes is what makes a crash harmless. A commit appends to the active log, syncs it,
and replaces the manifest: that rename is the commit. A merge rewrites chunks from the sealed log,
syncs them, names a manifest without that log, and only then deletes it; manifests in between name
the chunks that are done, once their folder is synced. Its threads only change files: what they have
finished is entered into memory by whoever changes the table next.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from .errors import CorruptStoreError, StoreError
from .history import Facts
from .interrupts import uninterrupted
from .log import ALIGNMENT, FillRecords, LogState
from .moving import Tail
from .stored import StoredState
from .warning import warn


@dataclass(frozen=True)
class Run:
    """A run that is written behind the active log's end, and no part of it yet.

    Args:
        rows: ``(n,) int64``, sorted and unique.
        state: the log's state with it.
    """

    rows: torch.Tensor
    state: LogState


class Storage(StoredState):
    """Where records are stored, and how that changes."""

    def recover(self) -> None:
        """Remove what a killed writer left; `begin_merge` goes on with its merge."""
        self.store.sync()
        self._logs.drop_tails()
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
        log = self._logs.active
        return not log.suspect and log.end_after(count) <= log.shape.capacity

    def _ensure_room(self, count: int) -> bool:
        """Whether what was appended had to move to the other log for it."""
        self.check()
        fits = self.has_room(count)
        if not fits:
            self._switch_logs()
        return not fits

    def write(self, rows: torch.Tensor, fill: FillRecords) -> Run:
        """Write the records of sorted unique rows behind the active log's end.

        Raises:
            OSError: the disk is full, or failed. The log is as it was.
        """
        return Run(rows, self._logs.active.write(rows.numpy(), fill))

    def read_back(self, run: Run, *, wait: bool) -> None:
        """Have a run read into the page cache, which it was written past; perhaps wait for it."""
        end = run.state.records
        self._logs.active.read_back(end - len(run.rows), end, wait=wait)

    def accept(self, run: Run) -> int:
        """Make a run a part of the log; return the global position of its first record."""
        self._logs.active.accept(run.state)
        self._counters.appended(len(run.rows), self.store.layout.record_bytes)
        return self._logs.active.base + run.state.records - len(run.rows)

    def append_slots(self, slots: torch.Tensor) -> Run:
        """Append the cache's records at ``slots``, which are in the order of their rows."""
        cache = self._cache

        def fill(start: int, stop: int, out: torch.Tensor) -> None:
            torch.index_select(cache.records, 0, slots[start:stop], out=out)

        run = self.write(cache.row.index_select(0, slots), fill)
        with uninterrupted():
            cache.stored(slots, self.accept(run))
        return run

    # Committing

    def commit(self, facts: Facts, *, flush: bool = False, closing: bool = False) -> None:
        """Make all records durable, and with ``flush`` bring them into the table's chunks.

        Args:
            facts: what to commit beside the records. A commit is skipped if nothing has changed.
            flush: wait for a merge of all.
            closing: stop a merge, and only warn of one that failed: opening goes on with it.

        Raises:
            OSError: the disk is full, or failed, here or in a merge since the last call. Nothing is
                lost, and a later call may succeed.
            CorruptStoreError: a merge found a damaged chunk file.
        """
        begin = time.perf_counter()
        self._store_dirty()
        last, active = self.manifest.commit, self._logs.active
        if active.state != active.committed or (facts.step, facts.param_groups) != (
            last.step,
            last.param_groups,
        ):
            self._sync()
            logs = self._logs.states(seal=flush or self._full)
            # To sync may have moved commits to other logs.
            self._name_history(self.manifest.history.added(facts, logs, self._branch))
            self._counters.committed(begin)
        try:
            self._advance_merge(flush=flush, closing=closing)
        except (OSError, StoreError, MemoryError) as error:
            error.add_note("All steps up to here were committed all the same.")
            raise

    def hand_out(self) -> None:
        """Keep the newest commit until two others were handed out: a checkpoint will name it."""
        history = self.manifest.history
        if history.newest.number not in history.checkpoints[-1:]:
            self._name_history(history.handed_out())

    def _advance_merge(self, *, flush: bool, closing: bool) -> None:
        """Behind a commit: end a merge that is over, seal a log that is full, or merge all.

        Closing stops a merge that goes on.
        """
        self._conclude_merge(forgiving=closing and not flush)
        self._seal(flush or self._full)
        while flush and self._logs.sealed:
            self._finish_merge(shown=True)
            self._seal(True)
        if self._full and self.manifest.history.only_former_unmerged:
            self._name_history(self.manifest.history.given_up())
        if closing:
            self._put_merge_down_at_close()

    def _put_merge_down_at_close(self) -> None:
        try:
            self.put_merge_down()
        except OSError as error:
            warn(f"{self.store.path}: {error}; the merge will begin anew, and nothing is lost")

    def _store_dirty(self) -> None:
        """Append all dirty records to the log."""
        self.store.sync()
        dirty = int(self._cache.dirty.count_nonzero())
        self._ensure_room(dirty + ALIGNMENT * self._cache.dirty_parts)
        for slots in self._cache.dirty_slots():
            if len(slots):
                self.append_slots(slots)

    def store_all(self) -> None:
        """Append all dirty records to the log, and make it durable: a commit but for its name."""
        self._store_dirty()
        self._sync()
        self._conclude_merge()

    def _seal(self, wanted: bool) -> None:
        """Close the active log, which makes no commit: all that it has is in one already."""
        if wanted and self._logs.active.end and not self._logs.sealed:
            self._name_history(self.manifest.history.restated(self._logs.states(seal=True)))

    @property
    def _full(self) -> bool:
        return self._logs.active.end > self.store.layout.log_limit

    def _sync(self) -> None:
        """Make the active log durable; where the disk failed, in new files."""
        try:
            self._logs.active.sync()
            return
        except OSError:
            if not self._logs.active.suspect:
                raise
        try:
            self._switch_logs()
            self._store_dirty()
            self._logs.active.sync()
        except OSError as error:
            self._failed = f"the disk failed twice to keep the log ({error}): open the store again"
            raise

    def keep_commits(self, count: int) -> None:
        """Keep another number of commits from now on."""
        self._name_history(self.manifest.history.keeping(count))

    # Moving records

    def _switch_logs(self) -> None:
        """Seal the active log at its last commit, and move what lies behind into the other log.

        Nothing becomes a commit by it: the manifest names other logs for the same state.
        """
        self._finish_merge()
        old, new = self._logs.active, self._logs.other
        if old.suspect:
            try:
                old.check_tail()
            except CorruptStoreError as error:
                self._failed = f"the disk lost what was appended ({error}): open the store again"
                raise
        tail = Tail(old, new, self._cache)
        try:
            tail.copy(self._counters)
            logs = (old.committed, LogState(new.state.generation))
            named = self._manifest(self.manifest.history.restated(logs))
            self._name(named, tail.enter)
        finally:
            if self._logs.active is old:
                with uninterrupted():
                    new.restart(new.state.generation)
                    new.drop_tail()

    # Going back, and growing: the table reads all of the store anew then

    def rollback(self, number: int) -> None:
        """Name an earlier commit as the newest; what came after it is lost.

        Raises:
            StoreError: it is not kept.
            OSError: the disk is full, or failed; nothing has changed.
        """
        history = self.manifest.history
        target = history.find(number, self.store.path)
        self.store.sync()
        if target == self.manifest.commit:
            self.put_merge_down()
        else:
            self.stop_merge()
            self.store.write_manifest(self._manifest(history.rolled_back(target)))

    def resize(self, facts: Facts) -> None:
        """Commit another number of rows, right behind `store_all`."""
        self.stop_merge()
        logs = self._logs.states(seal=False)
        history = self.manifest.history.added(facts, logs, self._branch)
        self.store.resize(self._manifest(history))
