"""How much memory this process may use. Knows the machine and its cgroups, not tables."""

from __future__ import annotations

import os
from pathlib import Path


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
