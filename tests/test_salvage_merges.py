"""Salvage of stores whose log is sealed, and whose merge a kill or a broken disk ended."""

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
from test_corruption import flip
from test_merging import Pair, wait_for_merge
from test_salvage import (
    CHUNK_ROWS,
    LARGE_CACHE,
    ROWS,
    changed,
    chunk_of,
    mixed,
    salvaged,
    the_log,
)

from conftest import Stores
from ooc_embed import report
from ooc_embed.storage import Storage

pytestmark = pytest.mark.usefixtures("one_thread")


def fail_at_5(name: str, arguments: tuple[Any, ...]) -> None:
    """The merge of the chunks 0 to 4 goes well."""
    if name == "rename" and "table/c.5.0" in str(arguments[1]):
        raise OSError(errno.EIO, "failing on purpose")


class Sealed(Pair):
    """A table that was given its rows, and whose log of rows that 4 does not divide is sealed.

    The merge fails at its chunk 5; a commit behind it may have rows of its own.
    """

    def __init__(self, path: Path, *, keep: int = 1) -> None:
        super().__init__(path, LARGE_CACHE)
        self.emb.keep_commits = keep
        self.initial = self.record()

    def record(self) -> workload.State:
        """As torch has it; a row that was given is of version 1."""
        ram = self.ram
        moments = {name: getattr(ram, name).numpy().copy() for name in workload.FIELDS}
        return workload.State(moments, ram.version.numpy() + 1, ram.step, 0.1)

    def train_to_seal(self) -> None:
        self.before = self.record()
        ids = torch.arange(ROWS)
        for part in ids[ids % 4 != 0].split(500):
            self.train_rows(part)
        self.emb.commit()
        self.merged = self.record()
        assert going_back.is_sealed(self.path)

    def kill(self, *, named: bool) -> None:
        """Five of six chunks are merged; the manifest has their checksums or has not."""
        with system_calls.watched(self.path, fail_at_5):
            self.train_to_seal()
            wait_for_merge(self.emb)
            if named:
                with pytest.raises(OSError, match="on purpose"):
                    self.emb.commit()
                self.train_rows(torch.arange(0, ROWS, 400))
                self.emb.commit()
            going_back.abandon(self.emb)
        merged = store_files.manifest(self.path)["merged_crc32"]
        assert sorted(map(int, merged)) == ([0, 1, 2, 3, 4] if named else [])
        self.state = self.record()
        self.number = max(going_back.named(self.path))


def anew(state: workload.State) -> workload.State:
    """How rows begin that were given: as zeros."""
    fields = {name: np.zeros_like(values) for name, values in state.fields.items()}
    return workload.State(fields, np.zeros_like(state.version), 0, 0.1)


@pytest.fixture(params=[False, True], ids=["killed", "committed"])
def merging(request: pytest.FixtureRequest, tmp_path: Path) -> Sealed:
    sealed = Sealed(tmp_path / "t.zarr")
    sealed.kill(named=request.param)
    return sealed


def test_a_store_in_an_unfinished_merge_becomes_an_equal_copy(
    merging: Sealed, stores: Stores
) -> None:
    result = salvaged(merging.path, stores, merging.state)
    assert (result.commit, len(result.lost), result.older) == (merging.number, 0, 0)
    # Of a killed merge no manifest has the checksums of the five chunks that it had done.
    named = store_files.manifest(merging.path)["merged_crc32"]
    assert result.unchecked == 5 - len(named)
    assert ("5 chunk files are of a merge that was killed" in str(result)) == (not named)


@pytest.mark.parametrize("index", [1, 5])
def test_of_a_damaged_chunk_in_an_unfinished_merge_only_rows_of_no_log_are_lost(
    merging: Sealed, stores: Stores, index: int
) -> None:
    """Chunk 1 was merged, 5 was not. What a checksum covers is found in a row of no log, too."""
    covered = index == 5 or store_files.manifest(merging.path)["merged_crc32"]
    flip(merging.path / "table" / f"c.{index}.0", (0 if covered else 1) * workload.WIDTH * 8)
    assert (
        "rows {:,} to {:,}".format(*((1024, 2047) if index == 1 else (5120, 5999)))
        in (report.verify(merging.path)[0])
    )
    lost = chunk_of(index) & ~changed(merging.before, merging.state)
    result = salvaged(merging.path, stores, mixed(merging.state, anew(merging.state), lost))
    np.testing.assert_array_equal(result.lost, np.flatnonzero(lost))
    assert result.older == 0


def test_merged_chunks_are_sound_though_the_sealed_log_is_damaged(
    merging: Sealed, stores: Stores
) -> None:
    """A record of row 5120 or behind, whose chunk the merge did not come to, is damaged."""
    log = the_log(merging.path, "records")
    rows = store_files.read_by_hand(
        merging.path, str(log.parent.parent.relative_to(merging.path)) + "/rows"
    )
    position = int(np.flatnonzero(rows >= 5 * CHUNK_ROWS)[0])
    index, within = divmod(position, CHUNK_ROWS)
    flip(log.with_name(f"c.{index}.0"), within * workload.WIDTH * 8)
    (problem,) = report.verify(merging.path)
    assert problem.startswith(f"{log} to c.")
    left_out = chunk_of(5) & ~changed(merging.merged, merging.state)
    want = mixed(merging.state, merging.before, left_out)
    result = salvaged(merging.path, stores, want)
    assert len(result.lost) == 0
    assert (
        result.older
        == (changed(merging.before, merging.merged) & ~changed(merging.merged, merging.state)).sum()
    )


