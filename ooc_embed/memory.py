"""Ranges of virtual memory that end with their last view. Knows pages; knows no file or table."""

from __future__ import annotations

import ctypes
import errno
import math
import mmap
import os
import weakref
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch

PAGE = mmap.PAGESIZE
MAP_FIXED = 0x10
MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)
MADV_RANDOM = 1
MADV_WILLNEED = 3
_MADV_DONTFORK = 10
_MADV_HUGEPAGE = 14
_MAP_FAILED = ctypes.c_void_p(-1).value
_HUGE_PAGE = 2 << 20
# More than it takes.
_MAPS_OF_A_THREAD = 16

libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
]
libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
libc.syscall.restype = ctypes.c_long


class Span:
    """A range of anonymous memory that is unmapped when its last view is gone.

    A forked child does not have it: the disk may be writing to it when a DataLoader forks, and what
    is copied on the next write to it would be lost to one of the two.

    Args:
        nbytes: its size.
        writable: else it reads as zeros, until files are mapped over parts of it.

    Raises:
        OSError: the system has no room for it.

    Attributes:
        address, nbytes: where it is.
    """

    def __init__(self, nbytes: int, *, writable: bool) -> None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        if not writable:  # more memory than there is must be refused here, not killed for later
            flags |= MAP_NORESERVE
        self.nbytes = nbytes
        self.address = map_memory(0, nbytes, flags, -1, writable=writable)
        # At exit other views may still be read; the kernel unmaps then.
        weakref.finalize(self, unmap, self.address, nbytes, os.getpid()).atexit = False
        # Not marked read-only where it is: torch warns of such arrays, and none leaves the package.
        self.__array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (self.address, False),
            "version": 3,
        }


def map_memory(address: int, nbytes: int, flags: int, fd: int, *, writable: bool = False) -> int:
    """``mmap``, kept from forked children; returns the address.

    Raises:
        OSError: the system has no room for it.
    """
    protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    result = libc.mmap(address, nbytes, protection, flags, fd, 0)
    if result == _MAP_FAILED:
        code = ctypes.get_errno()
        raise OSError(code, f"mmap of {nbytes:,} bytes: {os.strerror(code)}{_too_many_maps(code)}")
    libc.madvise(result, nbytes, _MADV_DONTFORK)
    return int(result)


def check_thread() -> None:
    """See that a thread can begin here: its stack and its heap are maps of their own.

    Python does not: it waits for ever for a thread that dies of that.

    Raises:
        RuntimeError: it cannot, as Python itself says where the system refuses one.
    """
    pages = 2 * _MAPS_OF_A_THREAD
    address = libc.mmap(
        0, pages * PAGE, mmap.PROT_READ, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0
    )
    if address == _MAP_FAILED:
        raise RuntimeError("can't start new thread: no memory")
    try:
        for page in range(0, pages, 2):  # each makes two maps of one
            if libc.mprotect(address + page * PAGE, PAGE, mmap.PROT_READ | mmap.PROT_WRITE):
                raise RuntimeError("can't start new thread: too many maps")
    finally:
        libc.munmap(address, pages * PAGE)


def _too_many_maps(code: int) -> str:
    """What to do where a process has all the maps it may have; "" where that is not the reason."""
    if code != errno.ENOMEM:
        return ""
    with suppress(OSError, ValueError):
        most = int(Path("/proc/sys/vm/max_map_count").read_text())
        with Path("/proc/self/maps").open("rb") as lines:
            count = sum(1 for _ in lines)
        # One that splits another takes two more.
        if count + 2 >= most:
            return (
                f". This process has {count:,} maps, vm.max_map_count allows {most:,}: raise it, "
                f"as by sysctl -w vm.max_map_count={4 * most}, or make tables with larger "
                f"chunk_rows, which have fewer files"
            )
    return ""


def unmap(address: int, nbytes: int, pid: int) -> None:
    """``munmap`` of what the process ``pid`` mapped; in a forked child it does nothing.

    The child has no such mapping: what is there now is something else of its own.
    """
    if os.getpid() == pid:
        libc.munmap(address, nbytes)


def page_aligned(nbytes: int) -> np.ndarray:
    """A zeroed ``(nbytes,) uint8`` buffer that starts on a page, as O_DIRECT wants it.

    Larger ones lie on transparent huge pages, where the system has them: then a request to the disk
    is a few long pieces of memory instead of a thousand, and goes through in one.
    """
    span = Span(nbytes + (_HUGE_PAGE if nbytes >= _HUGE_PAGE else PAGE), writable=True)
    start = 0
    if nbytes >= _HUGE_PAGE:
        start = -span.address % _HUGE_PAGE
        libc.madvise(span.address, span.nbytes, _MADV_HUGEPAGE)
    return np.asarray(span)[start : start + nbytes]


def huge_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A zeroed CPU tensor on transparent huge pages, where the system has them.

    Rows at random places of a large array each cost a walk of the page table, and half the time of
    a gather goes into these walks: 2.6 ms for 16 k rows of 512 bytes out of 1.5 GB on pages of
    4 KiB, 1.1 ms on huge ones. Memory is taken as it is first written.
    """
    memory = page_aligned(math.prod(shape) * dtype.itemsize)
    return torch.from_numpy(memory).view(dtype).view(shape)
