"""A table that grows: old rows stay as they are, new ones begin as all do, and no crash shows."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import crash_child
import numpy as np
import pytest
import store_files
import system_calls
import torch
import workload
from shadowed import Run, make

import ooc_embed
from conftest import Stores
from ooc_embed import DiskEmbedding, opened, report
from ooc_embed.places import StoredRecords

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:.*gives up commit"),  # a flush does, as it should
]

MORE = 9500  # rows, in chunks that the first 6,000 do not reach
CALLS = (*system_calls.WRITES, *system_calls.SYNCS, *system_calls.NAMES, "open")


@pytest.fixture(scope="module")
def long_rows(tmp_path_factory: pytest.TempPathFactory) -> torch.Tensor:
    """The initial rows of a table of that seed that was made with so many."""
    path = tmp_path_factory.mktemp("long") / "t.zarr"
    options: dict[str, Any] = {"seed": 7, "dtype": torch.float64, "chunk_rows": 2048}
    with DiskEmbedding(MORE, workload.DIM, path=path, **options) as emb:
        return emb.weight[:]


def grow(run: Run, long_rows: torch.Tensor, rows: int = MORE) -> None:
    """Resize, and give the oracle the same new rows, which have no moments."""
    run.emb.resize(rows)
    old, new = run.shadow, workload.Shadow(long_rows[:rows])
    count = len(old.version)
    new.module.weight.data[:count] = old.module.weight.data
    new.version[:count], new.step = old.version, old.step
    state = old.optimizer.state_dict()
    for name, moments in state["state"].get(0, {}).items():
        if name != "step":
            longer = torch.zeros(rows, workload.DIM, dtype=torch.float64)
            longer[:count] = moments
            state["state"][0][name] = longer
    new.optimizer.load_state_dict(state)
    run.shadow = new


def train_anywhere(run: Run, seed: int) -> None:
    """A step on rows of the whole table, old and new."""
    rng = np.random.default_rng(seed)
    ids = torch.from_numpy(rng.integers(0, run.emb.num_embeddings, 700))
    grads = torch.from_numpy(rng.standard_normal((700, workload.DIM)))
    workload.train(run.emb, ids, grads)
    run.shadow.train(ids, grads)


# What grows, and what stays


def test_old_rows_stay_bit_for_bit_and_new_ones_are_those_of_a_table_made_so_long(
    make_table: Any,
) -> None:
    emb, long = make_table(10, 2, seed=3), make_table(13, 2, seed=3)
    for table in (emb, long):
        table(torch.tensor([1, 2, 9])).square().sum().backward()
    emb.resize(13)
    assert emb.num_embeddings == len(emb.weight) == 13
    assert emb.step == 1
    assert torch.equal(emb.weight[:], long.weight[:])
    assert torch.equal(emb.version[:], long.version[:])
    for name in ("exp_avg", "exp_avg_sq"):
        assert torch.equal(emb.state[name][:], long.state[name][:])
        assert not emb.state[name][10:].any()
    for table in (emb, long):
        table(torch.tensor([12, 9, 12])).square().sum().backward()
    assert torch.equal(emb.weight[:], long.weight[:])


@pytest.mark.parametrize(
    ("rows", "error", "text"),
    [
        (5, ValueError, "10 rows cannot shrink to 5"),
        (0, ValueError, "at least 1, got 0"),
        (12.0, TypeError, "integer, got 12.0"),
        (True, TypeError, "integer, got True"),
        (10**9, ValueError, r"1,000,000,000 rows .* 1,024 rows each, 32,768 are possible: make"),
    ],
)
def test_a_size_that_makes_no_sense_is_refused_before_a_write(
    make_table: Any, rows: Any, error: type[Exception], text: str
) -> None:
    emb = make_table()
    with store_files.untouched(emb.path), pytest.raises(error, match=text):
        emb.resize(rows)
    emb(torch.tensor([9])).sum().backward()
    assert emb.step == 1


def test_the_same_size_is_a_commit_and_no_change(make_table: Any) -> None:
    emb = make_table()
    emb(torch.tensor([9])).sum().backward()
    emb.resize(np.int64(10))
    assert store_files.newest_commit(emb.path)["step"] == 1
    assert emb.commits() == {1: 1}


@pytest.mark.parametrize("cache", [workload.SMALL_CACHE, 1 << 20])
def test_a_table_that_grew_trains_as_one_in_ram(
    stores: Stores, long_rows: torch.Tensor, cache: int
) -> None:
    run = make(stores.new_path(), keep=1, cache=cache)
    for index, rows in enumerate((6000, 6001, 7168, 9000, MORE)):
        if index:
            grow(run, long_rows, rows)
        run.check()
        for seed in range(3):
            train_anywhere(run, 10 * index + seed)
    run.check()
    run.emb.close(flush=True)
    workload.assert_zarr_is(run.emb.path, run.shadow.state())
    store_files.assert_every_reader_agrees(run.emb.path)


def test_a_step_on_every_new_row_finds_room_in_the_log(
    stores: Stores, long_rows: torch.Tensor
) -> None:
    run = make(stores.new_path(), keep=1)
    run.play(*range(3))
    grow(run, long_rows)
    ids, grads = torch.arange(MORE), torch.ones(MORE, workload.DIM, dtype=torch.float64)
    for _ in range(3):
        workload.train(run.emb, ids, grads)
        run.shadow.train(ids, grads)
    run.check()


def test_rows_behind_the_end_are_refused_until_the_table_reaches_them(make_table: Any) -> None:
    emb = make_table()
    view, optimizer = emb.weight, emb.optimizer
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    with pytest.raises(IndexError, match="12"):
        emb(torch.tensor([12]))
    with pytest.raises(IndexError, match="12"):
        view[12]
    emb.resize(13)
    assert emb(torch.tensor([12])).shape == (1, 2)
    emb.prefetch(torch.tensor([12]))
    assert view.shape == (13, 2)
    view[12] = torch.tensor([5.0, 6.0])
    assert emb.weight[12].tolist() == [5, 6]
    assert emb.optimizer is optimizer
    emb(torch.tensor([1])).sum().backward()
    schedule.step()
    assert optimizer.param_groups[0]["lr"] == 0.5e-3


def test_bags_padding_and_imported_rows_grow_too(stores: Stores) -> None:
    rows = torch.randn(10, 2)
    bag = ooc_embed.DiskEmbeddingBag(
        10, 2, path=stores.new_path(), init=rows, padding_idx=-1, mode="sum"
    )
    bag.resize(2000)
    assert bag.padding_idx == 9
    out = bag(torch.tensor([[9, 3, 1999]]))
    assert torch.equal(out[0], rows[3])  # new rows of an imported table are zeros
    out.sum().backward()
    bag.close()
    with ooc_embed.DiskEmbeddingBag.open(bag.path) as again:
        assert again.num_embeddings == 2000
        assert torch.equal(again.weight[9], rows[9])
        assert again.version[:].sum() == 10 + 2


# Commits, readers


def test_a_rollback_to_fewer_rows_goes_on_and_grows_again(
    stores: Stores, long_rows: torch.Tensor
) -> None:
    run = make(stores.new_path(), keep=6)
    run.play(*range(8))
    run.save()
    grow(run, long_rows, 8000)
    run.kept[max(run.emb.commits())] = run.shadow
    for index in range(8):
        train_anywhere(run, index)
        run.save()
    assert len(store_files.newest_commit(run.emb.path)["logs"]) == 2
    short = min(run.emb.commits())
    run.emb.keep_commits = 20
    run.roll_back(short)
    fewer = run.emb.num_embeddings
    run.check()
    for index in range(4):
        train_anywhere(run, 50 + index)
    run.save()
    grow(run, long_rows)
    train_anywhere(run, 60)
    run.check()
    assert fewer in (6000, 8000)
    run.emb.close()
    again = DiskEmbedding.open(run.emb.path)
    workload.assert_table_is(again, run.shadow.state())
    again.close()


def test_going_back_behind_a_growth_leaves_arrays_longer_than_the_table(
    stores: Stores, long_rows: torch.Tensor
) -> None:
    path = stores.new_path()
    run = make(path, keep=6)
    run.play(0, 1)
    run.save()
    kept = max(run.emb.commits())
    grow(run, long_rows)
    train_anywhere(run, 1)
    run.emb.commit()
    reader = DiskEmbedding.open(path, mode="r", commit=kept)
    run.roll_back(kept)
    assert run.emb.num_embeddings == reader.num_embeddings == 6000
    assert store_files.metadata(path, "table")["shape"] == [MORE, workload.WIDTH]
    workload.assert_table_is(reader, run.shadow.state())
    reader.close()
    with pytest.raises(IndexError):
        run.emb(torch.tensor([6000]))
    run.play(2, 3)
    run.emb.close(flush=True)
    again = run.opened(path)
    again.check()
    grow(again, long_rows, 7000)
    train_anywhere(again, 3)
    again.check()
    again.emb.close()


def test_a_reader_keeps_the_rows_of_its_commit(stores: Stores, long_rows: torch.Tensor) -> None:
    run = make(stores.new_path(), keep=1)
    run.play(0, 1)
    run.save()
    before, reader = run.shadow.state(), DiskEmbedding.open(run.emb.path, mode="r")
    grow(run, long_rows)
    after, later = run.shadow.state(), DiskEmbedding.open(run.emb.path, mode="r")
    train_anywhere(run, 1)
    run.emb.flush()
    assert (len(reader.weight), len(later.weight)) == (6000, MORE)
    workload.assert_table_is(reader, before)
    workload.assert_table_is(later, after)
    reader.close()
    later.close()


def test_a_table_goes_back_to_its_last_commit_with_the_rows_of_that(make_table: Any) -> None:
    emb = make_table(keep_commits=3)
    emb.commit()
    emb.resize(20)
    emb(torch.tensor([15])).sum().backward()
    emb.rollback()
    assert (emb.num_embeddings, emb.step) == (20, 0)
    emb.rollback(0)
    assert emb.num_embeddings == 10


# Crashes and full disks


def test_a_crash_at_any_system_call_leaves_the_old_length_or_the_new_one(
    quick: Path, long_rows: torch.Tensor
) -> None:
    run = make(quick / "t.zarr", keep=1)
    run.play(*range(4))
    run.save()
    run.play(4)
    crashes: list[Path] = []

    def crash_here(name: str, arguments: tuple[Any, ...]) -> None:
        crashes.append(
            store_files.copied(quick / "t.zarr", quick / "crashes" / f"{len(crashes)}.zarr")
        )

    last = max(run.emb.commits())
    states = {(6000, run.emb.step - 1): run.kept[last].state()}
    with system_calls.watched(quick / "t.zarr", crash_here, names=CALLS):
        grow(run, long_rows)
    states[MORE, run.emb.step] = run.shadow.state()
    run.emb.close()
    seen = set()
    assert len(crashes) > 15
    for copy in crashes:
        store_files.assert_every_reader_agrees(copy)
        with DiskEmbedding.open(copy, cache_bytes=workload.SMALL_CACHE) as emb:
            moment = (emb.num_embeddings, emb.step)
            seen.add(moment)
            workload.assert_table_is(emb, states[moment])
            emb.resize(MORE)
            emb(torch.arange(0, MORE, 7)).sum().backward()
        assert report.verify(copy) == []
    assert seen == set(states)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_a_call_that_fails_leaves_the_old_length_or_the_new_one_and_the_table_goes_on(
    quick: Path, long_rows: torch.Tensor, code: int
) -> None:
    run = make(quick / "t.zarr", keep=1)
    lengths = iter(range(6001, MORE))
    number, finished = 0, False
    while not finished:
        run.play(number)
        calls = iter(range(1 << 30))

        def fail(*_: Any, calls: Iterator[int] = calls, number: int = number) -> None:
            if next(calls) == number:
                raise OSError(code, os.strerror(code))

        before, after = run.emb.num_embeddings, next(lengths)
        with system_calls.watched(quick / "t.zarr", fail, names=CALLS):
            try:
                run.emb.resize(after)
                finished = next(calls) <= number
            except OSError as error:
                assert error.errno == code
        assert run.emb.num_embeddings in (before, after)
        try:
            grow(run, long_rows, after)
        except OSError as error:
            assert "a merge in the background that failed" in str(error.__notes__)
            grow(run, long_rows, after)
        run.check()
        number += 1
    assert number > 12
    run.emb.close(flush=True)
    workload.assert_zarr_is(quick / "t.zarr", run.shadow.state())


GROW_BEYOND_MEMORY = """
import resource, sys, torch
from ooc_embed import DiskEmbedding

