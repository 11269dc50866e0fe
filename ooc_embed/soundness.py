"""Which files of a store are what its manifest says. Knows the formats; changes nothing.

Checksums are compared by plain calls: a page that the disk cannot read is an error then, where a
map of it would end the process.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

import numpy as np

from . import durable
from .errors import CorruptStoreError
from .log import ALIGNMENT, SKIPPED, LogState, RecordLog, named, records_path, rows_path
from .memory import page_aligned
from .merge import NewestRecords
from .store import Store

_BLOCK_BYTES = 8 << 20


@dataclass(frozen=True)
class LogCheck:
    """What is sound of a log.

    Args:
        whole: prefixes that kept commits name, and whose row ids and records are sound.
        ids_whole: whether all its row ids are.
        readable: whether they are, and its records can be read, though they may be others.
        problems: what is wrong.
    """

    whole: tuple[LogState, ...]
    ids_whole: bool
    readable: bool
    problems: tuple[str, ...]


def check_log(store: Store, generation: int) -> LogCheck:
    """Compare a log's row ids and records with the checksums that the kept commits name."""
    history, rows = store.manifest.history, store.layout.num_embeddings
    states = history.states_of(generation)
    ids, records = _arrays(store, generation)

    def ids_crc32(start: int, stop: int, crc: int) -> int:
        block = ids.read(start, stop)
        found = block.view("<i8")
        bad = found[(found != SKIPPED) & ((found < 0) | (found >= rows))]
        if len(bad):
            raise CorruptStoreError(
                f"{ids.named(start, stop)} names row {bad[0]}, the table has {rows}"
            )
        return zlib.crc32(block.data, crc)

    def records_crc32(start: int, stop: int, crc: int) -> int:
        kept = ids.read(start, stop).view("<i8")[:, 0] != SKIPPED
        return zlib.crc32(records.read(start, stop)[kept].data, crc)

    crcs = [state.rows_crc32 for state in states]
    sound, ids_read, of_ids = _sound(states, crcs, records.block, ids_crc32, ids, "row ids")
    ids_whole = ids_read and not of_ids
    crcs = [state.records_crc32 for state in sound]
    whole, readable, of_records = _sound(
        sound, crcs, records.block, records_crc32, records, "records"
    )
    needed = ", ".join(
        str(commit.number)
        for commit in history.commits
        if any(log.generation == generation and log not in whole for log in commit.logs)
    )
    problems = tuple(f"{text}; needed by commit {needed}" for text in of_ids + of_records)
    return LogCheck(whole, ids_whole, ids_whole and readable, problems)


def row_ids(store: Store, state: LogState) -> Iterator[np.ndarray]:
    """Yield the row ids of a log's prefix, ``(n,) int64``, by blocks."""
    ids, _ = _arrays(store, state.generation)
    for start in range(0, state.records, ids.block):
        yield ids.read(start, min(start + ids.block, state.records)).view("<i8")[:, 0]


def newest_records(store: Store, state: LogState, closing: ExitStack) -> NewestRecords:
    """Map a log's prefix, until ``closing`` ends.

    Raises:
        CorruptStoreError, OSError: a file is missing or short, or cannot be opened.
    """
    log = RecordLog(store.log_folder(state.generation), store.layout.log, state)
    closing.callback(log.close)
    return NewestRecords(log, store.layout.chunk_rows, store.layout.num_chunks)


