"""Rows through mapped files equal np.fromfile; every map and descriptor is given back."""

from __future__ import annotations

import errno
import gc
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ooc_embed import CorruptStoreError, DiskEmbedding, durable, mapped, memory
from ooc_embed.mapped import MappedRows

pytestmark = pytest.mark.usefixtures("one_thread")

FILES, ROWS, WIDTH = 4, 1024, 3
FLOAT = np.dtype("<f4")
linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self")


def write_chunk(folder: Path, index: int, seed: int = 0) -> Path:
    rng = np.random.default_rng([seed, index])
    path = folder / f"c.{index}.0"
    rng.standard_normal((ROWS, WIDTH)).astype(FLOAT).tofile(path)
    return path


def by_numpy(folder: Path) -> np.ndarray:
    whole = np.zeros((FILES * ROWS, WIDTH), FLOAT)
    for index in range(FILES):
        path = folder / f"c.{index}.0"
        if path.exists():
            block = np.fromfile(path, FLOAT).reshape(ROWS, WIDTH)
            whole[index * ROWS : (index + 1) * ROWS] = block
    return whole


def mapped_folder(folder: Path, indices: tuple[int, ...] = (0, 1, 3)) -> MappedRows:
    rows = MappedRows(FILES, ROWS, WIDTH, FLOAT)
    for index in indices:
        rows.map_file(index, write_chunk(folder, index))
    return rows


def some_rows(seed: int, count: int = 500) -> torch.Tensor:
    return torch.randint(0, FILES * ROWS, (count,), generator=torch.Generator().manual_seed(seed))


def maps_of(path: Path) -> list[str]:
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if str(path) in line]


def descriptors_of(path: Path) -> list[str]:
    found = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{fd}")
        except FileNotFoundError:  # the descriptor of this very listing
            continue
        if target.startswith(str(path)):
            found.append(target)
    return found


@pytest.mark.parametrize("order", ["sorted", "shuffled", "repeated", "empty", "all"])
def test_a_gather_equals_fromfile(tmp_path: Path, order: str) -> None:
    rows = mapped_folder(tmp_path)
    index = {
        "sorted": some_rows(1).unique(),
        "shuffled": some_rows(2),
        "repeated": torch.tensor([5, 5, 4095, 0, 5]),
        "empty": torch.zeros(0, dtype=torch.int64),
        "all": torch.arange(FILES * ROWS),
    }[order]
    np.testing.assert_array_equal(rows.gather(index).numpy(), by_numpy(tmp_path)[index.numpy()])
    out = torch.full((len(index), WIDTH), 7.0)
    rows.gather(index, out)
    np.testing.assert_array_equal(out.numpy(), by_numpy(tmp_path)[index.numpy()])
    rows.close()


@pytest.mark.parametrize("dtype", ["<f4", "<f8"])
@pytest.mark.parametrize("width", [1, 5, 385])
def test_any_width_and_dtype_reads_as_fromfile(tmp_path: Path, width: int, dtype: str) -> None:
    values = np.random.default_rng(3).standard_normal((1024, width)).astype(dtype)
    values.tofile(tmp_path / "c.0.0")
    rows = MappedRows(1, 1024, width, np.dtype(dtype))
    rows.map_file(0, tmp_path / "c.0.0")
    np.testing.assert_array_equal(rows.read(0, 1024).numpy(), values)
    np.testing.assert_array_equal(rows.gather(torch.tensor([1023, 0])).numpy(), values[[1023, 0]])
    rows.close()


def test_an_absent_chunk_reads_as_zeros_until_it_is_mapped(tmp_path: Path) -> None:
    rows = mapped_folder(tmp_path)
    index = torch.arange(2 * ROWS, 3 * ROWS)
    assert (rows.gather(index) == 0).all()
    rows.map_file(2, write_chunk(tmp_path, 2))
    np.testing.assert_array_equal(rows.gather(index).numpy(), by_numpy(tmp_path)[index.numpy()])
    rows.unmap_all()
    assert (rows.gather(torch.arange(FILES * ROWS)) == 0).all()
    rows.close()


