"""Snapshots: a second store that holds the same, shares what never changes, and goes its way."""

from __future__ import annotations

import contextlib
import copy
import errno
import json
import os
import shutil
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
import zarr
from shadowed import (
    assert_is_whole,
    expected_links,
    files,
    linked,
    make,
    shared_bytes_stay,
    trained,
)
from test_sync_order import Journal

import ooc_embed
from conftest import Stores
from ooc_embed import DiskEmbedding, disk_facts, merging, report, snapshot

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:.*gives up commit"),  # a flush does, as it should
]

NO_LINKS = (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP, errno.ENOSYS)
CALLS = (*system_calls.WRITES, *system_calls.SYNCS, *system_calls.NAMES, "open", "sendfile")


@contextlib.contextmanager
def linking_fails(code: int) -> Iterator[None]:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(code, os.strerror(code))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "link", refuse)
        yield


def test_a_snapshot_is_the_store_in_every_row_and_commit(stores: Stores) -> None:
    path, target = stores.new_path(), stores.new_path()
    run = trained(path)
    run.play(30)  # dirty rows in the cache, and a step that no commit has yet
    run.emb.snapshot(target)
    assert store_files.manifest(target) == store_files.manifest(path)
    assert linked(path, target) == expected_links(path)
    assert {name.split("/")[0] for name in linked(path, target)} == {"table", "log"}
    assert_is_whole(target)
    assert_is_whole(path)
    run.kept[max(run.emb.commits())] = copy.deepcopy(run.shadow)
    other = run.opened(target)
    assert other.emb.commits() == run.emb.commits()
    for each in (run, other):
        each.check()
        each.play(31)
        each.emb.close(flush=True)
        workload.assert_zarr_is(each.emb.path, each.shadow.state())


@pytest.mark.parametrize("first", ["original", "snapshot"])
@pytest.mark.parametrize("kept", [0, 1])
def test_original_and_snapshot_go_their_own_ways_and_never_change_each_other(
    stores: Stores, tmp_path: Path, first: str, kept: int
) -> None:
    path, target = stores.new_path(), stores.new_path()
    run = trained(path)
    run.emb.snapshot(target)
    other = run.opened(target)
    pair = (run, other) if first == "original" else (other, run)
    with shared_bytes_stay(path, target, tmp_path / "witness") as names:
        assert len(names) > 3
        for turn, each in enumerate(pair):
            # Back into the middle of a file that was full, and over it with other records.
            each.roll_back(sorted(each.emb.commits())[kept])
            each.check()
            for index in range(5):
                each.play(100 * (turn + 1) + index)
                each.save()
            each.roll_back(min(each.emb.commits()))
            each.check()
            each.play(50 + turn)
            each.save(DiskEmbedding.flush)
            for one in pair:
                one.check()
    for each in pair:
        each.emb.close(flush=True)
        workload.assert_zarr_is(each.emb.path, each.shadow.state())
        assert_is_whole(each.emb.path)


def test_a_snapshot_outlives_its_original(stores: Stores) -> None:
    path, target = stores.new_path(), stores.new_path()
    run = trained(path)
    run.emb.snapshot(target)
    run.emb.close()
    shutil.rmtree(path)
    other = run.opened(target)
    other.check()
    other.play(40, 41)
    other.emb.close(flush=True)
    workload.assert_zarr_is(target, other.shadow.state())


@pytest.mark.parametrize("code", NO_LINKS)
def test_where_links_are_not_possible_all_is_copied(stores: Stores, code: int) -> None:
    path, target = stores.new_path(), stores.new_path()
    run = trained(path)
    with linking_fails(code):
        run.emb.snapshot(target)
    assert linked(path, target) == set()
    assert_is_whole(target)
    other = run.opened(target)
    other.check()
    for each in (run, other):
        each.emb.close()


