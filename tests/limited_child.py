"""A process that uses a table while a limit of the system is reached, over and over.

Run as a script: `limited_child.py LIMIT FOLDER`. It says how often each call was refused.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import errno
import functools
import json
import mmap
import os
import resource
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import crash_child
import torch
import workload

from ooc_embed import DiskEmbedding, report

SEED = 6
CACHE = workload.SMALL_CACHE
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def count_maps() -> int:
    with Path("/proc/self/maps").open("rb") as lines:
        return sum(1 for _ in lines)


class Filler:
    """Takes maps: each second page of its memory that may not be read makes two of one.

    Args:
        maps: how many.
    """

    def __init__(self, maps: int) -> None:
        self._memory = mmap.mmap(-1, (maps + 2) * mmap.PAGESIZE)
        self._pin = ctypes.c_char.from_buffer(self._memory)
        for page in range(1, maps, 2):
            _libc.mprotect(ctypes.addressof(self._pin) + page * mmap.PAGESIZE, mmap.PAGESIZE, 0)

    def close(self) -> None:
        del self._pin
        self._memory.close()


@functools.cache
def most_of_the_maps() -> Filler:
    """Held until the process ends, so that `few_maps` takes no time."""
    return Filler(most_maps() - count_maps() - 3000)


def most_maps() -> int:
    return int(Path("/proc/sys/vm/max_map_count").read_text())


@contextlib.contextmanager
def few_maps(leave: int) -> Iterator[None]:
    """Take all maps that this process may have but `leave`, or one more."""
    most_of_the_maps()
    filler = Filler(most_maps() - count_maps() - leave)
    try:
        yield
    finally:
        filler.close()


@contextlib.contextmanager
def little_memory(leave: int) -> Iterator[None]:
    """Let this process have `leave` times 64 KiB more than it has."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    now = pages * mmap.PAGESIZE + (leave << 16)
    resource.setrlimit(resource.RLIMIT_AS, (now, resource.RLIM_INFINITY))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