def test_a_replaced_chunk_is_seen_once_it_is_mapped_again(tmp_path: Path) -> None:
    rows = mapped_folder(tmp_path)
    index = some_rows(4)
    before = by_numpy(tmp_path)
    (tmp_path / "new").mkdir()
    os.replace(write_chunk(tmp_path / "new", 1, seed=9), tmp_path / "c.1.0")
    np.testing.assert_array_equal(rows.gather(index).numpy(), before[index.numpy()])
    rows.map_file(1, tmp_path / "c.1.0")
    after = by_numpy(tmp_path)
    assert not np.array_equal(before, after)
    np.testing.assert_array_equal(rows.gather(index).numpy(), after[index.numpy()])
    rows.close()


def test_an_unlinked_chunk_stays_readable(tmp_path: Path) -> None:
    rows = mapped_folder(tmp_path)
    want = by_numpy(tmp_path)
    for file in tmp_path.iterdir():
        file.unlink()
    np.testing.assert_array_equal(rows.read(0, FILES * ROWS).numpy(), want)
    rows.close()


def test_what_was_gathered_is_a_copy(tmp_path: Path) -> None:
    rows = mapped_folder(tmp_path)
    for copy in (rows.gather(torch.arange(10)), rows.read(0, 10)):
        copy += 1.0
    np.testing.assert_array_equal(rows.read(0, 10).numpy(), by_numpy(tmp_path)[:10])
    rows.close()


@linux
def test_a_held_file_is_kept_until_it_is_let_go_of_and_takes_no_descriptor(tmp_path: Path) -> None:
    path = write_chunk(tmp_path, 0)
    before = len(os.listdir("/proc/self/fd"))
    held = mapped.HeldFile(path)
    path.unlink()
    (line,) = maps_of(path)
    assert line.endswith("(deleted)")
    assert len(os.listdir("/proc/self/fd")) == before
    address = held._address
    held.close()
    assert maps_of(path) == []
    other = mapped.map_memory(
        address, mapped.PAGE, 0x22 | mapped.MAP_FIXED, -1
    )  # private, anonymous
    held.close()
    assert maps_of_address(other)
    mapped.libc.munmap(other, mapped.PAGE)


def maps_of_address(address: int) -> list[str]:
    lines = Path("/proc/self/maps").read_text().splitlines()
    return [
        line
        for line in lines
        if int(line.split("-")[0], 16) <= address < int(line.split("-")[1].split()[0], 16)
    ]


@linux
def test_a_view_outlives_its_owner_and_then_lets_the_memory_go(tmp_path: Path) -> None:
    rows = mapped_folder(tmp_path)
    want = by_numpy(tmp_path)
    view = rows._tensor[ROWS - 5 : ROWS + 5]
    rows.close()
    del rows
    gc.collect()
    np.testing.assert_array_equal(view.numpy(), want[ROWS - 5 : ROWS + 5])
    assert maps_of(tmp_path)
    del view
    gc.collect()
    assert maps_of(tmp_path) == []


@linux
def test_close_gives_back_every_map_and_descriptor_and_may_be_repeated(tmp_path: Path) -> None:
    mapped.announces_in_batches()  # keeps one descriptor of the process itself
    before = len(os.listdir("/proc/self/fd"))
    rows = mapped_folder(tmp_path)
    assert len(maps_of(tmp_path)) == 3
    assert descriptors_of(tmp_path) == []
    rows.close()
    rows.close()
    assert maps_of(tmp_path) == []
    assert len(os.listdir("/proc/self/fd")) == before


@linux
def test_a_table_that_is_dropped_without_close_is_unmapped(tmp_path: Path) -> None:
    mapped.announces_in_batches()
    before = len(os.listdir("/proc/self/fd"))
    rows = mapped_folder(tmp_path)
    rows.gather(some_rows(1))
    del rows
    gc.collect()
    assert maps_of(tmp_path) == []
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("change", [-4096, -1, 1, 4096])
def test_a_chunk_of_another_size_is_refused_with_both_sizes(tmp_path: Path, change: int) -> None:
    path = write_chunk(tmp_path, 0)
    size = ROWS * WIDTH * 4
    os.truncate(path, size + change)
    rows = MappedRows(FILES, ROWS, WIDTH, FLOAT)
    with pytest.raises(CorruptStoreError, match="c.0.0") as error:
        rows.map_file(0, path)
    assert str(size) in str(error.value).replace(",", "")
    assert str(size + change) in str(error.value).replace(",", "")
    assert (rows.read(0, ROWS) == 0).all()
    rows.close()


