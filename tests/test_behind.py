"""Calls in other threads keep their order and their errors; runs of the log are written so."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import store_files
import system_calls
import torch
import workload

import ooc_embed
from ooc_embed import DiskEmbedding, log, report
from ooc_embed.behind import Behind

pytestmark = pytest.mark.usefixtures("one_thread")


def test_calls_run_in_their_order_in_other_threads() -> None:
    done: list[int] = []
    threads = set()

    def call(number: int) -> None:
        done.append(number)
        threads.add(threading.current_thread())

    with Behind(3) as behind:
        for number in range(50):
            behind.run(lambda number=number: call(number))
            assert len(done) > number - 3
    assert done == list(range(50))
    assert threading.current_thread() not in threads


def test_an_error_is_raised_once_and_no_later_call_begins() -> None:
    done: list[int] = []

    def fail() -> None:
        raise OSError(errno.EIO, "a disk")

    with pytest.raises(OSError, match="a disk"), Behind(2) as behind:
        behind.run(lambda: done.append(0))
        behind.run(fail)
        for number in range(1, 9):
            behind.run(lambda number=number: done.append(number))
    assert done == [0]


def test_the_error_of_the_last_call_is_raised_where_the_block_ends() -> None:
    def fail() -> None:
        raise OSError(errno.EIO, "a disk")

    with pytest.raises(OSError, match="a disk"), Behind(2) as behind:
        behind.run(fail)


def test_leaving_by_an_error_waits_for_the_calls_that_were_handed_over() -> None:
    let, done = threading.Event(), threading.Event()
    before = set(threading.enumerate())

    def call() -> None:
        assert let.wait(60)
        done.set()

    with pytest.raises(ZeroDivisionError), Behind(2) as behind:
        behind.run(call)
        behind.run(done.wait)
        let.set()
        raise ZeroDivisionError
    assert done.is_set()
    assert set(threading.enumerate()) <= before


def test_calls_run_in_the_caller_where_no_thread_can_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    done: list[int] = []
    with Behind(2) as behind:
        behind.run(lambda: done.append(0))
        monkeypatch.setattr(threading.Thread, "start", refuse)
        for number in range(1, 5):
            behind.run(lambda number=number: done.append(number))
    assert done == list(range(5))


# Runs of several blocks


class Pair:
    """A table whose runs are written in blocks of 1024 records, and torch's own in RAM."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.shadow = workload.Shadow(torch.zeros(9000, 4, dtype=torch.float64))
        adam = ooc_embed.SparseAdam(lr=workload.LR)
        self.emb = DiskEmbedding(
            9000, 4, path=path, init="zeros", optimizer=adam, dtype=torch.float64, chunk_rows=1024
        )

    def train(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        ids = torch.from_numpy(rng.permutation(9000)[:8500])
        grads = torch.from_numpy(rng.standard_normal((8500, 4)))
        workload.train(self.emb, ids, grads)
        self.shadow.train(ids, grads)

    def check_reader(self) -> None:
        with DiskEmbedding.open(self.path, mode="r") as reader:
            workload.assert_table_is(reader, self.shadow.state())
        assert report.verify(self.path) == []


@pytest.fixture
def pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pair:
    monkeypatch.setattr(log, "_BLOCK_BYTES", 1)
    return Pair(tmp_path / "t.zarr")


def test_a_run_of_many_blocks_reads_back_as_it_was_written(pair: Pair) -> None:
    pair.train(1)
    pair.emb.commit()
    (state,) = store_files.newest_commit(pair.path)["logs"][:1]
    assert state["records"] >= 8500
    pair.check_reader()
    pair.emb.close(flush=True)
    workload.assert_zarr_is(pair.path, pair.shadow.state())


@pytest.mark.parametrize("block", [0, 3, 8])
def test_a_write_that_fails_in_any_block_leaves_the_log_as_it_was(pair: Pair, block: int) -> None:
    pair.train(1)
    pair.emb.commit()
    before = store_files.newest_commit(pair.path)
    pair.train(2)
    seen = 0

    def fail(name: str, arguments: tuple[Any, ...]) -> None:
        nonlocal seen
        place = system_calls.target(arguments)
        if name == "pwrite" and place is not None and place.parent.name == "records":
            seen += 1
            if seen == block + 1:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with system_calls.watched(pair.path, fail), pytest.raises(OSError) as error:
        pair.emb.commit()
    assert error.value.errno == errno.ENOSPC
    assert store_files.newest_commit(pair.path) == before
    workload.assert_table_is(pair.emb, pair.shadow.state())
    pair.emb.commit()
    pair.check_reader()
    pair.emb.close()


def test_an_interrupt_between_blocks_leaves_no_write_behind(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair.train(1)
    pair.emb.commit()
    pair.train(2)
    real = torch.index_select
    calls = 0

    def select(*arguments: Any, **options: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == 4:
            raise KeyboardInterrupt
        return real(*arguments, **options)

    threads = set(threading.enumerate())
    monkeypatch.setattr(torch, "index_select", select)
    with pytest.raises(KeyboardInterrupt):
        pair.emb.commit()
    assert set(threading.enumerate()) <= threads
    workload.assert_table_is(pair.emb, pair.shadow.state())
    pair.emb.commit()
    pair.check_reader()
    pair.emb.close()
