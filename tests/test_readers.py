"""Readers see one commit and write nothing; one process writes, forks do not, threads may."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import crash_child
import numpy as np
import pytest
import store_files
import torch
import workload
import zarr

import ooc_embed
from ooc_embed import DiskEmbedding, LockedError, StoreError, describe, report

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def nursery() -> crash_child.Nursery:
    return crash_child.nursery()


@pytest.fixture(scope="module")
def seeded(tmp_path_factory: pytest.TempPathFactory) -> torch.Tensor:
    path = tmp_path_factory.mktemp("seeded") / "t.zarr"
    with crash_child.create(str(path), 1 << 20) as emb:
        return emb.weight[:]


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    """Ten rounds of script 81: some rows are merged, some in the log, some were never touched."""
    path = tmp_path / "t.zarr"
    with crash_child.create(str(path), workload.SMALL_CACHE) as emb:
        for index in range(10):
            workload.play(emb, workload.make_round(81, index))
            if index == 5:
                emb.flush()
    return path


def read(path: Path) -> DiskEmbedding:
    return DiskEmbedding.open(path, mode="r", cache_bytes=workload.SMALL_CACHE)


# One commit, for as long as it is open


def _commits(emb: DiskEmbedding) -> None:
    for index in range(10, 25):
        workload.play(emb, workload.make_round(81, index))
        emb.commit()


def _flushes(emb: DiskEmbedding) -> None:
    for index in range(10, 20):
        workload.play(emb, workload.make_round(81, index))
        emb.flush()


def _evictions_without_a_commit(emb: DiskEmbedding) -> None:
    for index in range(10, 30):
        workload.play(emb, workload.make_round(81, index))


def _every_row(emb: DiskEmbedding) -> None:
    for ids in torch.arange(workload.ROWS).split(500):
        workload.train(emb, ids, torch.ones(len(ids), workload.DIM, dtype=torch.float64))
    emb.flush()


def _closing(emb: DiskEmbedding) -> None:
    _commits(emb)
    emb.close(flush=True)


LATER = [_commits, _flushes, _evictions_without_a_commit, _every_row, _closing]


@pytest.mark.parametrize("later", LATER)
def test_a_reader_sees_the_commit_it_opened_whatever_the_writer_does(
    trained: Path, seeded: torch.Tensor, later: Callable[[DiskEmbedding], None]
) -> None:
    want = workload.history(81, 10, seeded)[10]
    writer = DiskEmbedding.open(trained, cache_bytes=workload.SMALL_CACHE)
    with writer, read(trained) as reader:
        workload.assert_table_is(reader, want)
        later(writer)
        workload.assert_table_is(reader, want)
        ids = torch.arange(0, workload.ROWS, 11)
        got = reader(ids).detach().numpy()
        np.testing.assert_allclose(got, want.fields["weight"][ids], rtol=1e-9, atol=1e-11)


def test_a_reader_that_looked_at_nothing_before_the_merge_still_sees_its_commit(
    trained: Path, seeded: torch.Tensor
) -> None:
    want = workload.history(81, 10, seeded)[10]
    with DiskEmbedding.open(trained, cache_bytes=workload.SMALL_CACHE) as writer:
        reader = read(trained)
        _every_row(writer)
        _flushes(writer)
    workload.assert_table_is(reader, want)
    shutil.rmtree(trained)
    workload.assert_table_is(reader, want)
    reader.close()


def test_readers_of_different_commits_stand_side_by_side(
    trained: Path, seeded: torch.Tensor
) -> None:
    states = workload.history(81, 40, seeded)
    readers = []
    with DiskEmbedding.open(trained, cache_bytes=workload.SMALL_CACHE) as writer:
        for index in range(10, 40):
            workload.play(writer, workload.make_round(81, index))
            if index % 4 == 0:
                writer.flush() if index % 8 == 0 else writer.commit()
                readers.append(read(trained))
        steps = [reader.step for reader in readers]
        assert steps == sorted(set(steps))
        for reader in readers:
            workload.assert_table_is(reader, states[reader.step])
            reader.close()


def test_a_reader_opened_at_any_moment_of_training_and_merging_sees_exactly_one_commit(
    tmp_path: Path, nursery: crash_child.Nursery, seeded: torch.Tensor
) -> None:
    path = tmp_path / "t.zarr"
    states = workload.history(82, 120, seeded)
    nursery.start(
        "train", path=str(path), seed=82, rounds=120, cache_bytes=workload.SMALL_CACHE, flushes=True
    )
    event = nursery.next_event()
    assert event == ["opened", 0]
    seen = []
    while event is None or event[0] != "died":
        with read(path) as reader:
            seen.append(reader.step)
            workload.assert_table_is(reader, states[reader.step])
        while (event := nursery.next_event(0)) is not None and event[0] != "died":
            pass
    assert event == ["died", 0]
    assert seen == sorted(seen)
    assert len(set(seen)) > 3


def test_what_a_reader_looks_up_is_what_plain_zarr_reads_after_a_flush(trained: Path) -> None:
    with DiskEmbedding.open(trained) as writer:
        writer.flush()
    table = np.asarray(zarr.open_group(trained, mode="r")["table"][:])
    version = table[:, -1].astype(np.int64)
    touched = np.flatnonzero(version)
    with read(trained) as reader:
        got = reader(torch.from_numpy(touched)).detach().numpy()
        np.testing.assert_array_equal(got, table[touched, : workload.DIM])
        np.testing.assert_array_equal(reader.version[:].numpy(), version)
        moments = reader.state["exp_avg_sq"][:].numpy()
        np.testing.assert_array_equal(moments, table[:, 2 * workload.DIM : 3 * workload.DIM])


# A reader writes nothing


def everything_a_reader_does(path: Path) -> None:
    with read(path) as reader:
        assert reader.read_only
        reader(torch.arange(0, workload.ROWS, 3))
        reader.weight[:]
        for _, block in reader.weight.blocks():
            assert block.shape[1] == workload.DIM
        reader.state["exp_avg"][10:20]
        reader.version[[1, 2]]
        repr(reader)
    describe(path)
    assert report.verify(path) == []


def test_a_reader_changes_no_byte_and_no_time(trained: Path) -> None:
    with store_files.untouched(trained.parent):
        everything_a_reader_does(trained)


def test_a_reader_beside_a_writer_changes_nothing_and_takes_no_lock(trained: Path) -> None:
    with DiskEmbedding.open(trained) as writer:
        with store_files.untouched(trained):
            everything_a_reader_does(trained)
        workload.play(writer, workload.make_round(81, 10))
        assert writer.step == 11
    with read(trained), DiskEmbedding.open(trained) as writer:
        assert writer.step == 11


def test_a_reader_of_a_killed_run_leaves_it_as_it_is(
    tmp_path: Path, nursery: crash_child.Nursery
) -> None:
    path = tmp_path / "t.zarr"
    rng = random.Random(83)
    arguments = {"path": str(path), "seed": 83, "rounds": 200, "flushes": True}
    for _ in range(6):
        nursery.run_and_kill("train", rng, 15, 0.01, cache_bytes=workload.SMALL_CACHE, **arguments)
        with store_files.untouched(path):
            everything_a_reader_does(path)


def test_a_reader_works_in_a_folder_without_permission_to_write(trained: Path) -> None:
    """Root may write all the same; then only that nothing changes is tested."""
    places = [trained, *trained.rglob("*")]
    for place in places:
        place.chmod(0o555 if place.is_dir() else 0o444)
    try:
        with store_files.untouched(trained):
            everything_a_reader_does(trained)
        if os.geteuid():
            with pytest.raises(OSError):
                DiskEmbedding.open(trained).close()
    finally:
        for place in places:
            place.chmod(0o755 if place.is_dir() else 0o644)


@pytest.mark.skipif(sys.platform != "linux", reason="mounts a folder read-only, as Linux can")
def test_a_reader_works_on_a_read_only_file_system(trained: Path) -> None:
    place = trained.parent / "mounted"
    place.mkdir()
    command = ["mount", "--bind", "-o", "ro", str(trained), str(place)]
    if subprocess.run(command, capture_output=True).returncode:
        pytest.skip("may not mount here")
    try:
        everything_a_reader_does(place)
        with pytest.raises(PermissionError, match="open it with mode='r'"):
            DiskEmbedding.open(place)
        everything_a_reader_does(place)
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


def _train(emb: DiskEmbedding) -> None:
    emb(torch.tensor([1])).sum().backward()


def _assign(emb: DiskEmbedding) -> None:
    emb.weight[[1]] = torch.ones(1, workload.DIM, dtype=torch.float64)


def _assign_moments(emb: DiskEmbedding) -> None:
    emb.state["exp_avg"][[1]] = torch.ones(1, workload.DIM, dtype=torch.float64)


def _commit(emb: DiskEmbedding) -> None:
    emb.commit()


def _flush(emb: DiskEmbedding) -> None:
    emb.flush()


@pytest.mark.parametrize("write", [_train, _assign, _assign_moments, _commit, _flush])
def test_whatever_would_write_through_a_reader_raises(
    trained: Path, write: Callable[[DiskEmbedding], None]
) -> None:
    with read(trained) as reader:
        before = reader.weight[:]
        with store_files.untouched(trained), pytest.raises((StoreError, RuntimeError)):
            write(reader)
        assert reader.step == 10
        assert torch.equal(reader.weight[:], before)


def test_a_reader_of_a_table_with_max_norm_raises_and_says_why(tmp_path: Path) -> None:
    path = tmp_path / "t.zarr"
    with DiskEmbedding(10, 4, path=path, max_norm=1.0) as emb:
        emb(torch.tensor([1]))
    with (
        store_files.untouched(path),
        pytest.raises((StoreError, RuntimeError), match="max_norm"),
        read(path) as reader,
    ):
        reader(torch.tensor([1]))


# One writer


def test_a_second_writer_of_the_same_process_is_told_so(trained: Path) -> None:
    with DiskEmbedding.open(trained) as writer:
        with pytest.raises(LockedError, match="same process") as error:
            DiskEmbedding.open(trained)
        assert str(os.getpid()) in str(error.value)
        workload.play(writer, workload.make_round(81, 10))
    with DiskEmbedding.open(trained) as again:
        assert again.step == 11


def test_the_constructor_with_a_table_open_is_told_so_too(tmp_path: Path) -> None:
    path = tmp_path / "t.zarr"
    with DiskEmbedding(10, 2, path=path):
        with pytest.raises(FileExistsError):
            DiskEmbedding(10, 2, path=path)
        with pytest.raises(LockedError, match="same process"):
            DiskEmbedding(10, 2, path=path, overwrite=True)
        with pytest.raises(LockedError, match="same process"):
            DiskEmbedding.open(path)


def test_a_second_writer_by_another_name_is_refused(trained: Path) -> None:
    link = trained.parent / "link.zarr"
    link.symlink_to(trained)
    with DiskEmbedding.open(trained):
        for name in (link, trained / ".." / trained.name):
            with pytest.raises(LockedError):
                DiskEmbedding.open(name)


def test_a_second_writer_in_another_process_is_told_the_pid_until_that_one_is_killed(
    trained: Path, nursery: crash_child.Nursery
) -> None:
    pid = nursery.start("hold", path=str(trained))
    assert nursery.next_event() == ["holding", 10, 0]
    try:
        with store_files.untouched(trained), pytest.raises(LockedError) as error:
            DiskEmbedding.open(trained)
        assert str(pid) in str(error.value)
        assert "same process" not in str(error.value)
        with read(trained) as reader:
            assert reader.step == 10
    finally:
        os.kill(pid, signal.SIGKILL)
    assert nursery.rest()[-1] == ["died", -signal.SIGKILL]
    with DiskEmbedding.open(trained) as writer:
        workload.play(writer, workload.make_round(81, 10))
        assert writer.step == 11


SECOND_RANK = """
import sys
import torch.distributed as distributed
import ooc_embed

