"""What is durable before what: syncs, renames and unlinks come in the order that is promised."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import crash_child
import pytest
import store_files
import system_calls
import torch
import workload

from ooc_embed import DiskEmbedding

pytestmark = pytest.mark.usefixtures("one_thread")


def is_part(name: str) -> bool:
    """Whether a file is part of the store; who holds its lock may be forgotten in a power cut."""
    return ".tmp" not in name and name != "writer.json"


class Journal:
    """What each file and folder held when it was last synced, as a power cut would leave it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.synced: dict[Path, Any] = {}
        self.commits = 0
        self.deleted = 0
        self.root_synced = False

    def now(self, place: Path) -> Any:
        """A folder's names but temporary ones, a file's time of last write and size."""
        if place.is_dir():
            return {(e.name, e.inode()) for e in os.scandir(place) if is_part(e.name)}
        status = place.stat()
        return status.st_mtime_ns, status.st_size, status.st_ino

    def after(self, name: str, arguments: tuple[Any, ...]) -> None:
        place = system_calls.target(arguments)
        assert place is not None
        if name in system_calls.SYNCS:
            self.synced[place] = self.now(place)
            self.root_synced |= place == self.path
        elif name in ("rename", "replace"):
            target = Path(arguments[1])
            if place in self.synced:
                self.synced[target] = self.synced.pop(place)
            if target == self.path / "zarr.json":
                self.commits += 1
                self.root_synced = False

    def before(self, name: str, arguments: tuple[Any, ...]) -> None:
        place = system_calls.target(arguments)
        assert place is not None
        if name in ("rename", "replace"):
            target = Path(arguments[1])
            is_chunk = target.parent == self.path / "table" and target.name.startswith("c.")
            if is_chunk or target == self.path / "zarr.json":
                assert self.synced.get(place) == self.now(place), f"{place} was renamed unsynced"
            if target == self.path / "zarr.json":
                self._check_everything_is_durable()
        elif name in ("unlink", "remove") and "c." in place.name and ".tmp" not in place.name:
            self.deleted += 1
            self._check_nothing_names(place)

    def _check_everything_is_durable(self) -> None:
        """All that the new manifest can name: everything but the manifest itself."""
        for folder, _, names in os.walk(self.path):
            if Path(folder) != self.path:
                # That a file is gone need not be durable, only what is there.
                missing = self.now(Path(folder)) - self.synced.get(Path(folder), set())
                assert not missing, f"{folder} was not synced: {missing}"
            for name in names:
                file = Path(folder, name)
                if is_part(name) and file != self.path / "zarr.json":
                    assert self.synced.get(file) == self.now(file), f"{file} was not synced"

    def _check_nothing_names(self, place: Path) -> None:
        assert self.root_synced, f"{place} was deleted before the manifest was durable"
        parts = place.relative_to(self.path).parts
        assert parts[0] == "log", f"{place} was deleted"
        for log in store_files.newest_commit(self.path)["logs"]:
            if log["generation"] % 2 == int(parts[1]):
                # Of a log that is named, only files behind its end.
                assert log["records"] <= int(place.name.split(".")[1]) * 1024, place


def run(path: Path, journal: Journal, work: Callable[[DiskEmbedding], None]) -> None:
    """Create under the journal, too: later commits name what creation wrote."""
    with system_calls.watched(path, journal.before, journal.after):
        emb = crash_child.create(str(path), workload.SMALL_CACHE)
        work(emb)
        emb.close()


def test_creation_syncs_every_file_and_folder_before_the_store_exists(tmp_path: Path) -> None:
    path = tmp_path / "t.zarr"
    journal = Journal(path)
    calls = []
    real = os.fsync

    def remember(fd: int) -> None:
        calls.append(Path(os.readlink(f"/proc/self/fd/{fd}")))
        real(fd)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", remember)
        run(path, journal, lambda emb: None)
    assert journal.commits == 1
    assert tmp_path in calls, "the parent folder, which holds the store's name, was not synced"
    assert path in calls


def test_every_commit_syncs_what_it_names_before_its_manifest(tmp_path: Path) -> None:
    path = tmp_path / "t.zarr"
    journal = Journal(path)

    def work(emb: DiskEmbedding) -> None:
        # As many rows as leave the log below the limit at which a merge begins in the background.
        for index in range(4):
            workload.train(
                emb, torch.arange(index * 90, index * 90 + 100), torch.ones(100, 4).double()
            )
            emb.commit()

    run(path, journal, work)
    assert journal.commits >= 5


def test_a_growth_syncs_longer_arrays_and_their_folders_before_its_manifest(
    tmp_path: Path,
) -> None:
    path = tmp_path / "t.zarr"
    journal = Journal(path)

    def work(emb: DiskEmbedding) -> None:
        workload.train(emb, torch.arange(100), torch.ones(100, 4).double())
        emb.resize(9500)

    run(path, journal, work)
    assert journal.commits == 2
    assert store_files.metadata(path, "table")["shape"][0] == 9500


def test_a_merge_deletes_its_log_only_after_the_manifest_without_it_is_durable(
    tmp_path: Path,
) -> None:
    path = tmp_path / "t.zarr"
    journal = Journal(path)

    def work(emb: DiskEmbedding) -> None:
        for index in range(3):
            workload.train(emb, torch.arange(index, 6000, 7), torch.ones(_count(index), 4).double())
            emb.flush()

    run(path, journal, work)
    assert journal.commits >= 4
    assert journal.deleted >= 3


def _count(index: int) -> int:
    return len(range(index, 6000, 7))


@pytest.mark.parametrize("flushes", [False, True])
def test_a_long_run_with_evictions_and_merges_keeps_the_order(
    tmp_path: Path, flushes: bool
) -> None:
    path = tmp_path / "t.zarr"
    journal = Journal(path)

    def work(emb: DiskEmbedding) -> None:
        for index in range(40):
            played = workload.make_round(71, index, flushes)
            workload.play(emb, played)
            if played.then:
                getattr(emb, played.then)()

    # Merges run beside commits here: a chunk under way is no part of what a commit names.
    journal._check_everything_is_durable = lambda: None  # type: ignore[method-assign]
    run(path, journal, work)
    assert journal.commits > 10


def test_a_table_chunk_is_never_changed_in_place(tmp_path: Path) -> None:
    path = tmp_path / "t.zarr"
    written: set[Path] = set()

    def before(name: str, arguments: tuple[Any, ...]) -> None:
        place = system_calls.target(arguments)
        if place is not None and name in system_calls.WRITES:
            written.add(place)

    def work(emb: DiskEmbedding) -> None:
        for index in range(20):
            played = workload.make_round(72, index)
            workload.play(emb, played)
            if played.then:
                getattr(emb, played.then)()

    with system_calls.watched(path, before):
        emb = crash_child.create(str(path), workload.SMALL_CACHE)
        work(emb)
        emb.close(flush=True)
    final = set(store_files.chunk_files(path)) | {path / "zarr.json"}
    assert len(final) > 3
    assert written & final == set()