@contextlib.contextmanager
def few_files(leave: int) -> Iterator[None]:
    """Let this process open `leave` more files."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    free, held = [os.open("/dev/null", os.O_RDONLY)], limits[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(free) + leave, held))
    os.close(free[0])
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


LIMITS: dict[str, Callable[[int], contextlib.AbstractContextManager[None]]] = {
    "maps": few_maps,
    "memory": little_memory,
    "files": few_files,
}
AMOUNTS = {
    "maps": (0, 2, 5, 12, 25),
    # In units of 64 KiB. With less, Python itself cannot begin a thread, and waits for it for ever.
    "memory": (16, 64, 160, 400),
    "files": (1, 2, 3, 5, 8),
}
# What an error must say, so that a user knows what to do.
NAMED = {"maps": "vm.max_map_count", "memory": "", "files": "open files"}
CODES = {"maps": errno.ENOMEM, "memory": errno.ENOMEM, "files": errno.EMFILE}


class Life:
    """A table and its oracle, which do the same; a call that is refused is made again later."""

    def __init__(self, folder: Path, limit: str) -> None:
        self.folder = folder
        self.limit = limit
        self.refused: Counter[str] = Counter()
        self.emb = crash_child.create(str(folder / "t.zarr"), CACHE)
        self.emb.keep_commits = 3
        self.shadow = workload.Shadow(self.emb.weight[:])
        self.round = 0
        self.kept: dict[int, workload.Shadow] = {}

    def under(self, leave: int, name: str, call: Callable[[], Any]) -> bool:
        """Call within the limit; whether it was done. Any error but a clear one ends all."""
        with LIMITS[self.limit](leave):
            try:
                call()
                error = None
            except (OSError, MemoryError, RuntimeError) as caught:
                error = caught
        if error is None:
            return True
        self.refused[name] += 1
        self.see(error, name)
        return False

    def see(self, error: BaseException, name: str) -> None:
        if isinstance(error, OSError):
            assert error.errno == CODES[self.limit], (name, error)
            assert NAMED[self.limit] in str(error), (name, error)
        else:
            print(name, type(error), error, file=sys.stderr)

    def check(self) -> None:
        workload.assert_table_is(self.emb, self.shadow.state())

    def play(self) -> None:
        played = workload.make_round(SEED, self.round)
        self.round += 1
        workload.play(self.emb, played)
        self.shadow.play(played)

    def save(self) -> None:
        self.emb.commit()
        self.kept[max(self.emb.commits())] = copy.deepcopy(self.shadow)

    def train(self, leave: int) -> None:
        played = workload.make_round(SEED, self.round)
        self.round += 1
        step = self.emb.step
        self.under(leave, "step", lambda: workload.train(self.emb, played.ids, played.grads))
        if self.emb.step > step:
            self.shadow.train(played.ids, played.grads)
        self.check()

    def large_train(self, leave: int) -> None:
        ids = torch.arange(0, 3000)
        grads = torch.ones(3000, workload.DIM, dtype=torch.float64)
        step = self.emb.step
        self.under(leave, "large step", lambda: workload.train(self.emb, ids, grads))
        if self.emb.step > step:
            self.shadow.train(ids, grads)
        self.check()

    def again(self, leave: int, name: str, call: Callable[[], Any]) -> None:
        """Call within the limit; again without, if it was refused."""
        done = self.under(leave, name, call)
        if self.emb.closed:
            self.emb = DiskEmbedding.open(self.folder / "t.zarr", cache_bytes=CACHE)
        elif not done:
            self.check()
            call()
        self.check()

    def roll_back(self, leave: int) -> None:
        self.save()
        kept = copy.deepcopy(self.shadow)
        self.play()
        number = max(self.emb.commits())
        self.shadow = kept
        done = self.under(leave, "rollback", lambda: self.emb.rollback(number))
        if self.emb.closed:
            self.emb = DiskEmbedding.open(self.folder / "t.zarr", cache_bytes=CACHE)
        elif not done:
            self.emb.rollback(number)
        self.check()

    def open_reader(self, leave: int) -> None:
        self.save()
        self.under(leave, "reader", self.read)
        self.read()

    def read(self) -> None:
        with DiskEmbedding.open(self.folder / "t.zarr", mode="r") as reader:
            reader(torch.arange(100))

    def open_again(self, leave: int) -> None:
        self.emb.close()
        opened: list[DiskEmbedding] = []
        path = self.folder / "t.zarr"
        make = lambda: opened.append(DiskEmbedding.open(path, cache_bytes=CACHE))  # noqa: E731
        if not self.under(leave, "open", make):
            make()
        self.emb = opened.pop()
        self.check()

    def snapshot(self, leave: int) -> None:
        target = self.folder / f"{self.round}-{leave}.zarr"

        def copy_once() -> None:
            if not (target / "zarr.json").exists():
                self.emb.snapshot(target)

        self.again(leave, "snapshot", copy_once)
        assert report.verify(target) == []

    def create(self, leave: int) -> None:
        path = self.folder / f"new-{leave}.zarr"
        rows = torch.ones(3000, 4)
        make = lambda: DiskEmbedding(3000, 4, path=path, init=rows, chunk_rows=1024).close()  # noqa: E731
        if not self.under(leave, "creation", make) and not (path / "zarr.json").exists():
            make()
        assert report.verify(path) == []

    def run(self, leave: int) -> None:
        self.train(leave)
        self.large_train(leave)
        self.again(leave, "commit", self.emb.commit)
        self.again(leave, "state_dict", self.emb.state_dict)
        self.train(leave)
        self.again(leave, "flush", self.emb.flush)
        self.roll_back(leave)
        self.snapshot(leave)
        self.open_reader(leave)
        self.open_again(leave)
        self.create(leave)
        for _ in range(3):
            self.play()
        self.check()
        self.emb.commit()
        assert report.verify(self.folder / "t.zarr") == []

    def grow(self, leave: int) -> None:
        """Last, as the oracle does not grow."""
        rows = self.emb.num_embeddings + 1024
        before = self.emb.weight[:]
        done = self.under(leave, "resize", lambda: self.emb.resize(rows))
        if self.emb.closed:
            self.emb = DiskEmbedding.open(self.folder / "t.zarr", cache_bytes=CACHE)
        elif not done:
            self.emb.resize(rows)
        assert self.emb.num_embeddings == rows
        assert torch.equal(self.emb.weight[: len(before)], before)


def main(limit: str, folder: Path) -> None:
    torch.set_num_threads(1)
    import warnings

    warnings.simplefilter("ignore")
    life = Life(folder, limit)
    life.play()
    life.emb.flush()
    amounts = AMOUNTS[limit]
    for leave in amounts:
        life.run(leave)
    life.emb.flush()
    life.check()
    workload.assert_zarr_is(folder / "t.zarr", life.shadow.state())
    for leave in amounts:
        life.grow(leave)
    life.emb.close()
    assert report.verify(folder / "t.zarr") == []
    print(json.dumps(life.refused))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
