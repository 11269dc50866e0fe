"""Merges in the background: training beside them stays exact, and they stop, fail and go on."""

from __future__ import annotations

import errno
import gc
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import crash_child
import numpy as np
import pytest
import ram_reference
import store_files
import torch
import workload
from ram_reference import RamTable

import ooc_embed
from ooc_embed import DiskEmbedding, merging, report
from ooc_embed.merging import Merge, Worker
from ooc_embed.storage import Storage
from ooc_embed.store import Store

pytestmark = pytest.mark.usefixtures("one_thread")

ROWS, DIM, CHUNKS = 6000, 4, 6
# Few enough slots that most of a batch pushes others out.
SMALL_CACHE = 600 * 13 * 8


class Gate:
    """Holds the threads of merges where they would write a chunk."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.arrived = threading.Semaphore(0)
        self.written: list[int] = []
        self._permits = threading.Semaphore(0)
        self._written = threading.Semaphore(0)
        real = Store.write_chunk

        def write_chunk(store: Store, index: int, chunk: np.ndarray) -> int:
            self.arrived.release()
            assert self._permits.acquire(timeout=60)
            crc = real(store, index, chunk)
            self.written.append(index)
            self._written.release()
            return crc

        patch.setattr(Store, "write_chunk", write_chunk)

    def let(self, count: int) -> None:
        """Let so many chunks through, and wait until they are written."""
        for _ in range(count):
            self._permits.release()
        for _ in range(count):
            assert self._written.acquire(timeout=60)

    def open(self) -> None:
        self._permits.release(1000)


@pytest.fixture
def gate() -> Iterator[Gate]:
    with pytest.MonkeyPatch.context() as patch:
        gate = Gate(patch)
        yield gate
        gate.open()


class Pair:
    """A table that was given its rows, and torch's own with the same ones; fed the same batches."""

    def __init__(self, path: Path, cache_bytes: int = SMALL_CACHE) -> None:
        initial = torch.randn(
            ROWS, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
        )
        rule = ooc_embed.SparseAdam(lr=0.1)
        self.path = path
        self.ram = RamTable(initial, lr=0.1)
        self.emb = DiskEmbedding(
            ROWS,
            DIM,
            path=path,
            init=initial,
            optimizer=rule,
            dtype=torch.float64,
            chunk_rows=1024,
            cache_bytes=cache_bytes,
        )
        self._generator = torch.Generator().manual_seed(2)

    def train(self, steps: int = 1, count: int = 500) -> None:
        for _ in range(steps):
            self.train_rows(torch.randint(0, ROWS, (count,), generator=self._generator))

    def train_rows(self, ids: torch.Tensor) -> None:
        grads = torch.randn(len(ids), DIM, dtype=torch.float64, generator=self._generator)
        ram_reference.train_both(self.emb, self.ram, ram_reference.weighted_sum(ids, grads))

    def seal(self) -> None:
        """Step every row and commit: the log is more than half of the table then."""
        for ids in torch.arange(ROWS).split(500):
            self.train_rows(ids)
        self.emb.commit()
        assert sealed(self.path)

    def check(self, emb: DiskEmbedding | None = None) -> None:
        emb = emb or self.emb
        assert emb.step == self.ram.step
        close = ram_reference.tolerances(torch.float64)
        torch.testing.assert_close(emb.weight[:], self.ram.weight, **close)
        torch.testing.assert_close(emb.state["exp_avg"][:], self.ram.exp_avg, **close)
        assert torch.equal(emb.version[:].long(), self.ram.version + 1)

    def check_reader(self, path: Path | None = None) -> None:
        with DiskEmbedding.open(path or self.path, mode="r") as reader:
            self.check(reader)

    def finish(self) -> None:
        """All of it arrives in the zarr table."""
        ram_reference.assert_same(self.emb, self.ram)
        assert not sealed(self.path)
        self.emb.close()
        assert report.verify(self.path) == []


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    pair = Pair(tmp_path / "t.zarr")
    yield pair
    pair.emb.close()