def test_a_missing_chunk_is_refused_and_named(tmp_path: Path) -> None:
    rows = MappedRows(FILES, ROWS, WIDTH, FLOAT)
    with pytest.raises(CorruptStoreError, match="c.7.0"):
        rows.map_file(0, tmp_path / "c.7.0")
    rows.close()


def test_rows_that_do_not_fill_whole_pages_are_refused() -> None:
    with pytest.raises(ValueError, match="page"):
        MappedRows(1, 1000, 3, FLOAT)


@linux
def test_a_span_far_larger_than_memory_costs_none(tmp_path: Path) -> None:
    files = 1000
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    rows = MappedRows(files, 1 << 20, 385, FLOAT)  # 1.6 TB of addresses
    last = torch.tensor([0, files * (1 << 20) - 1])
    assert (rows.gather(last) == 0).all()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 << 10
    rows.close()


# Announcing


def refuse_process_madvise(code: int) -> Callable[..., int]:
    import ctypes

    def syscall(*_: Any) -> int:
        ctypes.set_errno(code)
        return -1

    return syscall


class FakeLibc:
    """libc with another `syscall`, and a count of the calls of madvise(MADV_WILLNEED)."""

    def __init__(self, real: Any, syscall: Callable[..., int]) -> None:
        self._real = real
        self.syscall = syscall
        self.announced = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def madvise(self, address: int, nbytes: int, advice: int) -> int:
        self.announced += advice == 3
        answer: int = self._real.madvise(address, nbytes, advice)
        return answer


@pytest.fixture
def asked_again() -> Iterator[None]:
    """The kernel is asked once a process; so that it is asked in the test, and again behind it."""
    mapped.announces_in_batches.cache_clear()
    yield
    mapped.announces_in_batches.cache_clear()


@pytest.mark.usefixtures("asked_again")
@pytest.mark.parametrize("code", [errno.ENOSYS, errno.EPERM, errno.EACCES, errno.EINVAL])
def test_where_process_madvise_is_refused_madvise_announces_and_rows_are_equal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    libc = FakeLibc(mapped.libc, refuse_process_madvise(code))
    monkeypatch.setattr(mapped, "libc", libc)
    rows = mapped_folder(tmp_path)
    index = some_rows(5).unique()
    got = rows.gather(index)
    np.testing.assert_array_equal(got.numpy(), by_numpy(tmp_path)[index.numpy()])
    assert libc.announced > 0
    assert not mapped.announces_in_batches()
    rows.close()


@pytest.mark.usefixtures("asked_again")
def test_where_there_is_no_pidfd_madvise_announces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "pidfd_open", raising=False)
    monkeypatch.setattr(mapped, "_self_descriptor", mapped._self_descriptor.__wrapped__)
    rows = mapped_folder(tmp_path)
    assert not mapped.announces_in_batches()
    index = some_rows(6)
    np.testing.assert_array_equal(rows.gather(index).numpy(), by_numpy(tmp_path)[index.numpy()])
    rows.close()


@linux
def test_where_the_kernel_takes_many_ranges_no_range_is_announced_on_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not mapped.announces_in_batches():
        pytest.skip("this kernel has no process_madvise, or forbids it here")
    libc = FakeLibc(mapped.libc, mapped.libc.syscall)
    monkeypatch.setattr(mapped, "libc", libc)
    rows = mapped_folder(tmp_path)
    index = torch.arange(0, FILES * ROWS, 2)
    np.testing.assert_array_equal(rows.gather(index).numpy(), by_numpy(tmp_path)[index.numpy()])
    assert libc.announced == 0
    rows.close()


