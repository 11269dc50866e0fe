"""Memory: how much a process may use, and large arrays on huge pages. Knows cgroups, not tables."""

from __future__ import annotations

import math
import mmap
import os
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch

_HUGE_PAGE = 2 << 20


def huge_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A zeroed CPU tensor on transparent huge pages, where the system has them.

    Rows at random places of a large array each cost a walk of the page table, and half the time of
    a gather goes into these walks: 2.6 ms for 16 k rows of 512 bytes out of 1.5 GB on pages of
    4 KiB, 1.1 ms on huge ones. Memory is taken as it is first written.
    """
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes < _HUGE_PAGE:
        return torch.zeros(shape, dtype=dtype, device="cpu")
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    memory = mmap.mmap(-1, nbytes + _HUGE_PAGE, flags=flags)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    whole = np.frombuffer(memory, dtype=np.uint8)
    start = -whole.ctypes.data % _HUGE_PAGE
    return torch.from_numpy(whole[start : start + nbytes]).view(dtype).view(shape)


def usable_memory() -> int:
    """Bytes of memory that this process may use: the machine's, or its cgroups' limit."""
    limits = [_machine_memory()]
    for line in _lines(Path("/proc/self/cgroup")):
        _, controllers, group = line.split(":", 2)
        if controllers == "":
            limits += _limits(Path("/sys/fs/cgroup"), group, "memory.max")
        elif "memory" in controllers.split(","):
            limits += _limits(Path("/sys/fs/cgroup/memory"), group, "memory.limit_in_bytes")
    return min(limits)


def _machine_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _limits(root: Path, group: str, name: str) -> list[int]:
    """The limits of a cgroup and of those above it."""
    folder = root / group.lstrip("/")
    found = []
    for path in (folder, *folder.parents):
        if not path.is_relative_to(root):
            break
        found += [int(line) for line in _lines(path / name) if line.isdigit()]
    return found


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
