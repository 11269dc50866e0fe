"""A queue of direct reads and writes that stays full, by Linux AIO; knows files and bytes."""

from __future__ import annotations

import ctypes
import os
import platform

import numpy as np
from numpy.typing import NDArray

from .memory import page_aligned

READ, WRITE = 0, 1  # IOCB_CMD_PREAD, IOCB_CMD_PWRITE

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
        self._memory = page_aligned(depth * block_bytes)
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
        self.run(np.full(len(fds), READ), fds, offsets, nbytes)

    def write(
        self, fds: NDArray[np.int64], offsets: NDArray[np.int64], nbytes: NDArray[np.int64]
    ) -> None:
        """Writes the first nbytes of whichever row of ``buffer`` is free to every (fd, offset)."""
        self.run(np.full(len(fds), WRITE), fds, offsets, nbytes)

    def run(
        self,
        opcodes: NDArray[np.int64],
        fds: NDArray[np.int64],
        offsets: NDArray[np.int64],
        nbytes: NDArray[np.int64],
    ) -> None:
        """Begins every (READ or WRITE, fd, offset, nbytes) in this order, and waits for all."""
        total = len(offsets)
        free = np.arange(len(self._iocbs))
        sent = done = 0
        while done < total:
            slots = free[: total - sent]
            batch = slice(sent, sent + len(slots))
            self._iocbs["opcode"][slots] = opcodes[batch]
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