def test_an_error_of_linking_that_means_no_lack_of_links_is_raised(stores: Stores) -> None:
    path, target = stores.new_path(), stores.new_path()
    run = trained(path)
    with linking_fails(errno.EIO), pytest.raises(OSError) as caught:
        run.emb.snapshot(target)
    assert caught.value.errno == errno.EIO
    assert not target.exists()
    run.check()
    run.emb.close()


def test_a_snapshot_on_another_file_system_is_a_copy(stores: Stores) -> None:
    path = stores.new_path()
    run = trained(path)
    with store_files.quick_folder(path.parent) as folder:
        if folder.stat().st_dev == path.stat().st_dev:
            pytest.skip("needs a second file system")
        run.emb.snapshot(folder / "s.zarr")
        assert_is_whole(folder / "s.zarr")
        other = run.opened(folder / "s.zarr")
        other.play(40)
        other.emb.flush()
        other.check()
        other.emb.close()
    run.emb.close()


def test_another_disk_that_is_too_small_is_refused_before_files_are_copied(
    stores: Stores, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, target = stores.new_path(), stores.new_path()
    run = trained(path)
    monkeypatch.setattr(snapshot, "free_bytes", lambda _: 1000)
    with (
        linking_fails(errno.EXDEV),
        pytest.raises(OSError, match=r"copy of [\d,]+ bytes, 1,000 bytes are free") as caught,
    ):
        run.emb.snapshot(target)
    assert caught.value.errno == errno.ENOSPC
    assert not target.exists()
    run.emb.snapshot(target)  # by links
    assert_is_whole(target)
    run.emb.close()


def test_a_network_disk_is_warned_of(stores: Stores, monkeypatch: pytest.MonkeyPatch) -> None:
    run = trained(stores.new_path())
    monkeypatch.setattr(disk_facts, "file_system", lambda _: "nfs")
    with pytest.warns(UserWarning, match="is on nfs, a network") as caught:
        run.emb.snapshot(stores.new_path())
    assert caught[0].filename == __file__
    run.emb.close()


@pytest.mark.parametrize("what", ["store", "open store", "file", "folder", "zarr", "itself"])
def test_a_place_that_is_taken_is_refused_before_anything_is_written(
    stores: Stores, tmp_path: Path, what: str
) -> None:
    run = make(stores.new_path())
    run.play(0)
    run.emb.commit()
    target = tmp_path / "target"
    other = None
    if "store" in what:
        other = crash_child.create(str(target), 1 << 20)
    if what == "store":
        other.close()
    elif what == "file":
        target.write_text("mine")
    elif what == "folder":
        target.mkdir()
        (target / "notes.txt").write_text("mine")
    elif what == "zarr":
        zarr.create_group(target)
    elif what == "itself":
        target = run.emb.path
    with store_files.untouched(tmp_path), pytest.raises((FileExistsError, ValueError)) as caught:
        run.emb.snapshot(target)
    assert str(target) in str(caught.value)
    assert "overwrite" not in str(caught.value)
    run.check()
    run.emb.close()
    if other is not None:
        other.close()


def test_a_place_inside_the_store_is_refused_by_whatever_name(
    stores: Stores, tmp_path: Path
) -> None:
    run = make(stores.new_path())
    path = run.emb.path
    (tmp_path / "link").symlink_to(path)
    for place in (path / "s.zarr", path / "table" / "s", tmp_path / "link" / "table" / "s"):
        with store_files.untouched(path), pytest.raises(ValueError, match="inside"):
            run.emb.snapshot(place)
    run.emb.snapshot(path / ".." / "beside.zarr")
    assert_is_whole(tmp_path / "beside.zarr")
    run.emb.close()


def test_a_reader_and_a_closed_table_refuse_and_say_why(stores: Stores, tmp_path: Path) -> None:
    run = make(stores.new_path())
    with (
        DiskEmbedding.open(run.emb.path, mode="r") as reader,
        pytest.raises(ooc_embed.StoreError, match=r"open to read.*r\+"),
    ):
        reader.snapshot(tmp_path / "s.zarr")
    run.emb.close()
    with pytest.raises(ooc_embed.StoreError, match="closed"):
        run.emb.snapshot(tmp_path / "s.zarr")
    assert not (tmp_path / "s.zarr").exists()


def test_a_crash_at_any_system_call_leaves_the_store_and_a_whole_snapshot_or_none(
    quick: Path,
) -> None:
    run = trained(quick / "t.zarr")
    run.play(30)
    before = run.emb.step - 1
    states = {before: run.kept[max(run.kept)].state(), run.emb.step: run.shadow.state()}
    crashes: list[Path] = []
    done: list[bool] = []

    def crash_here(name: str, arguments: tuple[Any, ...]) -> None:
        place = quick / "crashes" / str(len(crashes))
        place.mkdir(parents=True)
        for store in ("t.zarr", "s.zarr"):
            if (quick / store).exists():
                store_files.copied(quick / store, place / store)
        crashes.append(place)
        done.append((quick / "s.zarr" / "zarr.json").exists())

    with system_calls.watched(quick, crash_here, names=CALLS):
        run.emb.snapshot(quick / "s.zarr")
    run.emb.close()
    assert len(crashes) > 60
    for place, finished in zip(crashes, done, strict=True):
        with DiskEmbedding.open(place / "t.zarr") as emb:
            workload.assert_table_is(emb, states[emb.step])
            if not finished:
                # What is left of it is no store, and the next one replaces it.
                with pytest.raises((ooc_embed.FormatError, FileNotFoundError)):
                    DiskEmbedding.open(place / "s.zarr")
                if int(place.name) % 8:  # some of them: it takes a moment
                    continue
                emb.snapshot(place / "s.zarr")
        assert report.verify(place / "s.zarr") == []
        with DiskEmbedding.open(place / "s.zarr") as other:
            workload.assert_table_is(other, states[other.step])


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_a_call_that_fails_leaves_nothing_at_the_target_and_the_table_trains_on(
    quick: Path, code: int
) -> None:
    run = make(quick / "t.zarr", cache=1 << 20)
    run.play(0)
    run.save(DiskEmbedding.flush)
    run.play(1)
    target = quick / "s.zarr"
    ids, number, finished = torch.arange(100), 0, False
    while not finished:
        workload.train(run.emb, ids, torch.ones(100, workload.DIM).double())
        run.shadow.train(ids, torch.ones(100, workload.DIM).double())
        calls = iter(range(1 << 30))

        def fail(*_: Any, calls: Iterator[int] = calls, number: int = number) -> None:
            if next(calls) == number:
                raise OSError(code, os.strerror(code))

        with system_calls.watched(quick, fail, names=CALLS):
            try:
                run.emb.snapshot(target)
                finished = next(calls) <= number
            except OSError as error:
                assert error.errno == code
                assert not target.exists()
        if target.exists():
            shutil.rmtree(target)
        run.check()
        number += 1
    assert number > 40
    run.emb.snapshot(target)
    run.emb.close(flush=True)
    workload.assert_zarr_is(quick / "t.zarr", run.shadow.state())
    other = run.opened(target)
    other.check()
    other.emb.close()


def test_what_a_snapshot_names_is_durable_before_its_manifest(quick: Path) -> None:
    run = trained(quick / "t.zarr")
    target = quick / "s.zarr"
    journal = Journal(target)
    with system_calls.watched(target, journal.before, journal.after):
        run.emb.snapshot(target)
    assert journal.commits == 1
    assert journal.root_synced
    run.emb.close()


def test_a_merge_that_runs_waits_for_the_snapshot_and_both_finish_it(
    stores: Stores, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, target = stores.new_path(), stores.new_path()
    run = make(path, keep=1, cache=1 << 20)
    run.play(0)
    run.save(DiskEmbedding.flush)
    merged, go_on = threading.Event(), threading.Event()
    real = merging.Merge._merge_chunk

    def slowly(self: merging.Merge, index: int, *rest: Any) -> int:
        if index == 1:
            go_on.wait()
        crc = real(self, index, *rest)
        if index == 0:
            merged.set()
        return crc

    stop = merging.Merge.stop

    def let_go_and_stop(self: merging.Merge) -> None:
        go_on.set()  # not before: a merge that is over is no running one
        stop(self)

    monkeypatch.setattr(merging.Merge, "_merge_chunk", slowly)
    monkeypatch.setattr(merging.Merge, "stop", let_go_and_stop)
    ids = torch.arange(workload.ROWS)
    grads = torch.ones(workload.ROWS, workload.DIM).double()
    workload.train(run.emb, ids, grads)
    run.shadow.train(ids, grads)
    run.save()
    merged.wait()
    assert len(store_files.newest_commit(path)["logs"]) == 2
    run.emb.snapshot(target)
    before = run.shadow.state()
    run.play(3)
    assert len(store_files.newest_commit(target)["logs"]) == 2
    assert report.verify(target) == []
    assert len(store_files.chunk_files(path)) > 0
    with DiskEmbedding.open(target) as other:
        workload.assert_table_is(other, before)
        other.flush()
    workload.assert_zarr_is(target, before)
    run.emb.close(flush=True)
    workload.assert_zarr_is(path, run.shadow.state())


def test_foreign_attributes_and_a_checkpoint_come_along(stores: Stores) -> None:
    path, target = stores.new_path(), stores.new_path()
    run = trained(path)
    for name in ("zarr.json", "table/zarr.json"):
        described = json.loads((path / name).read_text())
        described["attributes"] = {**described.get("attributes", {}), "mine": [1, None]}
        (path / name).write_text(json.dumps(described))
    model = torch.nn.Sequential(run.emb)
    run.emb.commit()
    run.emb.snapshot(target)
    saved = model.state_dict()
    for name in ("", "table"):
        assert zarr.open(target / name, mode="r").attrs["mine"] == [1, None]
    other = run.opened(target)
    assert torch.nn.Sequential(other.emb).load_state_dict(saved).missing_keys == []
    other.emb.close()
    run.emb.close()


def test_imported_rows_and_bags_have_snapshots_too(stores: Stores, tmp_path: Path) -> None:
    rows = torch.randn(3000, 4)
    bag = ooc_embed.DiskEmbeddingBag(
        3000, 4, path=stores.new_path(), init=rows, mode="sum", chunk_rows=1024
    )
    target = stores.new_path()
    with shared_bytes_stay(bag.path, bag.path, tmp_path / "witness"):
        bag.snapshot(target)
        assert linked(bag.path, target) == {"table/c.0.0", "table/c.1.0", "table/c.2.0"}
        bag(torch.arange(3000)[None]).sum().backward()
        bag.close(flush=True)
    with DiskEmbedding.open(target) as emb:
        assert torch.equal(emb.weight[:], rows)
        emb(torch.arange(3000)).sum().backward()
        emb.flush()
    weight = store_files.read_by_hand(target, "table")[:, :4]
    np.testing.assert_array_equal(weight, store_files.read_by_hand(bag.path, "table")[:, :4])


def test_making_a_snapshot_shows_how_far_it_has_come(
    stores: Stores, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[str] = []

    def bar(items: Any, desc: str, **_: Any) -> Any:
        shown.extend([f"{desc} {len(items)}"] if "snapshot" in desc else [])
        return items

    monkeypatch.setattr("ooc_embed.progress.tqdm", bar)
    run = trained(stores.new_path())
    target = stores.new_path()
    run.emb.snapshot(target)
    assert shown == [f"making a snapshot {len(files(target)) - 1}"]
    run.emb.close()