class ChunkCheck:
    """Reads chunk files, and compares them with their checksums.

    A chunk file that an unfinished merge has replaced since the last manifest has no checksum in
    it: it is seen to have the merged records.

    Args:
        store: where they are.
        sealed: the newest records of its sealed log; None where there is none, or it is damaged.

    Attributes:
        unsure: chunks that an unfinished merge may have replaced, or brought into being.
        unchecked: those of them that were accepted for the log's rows, without a checksum.
    """

    def __init__(self, store: Store, sealed: NewestRecords | None) -> None:
        self._store = store
        self._sealed = sealed
        chunks = sealed.chunks() if sealed is not None else []
        self.unchecked: list[int] = []
        self.unsure = set(chunks) - store.manifest.merged.keys()

    @cached_property
    def buffer(self) -> np.ndarray:
        """What `read` reads into, ``(chunk_bytes,) uint8``; a manifest may ask for any size."""
        return page_aligned(self._store.layout.chunk_bytes)

    def read(self, index: int) -> str | None:
        """Read a chunk file that the manifest names into the buffer.

        Returns:
            What is wrong with it, or None.
        """
        layout, manifest = self._store.layout, self._store.manifest
        try:
            self._store.check_chunk_size(index)
            buffer = self.buffer
            self._store.read_chunk(index, buffer)
        except CorruptStoreError as error:
            return str(error)
        except OSError as error:
            return f"{explained(error)} ({layout.rows_of(index)})"
        found = zlib.crc32(buffer.data)
        expected = manifest.merged.get(index, manifest.checksums.get(index))
        if found == expected:
            return None
        if self._sealed is not None and index in self.unsure:
            self._sealed.put(index, buffer.view(layout.dtype).reshape(-1, layout.width))
            if zlib.crc32(buffer.data) == found:
                self.unchecked.append(index)
                return None
        return (
            f"{self._store.chunk_path(index)} has the checksum {found:#010x}, the manifest says "
            f"{expected:#010x} ({layout.rows_of(index)})"
        )


def explained(error: CorruptStoreError | OSError) -> str:
    """What is wrong with the file of which an error tells."""
    if isinstance(error, FileNotFoundError):
        return f"{error.filename} is missing"
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename} cannot be read: {error.strerror}"
    return str(error)


@dataclass(frozen=True)
class _Array:
    """One array of a log.

    Args:
        path: of a file of it.
        per_file: positions in a file.
        row_bytes: bytes at a position.
    """

    path: Callable[[int], Path]
    per_file: int
    row_bytes: int

    @property
    def block(self) -> int:
        """Positions that go through memory at once."""
        return max(_BLOCK_BYTES // self.row_bytes // ALIGNMENT, 1) * ALIGNMENT

    def named(self, start: int, stop: int) -> str:
        return named(self.path, self.per_file, start, stop)

    def read(self, start: int, stop: int) -> np.ndarray:
        """What is at the positions ``start`` to ``stop``: ``(n, row_bytes) uint8``.

        Raises:
            CorruptStoreError: a file has another size.
            OSError: one is missing, or cannot be read; it is named.
        """
        out = np.empty((stop - start, self.row_bytes), dtype=np.uint8)
        position = start
        while position < stop:
            index, within = divmod(position, self.per_file)
            end = min(position - within + self.per_file, stop)
            path, expected = self.path(index), self.per_file * self.row_bytes
            if (size := path.stat().st_size) != expected:
                raise CorruptStoreError(f"{path} has {size:,} bytes, {expected:,} expected")
            part = out[position - start : end - start].reshape(-1)
            durable.read_file(path, part, within * self.row_bytes)
            position = end
        return out


def _arrays(store: Store, generation: int) -> tuple[_Array, _Array]:
    """A log's row ids, and its records."""
    folder, shape = store.log_folder(generation), store.layout.log
    return (
        _Array(partial(rows_path, folder), shape.rows_per_file, 8),
        _Array(partial(records_path, folder), shape.records_per_file, store.layout.record_bytes),
    )


def _sound(
    states: Sequence[LogState],
    expected: Sequence[int],
    block: int,
    crc32: Callable[[int, int, int], int],
    array: _Array,
    what: str,
) -> tuple[tuple[LogState, ...], bool, list[str]]:
    """Compare prefixes, the shortest first, with their checksums.

    Returns:
        Those that are sound; whether all could be read; what is wrong.
    """
    sound: list[LogState] = []
    problems: list[str] = []
    position, crc = 0, 0
    for state, wanted in zip(states, expected, strict=True):
        try:
            begin = position
            while position < state.records:
                stop = min(position + block, state.records)
                position, crc = stop, crc32(position, stop, crc)
        except (CorruptStoreError, OSError) as error:
            return tuple(sound), False, [*problems, explained(error)]
        if not problems and crc != wanted:
            problems.append(
                f"{array.named(begin, state.records)}: the first {state.records:,} {what} have the "
                f"checksum {crc:#010x}, the manifest says {wanted:#010x}"
            )
        if not problems:
            sound.append(state)
    return tuple(sound), True, problems
