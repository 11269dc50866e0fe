"""An append-only log of records: positions, runs and checksums. Knows no cache and no manifest.

Records that were evicted or committed wait here, outside the zarr table, until a merge. What lies
behind the last commit's end is not part of the store: open ignores it and appends write over it.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

from . import durable, parsing
from .behind import Behind
from .errors import CorruptStoreError, StoreError
from .mapped import MappedRows
from .memory import page_aligned

# Large runs go past the page cache. They begin and end on whole pages, which 1024 records always
# are; from this length on the positions skipped for it are an eighth of a run at most.
ALIGNMENT = 1024
_DIRECT_RUN = 8 * ALIGNMENT
_BLOCK_BYTES = 8 << 20
_BUFFERS = 3
SKIPPED = -1


@dataclass(frozen=True)
class LogShape:
    """What the two logs of a store have in common.

    Args:
        capacity: positions in a log.
        rows_per_file, records_per_file: positions in a chunk file of either array.
        width: columns of a record.
        dtype: element type of a record.
    """

    capacity: int
    rows_per_file: int
    records_per_file: int
    width: int
    dtype: np.dtype


@dataclass(frozen=True)
class LogState:
    """A prefix of a log, as a commit names it: its first ``records`` positions.

    Of these ``inherited`` are those of a log that a rollback cut off there: readers, and links in a
    snapshot, may need what lies behind them in the same files.
    """

    generation: int
    records: int = 0
    rows_crc32: int = 0
    records_crc32: int = 0
    inherited: int = 0


# Puts the records `start` to `stop` of a run into `out`, (stop - start, W).
FillRecords = Callable[[int, int, torch.Tensor], None]


def files_of(folder: Path, shape: LogShape, records: int) -> Iterator[tuple[Path, bool]]:
    """Yield each file of a log's first ``records`` positions, and whether they fill it."""
    for path, size in ((rows_path, shape.rows_per_file), (records_path, shape.records_per_file)):
        for index in range(-(-records // size)):
            yield path(folder, index), (index + 1) * size <= records


def rows_path(folder: Path, index: int) -> Path:
    return folder / "rows" / f"c.{index}"


def records_path(folder: Path, index: int) -> Path:
    return folder / "records" / f"c.{index}.0"


def named(path: Callable[[int], Path], size: int, start: int, stop: int) -> str:
    """The files, of ``size`` positions each, of the positions ``start`` to ``stop``, in words."""
    first, last = start // size, max(stop - 1, start) // size
    return f"{path(first)}" + (f" to {path(last).name}" if last > first else "")


class RecordLog:
    """One log: an array of row ids and an array of their records, in the order of appending.

    Args:
        folder: the folder with the arrays ``rows`` and ``records``.
        shape: sizes.
        state: the prefix that the manifest names.
    """

    def __init__(self, folder: Path, shape: LogShape, state: LogState) -> None:
        self.folder = folder
        self.shape = shape
        self.state = state
        self.committed = state
        self.suspect = False
        files = self._files(shape.capacity, shape.records_per_file)
        self._records = MappedRows(files, shape.records_per_file, shape.width, shape.dtype)
        files = self._files(shape.capacity, shape.rows_per_file)
        self._rows = MappedRows(files, shape.rows_per_file, 1, np.dtype("<i8"))
        record_bytes = shape.width * shape.dtype.itemsize
        self._block = max(_BLOCK_BYTES // record_bytes // ALIGNMENT, 1) * ALIGNMENT
        self._buffers = [np.empty(0, dtype=np.uint8)] * _BUFFERS
        self._open: dict[str, durable.AppendFile] = {}
        self._new_names = False
        self._own: set[Path] = set()
        for index in range(self._files(state.records, shape.records_per_file)):
            self._records.map_file(index, self.records_path(index))
        for index in range(self._files(state.records, shape.rows_per_file)):
            self._rows.map_file(index, self.rows_path(index))

    @property
    def base(self) -> int:
        """Global position of the log's first record: the second log's follow the first's."""
        return (self.state.generation % 2) * self.shape.capacity

    @property
    def end(self) -> int:
        return self.state.records

    def rows_path(self, index: int) -> Path:
        return rows_path(self.folder, index)

    def records_path(self, index: int) -> Path:
        return records_path(self.folder, index)

    def end_after(self, count: int) -> int:
        """Where the log would end after a run of ``count`` records."""
        return self._begin(count) + count

    def gather(self, positions: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Copy the records at ``positions``, ``(n,) int64`` of this log, to ``(n, W)``."""
        return self._records.gather(positions, out)

    def announce(self, positions: torch.Tensor) -> None:
        """Have the pages of these records read ahead."""
        self._records.announce(positions)

    def read_back(self, start: int, stop: int, *, wait: bool) -> None:
        """Have the records from ``start`` to ``stop`` read into the page cache."""
        self._records.read_ahead(start, stop)
        if wait:
            self._records.wait_for(start, stop)

    def copier(self, positions: torch.Tensor) -> FillRecords:
        """Fills a run of another log with the records at ``positions``."""

        def fill(start: int, stop: int, out: torch.Tensor) -> None:
            self.gather(positions[start:stop], out)

        return fill

    def copy(self, positions: np.ndarray, out: np.ndarray, places: np.ndarray) -> None:
        """Copy the records at ascending ``(n,) int64`` positions to ``out[places]``."""
        self._records.copy(positions, out, places)

    def write(self, rows: np.ndarray, fill: FillRecords) -> LogState:
        """Write a run of rows, sorted and unique, behind the end.

        It is part of the log only once the state that this returns is given to `accept`; its last
        ``len(rows)`` positions are the run. Until then, and after a failure, the log is as it was.

        Raises:
            OSError: the disk is full, or failed.
        """
        count = len(rows)
        begin = self._begin(count)
        if begin + count > self.shape.capacity:
            raise StoreError(
                f"{self.folder}: a run of {count:,} records at {begin:,} passes its capacity of "
                f"{self.shape.capacity:,}"
            )
        self._own_tail()
        direct = count >= _DIRECT_RUN
        state = self.state
        listed = np.full(begin - state.records + count, SKIPPED, dtype="<i8")
        listed[begin - state.records :] = rows
        self._write("rows", state.records * 8, listed.view(np.uint8), direct=False)
        rows_crc = zlib.crc32(listed.data, state.rows_crc32)
        records_crc = self._write_records(begin, count, fill, state.records_crc32, direct)
        return replace(state, records=begin + count, rows_crc32=rows_crc, records_crc32=records_crc)

    def _write_records(
        self, begin: int, count: int, fill: FillRecords, crc: int, direct: bool
    ) -> int:
        """Write a run's records, and fill the next block meanwhile; returns the new ``crc``."""
        row_bytes = self.shape.width * self.shape.dtype.itemsize
        size = min(self._block, -(-count // ALIGNMENT) * ALIGNMENT) * row_bytes
        if len(self._buffers[0]) < size:
            self._buffers = [page_aligned(size) for _ in range(_BUFFERS)]
        with Behind(_BUFFERS - 1) as behind:
            for start in range(0, count, self._block):
                stop = min(start + self._block, count)
                nbytes = (stop - start) * row_bytes
                buffer = self._buffers[start // self._block % _BUFFERS]
                records = buffer[:nbytes].view(self.shape.dtype).reshape(-1, self.shape.width)
                fill(start, stop, torch.from_numpy(records))
                crc = zlib.crc32(buffer[:nbytes].data, crc)
                if direct:  # a last partial page goes out whole; what is behind the end is ignored
                    nbytes = -(-nbytes // durable.PAGE) * durable.PAGE
                write = partial(
                    self._write,
                    "records",
                    (begin + start) * row_bytes,
                    buffer[:nbytes],
                    direct=direct,
                )
                if count > self._block:
                    behind.run(write)
                else:
                    write()
        return crc

    def accept(self, state: LogState) -> None:
        """Make the run that `write` wrote a part of the log."""
        self.state = state

    def sync(self) -> None:
        """Make all that was appended durable, names included.

        Raises:
            OSError: the disk failed; records since the last sync must be written again elsewhere.
        """
        for file in self._open.values():
            self._sync_file(file)
        if self._new_names:
            durable.sync_directory(self.folder / "rows")
            durable.sync_directory(self.folder / "records")
            self._new_names = False

    def rows(self, positions: np.ndarray) -> np.ndarray:
        """The row ids at ascending ``(n,) int64`` positions, `SKIPPED` where there is none."""
        out = np.empty((len(positions), 1), dtype="<i8")
        self._rows.copy(positions, out, np.arange(len(positions)))
        return out.squeeze(1)

    def blocks(
        self, stop: int, block: int = 1 << 18, start: int = 0
    ) -> Iterator[tuple[int, np.ndarray]]:
        """Yield ``(position, row ids)`` of the positions ``start`` to ``stop``, by blocks."""
        for low in range(start, stop, block):
            yield low, self._rows.read(low, min(low + block, stop)).squeeze(1).numpy()

    def check_rows(self) -> None:
        """Compare the checksum of the committed row ids with what the manifest says.

        Raises:
            CorruptStoreError: they differ; the message names the files.
        """
        crc, state = 0, self.committed
        for _, rows in self.blocks(state.records):
            crc = zlib.crc32(rows.data, crc)
        if crc != state.rows_crc32:
            files = named(self.rows_path, self.shape.rows_per_file, 0, state.records)
            raise CorruptStoreError(
                f"{files}: the first {state.records:,} row ids have the checksum {crc:#010x}, the "
                f"manifest says {state.rows_crc32:#010x}"
            )

    def check_tail(self) -> None:
        """Compare the records since the last commit with the checksum of what was appended.

        Raises:
            CorruptStoreError: the system has lost some of them.
        """
        self._check_records(self.committed.records, self.state, self.committed.records_crc32)

    def _check_records(self, start: int, state: LogState, crc: int) -> None:
        for position, rows in self.blocks(state.records, self._block, start):
            kept = torch.from_numpy(np.flatnonzero(rows != SKIPPED) + position)
            crc = zlib.crc32(self.gather(kept).numpy().data, crc)
        if crc != state.records_crc32:
            files = named(self.records_path, self.shape.records_per_file, start, state.records)
            raise CorruptStoreError(
                f"{files}: the first {state.records:,} records have the checksum {crc:#010x}, "
                f"{state.records_crc32:#010x} was written"
            )

    def drop_tail(self) -> None:
        """Unlink the files that lie wholly behind the committed end, and temporary ones."""
        for name, size in self._arrays():
            keep = self._files(self.committed.records, size)
            folder = self.folder / name
            durable.remove_temporaries(folder)
            for path in folder.iterdir():
                if parsing.chunk_index(path.name, 1 if name == "rows" else 2) >= keep:
                    durable.remove(path)

    def restart(self, generation: int) -> None:
        """Begin again, empty, as another generation; `drop_tail` unlinks the files of this one."""
        self._close_files()
        self._records.unmap_all()
        self._rows.unmap_all()
        self.state = self.committed = LogState(generation)
        self.suspect = False
        self._own.clear()

    def close(self) -> None:
        self._close_files()
        self._records.close()
        self._rows.close()

    def _own_tail(self) -> None:
        """Before the first append behind a rollback, put copies in the place of inherited files.

        Not sooner: as long as the manifest names what the rollback takes back, a reader might open
        the copies.
        """
        if self.end != self.state.inherited:
            return
        for name, size in self._arrays():
            index, within = divmod(self.end, size)
            path, mapped = self._place(name, index)
            if within and path not in self._own:
                durable.renew(path)
                self._new_names = True
                mapped.map_file(index, path)
                self._own.add(path)

    def _begin(self, count: int) -> int:
        if count < _DIRECT_RUN:
            return self.end
        return -(-self.end // ALIGNMENT) * ALIGNMENT

    def _arrays(self) -> tuple[tuple[str, int], tuple[str, int]]:
        return ("rows", self.shape.rows_per_file), ("records", self.shape.records_per_file)

    @staticmethod
    def _files(positions: int, size: int) -> int:
        return -(-positions // size)

    def _write(self, name: str, offset: int, data: np.ndarray, *, direct: bool) -> None:
        """Write ``(n,) uint8`` at a byte offset of an array, across its chunk files."""
        file_bytes = self._file_bytes(name)
        while len(data):
            index, within = divmod(offset, file_bytes)
            part = data[: file_bytes - within]
            file = self._file(name, index)
            with durable.needs(file.path, part.nbytes):
                file.write(within, part, direct=direct)
            data, offset = data[len(part) :], offset + len(part)

    def _place(self, name: str, index: int) -> tuple[Path, MappedRows]:
        """A chunk file of an array, and where it is mapped."""
        if name == "rows":
            return self.rows_path(index), self._rows
        return self.records_path(index), self._records

    def _file_bytes(self, name: str) -> int:
        if name == "rows":
            return self.shape.rows_per_file * 8
        return self.shape.records_per_file * self.shape.width * self.shape.dtype.itemsize

    def _file(self, name: str, index: int) -> durable.AppendFile:
        """The chunk file that takes appends now; the one before it is synced and closed."""
        path, mapped = self._place(name, index)
        current = self._open.get(name)
        if current is not None:
            if current.path == path:
                return current
            self._sync_file(current)
            del self._open[name]
            current.close()
        nbytes = self._file_bytes(name)
        if not mapped.has_file(index):
            # Always a new file: readers may still map an old one of this name.
            durable.remove(path)
            durable.allocate(path, nbytes)
            self._new_names = True
            mapped.map_file(index, path)
        file = self._open[name] = durable.AppendFile(path, nbytes)
        return file

    def _sync_file(self, file: durable.AppendFile) -> None:
        try:
            file.sync()
        except OSError:
            # The kernel may call pages clean that it failed to write.
            self.suspect = True
            raise

    def _close_files(self) -> None:
        for file in self._open.values():
            file.close()
        self._open.clear()
