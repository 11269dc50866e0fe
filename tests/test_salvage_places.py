"""Where salvage writes, and what it reads beside a writer; knows what the store is, no format."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import going_back
import numpy as np
import pytest
import small_store
import store_files
import system_calls
import torch
from test_corruption import flip

from ooc_embed import DiskEmbedding, StoreError, report, salvage, soundness
from ooc_embed.salvage import Salvage
from ooc_embed.soundness import ChunkCheck, LogCheck
from ooc_embed.store import Store

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def damaged(quick: Path) -> Path:
    """A closed store, whose rows 1,024 to 2,047 are damaged."""
    path = small_store.train(quick / "t.zarr")
    flip(path / "table" / "c.1.0", 50)
    return path


def check(path: Path, result: Salvage) -> None:
    assert report.verify(path) == []
    assert 0 < len(result.lost) < 1024
    assert set(result.lost // 1024) == {1}


# Where it writes


def _a_store(path: Path) -> None:
    small_store.make(path).close()


def _a_file(path: Path) -> None:
    path.write_text("mine")


def _a_folder(path: Path) -> None:
    path.mkdir()
    (path / "mine.txt").write_text("mine")


@pytest.mark.parametrize("occupy", [_a_store, _a_file, _a_folder])
def test_what_is_there_is_refused_before_anything_is_read_or_written(
    damaged: Path, occupy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = damaged.with_name("out.zarr")
    occupy(out)
    monkeypatch.setattr(Store, "open", lambda *_: pytest.fail("was opened"))
    with store_files.untouched(damaged.parent), pytest.raises(FileExistsError, match=str(out)):
        salvage.salvage(damaged, out)


@pytest.mark.parametrize("place", [".", "out.zarr", "table/out.zarr", "../link/out.zarr"])
def test_a_place_inside_the_store_is_refused(damaged: Path, place: str) -> None:
    damaged.with_name("link").symlink_to(damaged)
    with (
        store_files.untouched(damaged.parent),
        pytest.raises(ValueError, match=r"inside of it: choose a path beside .*t\.zarr"),
    ):
        salvage.salvage(damaged, damaged / place)
    link = damaged.with_name("link")
    with pytest.raises(ValueError, match="inside of it: choose a path beside .*link"):
        salvage.salvage(link, damaged / place)


def test_a_full_disk_at_any_moment_leaves_nothing_and_a_second_try_works(damaged: Path) -> None:
    out = damaged.with_name("out.zarr")
    calls: list[str] = []
    with system_calls.watched(out, lambda name, _: calls.append(name)):
        salvage.salvage(damaged, damaged.with_name("out.zarr"))
    _remove(out)
    needing = ("pwrite", "posix_fallocate", "fsync", "rename")
    chosen = [place for place, name in enumerate(calls) if name in needing]
    assert len(chosen) > 10
    for failing in chosen:
        count = iter(range(len(calls)))

        def fail(name: str, _: Any, count: Any = count, failing: int = failing) -> None:
            if next(count, None) == failing:
                raise OSError(errno.ENOSPC, "no room, on purpose")

        with (
            store_files.untouched(damaged),
            system_calls.watched(out, fail),
            pytest.raises(OSError, match=r"no room, on purpose|bytes are free"),
        ):
            salvage.salvage(damaged, out)
        assert sorted(os.listdir(damaged.parent)) == ["t.zarr"], calls[failing]
    check(out, salvage.salvage(damaged, out))


def _remove(path: Path) -> None:
    for folder, _, names in os.walk(path, topdown=False):
        for name in names:
            Path(folder, name).unlink()
        Path(folder).rmdir()


def test_what_a_killed_salvage_left_is_no_store_and_is_begun_anew(damaged: Path) -> None:
    out = damaged.with_name("out.zarr")
    salvage.salvage(damaged, out)
    (out / "zarr.json").unlink()  # which is written last
    (out / "table" / "c.0.0").rename(out / "table" / "c.0.0.tmp")
    with pytest.raises(StoreError, match="unfinished creation"):
        DiskEmbedding.open(out)
    check(out, salvage.salvage(damaged, out))
    assert not (out / "table" / "c.0.0.tmp").exists()


# Beside a writer


def test_a_table_that_is_open_is_salvaged_as_of_its_last_commit(damaged: Path) -> None:
    out = damaged.with_name("out.zarr")
    with DiskEmbedding.open(damaged) as emb:
        small_store.step(emb, [1, 2, 4999])
        number, row = emb.commit(), emb.weight[4999]
        small_store.step(emb, [4999])
        result = salvage.salvage(damaged, out)
        assert (result.commit, result.step) == (number, emb.step - 1)
        small_store.step(emb, [4999])
    check(out, result)
    with DiskEmbedding.open(out) as again:
        assert torch.equal(again.weight[4999], row)


def test_a_store_that_a_merge_changes_meanwhile_is_read_again(
    quick: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, out = small_store.train(quick / "t.zarr"), quick / "out.zarr"
    emb = DiskEmbedding.open(path)
    reads: list[int] = []
    real = ChunkCheck.read

    def read(check: ChunkCheck, index: int) -> str | None:
        reads.append(index)
        if len(reads) == 2:
            small_store.some_steps(emb, 3)
            emb.flush()
        return real(check, index)

    monkeypatch.setattr(ChunkCheck, "read", read)
    result = salvage.salvage(path, out)
    assert reads == [0, 1, 0, 1, 2, 3, 4]
    assert (len(result.lost), result.older) == (0, 0)
    assert {result.commit: result.step} == emb.commits()
    weight, version = emb.weight[:], emb.version[:]
    emb.close()
    with DiskEmbedding.open(out) as again:
        assert torch.equal(again.weight[:], weight)
        assert torch.equal(again.version[:], version)


def test_a_log_that_goes_while_it_is_read_is_no_damage(
    quick: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There was no chunk file, whose change would tell."""
    path, out = quick / "t.zarr", quick / "out.zarr"
    emb = small_store.make(path)
    small_store.some_steps(emb, 1)
    emb.commit()
    real, reads = soundness.check_log, []

    def check_log(store: Store, generation: int) -> LogCheck:
        reads.append(generation)
        if len(reads) == 1:
            emb.flush()
        return real(store, generation)

    monkeypatch.setattr(salvage, "check_log", check_log)
    result = salvage.salvage(path, out)
    assert len(reads) == 2
    assert (result.step, len(result.lost), result.older) == (emb.step, 0, 0)
    emb.close()
    assert store_files.manifest(out)["chunk_crc32"] == store_files.manifest(path)["chunk_crc32"]


