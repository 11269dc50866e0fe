"""Going back: every commit that is kept can be returned to exactly, whatever came after it."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import going_back
import numpy as np
import pytest
import store_files
import system_calls
import torch
import workload
from going_back import create, go_on, open_again

from ooc_embed import DiskEmbedding, StoreError, report

pytestmark = pytest.mark.usefixtures("one_thread")

SEED = 91
ROUNDS = 40


@pytest.fixture(scope="module")
def states(weight: torch.Tensor) -> list[workload.State]:
    return workload.history(SEED, ROUNDS, weight)


@pytest.fixture
def path(quick: Path) -> Path:
    return quick / "t.zarr"


@pytest.fixture(scope="module")
def long_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """40 commits, all kept, of which the first 20 or so are in a sealed log."""
    path = tmp_path_factory.mktemp("long") / "t.zarr"
    with create(path, keep=50) as emb:
        go_on(emb, SEED, ROUNDS)
    assert going_back.is_sealed(path)
    assert not store_files.chunk_files(path)
    return path


# Exactly


def test_every_commit_is_kept_whole_as_plain_numpy_reads_it(
    long_store: Path, states: list[workload.State]
) -> None:
    commits = going_back.named(long_store)
    assert list(commits) == list(range(ROUNDS + 1))
    for number in commits:
        going_back.assert_commit_is(long_store, number, states[number])


@pytest.mark.parametrize("reopened", [False, True])
def test_every_commit_can_be_returned_to_exactly_from_the_newest_to_the_first(
    path: Path, states: list[workload.State], long_store: Path, reopened: bool
) -> None:
    store_files.copied(long_store, path)
    emb = open_again(path)
    assert emb.commits() == {number: number for number in range(ROUNDS + 1)}
    for number in range(ROUNDS, -1, -3):
        emb.rollback(number)
        if reopened:
            emb.close()
            emb = open_again(path)
        workload.assert_table_is(emb, states[number])
        assert list(emb.commits()) == list(range(number + 1))
    emb.close()
    assert report.verify(path) == []


@pytest.mark.parametrize("number", [1, 12, 25, 38])
def test_training_on_from_an_earlier_commit_equals_a_run_that_never_went_on(
    path: Path, states: list[workload.State], long_store: Path, number: int
) -> None:
    store_files.copied(long_store, path)
    with open_again(path) as emb:
        go_on(emb, 5, ROUNDS + 2, commits=False)
        emb.rollback(number)
        go_on(emb, SEED, ROUNDS)
        workload.assert_table_is(emb, states[ROUNDS])
        with pytest.warns(UserWarning, match="gives up"):
            emb.flush()
        workload.assert_zarr_is(path, states[ROUNDS])
    assert report.verify(path) == []


def test_rollbacks_and_other_branches_in_turn_stay_exact(path: Path, weight: torch.Tensor) -> None:
    """After each rollback another script runs, so that nothing of an undone branch may show."""
    rng = np.random.default_rng(3)
    script: dict[int, list[tuple[int, int, int]]] = {0: []}
    with create(path, keep=6) as emb:
        number = 0
        for turn in range(12):
            seed, first = 100 + turn, emb.step
            for step in range(first + 1, first + 1 + int(rng.integers(2, 9))):
                before = script[number]
                go_on(emb, seed, step)
                number = max(emb.commits())
                script[number] = [*before, (seed, step - 1, step)]
            going_back.assert_commit_is(
                path, number, going_back.shadow_of(weight, *script[number]).state()
            )
            number = int(rng.choice(list(emb.commits())))
            emb.rollback(number)
            want = going_back.shadow_of(weight, *script[number]).state()
            workload.assert_table_is(emb, want)
    assert report.verify(path) == []
    with open_again(path) as emb:
        workload.assert_table_is(emb, want)


def test_rolling_back_to_the_newest_commit_drops_what_was_not_committed(
    path: Path, states: list[workload.State]
) -> None:
    with create(path) as emb:
        go_on(emb, SEED, 10)
        manifest = (path / "zarr.json").read_bytes()
        go_on(emb, 5, 25, commits=False)
        emb.optimizer.param_groups[0]["lr"] = 7.0
        assert emb.stats().evictions > 0
        emb.rollback()
        workload.assert_table_is(emb, states[10])
        assert (path / "zarr.json").read_bytes() == manifest
        go_on(emb, SEED, 15)
        workload.assert_table_is(emb, states[15])
    assert report.verify(path) == []


def test_a_writer_may_open_at_an_earlier_commit(
    path: Path, states: list[workload.State], long_store: Path
) -> None:
    store_files.copied(long_store, path)
    with open_again(path, commit=20) as emb:
        workload.assert_table_is(emb, states[20])
        assert max(emb.commits()) == 20
        assert emb.commit() == 20
        go_on(emb, SEED, 22)
        assert list(emb.commits())[-2:] == [41, 42], "a number was given twice"
    with pytest.raises(StoreError, match=r"commit 30 of .*t.zarr is not kept"):
        open_again(path, commit=30)
    with open_again(path, commit=42) as emb:
        workload.assert_table_is(emb, states[22])


def test_a_rollback_lands_where_a_merge_under_way_has_replaced_files_already(
    path: Path, states: list[workload.State]
) -> None:
    """Both commits contain the sealed log whole, so its merge may begin; here it fails half-way."""
    with create(path) as emb:
        go_on(emb, SEED, 3, commits=False)
        emb.flush()
        go_on(emb, SEED, 12, commits=False)
        number = emb.commit()
        emb.keep_commits = 2
        emb.optimizer.param_groups[0]["lr"] = 0.5

        def fail_late(name: str, arguments: tuple[Any, ...]) -> None:
            if name == "rename" and "c.2.0" in str(arguments[0]):
                raise OSError(errno.EIO, "failing on purpose")

        with system_calls.watched(path, fail_late), pytest.raises(OSError, match="on purpose"):
            emb.flush()
        assert going_back.is_sealed(path)
        emb.rollback(number)
        workload.assert_table_is(emb, states[12])
        assert report.verify(path) == []
        emb.keep_commits = 1
        go_on(emb, SEED, 14)
        emb.flush()
        workload.assert_zarr_is(path, states[14])
    assert report.verify(path) == []


# Readers


def test_a_reader_opens_an_earlier_commit_and_keeps_to_it_whatever_the_writer_does(
    path: Path, states: list[workload.State]
) -> None:
    with create(path, keep=30) as emb:
        go_on(emb, SEED, 20)
        readers = [DiskEmbedding.open(path, "r", commit=number) for number in (4, 13, 19)]
        emb.rollback(13)
        readers.append(DiskEmbedding.open(path, "r", commit=7))
        go_on(emb, 6, 30)
        emb.rollback(8)
        go_on(emb, 7, 45)
        with pytest.warns(UserWarning, match="gives up"):
            emb.close(flush=True)
    for reader, number in zip(readers, (4, 13, 19, 7), strict=True):
        workload.assert_table_is(reader, states[number])
        assert going_back.word_of(reader)["commit"] == number
        reader.close()
    with pytest.raises(StoreError, match=r"commit 4 of .*t.zarr is not kept"):
        DiskEmbedding.open(path, "r", commit=4)


def test_a_reader_opened_at_any_moment_of_a_rollback_keeps_its_commit_while_others_follow(
    path: Path, states: list[workload.State]
) -> None:
    readers: list[DiskEmbedding] = []
    with create(path, keep=30) as emb:
        go_on(emb, SEED, 12)
        with system_calls.watched(
            path, lambda *_: readers.append(DiskEmbedding.open(path, mode="r"))
        ):
            emb.rollback(7)
            go_on(emb, 6, 14)
        go_on(emb, 6, 20)
    steps = [reader.step for reader in readers]
    assert {7, 12} < set(steps)
    for reader in readers:
        if reader.step in (7, 12) and max(reader.commits()) <= 12:
            workload.assert_table_is(reader, states[reader.step])
        reader.close()


def test_a_killed_rollback_leaves_readers_and_links_of_the_commits_it_took_back_alone(
    quick: Path, path: Path, states: list[workload.State]
) -> None:
    """The process ends right behind the manifest's rename; another one trains on in its files."""
    with create(path, keep=30) as emb:
        go_on(emb, SEED, 12)
    reader = DiskEmbedding.open(path, mode="r")
    with open_again(path) as emb:

        def die(name: str, arguments: tuple[Any, ...]) -> None:
            if name == "rename" and str(arguments[1]).endswith("t.zarr/zarr.json"):
                raise KeyboardInterrupt

        with system_calls.watched(path, lambda *_: None, die), pytest.raises(KeyboardInterrupt):
            emb.rollback(7)
        going_back.abandon(emb)
    with open_again(path) as emb:
        workload.assert_table_is(emb, states[7])
        emb.optimizer.param_groups[0]["lr"] = 0.5
        emb.commit()
    with open_again(path) as emb:
        go_on(emb, 6, 14)
    workload.assert_table_is(reader, states[12])
    reader.close()
