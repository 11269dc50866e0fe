"""Rows of one on-disk array as one tensor, by mapped files. Knows pages, not tables or logs."""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import resource
import weakref
from pathlib import Path

import numpy as np
import torch

from .errors import CorruptStoreError

_PAGE = mmap.PAGESIZE
_MAP_FIXED = 0x10
_MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)
_MAP_FAILED = ctypes.c_void_p(-1).value
_MADV_RANDOM = 1
_MADV_WILLNEED = 3
_MADV_DONTFORK = 10
_SYS_PROCESS_MADVISE = 440
_RANGES_PER_CALL = 1024
# Of a longer range the kernel may read no more ahead than this, its smallest usual limit.
_PAGES_PER_RANGE = 32
# Rows that `copy` moves at once: they stay in the processor's cache.
_COPIED_ROWS = 1024
# So many announced gathers in a row that caused no read, and the rows are taken to be resident.
_IDLE_ANNOUNCEMENTS = 8

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.syscall.restype = ctypes.c_long


class _Span:
    """A reserved range of virtual memory that is unmapped when its last view is gone."""

    def __init__(self, nbytes: int, shape: tuple[int, int], dtype: np.dtype) -> None:
        self.nbytes = nbytes
        self.address = _map(0, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE, -1)
        # Not marked read-only, though it is: torch warns about read-only arrays, and the tensor
        # never leaves this package.
        self.__array_interface__ = {
            "shape": shape,
            "typestr": dtype.str,
            "data": (self.address, False),
            "version": 3,
        }
        # At exit other views may still be read; the kernel unmaps then.
        weakref.finalize(self, _unmap, self.address, nbytes, os.getpid()).atexit = False


def _map(address: int, nbytes: int, flags: int, fd: int) -> int:
    result = _libc.mmap(address, nbytes, mmap.PROT_READ, flags, fd, 0)
    if result == _MAP_FAILED:
        code = ctypes.get_errno()
        raise OSError(code, f"mmap of {nbytes:,} bytes: {os.strerror(code)}")
    _libc.madvise(result, nbytes, _MADV_RANDOM)
    _libc.madvise(result, nbytes, _MADV_DONTFORK)
    return int(result)


def _unmap(address: int, nbytes: int, pid: int) -> None:
    # A forked child has no such mapping: what is there now is something else of its own.
    if os.getpid() == pid:
        _libc.munmap(address, nbytes)