def test_a_store_that_changes_each_time_is_refused_and_nothing_is_left(
    quick: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, out = small_store.train(quick / "t.zarr"), quick / "out.zarr"
    emb = DiskEmbedding.open(path)
    real = ChunkCheck.read

    def read(check: ChunkCheck, index: int) -> str | None:
        small_store.some_steps(emb, 3, steps=1)
        emb.flush()
        return real(check, index)

    monkeypatch.setattr(ChunkCheck, "read", read)
    monkeypatch.setattr(salvage, "_READ_ATTEMPTS", 3)
    with pytest.raises(StoreError, match=r"t\.zarr changed 3 times while it was being read"):
        salvage.salvage(path, out)
    assert not out.exists()
    emb.close()


def test_commits_that_a_writer_makes_meanwhile_are_no_reason_to_read_again(
    damaged: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = damaged.with_name("out.zarr")
    real, reads = ChunkCheck.read, []
    with DiskEmbedding.open(damaged) as emb:
        number = max(emb.commits())

        def read(check: ChunkCheck, index: int) -> str | None:
            reads.append(index)
            small_store.step(emb, [index])
            emb.commit()
            return real(check, index)

        monkeypatch.setattr(ChunkCheck, "read", read)
        result = salvage.salvage(damaged, out)
    assert reads == [0, 1, 2, 3, 4]
    assert result.commit == number
    monkeypatch.undo()
    check(out, result)
    assert going_back.named(out).keys() == {number}


# What it says


def told(**facts: Any) -> list[str]:
    known: dict[str, Any] = {
        "path": Path("out.zarr"),
        "layer": "DiskEmbedding",
        "commit": 7,
        "step": 1234,
        "newest": 7,
        "num_embeddings": 5000,
        "lost": np.empty(0, dtype=np.int64),
        "older": 0,
        "unchecked": 0,
    }
    return str(Salvage(**known | facts)).splitlines()


def test_a_whole_salvage_says_what_it_has_and_how_to_go_on() -> None:
    assert told() == [
        "out.zarr has 5,000 of 5,000 rows, as of commit 7 (step 1,234)",
        "go on with ooc_embed.DiskEmbedding.open('out.zarr')",
    ]


@pytest.mark.parametrize(
    ("lost", "text"),
    [
        ([0], "lost rows, which begin anew (1): 0"),
        ([0, 1, 2, 4, 4998, 4999], "lost rows, which begin anew (6): 0 to 2, 4, 4,998 to 4,999"),
        (
            range(0, 42, 2),
            f"lost rows, which begin anew (21): {', '.join(map(str, range(0, 40, 2)))}, and 1 more",
        ),
    ],
)
def test_lost_rows_are_told_as_ranges_of_which_the_first_twenty_are_shown(
    lost: Any, text: str
) -> None:
    lines = told(lost=np.array(lost, dtype=np.int64))
    assert lines[0].startswith(f"out.zarr has {5000 - len(lost):,} of 5,000 rows")
    assert lines[1] == text
