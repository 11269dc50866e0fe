"""The stored records of a table: its logs, its chunk files, and the commit protocol over both.

Knows the map from rows to places, which it keeps right while records move; does not know why rows
enter or leave the cache, and no optimizer.

The order of writes is what makes a crash harmless. A commit appends to the active log, syncs it,
and replaces the manifest: that rename is the commit. A merge rewrites chunks from the sealed log,
syncs them, names a manifest without that log, and only then deletes it. Its threads only change
files: what they have finished is entered here, by whoever changes the table next.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from .cache import RowCache
from .chunks import Chunks
from .errors import CorruptStoreError, StoreError
from .history import Facts, History
from .interrupts import uninterrupted
from .log import ALIGNMENT, FillRecords, LogState
from .logs import Logs
from .manifest import Manifest
from .merging import Merge
from .moving import Tail
from .places import StoredRecords
from .progress import progress
from .stats import Counters
from .store import Store
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
        self._branch = secrets.token_hex(8)
        self._failed: str | None = None
        self._chunks = Chunks(store, cache, counters)
        self._logs = Logs(store)
        self._logs.find_records(cache.where.numpy())
        both = (self._logs.active, self._logs.other)
        self.stored = StoredRecords(self._chunks.mapped, both, counters)

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

    def commit(
        self,
        facts: Facts,
        *,
        flush: bool = False,
        checkpoint: bool = False,
        closing: bool = False,
    ) -> None:
        """Make all records durable, and with ``flush`` bring them into the table's chunks.

        Args:
            facts: what to commit beside the records. A commit is skipped if nothing has changed.
            flush: wait for a merge of all.
            checkpoint: one will name this commit: it is kept until two others are.
            closing: only warn of a merge that failed, since opening goes on with it.

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
        history = self.manifest.history
        # Not before: of a call that raises, no checkpoint comes.
        if checkpoint and history.newest.number not in history.checkpoints[-1:]:
            self._name_history(history.handed_out())

    def _advance_merge(self, *, flush: bool, closing: bool) -> None:
        """Behind a commit: end a merge that is over, seal a log that is full, or merge all."""
        self._conclude_merge(forgiving=closing and not flush)
        self._seal(flush or self._full)
        while flush and self._logs.sealed:
            self._finish_merge(shown=True)
            self._seal(True)
        if self._full and self.manifest.history.only_former_unmerged:
            self._name_history(self.manifest.history.given_up())
        if closing:
            self.put_merge_down()

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

    def _name_history(self, history: History) -> None:
        self._name(self._manifest(history))

    def _manifest(self, history: History) -> Manifest:
        """The manifest with another history, and with what a merge has done so far."""
        merged = self._chunks.merged
        if merged != self.manifest.merged:
            self.store.sync_table()
        return replace(self.manifest, history=history, merged=merged)

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
        was_sealed = self._logs.sealed
        self._logs.follow(manifest.commit.logs)
        if was_sealed and not self._logs.sealed:
            self._chunks.follow()

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

    # Merging

    def begin_merge(self) -> Merge | None:
        """Have the sealed log merged in the background, if there is one that may be."""
        if self._logs.sealed and not self.manifest.history.unmerged:
            self._chunks.begin_merge(self._logs.other)
        return self._chunks.merge

    def _give_up_commits(self) -> None:
        """Keep no commit that does not contain the sealed log whole, so that it may be merged."""
        history = self.manifest.history
        if not history.unmerged:
            return
        if told := [commit for commit in history.unmerged if not history.is_former(commit)]:
            names = ", ".join(f"{commit.number} (step {commit.step})" for commit in told)
            warn(
                f"{self.store.path}: merging the log gives up commit {names}, which rollback could "
                f"return to until now; snapshot() keeps a commit for good"
            )
        self._name_history(history.given_up())

    def settle(self) -> None:
        """Use what a merge has finished; it costs nothing where that is nothing."""
        self._chunks.settle()

    def stop_merge(self) -> None:
        """Let a merge end early; `begin_merge` goes on with it."""
        self._chunks.stop_merge()

    def put_merge_down(self) -> None:
        """Stop a merge, and name what it has done: files that nobody watches have a checksum."""
        self.stop_merge()
        if self._chunks.merged != self.manifest.merged:
            self._name_history(self.manifest.history)

    def _finish_merge(self, *, shown: bool = False) -> None:
        """Wait until no log is sealed. An interrupted wait leaves the merge going on."""
        if self._chunks.merge is not None and self._chunks.merge.stopping:
            self.stop_merge()
        self._give_up_commits()
        merge = self.begin_merge()
        if merge is not None:
            chunks = merge.wait()
            for _ in progress(chunks, "merging", "chunk", merge.left) if shown else chunks:
                self._chunks.settle_one(merge)
            self._conclude_merge()

    def _conclude_merge(self, *, forgiving: bool = False) -> None:
        """Name the state without the sealed log if its merge is over; raise what made it fail."""
        self.settle()
        merge = self._chunks.merge
        if merge is None:
            return
        if merge.stopping:
            self.stop_merge()
            merge.tell_failure(as_warning=forgiving)
        elif merge.complete:
            self.stop_merge()
            self.store.sync_table()
            log = self._logs.other
            history, checksums = self.manifest.history.merged(), self._chunks.checksums
            self._name(replace(self.manifest, history=history, checksums=checksums, merged={}))
            log.drop_tail()
            self._counters.merged(merge.seconds)

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
        self.stop_merge()
        if target != self.manifest.commit:
            history = history.rolled_back(target)
            self.store.write_manifest(self._manifest(history))

    def resize(self, facts: Facts) -> None:
        """Commit another number of rows, right behind `store_all`."""
        self.stop_merge()
        logs = self._logs.states(seal=False)
        history = self.manifest.history.added(facts, logs, self._branch)
        self.store.resize(self._manifest(history))

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
        self._logs.close()
        self._chunks.close()