emb = DiskEmbedding(10**6, 64, path=sys.argv[1])
emb(torch.arange(100)).sum().backward()
emb.commit()
emb(torch.arange(200)).sum().backward()
first = emb.weight[:400]
commits = emb.commits()
used = 4096 * int(open("/proc/self/statm").read().split()[0])
resource.setrlimit(resource.RLIMIT_AS, (used + (16 << 30), -1))
for rows in (10**8, 2 * 10**8):
    try:
        emb.resize(rows)
    except OSError as error:
        assert f"a table of {rows:,} rows has no room" in str(error), error
    else:
        raise AssertionError(rows)
assert emb.num_embeddings == 10**6
assert emb.commits() == commits
# Where there is room for one of the maps, or the other, or both.
refused = grown = 0
for megabytes in range(1000, 10_000, 500):
    used = 4096 * int(open("/proc/self/statm").read().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (used + (megabytes << 20), -1))
    before = emb.num_embeddings
    try:
        emb.resize(before + 50_000)
        grown += 1
    except OSError as error:
        refused += 1
        assert emb.num_embeddings == before
    assert not emb.closed
assert refused and grown, (refused, grown)
resource.setrlimit(resource.RLIMIT_AS, (-1, -1))
assert torch.equal(emb.weight[:400], first)
emb(torch.arange(300)).sum().backward()
emb.resize(2 * 10**6)
assert torch.equal(emb.version[:400], torch.tensor([3] * 100 + [2] * 100 + [1] * 100 + [0] * 100))
emb.close()
with DiskEmbedding.open(sys.argv[1]) as again:
    assert (again.num_embeddings, again.step) == (2 * 10**6, 3)