class MappedRows:
    """All chunk files of one array behind one another in memory, as one ``(N, W)`` tensor.

    Files that are not mapped read as zeros. The memory is read-only (a write is a SIGSEGV), so
    `gather` copies and the tensor stays inside.

    Args:
        num_files: chunk files that the array can have.
        rows_per_file: rows in each; whole pages.
        width: columns of a row.
        dtype: element type on disk.
    """

    def __init__(self, num_files: int, rows_per_file: int, width: int, dtype: np.dtype) -> None:
        self._rows_per_file = rows_per_file
        self._row_bytes = width * dtype.itemsize
        self._file_bytes = rows_per_file * self._row_bytes
        if self._file_bytes % _PAGE:
            raise ValueError(f"{rows_per_file} rows of {self._row_bytes} bytes are no whole pages")
        self._span = _Span(num_files * self._file_bytes, (num_files * rows_per_file, width), dtype)
        self._tensor = torch.from_numpy(np.asarray(self._span))
        self._present = np.zeros(num_files, dtype=bool)
        self._idle = 0

    def has_file(self, index: int) -> bool:
        """Whether file ``index`` is mapped."""
        return bool(self._present[index])

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
            _map(address, self._file_bytes, mmap.MAP_SHARED | _MAP_FIXED, fd)
        finally:
            os.close(fd)
        self._present[index] = True

    def unmap_all(self) -> None:
        """Let every file read as zeros again."""
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE | _MAP_FIXED
        _map(self._span.address, self._span.nbytes, flags, -1)
        self._present[:] = False

    def gather(self, rows: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Copy rows, ``(n,) int64`` best sorted, to ``(n, W)``; their pages are read ahead.

        Announcing pages that are resident costs time for nothing, so it stops when it causes no
        reads, and starts again when a gather faults.
        """
        before = _own_usage()
        announced = self._idle < _IDLE_ANNOUNCEMENTS
        if announced:
            self.announce(rows)
        result = torch.index_select(self._tensor, 0, rows, out=out)
        after = _own_usage()
        if announced:
            self._idle = 0 if after.ru_inblock > before.ru_inblock else self._idle + 1
        elif after.ru_majflt > before.ru_majflt:
            self._idle = 0
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
        return self._tensor[start:stop].clone()

    def announce(self, rows: torch.Tensor) -> None:
        """Ask the kernel to read the pages of ``rows`` ahead, all in one queue."""
        wanted = np.sort(rows.numpy())
        if not self._present.all():
            # Advice on a range without a file is an error that ends the whole call.
            wanted = wanted[self._present[wanted // self._rows_per_file]]
        self._announce_spans(wanted, wanted + 1)

    def _announce_spans(self, starts: np.ndarray, stops: np.ndarray) -> None:
        """Announce the pages of ascending spans of rows; those that touch go out as one range."""
        first = starts * self._row_bytes // _PAGE
        last = -(-stops * self._row_bytes // _PAGE)
        apart = first[1:] > last[:-1]
        first = first[np.concatenate(([True], apart))[: len(first)]]
        last = last[np.concatenate((apart, [True]))[: len(last)]]
        pieces = -(-(last - first) // _PAGES_PER_RANGE)
        number = np.arange(pieces.sum()) - np.repeat(np.cumsum(pieces) - pieces, pieces)
        begin = np.repeat(first, pieces) + number * _PAGES_PER_RANGE
        end = np.minimum(begin + _PAGES_PER_RANGE, np.repeat(last, pieces))
        ranges = np.empty((len(begin), 2), dtype=np.uint64)
        ranges[:, 0] = self._span.address + begin * _PAGE
        ranges[:, 1] = (end - begin) * _PAGE
        for start in range(0, len(ranges), _RANGES_PER_CALL):
            _advise(ranges[start : start + _RANGES_PER_CALL])

    def close(self) -> None:
        """Drop the tensor; the memory is unmapped when the last view of it is gone."""
        if hasattr(self, "_tensor"):
            del self._tensor, self._span


def _own_usage() -> resource.struct_rusage:
    """What this thread has read and faulted, where the system tells threads apart."""
    return resource.getrusage(getattr(resource, "RUSAGE_THREAD", resource.RUSAGE_SELF))


class HeldFile:
    """Keeps a file's content though its name goes, without a descriptor; not in a forked child.

    Args:
        path: the file, of a page or more.
    """

    def __init__(self, path: Path) -> None:
        fd = os.open(path, os.O_RDONLY)
        try:
            self._address = _map(0, _PAGE, mmap.MAP_SHARED, fd)
        finally:
            os.close(fd)

    def close(self) -> None:
        """Let it go, once; the last one to do so waits until the file is deleted."""
        _libc.munmap(self._address, _PAGE)


def _advise(ranges: np.ndarray) -> None:
    """Announce ``(n, 2)`` ranges of address and length; it is advice, which may be ignored."""
    if announces_in_batches():
        done = _libc.syscall(
            _SYS_PROCESS_MADVISE,
            _self_descriptor(os.getpid()),
            ctypes.c_void_p(ranges.ctypes.data),
            ctypes.c_size_t(len(ranges)),
            _MADV_WILLNEED,
            0,
        )
        if done >= 0:
            return
    for address, nbytes in ranges.tolist():
        _libc.madvise(address, nbytes, _MADV_WILLNEED)


@functools.cache
def announces_in_batches() -> bool:
    """Whether the kernel takes many ranges in one call (``process_madvise``); old ones do not."""
    fd = _self_descriptor(os.getpid())
    none = ctypes.c_void_p(None)
    return fd >= 0 and _libc.syscall(_SYS_PROCESS_MADVISE, fd, none, 0, _MADV_WILLNEED, 0) == 0


@functools.cache
def _self_descriptor(pid: int) -> int:
    """A descriptor of this process, for ``process_madvise``, or -1 where there is none."""
    if not hasattr(os, "pidfd_open"):
        return -1
    try:
        return os.pidfd_open(pid)
    except OSError:
        return -1