@pytest.mark.parametrize("order", ["sorted", "shuffled", "repeated", "empty", "all"])
def test_pages_that_touch_are_announced_together_and_each_page_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, order: str
) -> None:
    """A row is 1.5 kB, as rows of 128 numbers with Adam are: some lie on two pages."""
    width = 385
    rows = MappedRows(2, 1024, width, FLOAT)
    path = tmp_path / "c.0.0"
    np.zeros((1024, width), FLOAT).tofile(path)
    rows.map_file(1, path)
    index = {
        "sorted": torch.arange(1024, 2048, 5),
        "shuffled": some_rows(9, 300) % 1024 + 1024,
        "repeated": torch.tensor([1500, 1500, 1024, 1500]),
        "empty": torch.zeros(0, dtype=torch.int64),
        "all": torch.arange(2048),
    }[order]
    ranges: list[list[int]] = []
    monkeypatch.setattr(mapped, "_advise", lambda part: ranges.extend(part.tolist()))
    rows.announce(index)
    start = rows._span.address
    got = [(a - start + at) // 4096 for a, size in ranges for at in range(0, size, 4096)]
    wanted = {
        (row * width * 4 + byte) // 4096
        for row in index.tolist()
        if row >= 1024
        for byte in (0, width * 4 - 1)
    }
    assert sorted(got) == sorted(wanted)
    ends = {a + size: size for a, size in ranges}
    # A range goes on right behind another one only where that has the most pages it may have.
    assert all(ends.get(a, 32 * 4096) == 32 * 4096 for a, _ in ranges)
    assert max([0, *ends.values()]) <= 32 * 4096
    rows.close()


def test_announcing_rows_of_an_absent_chunk_is_harmless(tmp_path: Path) -> None:
    rows = mapped_folder(tmp_path, indices=())
    rows.announce(torch.arange(FILES * ROWS))
    assert (rows.gather(some_rows(7)) == 0).all()
    rows.close()


def drop_from_cache(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


@linux
def test_announcing_stops_for_resident_rows_and_starts_again_when_gathers_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which gathers announced is counted; that cold pages fault is the kernel's doing."""
    rows = mapped_folder(tmp_path, indices=(0, 1, 2, 3))
    announcements = []
    real = rows.announce
    monkeypatch.setattr(rows, "announce", lambda index: (announcements.append(1), real(index)))
    index = torch.arange(0, FILES * ROWS, mapped.PAGE // rows.row_bytes)  # a page each
    for _ in range(100):
        rows.gather(index)
    assert 0 < len(announcements) < 50
    quiet = len(announcements)
    rows.gather(index)
    assert len(announcements) == quiet
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_majflt
    rows.unmap_all()
    for number in range(FILES):
        drop_from_cache(tmp_path / f"c.{number}.0")
        rows.map_file(number, tmp_path / f"c.{number}.0")
    rows.gather(index)
    if resource.getrusage(resource.RUSAGE_SELF).ru_majflt == faults:
        pytest.skip("this file system keeps pages in memory though asked to drop them")
    rows.gather(index)
    assert len(announcements) == quiet + 1
    np.testing.assert_array_equal(rows.gather(index).numpy(), by_numpy(tmp_path)[index])
    rows.close()


# Direct appends beside a mapping


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("read_first", [True, False])
def test_appends_beside_a_live_mapping_of_the_reserved_file_read_back_right(
    tmp_path: Path, direct: bool, read_first: bool
) -> None:
    """Pages that were cached as zeros before give way to what a direct write puts on disk."""
    run, runs, width = 4096, 14, 13
    path = tmp_path / "c.0.0"
    durable.allocate(path, runs * run * width * 4)
    rows = MappedRows(1, runs * run, width, FLOAT)
    rows.map_file(0, path)
    everything = torch.arange(runs * run)
    if read_first:
        assert (rows.gather(everything) == 0).all()
    file = durable.AppendFile(path, runs * run * width * 4)
    rng = np.random.default_rng(8)
    want = np.zeros((runs * run, width), FLOAT)
    for number in range(runs):
        block = rng.standard_normal((run, width)).astype(FLOAT)
        begin = number * run
        want[begin : begin + run] = block
        buffer = memory.page_aligned(block.nbytes)
        buffer[:] = block.view(np.uint8).ravel()
        file.write(begin * width * 4, buffer, direct=direct)
        np.testing.assert_array_equal(rows.gather(everything).numpy(), want)
    file.sync()
    file.close()
    np.testing.assert_array_equal(rows.gather(everything).numpy(), want)
    np.testing.assert_array_equal(np.fromfile(path, FLOAT).reshape(-1, width), want)
    rows.close()


# Whole tables


MANY_CHUNKS = """
import resource, sys
import torch
import ooc_embed

torch.set_num_threads(1)
chunks = 500
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
with ooc_embed.DiskEmbedding(
    chunks * 1024, 1, path=sys.argv[1], init="zeros", chunk_rows=1024, cache_bytes=4096,
    optimizer=ooc_embed.SparseAdam(lr=0.1),
) as emb:
    for ids in torch.arange(0, chunks * 1024, 512).split(100):
        emb(ids).sum().backward()
    emb.flush()
with ooc_embed.DiskEmbedding.open(sys.argv[1]) as emb:
    weight = emb.weight[:]
    assert (weight[::512] < 0).all()
    assert int((weight != 0).sum()) == len(weight) // 512
"""


@linux
def test_a_table_of_500_chunks_trains_with_64_file_descriptors(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", MANY_CHUNKS, str(tmp_path / "t.zarr")],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)},
    )
    assert done.returncode == 0, done.stderr
    assert len(list((tmp_path / "t.zarr" / "table").glob("c.*"))) == 500


def train_everywhere(path: Path) -> DiskEmbedding:
    emb = DiskEmbedding(5000, 4, path=path, chunk_rows=1024, cache_bytes=300 * 13 * 4)
    for seed in range(6):
        ids = torch.randint(0, 5000, (400,), generator=torch.Generator().manual_seed(seed))
        emb(ids).square().sum().backward()
    emb.flush()
    emb(torch.arange(400)).sum().backward()
    return emb


@linux
@pytest.mark.parametrize("flush", [False, True])
def test_no_descriptor_and_no_map_of_the_store_is_left_after_close(
    tmp_path: Path, flush: bool
) -> None:
    path = tmp_path / "t.zarr"
    train_everywhere(tmp_path / "first.zarr").close()  # zarr's event loop stays open from here on
    before = len(os.listdir("/proc/self/fd"))
    emb = train_everywhere(path)
    view = emb.weight
    looked_up = emb(torch.arange(10))
    assert maps_of(path)
    assert descriptors_of(path)
    emb.close(flush=flush)
    assert maps_of(path) == []
    assert descriptors_of(path) == []
    assert looked_up.shape == (10, 4)
    assert view.shape == (5000, 4)
    del emb
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= before


@linux
def test_no_descriptor_and_no_map_is_left_after_a_reader_closes_or_a_writer_is_reopened_often(
    tmp_path: Path,
) -> None:
    path = tmp_path / "t.zarr"
    train_everywhere(path).close()
    before = len(os.listdir("/proc/self/fd"))
    for mode in ("r", "r+", "r", "r+"):
        with DiskEmbedding.open(path, mode=mode) as emb:
            emb(torch.arange(100))
        assert maps_of(path) == []
        assert descriptors_of(path) == []
    assert len(os.listdir("/proc/self/fd")) <= before


@linux
def test_training_for_long_opens_no_more_files(tmp_path: Path) -> None:
    emb = train_everywhere(tmp_path / "t.zarr")
    counts = []
    for seed in range(12):
        ids = torch.randint(0, 5000, (400,), generator=torch.Generator().manual_seed(seed))
        emb(ids).sum().backward()
        emb.flush()
        counts.append(len(os.listdir("/proc/self/fd")))
    assert max(counts[2:]) <= max(counts[:2])
    emb.close()


@pytest.mark.parametrize(
    "use", ["look up", "train", "read a view", "write a view", "commit", "optimizer"]
)
def test_a_closed_table_says_that_it_is_closed(tmp_path: Path, use: str) -> None:
    emb = train_everywhere(tmp_path / "t.zarr")
    emb.close()
    with pytest.raises(Exception, match="closed") as error:
        if use == "look up":
            emb(torch.tensor([1]))
        elif use == "train":
            emb(torch.tensor([1])).sum().backward()
        elif use == "read a view":
            emb.weight[0]
        elif use == "write a view":
            emb.weight[[0]] = 1.0
        elif use == "commit":
            emb.commit()
        else:
            emb.flush()
    assert isinstance(error.value, (RuntimeError, ValueError)) or "StoreError" in str(
        type(error.value).__mro__
    )