"""


def test_a_growth_for_which_there_is_no_memory_is_refused_before_it_is_committed(
    tmp_path: Path,
) -> None:
    path = tmp_path / "t.zarr"
    subprocess.run([sys.executable, "-c", GROW_BEYOND_MEMORY, str(path)], check=True, timeout=120)
    assert report.verify(path) == []


def test_a_growth_is_one_commit(stores: Stores) -> None:
    emb = crash_child.create(str(stores.new_path()), workload.SMALL_CACHE)
    emb.keep_commits = 2
    workload.train(emb, torch.arange(100), torch.ones(100, workload.DIM).double())
    emb.commit()
    workload.train(emb, torch.arange(100), torch.ones(100, workload.DIM).double())
    emb.resize(MORE)
    assert emb.commits() == {1: 1, 2: 2}
    emb.rollback(1)
    assert (emb.num_embeddings, emb.step) == (6000, 1)
    emb.close()


def test_rows_that_are_read_ahead_are_checked_against_the_map_that_is_used(
    stores: Stores, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the check of the ids and the reading the table goes back to fewer rows, or closes."""
    emb = crash_child.create(str(stores.new_path()), workload.SMALL_CACHE)
    emb.keep_commits = 2
    emb.resize(MORE)
    fetcher = emb._table._rows
    ids = torch.arange(MORE)
    emb.rollback(0)
    announced: list[torch.Tensor] = []
    monkeypatch.setattr(StoredRecords, "announce", lambda _, rows, homes: announced.append(rows))
    emb._table._rows.prefetch(ids)
    fetcher.prefetch(ids)  # whose cache has no map any more
    assert [len(rows) for rows in announced] == [6000, 0]
    emb.close()