@pytest.mark.parametrize("array", ["rows", "records"])
def test_without_the_sealed_log_merged_chunks_are_taken_by_their_checksums_alone(
    merging: Sealed, stores: Stores, array: str
) -> None:
    the_log(merging.path, array).unlink()
    left_out = ~changed(merging.merged, merging.state)
    if store_files.manifest(merging.path)["merged_crc32"]:
        lost = np.zeros(ROWS, bool)
        want = mixed(merging.state, merging.before, left_out & chunk_of(5))
    else:
        lost = chunk_of(0, 1, 2, 3, 4)
        want = mixed(merging.before, anew(merging.state), lost)
        want = mixed(merging.state, want, np.ones(ROWS, bool))  # the step is the newest commit's
    result = salvaged(merging.path, stores, want)
    np.testing.assert_array_equal(result.lost, np.flatnonzero(lost))
    in_sealed = changed(merging.before, merging.merged) & left_out & ~lost
    assert result.older == (in_sealed.sum() if array == "records" else None)


@pytest.mark.parametrize("damaged", ["sealed", "active"])
def test_of_two_logs_the_sound_one_is_taken(tmp_path: Path, stores: Stores, damaged: str) -> None:
    sealed = Sealed(tmp_path / "t.zarr")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Storage, "begin_merge", lambda _: None)
        sealed.train_to_seal()
        sealed.train_rows(torch.arange(2, ROWS, 300))
        sealed.emb.commit()
        going_back.abandon(sealed.emb)
    state = sealed.record()
    flip(the_log(sealed.path, "records", ["sealed", "active"].index(damaged)), 0)
    in_sealed, in_active = changed(sealed.before, sealed.merged), changed(sealed.merged, state)
    if damaged == "sealed":
        old = in_sealed & ~in_active
        want = mixed(state, sealed.before, old)
    else:
        old = in_active
        want = mixed(state, sealed.merged, old)
    result = salvaged(sealed.path, stores, want)
    assert (result.older, len(result.lost)) == (old.sum(), 0)


def test_a_commit_that_keeps_a_sealed_log_from_its_merge_is_gone_back_to(
    tmp_path: Path, stores: Stores
) -> None:
    sealed = Sealed(tmp_path / "t.zarr", keep=2)
    sealed.train_rows(torch.arange(0, ROWS, 9))
    number, state = sealed.emb.commit(), sealed.record()
    sealed.train_to_seal()
    going_back.abandon(sealed.emb)
    log = store_files.newest_commit(sealed.path)["logs"][0]
    index, within = divmod(log["records"] - 1, CHUNK_ROWS)
    records = the_log(sealed.path, "records")
    flip(records.with_name(f"c.{index}.0"), within * workload.WIDTH * 8)
    flip(sealed.path / "table" / "c.2.0", 0)
    lost = chunk_of(2) & (np.arange(ROWS) % 9 != 0)
    result = salvaged(sealed.path, stores, mixed(state, anew(state), lost))
    np.testing.assert_array_equal(result.lost, np.flatnonzero(lost))
    assert (result.commit, result.older) == (number, 0)


class FirstMerge:
    """A seeded table of which three rows in four were trained once, killed in its first merge."""

    def __init__(self, path: Path, *, named: bool) -> None:
        self.path = path
        emb = going_back.create(path, cache_bytes=LARGE_CACHE)
        shadow = workload.Shadow(emb.weight[:])
        self.initial = shadow.state()

        ids = torch.arange(ROWS)
        ids = ids[ids % 4 != 0]
        with system_calls.watched(path, fail_at_5):
            for each in (emb, shadow):
                train = each.train if each is shadow else lambda *batch: workload.train(emb, *batch)
                train(ids, torch.ones(len(ids), workload.DIM, dtype=torch.float64))
            emb.commit()
            wait_for_merge(emb)
            if named:
                emb._table._storage.put_merge_down()
            going_back.abandon(emb)
        self.state = shadow.state()
        known = store_files.manifest(path)
        assert known["chunk_crc32"] == {}
        assert sorted(map(int, known["merged_crc32"])) == ([0, 1, 2, 3, 4] if named else [])
        assert len(store_files.chunk_files(path)) == 5


@pytest.mark.parametrize("named", [False, True])
def test_a_damaged_chunk_that_a_first_merge_brought_into_being_costs_no_row(
    tmp_path: Path, stores: Stores, named: bool
) -> None:
    first = FirstMerge(tmp_path / "t.zarr", named=named)
    flip(first.path / "table" / "c.1.0", 0)
    result = salvaged(first.path, stores, first.state)
    assert (result.older, len(result.lost)) == (0, 0)


@pytest.mark.parametrize("named", [False, True])
def test_of_a_first_merge_whose_log_is_damaged_chunks_with_a_checksum_are_taken(
    tmp_path: Path, stores: Stores, named: bool
) -> None:
    first = FirstMerge(tmp_path / "t.zarr", named=named)
    flip(the_log(first.path, "rows"), 0)
    (problem,) = report.verify(first.path)  # and no chunk file is a stranger
    assert "row ids have the checksum" in problem or "names row" in problem
    behind = chunk_of(5) if named else np.ones(ROWS, bool)
    result = salvaged(first.path, stores, mixed(first.state, first.initial, behind))
    assert (result.older, len(result.lost)) == (None, 0)
