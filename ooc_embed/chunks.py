"""The table's chunk files as mapped rows, and the merge that replaces them in the background.

Knows the map from rows to places, which merged rows leave the log in; names no state.
"""

from __future__ import annotations

from .cache import RowCache
from .errors import CorruptStoreError
from .interrupts import uninterrupted
from .log import RecordLog
from .mapped import MappedRows
from .merging import Merge
from .stats import Counters
from .store import Store


class Chunks:
    """The chunk files of a table.

    Args:
        store: where they are.
        cache: holds the map from rows to places.
        counters: where written bytes are counted.

    Attributes:
        mapped: their rows.
        merge: what replaces some of them, or None.

    Raises:
        CorruptStoreError: one is missing or short.
    """

    def __init__(self, store: Store, cache: RowCache, counters: Counters) -> None:
        self.merge: Merge | None = None
        self._store = store
        self._cache = cache
        self._counters = counters
        # Those that have the sealed log's records, and are mapped so.
        self._merged: dict[int, int] = {}
        manifest, layout = store.manifest, store.layout
        self._known_crc32 = manifest.checksums | manifest.merged
        # Those that have rows of the sealed log may have either content, of a killed merge.
        sealed = manifest.commit.sealed is not None
        self._unsure = manifest.checksums.keys() - manifest.merged.keys() if sealed else set()
        store.check_chunk_sizes()
        self.mapped = MappedRows(layout.num_chunks, layout.chunk_rows, layout.width, layout.dtype)
        for index in manifest.checksums:
            self.mapped.map_file(index, store.chunk_path(index))

    @property
    def checksums(self) -> dict[int, int]:
        """Of all files, those that a merge has replaced among them."""
        return self._store.manifest.checksums | self.merged

    @property
    def merged(self) -> dict[int, int]:
        """Of those that are known to have the sealed log's records, in this process or before."""
        return self._store.manifest.merged | self._merged

    def begin_merge(self, log: RecordLog) -> None:
        """Have a sealed log merged in the background; one that goes on already does so."""
        with uninterrupted():
            if self.merge is None:
                self.merge = Merge(self._store, log, self._known_crc32, self._unsure, self._merged)

    def settle(self) -> None:
        """Use the files that a merge has finished; it costs nothing where there are none."""
        while self.merge is not None and self.merge.finished:
            self.settle_one(self.merge)

    def settle_one(self, merge: Merge) -> None:
        """Use the first of the files that a merge has finished."""
        with uninterrupted():
            index, crc = merge.finished[0]
            log, rows = merge.log, self._store.layout.chunk_rows
            try:
                self.mapped.map_file(index, self._store.chunk_path(index))
            except (OSError, CorruptStoreError) as error:
                merge.fail(error)
            else:
                block = slice(index * rows, (index + 1) * rows)
                self._cache.moved(block, log.base, log.base + log.shape.capacity)
                self._merged[index] = crc
                self._counters.bytes_written += self._store.layout.chunk_bytes
            merge.settled()

    def stop_merge(self) -> None:
        """Let a merge end after the files that are in flight; `begin_merge` goes on with it."""
        if self.merge is not None:
            self.merge.stop()
            self.settle()
            self.merge.close()
            self.merge = None

    def follow(self) -> None:
        """The manifest names these files, and no sealed log."""
        self._known_crc32 = dict(self._store.manifest.checksums)
        self._unsure = set()
        self._merged = {}

    def close(self) -> None:
        self.mapped.close()

    def __del__(self) -> None:
        # Its threads hold the store, and wait for ever where a table was dropped in the middle.
        merge: Merge | None = getattr(self, "merge", None)
        if merge is not None:
            merge.end()