@pytest.mark.parametrize("what", ["empty_map", "Span"])
def test_any_memory_that_is_not_there_stops_a_growth_before_its_commit(
    stores: Stores, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    emb = crash_child.create(str(stores.new_path()), workload.SMALL_CACHE)
    workload.train(emb, torch.arange(9), torch.ones(9, workload.DIM).double())

    def refuse(*_: Any, **__: Any) -> Any:
        raise OSError(errno.ENOMEM, "mmap of 7 bytes")

    with monkeypatch.context() as patch:
        patch.setattr(opened.RowCache if what == "empty_map" else opened, what, refuse)
        with pytest.raises(OSError, match=r"9,500 rows has no room .*mmap of 7 bytes") as caught:
            emb.resize(MORE)
    assert caught.value.errno == errno.ENOMEM
    assert emb.commits() == {0: 0}
    emb.resize(MORE)
    assert emb.commits() == {1: 1}
    emb.close()


def test_a_growth_keeps_what_a_merge_has_done_and_tells_what_made_one_fail(
    stores: Stores,
) -> None:
    run = make(stores.new_path(), keep=1, cache=1 << 22)
    ids, grads = torch.arange(workload.ROWS), torch.ones(workload.ROWS, workload.DIM).double()
    for turn in range(2):
        workload.train(run.emb, ids, grads)
        run.emb.commit()
        merge = run.emb._table._storage._chunks.merge
        assert merge is not None
        if turn:
            merge.fail(OSError(errno.EIO, "on purpose"))
            with pytest.raises(OSError, match="on purpose"):
                run.emb.resize(MORE + 1)
            assert run.emb.num_embeddings == MORE
        else:
            for worker in merge._workers:
                while worker.is_alive() and merge.left:
                    run.emb._table._storage.settle()
            run.emb.resize(MORE)
            assert run.emb.stats().merges == 1
    run.emb.close()


def test_rows_are_read_ahead_while_the_table_grows_and_goes_back(stores: Stores) -> None:
    """In the instant of a change the map is of another length, or none."""
    emb = crash_child.create(str(stores.new_path()), workload.SMALL_CACHE)
    emb.keep_commits = 50
    errors: list[BaseException] = []
    over = threading.Event()

    def read_ahead() -> None:
        while not over.is_set():
            try:
                emb.prefetch(torch.arange(0, emb.num_embeddings, 3))
            except IndexError as error:  # of ids that the table has no longer
                if "out of range for a table of" not in str(error):
                    errors.append(error)
            except BaseException as error:
                errors.append(error)

    thread = threading.Thread(target=read_ahead)
    thread.start()
    try:
        for rows in range(6001, 6030):
            emb.resize(rows)
            emb.rollback(min(emb.commits()))
    finally:
        over.set()
        thread.join()
    assert errors == []
    emb.close()


def test_arrays_that_a_stopped_growth_left_longer_are_no_damage(stores: Stores) -> None:
    path = stores.new_path()
    with crash_child.create(str(path), 1 << 20) as emb:
        emb(torch.tensor([1])).sum().backward()
        weight = emb.weight[:]
    for name in ("table", "log/1/rows"):
        described = store_files.metadata(path, name)
        described["shape"][0] += 5000
        (path / name / "zarr.json").write_text(json.dumps(described))
    for mode in ("r", "r+"):
        with DiskEmbedding.open(path, mode=mode) as again:
            assert torch.equal(again.weight[:], weight)
    assert report.verify(path) == []
