"""A full or failing disk: an OSError, nothing lost, and the same table goes on when it can."""

from __future__ import annotations

import contextlib
import copy
import errno
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scripted
import store_files
import system_calls
import torch
import workload

import ooc_embed
from ooc_embed import DiskEmbedding, report

pytestmark = pytest.mark.usefixtures("one_thread")

DISK_BYTES = 8 << 20


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own of 8 MiB."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = shutil.which("mount")
    if sys.platform != "linux" or mount is None:
        pytest.skip("needs Linux's tmpfs")
    options = ["-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(place)]
    done = subprocess.run([mount, *options], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"may not mount here; try: unshare -Urm pytest {Path(__file__).name}")
    yield place
    # Lazily: what a failed test still holds open must not fail the next one.
    subprocess.run(["umount", "-l", str(place)], check=True)


def fill(place: Path, leave: int = 0) -> Path:
    """A file that takes all of the disk but `leave` bytes; unlink it to make room."""
    filler = place / "filler"
    free = shutil.disk_usage(place).free - leave
    with filler.open("wb") as stream:
        os.posix_fallocate(stream.fileno(), 0, free // 4096 * 4096)
    return filler


def assert_names_needed_and_free(error: OSError) -> None:
    assert error.errno == errno.ENOSPC
    text = str(error).replace(",", "").replace("_", "")
    numbers = [int(number) for number in re.findall(r"\d+(?= bytes)", text)]
    assert len(numbers) == 2, text
    needed, free = numbers
    assert re.search("need", text)
    assert re.search("free", text)
    assert needed > 0
    assert free < DISK_BYTES


def table(path: Path, **options: Any) -> DiskEmbedding:
    """3000 rows of zeros, 13 columns of float64: 3 chunks of 106 kB."""
    defaults: dict[str, Any] = {"init": "zeros", "chunk_rows": 1024, "dtype": torch.float64}
    adam = ooc_embed.SparseAdam(lr=workload.LR)
    return DiskEmbedding(3000, 4, path=path, optimizer=adam, **(defaults | options))


class Pair:
    """A table and its oracle, fed the same batches."""

    def __init__(self, emb: DiskEmbedding) -> None:
        self.emb = emb
        self.shadow = workload.Shadow(torch.zeros(3000, 4, dtype=torch.float64))
        self._seed = 0

    def batch(self, count: int = 400) -> tuple[torch.Tensor, torch.Tensor]:
        self._seed += 1
        generator = torch.Generator().manual_seed(self._seed)
        ids = torch.randint(0, 3000, (count,), generator=generator)
        return ids, torch.randn(count, 4, dtype=torch.float64, generator=generator)

    def train(self, steps: int = 1, count: int = 400) -> None:
        for _ in range(steps):
            ids, grads = self.batch(count)
            workload.train(self.emb, ids, grads)
            self.shadow.train(ids, grads)

    def check(self) -> None:
        workload.assert_table_is(self.emb, self.shadow.state())

    def check_reopened(self) -> None:
        path = self.emb.path
        self.emb.close()
        assert report.verify(path) == []
        store_files.assert_every_reader_agrees(path)
        with DiskEmbedding.open(path) as self.emb:
            self.check()
            self.emb.flush()
            workload.assert_zarr_is(path, self.shadow.state())


# A disk that is really full


@pytest.mark.parametrize("leave", [0, 4096, 16384])
def test_creation_on_a_full_disk_is_an_error_and_works_once_there_is_room(
    small_disk: Path, leave: int
) -> None:
    filler = fill(small_disk, leave)
    path = small_disk / "t.zarr"
    try:
        with pytest.warns(UserWarning, match="free"):
            emb = table(path)
    except OSError as error:
        assert error.errno == errno.ENOSPC
        assert not (path / "zarr.json").exists()
        filler.unlink()
        emb = table(path)
    else:
        filler.unlink()
    pair = Pair(emb)
    pair.train(3)
    pair.check_reopened()


def test_a_full_disk_at_the_first_commit_loses_nothing(small_disk: Path) -> None:
    pair = Pair(table(small_disk / "t.zarr"))
    pair.train(5)
    filler = fill(small_disk)
    for _ in range(2):
        with pytest.raises(OSError) as error:
            pair.emb.commit()
        assert_names_needed_and_free(error.value)
        pair.check()
    pair.train(2)
    filler.unlink()
    pair.emb.commit()
    pair.train(1)
    pair.check_reopened()


def test_a_full_disk_at_an_eviction_leaves_the_step_not_begun(small_disk: Path) -> None:
    pair = Pair(table(small_disk / "t.zarr", cache_bytes=600 * 13 * 8))
    pair.emb.commit()
    filler = fill(small_disk)
    failed = 0
    for _ in range(12):
        ids, grads = pair.batch()
        loss = None
        try:
            loss = (pair.emb(ids) * grads).sum()
            loss.backward()
        except OSError as error:
            assert_names_needed_and_free(error)
            failed += 1
            assert pair.emb.step == pair.shadow.step
        else:
            pair.shadow.train(ids, grads)
    assert failed > 0
    # Looking rows up needs no room on the disk that is not there: what is known can still be read.
    with contextlib.suppress(OSError):
        pair.check()
    filler.unlink()
    pair.check()
    pair.train(5)
    pair.check_reopened()


def test_the_very_batch_that_met_a_full_disk_trains_when_it_is_repeated(small_disk: Path) -> None:
    pair = Pair(table(small_disk / "t.zarr", cache_bytes=600 * 13 * 8))
    filler = fill(small_disk)
    repeated = 0
    for _ in range(8):
        ids, grads = pair.batch()
        try:
            workload.train(pair.emb, ids, grads)
        except OSError:
            filler.unlink(missing_ok=True)
            repeated += 1
            workload.train(pair.emb, ids, grads)
        pair.shadow.train(ids, grads)
        pair.check()
    assert repeated == 1
    pair.check_reopened()


def test_a_full_disk_during_a_merge_loses_nothing(small_disk: Path) -> None:
    pair = Pair(table(small_disk / "t.zarr"))
    pair.train(4)
    pair.emb.commit()
    committed = pair.shadow.state()
    filler = fill(small_disk, leave=150_000)  # room for one of the three chunks
    for _ in range(2):
        with pytest.raises(OSError) as error:
            pair.emb.flush()
        assert_names_needed_and_free(error.value)
    pair.check()
    with DiskEmbedding.open(pair.emb.path, mode="r") as reader:
        workload.assert_table_is(reader, committed)
    store_files.assert_every_reader_agrees(pair.emb.path)
    pair.train(1)
    filler.unlink()
    pair.emb.flush()
    workload.assert_zarr_is(pair.emb.path, pair.shadow.state())
    pair.train(3)
    pair.check_reopened()


def test_a_full_disk_at_an_import_of_weights_leaves_no_store(small_disk: Path) -> None:
    weight = torch.randn(3000, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    path = small_disk / "t.zarr"
    filler = fill(small_disk, leave=220_000)  # room for metadata and one of three chunks
    with pytest.warns(UserWarning, match="free"), pytest.raises(OSError) as error:
        table(path, init=weight)
    assert_names_needed_and_free(error.value)
    assert not (path / "zarr.json").exists()
    filler.unlink()
    with table(path, init=weight) as emb:
        assert torch.equal(emb.weight[:], weight)
    assert report.verify(path) == []


def test_a_full_disk_at_close_can_be_closed_again_when_there_is_room(small_disk: Path) -> None:
    pair = Pair(table(small_disk / "t.zarr"))
    pair.train(3)
    filler = fill(small_disk)
    with pytest.raises(OSError) as error:
        pair.emb.close()
    assert_names_needed_and_free(error.value)
    filler.unlink()
    pair.check_reopened()


def test_a_full_disk_at_an_assignment_keeps_the_rows_as_they_were(small_disk: Path) -> None:
    pair = Pair(table(small_disk / "t.zarr", cache_bytes=600 * 13 * 8))
    pair.train(1)
    filler = fill(small_disk)
    with pytest.raises(OSError) as error:
        pair.emb.weight[0:3000] = torch.ones(3000, 4, dtype=torch.float64)
    assert_names_needed_and_free(error.value)
    filler.unlink()
    pair.emb.weight[0:3000] = torch.ones(3000, 4, dtype=torch.float64)
    assert (pair.emb.weight[:] == 1).all()
    path = pair.emb.path
    pair.emb.close()
    assert report.verify(path) == []


def test_a_store_is_read_on_a_full_disk(small_disk: Path) -> None:
    pair = Pair(table(small_disk / "t.zarr"))
    pair.train(3)
    path = pair.emb.path
    pair.emb.close()
    filler = fill(small_disk)
    with DiskEmbedding.open(path, mode="r") as emb:
        workload.assert_table_is(emb, pair.shadow.state())
    assert report.verify(path) == []
    # A writer may have to write to open; then it says so, and does not stay locked.
    try:
        pair.emb = DiskEmbedding.open(path)
    except OSError as error:
        assert error.errno == errno.ENOSPC
        filler.unlink()
        pair.emb = DiskEmbedding.open(path)
    pair.check()
    filler.unlink(missing_ok=True)
    pair.train(1)
    pair.check_reopened()


def test_a_full_disk_at_a_growth_leaves_the_old_length_and_it_grows_later(small_disk: Path) -> None:
    pair = Pair(table(small_disk / "t.zarr"))
    pair.train(3)
    filler = fill(small_disk)
    with pytest.raises(OSError) as error:
        pair.emb.resize(5000)
    assert_names_needed_and_free(error.value)
    assert pair.emb.num_embeddings == 3000
    pair.check()
    filler.unlink()
    pair.emb.resize(5000)
    assert pair.emb.num_embeddings == 5000
    assert not pair.emb.weight[3000:].any()
    pair.emb.flush()
    want = pair.shadow.state().fields["weight"]
    torch.testing.assert_close(pair.emb.weight[:3000], torch.from_numpy(want))
    pair.emb.close()
    assert report.verify(small_disk / "t.zarr") == []


def test_a_full_disk_at_a_snapshot_leaves_nothing_there_and_it_is_made_later(
    small_disk: Path,
) -> None:
    pair = Pair(table(small_disk / "t.zarr"))
    pair.train(3)
    pair.emb.commit()
    filler = fill(small_disk)
    with pytest.raises(OSError) as error:
        pair.emb.snapshot(small_disk / "copy.zarr")
    assert error.value.errno == errno.ENOSPC
    assert not (small_disk / "copy.zarr").exists()
    pair.train(1)
    filler.unlink()
    pair.emb.snapshot(small_disk / "copy.zarr")
    assert report.verify(small_disk / "copy.zarr") == []
    with DiskEmbedding.open(small_disk / "copy.zarr", mode="r") as other:
        workload.assert_table_is(other, pair.shadow.state())
    pair.check_reopened()


@pytest.mark.filterwarnings("ignore:.*gives up commit")
@pytest.mark.parametrize("leave", [0, 4096])
def test_a_full_disk_at_a_checkpoint_or_a_rollback_loses_nothing(
    small_disk: Path, leave: int
) -> None:
    pair = Pair(table(small_disk / "t.zarr", keep_commits=2))
    pair.train(2)
    pair.emb.flush()
    committed = copy.deepcopy(pair.shadow)
    pair.train(2)
    filler = fill(small_disk, leave)
    with pytest.raises(OSError) as error:
        pair.emb.state_dict()
    assert_names_needed_and_free(error.value)
    pair.check()
    # To go back writes a manifest at most: there may be room for that, or there is none.
    try:
        pair.emb.rollback()
    except OSError as late:
        assert_names_needed_and_free(late)
        pair.check()
    else:
        pair.shadow = committed
    filler.unlink()
    pair.emb.state_dict()
    pair.train(2)
    pair.check_reopened()


@pytest.mark.parametrize("pages", range(3))
def test_a_disk_with_room_for_all_but_the_manifest_keeps_the_commit_before(
    small_disk: Path, pages: int
) -> None:
    """Nothing but hyper-parameters changes, so the manifest is all that is written."""
    pair = Pair(table(small_disk / "t.zarr"))
    pair.train(2)
    pair.emb.commit()
    number = max(pair.emb.commits())
    filler = fill(small_disk, pages * 4096)
    pair.emb.optimizer.param_groups[0]["lr"] = pair.shadow.optimizer.param_groups[0]["lr"] = 0.05
    try:
        pair.emb.commit()
    except OSError as error:
        assert_names_needed_and_free(error)
        assert store_files.newest_commit(pair.emb.path)["commit"] == number
    else:
        assert pages
    filler.unlink()
    pair.train(1)
    pair.check_reopened()


def test_a_disk_that_fills_up_while_it_is_trained_stops_and_goes_on(small_disk: Path) -> None:
    """The log grows until there is no room for more of it."""
    pair = Pair(table(small_disk / "t.zarr", cache_bytes=600 * 13 * 8))
    filler = fill(small_disk, leave=400_000)
    error = None
    for _ in range(40):
        ids, grads = pair.batch()
        try:
            workload.train(pair.emb, ids, grads)
            pair.shadow.train(ids, grads)
            pair.emb.commit()
        except OSError as caught:
            error = caught
            break
    assert error is not None
    assert_names_needed_and_free(error)
    filler.unlink()
    pair.check()
    with contextlib.suppress(OSError):
        pair.emb.commit()  # tells of a merge that failed, too
    pair.train(3)
    pair.check_reopened()


def test_a_full_disk_at_an_import_from_a_file_leaves_no_store(small_disk: Path) -> None:
    rows = torch.randn(3000, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    file = small_disk.parent / "rows.npy"
    np.save(file, rows.numpy())
    path = small_disk / "t.zarr"
    filler = fill(small_disk, leave=220_000)
    with pytest.warns(UserWarning, match="free"), pytest.raises(OSError) as error:
        DiskEmbedding.from_pretrained(file, path=path, chunk_rows=1024)
    assert_names_needed_and_free(error.value)
    assert not path.exists()
    filler.unlink()
    with DiskEmbedding.from_pretrained(file, path=path, chunk_rows=1024) as emb:
        assert torch.equal(emb.weight[:], rows)
    assert report.verify(path) == []


# A disk that fails at any one call


@pytest.fixture(scope="module")
def script_states(tmp_path_factory: pytest.TempPathFactory) -> list[workload.State]:
    return scripted.states(tmp_path_factory.mktemp("seeded") / "t.zarr")


class Failing:
    """Lets `allowed` calls of the given names through, then fails `times` of them."""

    def __init__(self, names: tuple[str, ...], code: int, allowed: int, times: int = 1) -> None:
        self.names = names
        self.code = code
        self.allowed = allowed
        self.times = times
        self.seen = 0

    def __call__(self, name: str, arguments: tuple[Any, ...]) -> None:
        if name not in self.names:
            return
        self.seen += 1
        if self.allowed < self.seen <= self.allowed + self.times:
            raise OSError(self.code, os.strerror(self.code), str(system_calls.target(arguments)))


# The calls that fail, how, and every which of them in turn.
KINDS: dict[str, tuple[tuple[str, ...], int, int]] = {
    "full at a write": (("write", "pwrite", "pwritev", "writev"), errno.ENOSPC, 1),
    "failing at a write": (("write", "pwrite", "pwritev", "writev"), errno.EIO, 4),
    "full at a reservation": (("posix_fallocate",), errno.ENOSPC, 1),
    "failing at a sync": (system_calls.SYNCS, errno.EIO, 1),
    "full at a name": (("open", "rename", "replace", "link", "mkdir"), errno.ENOSPC, 1),
    "failing at an unlink": (("unlink", "remove", "rmdir"), errno.EIO, 1),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_disk_that_fails_once_at_any_call_costs_nothing(
    quick: Path, script_states: list[workload.State], kind: str
) -> None:
    names, code, stride = KINDS[kind]
    counting = Failing(names, code, allowed=1 << 30)
    scripted.run(quick / "counted.zarr", script_states, counting)
    assert counting.seen > 3
    shown = 0
    for number in range(0, counting.seen, stride):
        path = quick / f"{number}.zarr"
        shown += scripted.run(path, script_states, Failing(names, code, number))
        shutil.rmtree(path)
    if kind not in ("failing at an unlink", "failing at a sync"):
        assert shown > 0


@pytest.mark.parametrize("names", [("fsync",), ("fdatasync",), system_calls.SYNCS])
def test_a_disk_that_fails_to_sync_for_a_while_leaves_the_last_commit(
    quick: Path, script_states: list[workload.State], names: tuple[str, ...]
) -> None:
    counting = Failing(names, errno.EIO, allowed=1 << 30)
    scripted.run(quick / "counted.zarr", script_states, counting)
    for number in range(0, counting.seen, 2):
        path = quick / f"{number}.zarr"
        scripted.run(path, script_states, Failing(names, errno.EIO, number, times=4))
        shutil.rmtree(path)


def test_after_a_failed_fdatasync_records_are_written_again_to_new_files(quick: Path) -> None:
    """The kernel may call pages clean that it could not write: writing again proves nothing."""
    path = quick / "t.zarr"
    pair = Pair(table(path))
    pair.train(2)
    pair.emb.commit()
    pair.train(2)
    failed: set[tuple[int, Path]] = set()

    def fail_once(name: str, arguments: tuple[Any, ...]) -> None:
        if name == "fdatasync" and not failed:
            place = system_calls.target(arguments)
            assert place is not None
            failed.add((os.fstat(arguments[0]).st_ino, place))
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    with system_calls.watched(path, fail_once):
        try:
            pair.emb.commit()
        except OSError:
            pair.emb.commit()
    ((inode, place),) = failed
    assert store_files.newest_commit(path)["step"] == 4
    # The records of the last two steps are in files that did not exist when the sync failed; the
    # file that failed may still hold what was good at the commit before.
    newer = [
        file
        for number in "01"
        for file in store_files.chunk_files(path, f"log/{number}/records")
        if file.stat().st_ino != inode
    ]
    assert newer, place
    with DiskEmbedding.open(path, mode="r") as reader:
        workload.assert_table_is(reader, pair.shadow.state())
    pair.train(1)
    pair.check_reopened()


def test_a_writer_whose_disk_keeps_failing_to_sync_refuses_until_it_is_opened_again(
    quick: Path,
) -> None:
    path = quick / "t.zarr"
    pair = Pair(table(path))
    pair.train(2, count=50)
    pair.emb.commit()
    committed = pair.shadow.state()
    pair.train(1, count=50)

    def fail(name: str, arguments: tuple[Any, ...]) -> None:
        if name == "fdatasync":
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    with system_calls.watched(path, fail):
        with pytest.raises(OSError, match=os.strerror(errno.EIO)):
            pair.emb.commit()
        with pytest.raises(ooc_embed.StoreError, match="open"):
            pair.emb.commit()
    with pytest.raises(ooc_embed.StoreError, match="open"):
        pair.emb.commit()
    with pytest.raises(ooc_embed.StoreError, match="open"):
        workload.train(pair.emb, *pair.batch())
    with pytest.raises(ooc_embed.StoreError, match="open"):
        pair.emb.close()
    assert pair.emb.closed
    assert report.verify(path) == []
    with DiskEmbedding.open(path) as emb:
        workload.assert_table_is(emb, committed)
        workload.train(emb, torch.tensor([1]), torch.ones(1, 4, dtype=torch.float64))


@pytest.mark.parametrize("kind", ["full at a write", "full at a reservation", "failing at a sync"])
def test_creation_that_fails_at_any_call_can_be_repeated(quick: Path, kind: str) -> None:
    names, code, _ = KINDS[kind]
    weight = torch.ones(3000, 4, dtype=torch.float64)

    def create(path: Path) -> DiskEmbedding:
        return table(path, init=weight)

    counting = Failing(names, code, allowed=1 << 30)
    with system_calls.watched(quick, counting):
        create(quick / "counted.zarr").close()
    failed = 0
    for number in range(counting.seen):
        path = quick / f"{number}.zarr"
        with system_calls.watched(quick, Failing(names, code, number)):
            try:
                create(path).close()
            except OSError:
                failed += 1
                # The rename that makes it a store may have come before the sync that failed.
                if not (path / "zarr.json").exists():
                    create(path).close()
        with DiskEmbedding.open(path) as emb:
            assert emb.step == 0
            workload.train(emb, torch.tensor([1]), torch.ones(1, 4, dtype=torch.float64))
        assert report.verify(path) == []
    assert failed > 0