def sealed(path: Path) -> bool:
    return len(store_files.newest_commit(path)["logs"]) == 2


def workers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if isinstance(thread, Worker)]


def wait_for_workers() -> None:
    for worker in workers():
        worker.join()


def wait_for_merge(emb: DiskEmbedding) -> None:
    """Until every chunk is written and waits to be settled, or the merge has failed."""
    merge = emb._table._storage._chunks.merge
    assert merge is not None
    with merge._changed:
        assert merge._changed.wait_for(
            lambda: merge.stopping or len(merge.finished) == merge._left, timeout=60
        )
    if merge.stopping:
        wait_for_workers()


# Beside training


@pytest.mark.parametrize("merged", [0, 1, 4, CHUNKS])
def test_steps_and_commits_beside_a_merge_are_exact_and_durable(
    pair: Pair, gate: Gate, merged: int
) -> None:
    pair.seal()
    gate.let(merged)
    for _ in range(4):
        pair.train(3)
        pair.check()
        pair.emb.commit()
        pair.check_reader()
        assert report.verify(pair.path) == []
    copy = store_files.copied(pair.path, pair.path.with_name("copy.zarr"))
    step, weight = pair.ram.step, pair.ram.weight.clone()
    pair.train(2)
    if merged < CHUNKS:
        assert sealed(pair.path)
    gate.open()
    pair.finish()
    with DiskEmbedding.open(copy) as emb:
        assert emb.step == step
        emb.flush()
    found = ram_reference.read_rows(copy).weight
    torch.testing.assert_close(found, weight, rtol=1e-12, atol=1e-12)


def test_a_commit_after_the_last_chunk_names_the_state_without_the_log(
    pair: Pair, gate: Gate
) -> None:
    pair.seal()
    gate.open()
    wait_for_merge(pair.emb)
    assert sealed(pair.path)  # no step writes a manifest
    pair.train()
    assert sealed(pair.path)
    pair.emb.commit()
    assert not sealed(pair.path)
    assert workers() == []
    log = [*(pair.path / "log" / "0" / "records").glob("c.*")]
    assert log == []
    pair.check()
    pair.finish()


def test_a_commit_that_has_nothing_else_to_say_ends_a_merge_too(pair: Pair, gate: Gate) -> None:
    pair.seal()
    number = pair.emb.commit()
    gate.open()
    wait_for_merge(pair.emb)
    assert pair.emb.commit() == number
    assert not sealed(pair.path)
    with store_files.untouched(pair.path):
        assert pair.emb.commit() == number


def test_readers_of_before_during_and_after_a_merge_see_their_commit(
    pair: Pair, gate: Gate
) -> None:
    readers = []

    def read() -> None:
        emb = DiskEmbedding.open(pair.path, mode="r")
        readers.append((emb, pair.ram.weight.clone(), pair.ram.step))

    pair.train(2)
    pair.emb.commit()
    read()
    pair.seal()
    read()
    for _ in range(CHUNKS):
        gate.let(1)
        read()
        pair.train()
        pair.emb.commit()
        read()
    gate.open()
    pair.emb.flush()
    read()
    for emb, weight, step in readers:
        assert emb.step == step
        torch.testing.assert_close(emb.weight[:], weight, rtol=1e-12, atol=1e-12)
        emb.close()


