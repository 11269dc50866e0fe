"""What a store's manifest says, and memory that follows it: logs, chunk files, and their merge.

Knows the map from rows to places, which it keeps right while a merge goes on; makes no commit.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import replace

from .cache import RowCache
from .chunks import Chunks
from .errors import StoreError
from .history import History
from .interrupts import uninterrupted
from .logs import Logs
from .manifest import Manifest
from .merging import Merge
from .places import StoredRecords
from .progress import progress
from .stats import Counters
from .store import Store
from .warning import warn


class StoredState:
    """A state of a store: its manifest, its logs, its chunk files.

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

    # Naming

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
        """Stop a merge, and name what it has done, so that its files have checksums meanwhile."""
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
        if self._logs.sealed:  # or the sealed log would be written over
            raise StoreError(f"{self.store.path}: a merge was stopped from elsewhere: call again")

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