path, group = sys.argv[1:]
distributed.init_process_group("gloo", init_method=f"file://{group}", rank=1, world_size=2)
for make in (
    lambda: ooc_embed.DiskEmbedding(10, 2, path=path),
    lambda: ooc_embed.DiskEmbedding(10, 2, path=path, overwrite=True),
    lambda: ooc_embed.DiskEmbedding.open(path),
):
    try:
        make()
    except (FileExistsError, ooc_embed.LockedError) as error:
        print(type(error).__name__, error)
distributed.barrier()
distributed.destroy_process_group()
"""


def test_the_second_rank_of_a_process_group_that_would_write_is_refused(tmp_path: Path) -> None:
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_gloo_available()):
        pytest.skip("this torch has no gloo")
    path, group = tmp_path / "t.zarr", tmp_path / "group"
    with DiskEmbedding(10, 2, path=path) as emb:
        second = subprocess.Popen(
            [sys.executable, "-c", SECOND_RANK, str(path), str(group)],
            stdout=subprocess.PIPE,
            text=True,
        )
        distributed.init_process_group("gloo", init_method=f"file://{group}", rank=0, world_size=2)
        try:
            emb(torch.tensor([1])).sum().backward()
            distributed.barrier()
        finally:
            distributed.destroy_process_group()
        said = second.communicate()[0].splitlines()
        assert second.returncode == 0
        assert [line.split()[0] for line in said] == [
            "FileExistsError",
            "LockedError",
            "LockedError",
        ]
        assert all(str(os.getpid()) in line for line in said[1:])
        assert emb.step == 1


def test_a_reader_does_not_keep_a_writer_out(trained: Path, nursery: crash_child.Nursery) -> None:
    pid = nursery.start("hold", path=str(trained), mode="r")
    assert nursery.next_event() == ["holding", 10, 0]
    try:
        with DiskEmbedding.open(trained) as writer:
            workload.play(writer, workload.make_round(81, 10))
            writer.flush()
    finally:
        os.kill(pid, signal.SIGKILL)
    assert nursery.rest()[-1] == ["died", -signal.SIGKILL]


def test_a_fork_that_outlives_a_killed_writer_does_not_keep_its_lock(
    trained: Path, nursery: crash_child.Nursery
) -> None:
    pid = nursery.start("hold", path=str(trained), fork=True)
    event = nursery.next_event()
    assert event is not None and event[0] == "holding"
    orphan = event[2]
    os.kill(pid, signal.SIGKILL)
    assert nursery.rest()[-1] == ["died", -signal.SIGKILL]
    try:
        os.kill(orphan, 0)  # it is there
        with DiskEmbedding.open(trained) as writer:
            assert writer.step == 10
    finally:
        os.kill(orphan, signal.SIGKILL)


@pytest.mark.parametrize("mode", ["r", "r+"])
def test_a_fork_can_do_nothing_with_the_table_and_its_exit_changes_nothing(
    trained: Path, nursery: crash_child.Nursery, mode: str
) -> None:
    events = nursery.run("use in a fork", path=str(trained), mode=mode)
    forked = {name: (kind, text) for _, name, kind, text in (e for e in events if e[0] == "forked")}
    assert sorted(forked) == ["assignment", "backward", "commit", "flush", "lookup", "view"]
    for name, (kind, text) in forked.items():
        assert kind in ("StoreError", "RuntimeError"), (name, kind, text)
    for name in ("lookup", "view"):
        assert "fork" in forked[name][1]
    assert ["fork ended", 0] in events
    steps = 10 if mode == "r" else 11
    assert events[-2:] == [["step", steps], ["died", 0]]
    assert report.verify(trained) == []
    with read(trained) as reader:
        assert reader.step == steps


# Threads


def table_without_memory(path: Path, rows: int) -> DiskEmbedding:
    """With betas of 0 a step moves a row by lr against the gradient's sign, whatever its number."""
    adam = ooc_embed.SparseAdam(lr=0.01, betas=(0.0, 0.0), eps=1e-12)
    return DiskEmbedding(
        rows,
        4,
        path=path,
        init="zeros",
        optimizer=adam,
        chunk_rows=1024,
        dtype=torch.float64,
        cache_bytes=200 * 13 * 8,
    )


