"""Measures the disk itself, past the page cache; knows files and bytes, not tables."""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import platform
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

PAGE_BYTES = 4096
_READ, _WRITE = 0, 1  # IOCB_CMD_PREAD, IOCB_CMD_PWRITE

# io_setup, io_destroy, io_getevents, io_submit: libc has no wrappers for them.
_SYSCALLS = {"x86_64": (206, 207, 208, 209), "aarch64": (0, 1, 4, 2)}

# struct iocb and struct io_event of linux/aio_abi.h.
_IOCB = np.dtype(
    [
        ("data", "<u8"),
        ("key", "<u4"),
        ("rw_flags", "<i4"),
        ("opcode", "<u2"),
        ("priority", "<i2"),
        ("fd", "<u4"),
        ("buffer", "<u8"),
        ("nbytes", "<u8"),
        ("offset", "<i8"),
        ("reserved", "<u8"),
        ("flags", "<u4"),
        ("event_fd", "<u4"),
    ]
)
_EVENT = np.dtype([("data", "<u8"), ("iocb", "<u8"), ("result", "<i8"), ("result2", "<i8")])


class DirectQueue:
    """A queue of ``depth`` requests of up to ``block_bytes`` that is kept full by one thread.

    Linux AIO, since a pool of Python threads spends the two cores of a small machine on the
    interpreter's lock long before it saturates the disk.

    Raises:
        OSError: where the kernel refuses Linux AIO, or this is not Linux on x86-64 or arm64.
    """

    def __init__(self, depth: int, block_bytes: int) -> None:
        numbers = _SYSCALLS.get(platform.machine())
        if platform.system() != "Linux" or numbers is None:
            raise OSError(
                f"measuring the disk needs Linux on x86_64 or aarch64, "
                f"this is {platform.system()} on {platform.machine()}"
            )
        self._setup, self._destroy, self._getevents, self._submit = numbers
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._context = ctypes.c_ulong(0)
        self._call(self._setup, ctypes.c_int(depth), ctypes.byref(self._context))
        # Anonymous mappings begin at a page, which O_DIRECT asks of its buffers.
        self._memory = np.frombuffer(mmap.mmap(-1, depth * block_bytes), dtype=np.uint8)
        self.buffer = self._memory.reshape(depth, block_bytes)
        self._iocbs = np.zeros(depth, dtype=_IOCB)
        self._iocbs["data"] = np.arange(depth)
        self._iocbs["buffer"] = self._memory.ctypes.data + np.arange(depth) * block_bytes
        self._addresses = self._iocbs.ctypes.data + np.arange(depth) * _IOCB.itemsize
        self._events = np.zeros(depth, dtype=_EVENT)

    def __enter__(self) -> DirectQueue:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Waits for what is in flight and gives the queue back."""
        if self._context.value:
            self._call(self._destroy, self._context)
            self._context = ctypes.c_ulong(0)

    def read(
        self, fds: NDArray[np.int64], offsets: NDArray[np.int64], nbytes: NDArray[np.int64]
    ) -> None:
        """Reads every (fd, offset, nbytes), in any order, and drops what was read."""
        self._run(_READ, fds, offsets, nbytes)

    def write(
        self, fds: NDArray[np.int64], offsets: NDArray[np.int64], nbytes: NDArray[np.int64]
    ) -> None:
        """Writes the first nbytes of whichever row of ``buffer`` is free to every (fd, offset)."""
        self._run(_WRITE, fds, offsets, nbytes)

    def _run(
        self,
        opcode: int,
        fds: NDArray[np.int64],
        offsets: NDArray[np.int64],
        nbytes: NDArray[np.int64],
    ) -> None:
        self._iocbs["opcode"] = opcode
        total = len(offsets)
        free = np.arange(len(self._iocbs))
        sent = done = 0
        while done < total:
            slots = free[: total - sent]
            batch = slice(sent, sent + len(slots))
            self._iocbs["fd"][slots] = fds[batch]
            self._iocbs["offset"][slots] = offsets[batch]
            self._iocbs["nbytes"][slots] = nbytes[batch]
            self._send(self._addresses[slots])
            sent += len(slots)
            # Refilling by quarters keeps the queue deep at a quarter of the system calls.
            least = min(len(self._iocbs) // 4 or 1, sent - done)
            free = self._wait(least)
            done += len(free)

    def _send(self, addresses: NDArray[np.int64]) -> None:
        while len(addresses):
            accepted = self._call(
                self._submit,
                self._context,
                ctypes.c_long(len(addresses)),
                ctypes.c_void_p(addresses.ctypes.data),
            )
            addresses = addresses[accepted:]

    def _wait(self, least: int) -> NDArray[np.int64]:
        count = self._call(
            self._getevents,
            self._context,
            ctypes.c_long(least),
            ctypes.c_long(len(self._events)),
            ctypes.c_void_p(self._events.ctypes.data),
            None,
        )
        events = self._events[:count]
        slots = events["data"].astype(np.int64)
        short = events["result"] != self._iocbs["nbytes"][slots].astype(np.int64)
        if short.any():
            result = int(events["result"][short][0])
            if result < 0:
                raise OSError(-result, os.strerror(-result))
            raise OSError(f"the disk moved {result} bytes of a longer request")
        return slots

    def _call(self, number: int, *args: object) -> int:
        result = int(self._libc.syscall(ctypes.c_long(number), *args))
        if result < 0:
            errno = ctypes.get_errno()
            raise OSError(errno, f"Linux AIO: {os.strerror(errno)}")
        return result


def random_read_rate(
    files: Sequence[Path], *, seconds: float = 3.0, depth: int = 256, seed: int = 0
) -> float:
    """Random reads of one 4 KiB page a second, over all pages of ``files``, ``depth`` in flight."""
    rng = np.random.default_rng(seed)
    with _opened(files) as fds, DirectQueue(depth, PAGE_BYTES) as queue:
        ends = np.cumsum([os.fstat(fd).st_size // PAGE_BYTES for fd in fds])
        lengths = np.full(64 * depth, PAGE_BYTES)
        done, begin = 0, time.perf_counter()
        while time.perf_counter() - begin < seconds:
            page = rng.integers(ends[-1], size=len(lengths))
            file = np.searchsorted(ends, page, side="right")
            first = np.concatenate(([0], ends))[file]
            queue.read(np.asarray(fds)[file], (page - first) * PAGE_BYTES, lengths)
            done += len(lengths)
        return done / (time.perf_counter() - begin)


def sequential_read_rate(
    files: Sequence[Path], *, seconds: float = 3.0, block_bytes: int = 4 << 20, depth: int = 4
) -> float:
    """Bytes a second of whole blocks, file after file, until they end or the time is over."""
    with _opened(files) as fds, DirectQueue(depth, block_bytes) as queue:
        blocks = _blocks(fds, block_bytes)
        done, begin = 0, time.perf_counter()
        while time.perf_counter() - begin < seconds:
            batch = list(itertools.islice(blocks, 16 * depth))
            if not batch:
                break
            where, offsets, lengths = np.asarray(batch, dtype=np.int64).T
            queue.read(where, offsets, lengths)
            done += int(lengths.sum())
        return done / (time.perf_counter() - begin)


def write_sequentially(
    path: Path, content: NDArray[np.uint8], nbytes: int, *, depth: int = 4
) -> float:
    """Makes a file of ``nbytes`` from repetitions of ``content``; bytes a second, durable.

    Args:
        path: the file, which must not exist.
        content: one block, a multiple of 4 KiB long.
        nbytes: the size of the file.
        depth: how many blocks are in flight.
    """
    block_bytes = len(content)
    padded = -(-nbytes // PAGE_BYTES) * PAGE_BYTES
    begin = time.perf_counter()
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_DIRECT, 0o644)
    try:
        os.posix_fallocate(fd, 0, padded)
        with DirectQueue(depth, block_bytes) as queue:
            queue.buffer[:] = content
            blocks = np.asarray(list(_blocks([fd], block_bytes)), dtype=np.int64)
            queue.write(*blocks.T)
        os.ftruncate(fd, nbytes)
        os.fdatasync(fd)
    finally:
        os.close(fd)
    return nbytes / (time.perf_counter() - begin)


def _blocks(fds: Sequence[int], block_bytes: int) -> Iterator[tuple[int, int, int]]:
    """(fd, offset, nbytes) of all whole pages of the files, in order."""
    for fd in fds:
        end = os.fstat(fd).st_size // PAGE_BYTES * PAGE_BYTES
        for offset in range(0, end, block_bytes):
            yield fd, offset, min(block_bytes, end - offset)


@contextmanager
def _opened(files: Sequence[Path]) -> Iterator[list[int]]:
    if not files:
        raise ValueError("no files to read: the disk's rates are measured on existing files")
    with ExitStack() as stack:
        fds = []
        for file in files:
            fds.append(os.open(file, os.O_RDONLY | os.O_DIRECT))
            stack.callback(os.close, fds[-1])
        yield fds
