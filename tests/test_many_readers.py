"""Readers that stay open, or come at any instant, each see one commit: its rows say its number.

The n-th commit has the learning rate n, and its row r is n + r / 1024 in every column: a row of
another commit, or half of one, cannot pass. And threads: whatever others do to the table, an error
is clear and no row is wrong.
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import crash_child
import pytest
import torch
from crash_child import pattern, write_pattern
from effort import FULL

from ooc_embed import DiskEmbedding, LockedError, SparseAdam, StoreError, report

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:.*gives up commit"),
]

ROWS, DIM = 4000, 3


@pytest.fixture(scope="module")
def nursery() -> crash_child.Nursery:
    return crash_child.nursery()


def create(path: Path, rows: int = ROWS, **options: Any) -> DiskEmbedding:
    """A cache so small that rows go to the log ahead of the commit that they are of."""
    options = {"keep_commits": 3, "cache_bytes": 1 << 15, "chunk_rows": 1024} | options
    return DiskEmbedding(rows, DIM, path=path, init="zeros", dtype=torch.float64, **options)


def assert_sees_one_commit(reader: DiskEmbedding) -> int:
    rows = torch.randperm(reader.num_embeddings)[:1500]
    assert torch.equal(reader(rows).detach(), pattern(reader, rows))
    return int(reader.optimizer.param_groups[0]["lr"])


def test_a_process_that_reads_sees_its_commit_through_all_that_may_come(
    quick: Path, nursery: crash_child.Nursery
) -> None:
    """Rows that it never read before, after each: merges, going back, a growth, another table."""
    path, fifo = quick / "t.zarr", quick / "fifo"
    os.mkfifo(fifo)
    emb = create(path)
    for number, how in enumerate(("flush", "commit", "commit"), 1):
        write_pattern(emb, number, how)
    nursery.start("read when told", path=str(path), fifo=str(fifo))
    assert nursery.next_event() == ["reads", 3]

    def merge() -> None:
        for number in range(4, 7):
            write_pattern(emb, number, "flush")

    def go_back() -> None:
        write_pattern(emb, 7)
        emb.rollback(min(emb.commits()))

    def grow() -> None:
        emb.resize(6000)
        write_pattern(emb, 8, "flush")

    def overwrite() -> None:
        emb.close()
        with create(path, 9000, overwrite=True) as other:
            write_pattern(other, 9, "flush")

    events: list[Callable[[], object]] = [merge, go_back, grow, overwrite]
    events.append(lambda: shutil.rmtree(path))
    with fifo.open("w", buffering=1) as told:
        for index, happen in enumerate(events):
            happen()
            told.write(f"{index * 800} {(index + 1) * 800}\n")
            assert nursery.next_event() == ["read", True], happen
        told.write(f"0 {ROWS}\n")
        assert nursery.next_event() == ["read", True]
    assert nursery.rest()[-1] == ["died", 0]


@pytest.mark.parametrize("seed", range(20 if FULL else 2))
def test_readers_that_come_at_any_instant_see_exactly_one_commit_each(
    quick: Path, nursery: crash_child.Nursery, seed: int
) -> None:
    path = quick / "t.zarr"
    with create(path) as emb:
        write_pattern(emb, 1)
    nursery.start("write patterns", path=str(path), seed=seed, rounds=30)
    assert nursery.next_event() == ["opened"]
    rng = random.Random(seed)
    held: list[tuple[DiskEmbedding, int]] = []
    seen = set()
    event = None
    while event is None:
        reader = DiskEmbedding.open(path, mode="r")
        number = assert_sees_one_commit(reader)
        seen.add(number)
        held.append((reader, number))
        if len(held) > 6:
            older, known = held.pop(rng.randrange(len(held)))
            assert assert_sees_one_commit(older) == known
            older.close()
        event = nursery.next_event(0)
    assert event == ["died", 0]
    for reader, number in held:
        assert assert_sees_one_commit(reader) == number
        reader.close()
    assert len(seen) > 3
    assert report.verify(path) == []


def test_a_second_writer_through_a_bind_mount_is_refused(quick: Path) -> None:
    place = quick / "mounted"
    place.mkdir()
    with create(quick / "t.zarr") as emb:
        write_pattern(emb, 1)
        command = ["mount", "--bind", str(emb.path), str(place)]
        if sys.platform != "linux" or subprocess.run(command, capture_output=True).returncode:
            pytest.skip("may not mount here")
        try:
            with pytest.raises(LockedError, match="same process"):
                DiskEmbedding.open(place)
            with DiskEmbedding.open(place, mode="r") as reader:
                assert assert_sees_one_commit(reader) == 1
        finally:
            subprocess.run(["umount", "-l", str(place)], check=True)


# Threads


def assert_whole(rows: torch.Tensor) -> None:
    """With betas of 0 each step moves a row by 0.01, as a whole: a torn row would show."""
    steps = rows.detach() / -0.01
    assert torch.equal(steps.round(), steps.round()[:, :1].expand(-1, DIM))
    assert (steps - steps.round()).abs().max() < 1e-6


class Trainer(threading.Thread):
    """Trains until the table is closed; the first error that is not clear ends it."""

    def __init__(self, emb: DiskEmbedding, seed: int) -> None:
        super().__init__()
        self.steps = 0
        self.error: BaseException | None = None
        self._emb = emb
        self._generator = torch.Generator().manual_seed(seed)

    def run(self) -> None:
        try:
            while self._step():
                self.steps += 1
        except BaseException as error:
            self.error = error

    def _step(self) -> bool:
        ids = torch.randint(0, ROWS, (200,), generator=self._generator)
        try:
            found = self._emb(ids)
            assert_whole(found)
            found.sum().backward()
        except StoreError as error:
            assert "is closed" in str(error)
            return False
        except RuntimeError as error:
            assert "went back to another commit" in str(error)
        return True


def test_threads_that_train_meet_all_other_calls_with_clear_errors_and_right_rows(
    quick: Path,
) -> None:
    path = quick / "t.zarr"
    emb = create(path, optimizer=SparseAdam(lr=0.01, betas=(0.0, 0.0), eps=1e-12))
    threads = [Trainer(emb, seed) for seed in range(3)]
    for thread in threads:
        thread.start()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for turn in range(12):
            emb.commit()
            assert_whole(emb.weight[:])
            emb.flush() if turn % 3 == 0 else emb.state_dict()
            emb.resize(emb.num_embeddings + 512)
            emb.rollback(random.Random(turn).choice(list(emb.commits())))
        assert all(thread.is_alive() for thread in threads)
        emb.close()
    for thread in threads:
        thread.join()
        assert thread.error is None, thread.error
        assert thread.steps
    assert report.verify(path) == []
    with DiskEmbedding.open(path) as again:
        rows = again.weight[:]
        assert_whole(rows)
        assert torch.equal((rows[:, 0] / -0.01).round().long(), again.version[:])