def run_threads(*bodies: Callable[[], None]) -> None:
    failed: list[BaseException] = []
    start = threading.Barrier(len(bodies))

    def run(body: Callable[[], None]) -> None:
        try:
            start.wait()
            body()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=run, args=(body,)) for body in bodies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []


def signs(seed: int, steps: int) -> np.ndarray:
    return np.random.default_rng(seed).choice([-1.0, 1.0], size=(steps, 4))


def step_often(emb: DiskEmbedding, rows: np.ndarray, seed: int, steps: int = 500) -> None:
    """Steps on one eighth of `rows` each."""
    for number, sign in enumerate(signs(seed, steps)):
        ids = torch.from_numpy(rows[number % 8 :: 8])
        workload.train(emb, ids, torch.from_numpy(np.tile(sign, (len(ids), 1))))


def walked(
    rows: np.ndarray, seed: int, weight: np.ndarray, version: np.ndarray, steps: int = 500
) -> None:
    """What `step_often` does to weights and versions, by numpy."""
    for number, sign in enumerate(signs(seed, steps)):
        weight[rows[number % 8 :: 8]] -= 0.01 * sign
        version[rows[number % 8 :: 8]] += 1


def test_two_threads_that_train_rows_of_one_chunk_equal_a_serial_run(tmp_path: Path) -> None:
    even, odd = np.arange(0, 1000, 2), np.arange(1, 1000, 2)
    with table_without_memory(tmp_path / "t.zarr", 1000) as emb:
        run_threads(lambda: step_often(emb, even, 1), lambda: step_often(emb, odd, 2))
        assert emb.step == 1000
        emb.flush()
    weight, version = np.zeros((1000, 4)), np.zeros(1000)
    walked(even, 1, weight, version)
    walked(odd, 2, weight, version)
    table = np.asarray(zarr.open_group(tmp_path / "t.zarr", mode="r")["table"][:])
    np.testing.assert_allclose(table[:, :4], weight, atol=1e-9)
    np.testing.assert_array_equal(table[:, 12], version)


