"""Rows of one on-disk array as one tensor, by mapped files. Knows pages, not tables or logs."""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import resource
from pathlib import Path

import numpy as np
import torch

from .errors import CorruptStoreError
from .memory import (
    MADV_RANDOM,
    MADV_WILLNEED,
    MAP_FIXED,
    MAP_NORESERVE,
    PAGE,
    Span,
    libc,
    map_memory,
    unmap,
)

_SYS_PROCESS_MADVISE = 440
_RANGES_PER_CALL = 1024
# Of a longer range the kernel may read no more ahead than this, its smallest usual limit.
_PAGES_PER_RANGE = 32
# Rows that `copy` moves at once: they stay in the processor's cache.
_COPIED_ROWS = 1024
# So many announced gathers in a row that caused no read, and the rows are taken to be resident.
_IDLE_ANNOUNCEMENTS = 8
# Fewer reads than one for so many rows cost less than announcing them all would.
_ROWS_PER_READ = 64
_BLOCKS_PER_PAGE = PAGE // 512
# Every so many gathers are announced all the same.
_PROBED_GATHERS = 64
# A thread that announces ahead makes reads of its own meanwhile, and they say nothing here.
_WHO = getattr(resource, "RUSAGE_THREAD", resource.RUSAGE_SELF)


class MappedRows:
    """All chunk files of one array behind one another in memory, as one ``(N, W)`` tensor.

    Files that are not mapped read as zeros. The memory is read-only (a write is a SIGSEGV), so
    `gather` copies and the tensor stays inside.

    Args:
        num_files: chunk files that the array can have.
        rows_per_file: rows in each; whole pages.
        width: columns of a row.
        dtype: element type on disk.

    Attributes:
        row_bytes: bytes of a row.
    """

    def __init__(self, num_files: int, rows_per_file: int, width: int, dtype: np.dtype) -> None:
        self._rows_per_file = rows_per_file
        self.row_bytes = width * dtype.itemsize
        self._file_bytes = rows_per_file * self.row_bytes
        if self._file_bytes % PAGE:
            raise ValueError(f"{rows_per_file} rows of {self.row_bytes} bytes are no whole pages")
        self._span = Span(num_files * self._file_bytes, writable=False)
        libc.madvise(self._span.address, self._span.nbytes, MADV_RANDOM)
        rows = np.asarray(self._span).view(dtype).reshape(num_files * rows_per_file, width)
        self._tensor = torch.from_numpy(rows)
        self._present = np.zeros(num_files, dtype=bool)
        self._idle = 0

    def has_file(self, index: int) -> bool:
        """Whether file ``index`` is mapped."""
        return bool(self._present[index])

    def empty(self, count: int) -> torch.Tensor:
        """Memory for ``count`` rows: ``(count, W)``."""
        return torch.empty(count, self._tensor.shape[1], dtype=self._tensor.dtype, device="cpu")

    def map_file(self, index: int, path: Path) -> None:
        """Map ``path`` as file ``index``, in place of what was mapped there.

        Raises:
            CorruptStoreError: the file is missing or has another size.
        """
        try:
            fd = os.open(path, os.O_RDONLY)
        except FileNotFoundError:
            raise CorruptStoreError(
                f"{path} is missing ({self._file_bytes:,} bytes expected)"
            ) from None
        try:
            size = os.fstat(fd).st_size
            if size != self._file_bytes:
                # Reading a page behind the end of a mapped file kills the process (SIGBUS).
                raise CorruptStoreError(f"{path} has {size:,} bytes, {self._file_bytes:,} expected")
            address = self._span.address + index * self._file_bytes
            map_memory(address, self._file_bytes, mmap.MAP_SHARED | MAP_FIXED, fd)
            libc.madvise(address, self._file_bytes, MADV_RANDOM)
        finally:
            os.close(fd)
        self._present[index] = True

    def unmap_all(self) -> None:
        """Let every file read as zeros again."""
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED
        map_memory(self._span.address, self._span.nbytes, flags, -1)
        self._present[:] = False

    def gather(self, rows: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Copy rows, ``(n,) int64`` best sorted, to ``(n, W)``; their pages are read ahead.

        Announcing pages that are resident, or announced ahead of this, costs time for nothing, so
        it stops when it hardly causes reads, and starts again when a gather faults. A large gather
        runs in torch's other threads too, whose faults do not count: so it tries now and then.
        """
        before = resource.getrusage(_WHO)
        announced = self._idle < _IDLE_ANNOUNCEMENTS or self._idle % _PROBED_GATHERS == 0
        if announced:
            self.announce(rows)
        result = torch.index_select(self._tensor, 0, rows, out=out)
        after = resource.getrusage(_WHO)
        if announced:
            reads = (after.ru_inblock - before.ru_inblock) // _BLOCKS_PER_PAGE
        else:
            reads = after.ru_majflt - before.ru_majflt
        self._idle = 0 if reads > len(rows) // _ROWS_PER_READ else self._idle + 1
        return result

    def copy(self, rows: np.ndarray, out: np.ndarray, places: np.ndarray) -> None:
        """Copy rows, ``(n,) int64`` best ascending, to ``out[places]``; all are read ahead.

        Made for threads beside a training one: numpy lets go of the interpreter, and torch would
        start a team of threads for each thread that calls it.
        """
        self.announce(torch.from_numpy(rows))
        source = self._tensor.numpy()
        for start in range(0, len(rows), _COPIED_ROWS):
            part = slice(start, start + _COPIED_ROWS)
            out[places[part]] = source[rows[part]]

    def read(self, start: int, stop: int) -> torch.Tensor:
        """Copy the rows ``start`` to ``stop``, which are read ahead."""
        self._announce_spans(np.array([start]), np.array([stop]))
        # By numpy, as in `copy`: threads of a merge read by this too.
        return torch.from_numpy(np.array(self._tensor.numpy()[start:stop]))

    def read_ahead(self, start: int, stop: int) -> None:
        """Ask the kernel to read the pages of the rows ``start`` to ``stop`` ahead."""
        self._announce_spans(np.array([start]), np.array([stop]))

    def wait_for(self, start: int, stop: int) -> None:
        """Wait until the rows ``start`` to ``stop`` are in memory."""
        rows = self._tensor.numpy()[start:stop]
        # An element of each range that `read_ahead` asks for: a range is read as a whole.
        np.array(rows.reshape(-1)[:: _PAGES_PER_RANGE * PAGE // rows.itemsize])

    def announce(self, rows: torch.Tensor) -> None:
        """Ask the kernel to read the pages of ``rows`` ahead, all in one queue.

        Any thread may do so while others gather, map and close: once closed it does nothing.
        """
        wanted = np.sort(rows.numpy())
        if not self._present.all():
            # Advice on a range without a file is an error that ends the whole call.
            wanted = wanted[self._present[wanted // self._rows_per_file]]
        self._announce_spans(wanted, wanted + 1)

    def _announce_spans(self, starts: np.ndarray, stops: np.ndarray) -> None:
        """Announce the pages of ascending spans of rows; those that touch go out as one range."""
        # The memory is unmapped when the last reference is gone, and this is one.
        span = getattr(self, "_span", None)
        if span is None:
            return
        first = starts * self.row_bytes // PAGE
        last = -(-stops * self.row_bytes // PAGE)
        apart = first[1:] > last[:-1]
        first = first[np.concatenate(([True], apart))[: len(first)]]
        last = last[np.concatenate((apart, [True]))[: len(last)]]
        pieces = -(-(last - first) // _PAGES_PER_RANGE)
        number = np.arange(pieces.sum()) - np.repeat(np.cumsum(pieces) - pieces, pieces)
        begin = np.repeat(first, pieces) + number * _PAGES_PER_RANGE
        end = np.minimum(begin + _PAGES_PER_RANGE, np.repeat(last, pieces))
        ranges = np.empty((len(begin), 2), dtype=np.uint64)
        ranges[:, 0] = span.address + begin * PAGE
        ranges[:, 1] = (end - begin) * PAGE
        for start in range(0, len(ranges), _RANGES_PER_CALL):
            _advise(ranges[start : start + _RANGES_PER_CALL])

    def close(self) -> None:
        """Drop the tensor; the memory is unmapped when the last view of it is gone."""
        if hasattr(self, "_tensor"):
            del self._tensor, self._span


class HeldFile:
    """Keeps a file's content though its name goes, without a descriptor; not in a forked child.

    Args:
        path: the file, of a page or more.
    """

    _address = 0

    def __init__(self, path: Path) -> None:
        self._pid = os.getpid()
        fd = os.open(path, os.O_RDONLY)
        try:
            self._address = map_memory(0, PAGE, mmap.MAP_SHARED, fd)
        finally:
            os.close(fd)

    def close(self) -> None:
        """Let it go; the last one to do so waits until the file is deleted."""
        # Taken away first: interrupted here, a second call must not unmap what lies there by then.
        address, self._address = self._address, 0
        if address:
            unmap(address, PAGE, self._pid)

    def __del__(self) -> None:
        self.close()


def _advise(ranges: np.ndarray) -> None:
    """Announce ``(n, 2)`` ranges of address and length; it is advice, which may be ignored."""
    if announces_in_batches():
        done = libc.syscall(
            _SYS_PROCESS_MADVISE,
            _self_descriptor(os.getpid()),
            ctypes.c_void_p(ranges.ctypes.data),
            ctypes.c_size_t(len(ranges)),
            MADV_WILLNEED,
            0,
        )
        if done >= 0:
            return
    for address, nbytes in ranges.tolist():
        libc.madvise(address, nbytes, MADV_WILLNEED)


@functools.cache
def announces_in_batches() -> bool:
    """Whether the kernel takes many ranges in one call (``process_madvise``); old ones do not."""
    fd = _self_descriptor(os.getpid())
    none = ctypes.c_void_p(None)
    return fd >= 0 and libc.syscall(_SYS_PROCESS_MADVISE, fd, none, 0, MADV_WILLNEED, 0) == 0


@functools.cache
def _self_descriptor(pid: int) -> int:
    """A descriptor of this process, for ``process_madvise``, or -1 where there is none."""
    if not hasattr(os, "pidfd_open"):
        return -1
    try:
        return os.pidfd_open(pid)
    except OSError:
        return -1