def test_a_step_waits_for_the_merge_only_where_the_log_has_no_room(
    pair: Pair, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair.seal()
    storage = pair.emb._table._storage
    ends: list[int] = []
    real = Storage._finish_merge

    def finish(self: Storage, **options: Any) -> None:
        ends.append(self._logs.active.end)
        gate.open()
        real(self, **options)

    monkeypatch.setattr(Storage, "_finish_merge", finish)
    capacity = pair.emb._table.store.layout.log.capacity
    while not ends:
        pair.train()
        assert storage._logs.active.end <= capacity
    assert ends[0] > capacity - 2 * 600
    pair.check()
    pair.train(3)
    pair.finish()


def test_threads_pause_while_too_many_replaced_files_keep_their_space(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(merging, "_THREADS", 1)
    monkeypatch.setattr(merging, "_UNSETTLED", 2)
    paused = threading.Event()
    real = Merge._has_work

    def has_work(self: Merge) -> bool:
        found = real(self)
        if not found:
            paused.set()
        return found

    monkeypatch.setattr(Merge, "_has_work", has_work)
    pair.seal()
    assert paused.wait(20)
    merge = pair.emb._table._storage._chunks.merge
    assert merge is not None
    assert [index for index, _ in merge.finished] == [0, 1]
    pair.train()
    pair.check()
    pair.finish()


def test_no_more_threads_work_than_their_chunks_may_take_memory(
    pair: Pair, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(merging, "_CHUNKS_BYTES", 2 * 1024 * 13 * 8)
    pair.seal()
    assert len(workers()) == 2
    gate.open()
    pair.finish()
    assert workers() == []


# Stopping and going on


def opens_when_stopped(gate: Gate, patch: pytest.MonkeyPatch) -> None:
    """Chunks in flight are held until the merge has been told to stop."""
    real = Merge.stop

    def stop(self: Merge) -> None:
        self.stopping = True
        gate.open()
        real(self)

    patch.setattr(Merge, "stop", stop)


def test_close_stops_a_merge_after_the_chunks_in_flight_and_open_goes_on_with_it(
    pair: Pair, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair.seal()
    pair.train(2)
    for _ in range(4):
        assert gate.arrived.acquire(timeout=60)
    opens_when_stopped(gate, monkeypatch)
    pair.emb.close()
    assert sorted(gate.written) == [0, 1, 2, 3]
    assert workers() == []
    assert sealed(pair.path)
    assert report.verify(pair.path) == []
    pair.check_reader()
    pair.emb = DiskEmbedding.open(pair.path, cache_bytes=SMALL_CACHE)
    pair.train(2)
    pair.check()
    pair.finish()


def test_opening_does_not_wait_for_the_merge_it_goes_on_with(pair: Pair, gate: Gate) -> None:
    pair.seal()
    copy = store_files.copied(pair.path, pair.path.with_name("copy.zarr"))
    gate.open()
    pair.emb.close()
    with pytest.MonkeyPatch.context() as patch:
        second = Gate(patch)
        pair.path, pair.emb = copy, DiskEmbedding.open(copy, cache_bytes=SMALL_CACHE)
        assert second.arrived.acquire(timeout=60)
        pair.train(3)
        pair.check()
        pair.emb.commit()
        pair.check_reader()
        second.open()
        pair.finish()


def test_a_forked_child_does_not_wait_for_threads_that_it_does_not_have(
    pair: Pair, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair.seal()
    merge = pair.emb._table._storage._chunks.merge
    assert merge is not None
    monkeypatch.setattr(os, "getpid", lambda: -1)
    merge.end()
    assert not merge.stopping
    monkeypatch.undo()
    gate.open()
    pair.finish()


def test_close_does_not_begin_a_merge_of_the_log_that_it_seals(pair: Pair, gate: Gate) -> None:
    for ids in torch.arange(ROWS).split(500):
        pair.train_rows(ids)
    pair.emb.close()
    assert sealed(pair.path)
    assert gate.written == []
    gate.open()
    pair.emb = DiskEmbedding.open(pair.path)
    pair.finish()


def test_ctrl_c_leaves_a_flush_at_once_and_the_merge_goes_on(pair: Pair, gate: Gate) -> None:
    pair.train(5)

    def interrupt() -> None:
        assert gate.arrived.acquire(timeout=60)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        pair.emb.flush()
    thread.join()
    assert len(workers()) == 4
    pair.train(2)
    pair.check()
    gate.let(2)
    pair.train(2)
    pair.emb.commit()
    pair.check_reader()
    gate.open()
    pair.finish()


def test_ctrl_c_while_a_close_waits_leaves_a_table_that_merges_again(
    pair: Pair, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair.seal()
    real = threading.Thread.join

    def interrupted(self: threading.Thread, timeout: float | None = None) -> None:
        monkeypatch.setattr(threading.Thread, "join", real)
        raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "join", interrupted)
    with pytest.raises(KeyboardInterrupt):
        pair.emb.close()
    assert not pair.emb.closed
    gate.open()
    pair.train()
    pair.check()
    pair.finish()


def test_a_finalizer_that_the_collector_runs_in_a_thread_of_the_merge_closes_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    collected = threading.Event()
    dropped = threading.Event()
    real = Store.write_chunk

    def write_chunk(store: Store, index: int, chunk: np.ndarray) -> int:
        assert dropped.wait(60)
        if not collected.is_set():
            collected.set()
            gc.collect()
        return real(store, index, chunk)

    monkeypatch.setattr(Store, "write_chunk", write_chunk)
    pair = Pair(tmp_path / "t.zarr")
    pair.seal()
    pair.train(2)
    gc.disable()
    try:
        ring: list[Any] = [pair.emb]
        ring.append(ring)
        del pair.emb, ring
        before = set(threading.enumerate())
        dropped.set()
        assert collected.wait(60)
        wait_for_workers()
        for thread in set(threading.enumerate()) - before:
            thread.join()
    finally:
        gc.enable()
    pair.check_reader()
    pair.emb = DiskEmbedding.open(pair.path)
    pair.train()
    pair.finish()


AT_EXIT = """
import sys, threading, torch, ooc_embed
from ooc_embed.merging import Merge
from ooc_embed.store import Store

stopped = threading.Event()
real_stop, real_write = Merge.stop, Store.write_chunk

def stop(self):
    self.stopping = True
    stopped.set()
    real_stop(self)

def write_chunk(self, index, chunk):
    assert stopped.wait(60)
    return real_write(self, index, chunk)

Merge.stop, Store.write_chunk = stop, write_chunk
emb = ooc_embed.DiskEmbedding(6000, 4, path=sys.argv[1], init="zeros", chunk_rows=1024)
emb(torch.arange(6000)).sum().backward()
emb.commit()
emb(torch.arange(10)).sum().backward()
"""


def test_an_interpreter_that_ends_while_a_merge_runs_commits_and_stops_it(tmp_path: Path) -> None:
    path = tmp_path / "t.zarr"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", AT_EXIT, str(path)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)},
        timeout=100,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert sealed(path)
    assert len(store_files.chunk_files(path)) == 4
    with DiskEmbedding.open(path) as emb:
        assert emb.step == 2
        emb.flush()
    version = store_files.read_by_hand(path, "table")[:, -1]
    np.testing.assert_array_equal(version, np.where(np.arange(6000) < 10, 2, 1))


# Failing


def fail_once(patch: pytest.MonkeyPatch, method: str, error: Exception) -> None:
    """The first call for chunk 3 raises."""
    real: Callable[..., Any] = getattr(Store, method)
    failed = threading.Event()

    def call(store: Store, index: int, data: np.ndarray) -> Any:
        if index == 3 and not failed.is_set():
            failed.set()
            raise error
        return real(store, index, data)

    patch.setattr(Store, method, call)


@pytest.mark.parametrize("method", ["read_chunk", "write_chunk"])
def test_a_merge_that_failed_is_told_at_the_next_commit_and_done_by_a_later_one(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    fail_once(monkeypatch, method, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    pair.seal()
    wait_for_merge(pair.emb)
    pair.train(2)
    pair.check()
    with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
        pair.emb.commit()
    # The commit itself was made.
    pair.check_reader()
    pair.train()
    pair.emb.commit()
    pair.check_reader()
    wait_for_merge(pair.emb)
    pair.emb.commit()
    assert not sealed(pair.path)
    pair.check()
    pair.finish()


def test_a_merge_that_failed_is_a_warning_at_close_and_opening_begins_it_again(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_once(monkeypatch, "write_chunk", OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    pair.seal()
    wait_for_merge(pair.emb)
    pair.train()
    with pytest.warns(UserWarning, match="a merge failed.*No space left"):
        pair.emb.close()
    assert pair.emb.closed
    pair.emb = DiskEmbedding.open(pair.path, cache_bytes=SMALL_CACHE)
    pair.check()
    pair.finish()


def test_the_error_of_a_merge_says_that_the_commit_was_made(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_once(monkeypatch, "write_chunk", OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    pair.seal()
    wait_for_merge(pair.emb)
    with pytest.raises(OSError, match="No space left") as caught:
        pair.emb.commit()
    assert "were committed all the same" in caught.value.__notes__[1]


@pytest.mark.parametrize("started", [0, 1, 2])
def test_a_merge_goes_on_with_the_threads_that_the_system_gives_it(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, started: int
) -> None:
    real, left = threading.Thread.start, [started]

    def start(thread: threading.Thread) -> None:
        if isinstance(thread, Worker):
            if not left[0]:
                raise RuntimeError("can't start new thread")
            left[0] -= 1
        real(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    pair.seal()
    pair.train(2)
    pair.finish()


def test_the_last_commit_at_exit_moves_a_full_log_without_any_new_thread(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair.train()
    pair.emb.commit()
    storage = pair.emb._table._storage
    log, cache = storage._logs.active, pair.emb._table.cache
    while log.end_after(int(cache.dirty.count_nonzero()) + 1024) <= log.shape.capacity:
        pair.train()

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        pair.emb._finalizer()  # what an exit handler calls
    assert pair.emb.closed
    pair.check_reader()


def test_a_flush_whose_merge_fails_says_so_and_the_next_one_works(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_once(monkeypatch, "write_chunk", OSError(errno.EIO, os.strerror(errno.EIO)))
    pair.train(3)
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        pair.emb.flush()
    pair.check()
    pair.train(1)
    pair.finish()


def test_a_step_that_needs_the_failed_merge_does_it_again(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_once(monkeypatch, "write_chunk", OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    pair.seal()
    wait_for_merge(pair.emb)
    number = store_files.newest_commit(pair.path)["logs"][-1]["generation"]
    while store_files.newest_commit(pair.path)["logs"][-1]["generation"] == number:
        pair.train()
    pair.check()
    pair.emb.commit()
    pair.finish()


# Death


@pytest.fixture(scope="module")
def seeded(tmp_path_factory: pytest.TempPathFactory) -> torch.Tensor:
    path = tmp_path_factory.mktemp("seeded") / "t.zarr"
    with crash_child.create(str(path), 1 << 20) as emb:
        return emb.weight[:]


def test_a_run_killed_at_any_call_of_a_background_merge_is_its_last_commit(
    tmp_path: Path, seeded: torch.Tensor
) -> None:
    """Its main thread trains and commits on until one of the merge's threads kills the process."""
    nursery = crash_child.nursery()
    rounds, seed = 30, 91
    states = workload.history(seed, rounds, seeded, flushes=False)
    unfinished = call = 0
    while True:
        path = tmp_path / f"{call}.zarr"
        arguments = {"path": str(path), "seed": seed, "rounds": rounds, "cache_bytes": 1 << 20}
        events = nursery.run("train", flushes=False, dies_in_merge=call, **arguments)
        if events[-1] == ["died", 0]:
            break
        unfinished += sealed(path)
        committed = [step for name, step in events if name in ("opened", "committed")]
        begun = [step for name, step in events if name == "commit"]
        with DiskEmbedding.open(path, mode="r") as reader:
            assert reader.step in (committed[-1], *begun[-1:])
            workload.assert_table_is(reader, states[reader.step])
        assert report.verify(path) == []
        with DiskEmbedding.open(path, cache_bytes=workload.SMALL_CACHE) as emb:
            workload.play(emb, workload.make_round(seed, emb.step, flushes=False))
            workload.assert_table_is(emb, states[emb.step])
            emb.flush()
            workload.assert_zarr_is(path, states[emb.step])
        shutil.rmtree(path)
        call += 5
    assert unfinished >= 3
