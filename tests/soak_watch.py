"""What a process of a soak takes: memory, descriptors, maps, disk. Knows what is too much of it."""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from pathlib import Path

import soak_child
import store_files

# What a process takes beside the cache and the map of its rows: torch and numba, the buffers of
# merges and of the log, a batch.
BESIDE = 700 << 20


class Watch:
    """What one life takes, each second: memory, descriptors, maps, disk and log."""

    def __init__(self, path: Path, work: soak_child.Work, ram: int | None, pid: int) -> None:
        self._path = path
        self._proc = Path(f"/proc/{pid}")
        self._before = self._process()
        self.capacity = int(store_files.metadata(path, "log/0/rows")["shape"][0])
        record = 4 * (3 * work.dim + 1)
        chunk = store_files.metadata(path, "table")["chunk_grid"]["configuration"]["chunk_shape"]
        table = -(-work.rows // chunk[0]) * chunk[0] * record
        # Beside them, the chunks that a merge is writing.
        self.disk_bound = table + 2 * self.capacity * (record + 8) + (512 << 20)
        self.bound = work.cache_bytes + 4 * work.rows + BESIDE
        if ram is not None:
            self.bound = min(self.bound, ram)
        self.samples: list[dict[str, int]] = []
        self._next = 0.0

    def look(self, full: bool) -> None:
        """Take a sample, if it is time for one.

        Args:
            full: whether the cache is.
        """
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + 1
        try:
            sample = self._process()
        except (FileNotFoundError, ProcessLookupError):  # it died
            return
        logs = [log["records"] for log in store_files.newest_commit(self._path)["logs"]]
        sample |= {"log": max(logs), "logs": sum(logs), **_folder(self._path)}
        sample["quiet"] = int(full and len(logs) == 1)
        self.samples.append(sample)
        # Each file of the store is mapped, by a reader too; a merge holds on to replaced ones.
        for name, most in (
            ("anon", self.bound),
            ("log", self.capacity),
            ("disk", self.disk_bound),
            ("descriptors", self._before["descriptors"] + 40),
            ("maps", self._before["maps"] + 2 * sample["files"] + 100),
        ):
            assert sample[name] <= most, f"{name}: {sample[name]:,}, {most:,} at most expected"

    def _process(self) -> dict[str, int]:
        status = (self._proc / "status").read_text()
        if "RssAnon" not in status:
            raise ProcessLookupError("a zombie")
        return {
            "anon": 1024 * int(status.split("RssAnon:")[1].split()[0]),
            "descriptors": len(os.listdir(self._proc / "fd")),
            "maps": len((self._proc / "maps").read_bytes().splitlines()),
        }

    @property
    def quiet(self) -> list[float]:
        """Anonymous memory while the cache is full and no log is merged: it should not change."""
        return [sample["anon"] for sample in self.samples if sample["quiet"]]

    def check_flat(self) -> None:
        """In a long life it does not."""
        if len(self.quiet) >= 40:
            check_flat(self.quiet)


def first_and_last(values: list[float]) -> tuple[float, float]:
    """Medians of the first quarter and of the last one."""
    quarter = max(len(values) // 4, 1)
    return statistics.median(values[:quarter]), statistics.median(values[-quarter:])


def check_flat(values: list[float]) -> None:
    first, last = first_and_last(values)
    # What a table first uses some time after the cache is full takes a few percent.
    assert last <= 1.1 * first, f"memory grows: {first:,.0f} bytes at first, {last:,.0f} at last"


def _folder(path: Path) -> dict[str, int]:
    """How many files a store has, and their bytes on the disk."""
    found = {"files": 0, "disk": 0}
    for file in path.rglob("*"):
        with contextlib.suppress(FileNotFoundError):  # renamed or deleted meanwhile
            found["disk"] += file.stat().st_blocks * 512
            found["files"] += 1
    return found


def is_merging(path: Path) -> bool:
    """Whether a chunk file is, or was, being written."""
    return any((path / "table").glob("c.*.tmp"))


def peak(group: Path) -> int:
    return int(_either(group, "memory.peak", "memory.max_usage_in_bytes"))


def ooms(group: Path) -> int:
    text = _either(group, "memory.events", "memory.oom_control")
    return int(dict(line.split() for line in text.splitlines()).get("oom_kill", 0))


def _either(group: Path, *names: str) -> str:
    """What cgroups of version 2 or 1 say."""
    return next((group / name).read_text() for name in names if (group / name).exists())