def test_two_threads_that_train_the_same_rows_lose_no_update(tmp_path: Path) -> None:
    rows = np.arange(3000)
    with table_without_memory(tmp_path / "t.zarr", 3000) as emb:
        run_threads(lambda: step_often(emb, rows, 3), lambda: step_often(emb, rows, 4))
        assert emb.step == 1000
        emb.flush()
    weight, version = np.zeros((3000, 4)), np.zeros(3000)
    walked(rows, 3, weight, version)
    walked(rows, 4, weight, version)
    table = np.asarray(zarr.open_group(tmp_path / "t.zarr", mode="r")["table"][:])
    np.testing.assert_allclose(table[:, :4], weight, atol=1e-9)
    np.testing.assert_array_equal(table[:, 12], version)


def test_commits_flushes_and_reads_of_other_threads_disturb_no_training(tmp_path: Path) -> None:
    path = tmp_path / "t.zarr"
    rows = np.arange(3000)
    done = threading.Event()

    with table_without_memory(path, 3000) as emb:

        def train() -> None:
            try:
                step_often(emb, rows, 5, steps=150)
            finally:
                done.set()

        def save() -> None:
            saves = 0
            while not done.is_set():
                emb.flush() if saves % 3 == 0 else emb.commit()
                saves += 1
            assert saves

        def look() -> None:
            while not done.is_set():
                with torch.no_grad():
                    # Each weight is a walk of steps of 0.01: a torn row would not be.
                    found = emb(torch.arange(0, 3000, 50)) / 0.01
                assert (found - found.round()).abs().max() < 1e-6

        run_threads(train, save, look)
        assert emb.step == 150
        emb.flush()
    weight, version = np.zeros((3000, 4)), np.zeros(3000)
    walked(rows, 5, weight, version, steps=150)
    table = np.asarray(zarr.open_group(path, mode="r")["table"][:])
    np.testing.assert_allclose(table[:, :4], weight, atol=1e-9)
    np.testing.assert_array_equal(table[:, 12], version)
    assert report.verify(path) == []


def test_threads_may_share_a_reader(trained: Path, seeded: torch.Tensor) -> None:
    want = workload.history(81, 10, seeded)[10].fields["weight"]
    with read(trained) as reader:

        def look(seed: int) -> None:
            generator = torch.Generator().manual_seed(seed)
            for _ in range(60):
                ids = torch.randint(0, workload.ROWS, (300,), generator=generator)
                got = reader(ids).detach().numpy()
                np.testing.assert_allclose(got, want[ids.numpy()], rtol=1e-9, atol=1e-11)

        run_threads(*[lambda seed=seed: look(seed) for seed in range(4)])


def test_a_table_may_be_closed_in_another_thread_than_it_was_opened_in(tmp_path: Path) -> None:
    holder: list[Any] = []
    path = tmp_path / "t.zarr"
    run_threads(lambda: holder.append(table_without_memory(path, 100)))
    emb = holder.pop()
    workload.train(emb, torch.tensor([1]), torch.ones(1, 4, dtype=torch.float64))
    run_threads(emb.close)
    with read(path) as reader:
        assert reader.step == 1
