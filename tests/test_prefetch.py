"""What reading ahead does to the disk, and that it does nothing else; knows no loader."""

from __future__ import annotations

import os
import resource
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

import ooc_embed
from ooc_embed import mapped
from ooc_embed.mapped import MappedRows

linux = pytest.mark.skipif(sys.platform != "linux", reason="about Linux's page cache")


def blocks_read() -> int:
    """Blocks that this process had read from disks so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_inblock


def drop_from_cache(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


@pytest.fixture
def cold_store(make_table):
    """A closed store with rows in its table and newer ones in its log; the disk has them."""
    emb = make_table(20_000, 16, chunk_rows=4096)
    emb(torch.arange(0, 20_000)).sum().backward()
    emb.flush()
    emb(torch.arange(0, 20_000, 7)).sum().backward()
    emb.close()
    return emb.path


def cold_lookup(open_table, path: Path, mode: str, ids: torch.Tensor, *, ahead: bool) -> int:
    """Blocks that a lookup reads in a store whose files are not in memory."""
    for file in path.rglob("c.*"):
        drop_from_cache(file)
    emb = open_table(path, mode)
    if ahead:
        emb.prefetch(ids)
    before = blocks_read()
    emb(ids)
    blocks = blocks_read() - before
    emb.close()
    return blocks


@linux
@pytest.mark.parametrize("mode", ["r+", "r"])
def test_lookup_of_prefetched_rows_reads_nothing_from_the_disk(open_table, cold_store, mode):
    ids = torch.arange(3, 20_000, 50)
    plain = cold_lookup(open_table, cold_store, mode, ids, ahead=False)
    if not plain:
        pytest.skip("this file system keeps pages in memory though asked to drop them")
    assert cold_lookup(open_table, cold_store, mode, ids, ahead=True) < plain / 10


@linux
def test_prefetched_rows_of_the_log_are_read_ahead_too(open_table, cold_store):
    ids = torch.arange(0, 20_000, 7)
    plain = cold_lookup(open_table, cold_store, "r+", ids, ahead=False)
    if not plain:
        pytest.skip("this file system keeps pages in memory though asked to drop them")
    assert cold_lookup(open_table, cold_store, "r+", ids, ahead=True) < plain / 10


def test_rows_in_the_cache_are_not_announced(make_table, monkeypatch):
    emb = make_table(5000, chunk_rows=1024)
    emb(torch.arange(5000)).sum().backward()
    emb.flush()
    emb.close()
    with ooc_embed.DiskEmbedding.open(emb.path) as again:
        again(torch.arange(1000))
        announced = []
        monkeypatch.setattr(MappedRows, "announce", lambda _, rows: announced.append(rows.tolist()))
        again.prefetch(torch.tensor([[999, 1000], [4000, 1000]]))
        assert announced == [[1000, 4000]]
        again.prefetch(torch.arange(1000))
        assert announced == [[1000, 4000]]


@pytest.mark.parametrize(
    "ids",
    [
        torch.tensor(3),
        torch.tensor([[1, 1], [9, 0]]),
        torch.tensor([5, 2], dtype=torch.int32),
        torch.zeros(0, dtype=torch.int64),
    ],
    ids=["scalar", "repeated", "int32", "empty"],
)
@pytest.mark.parametrize("state", ["new", "flushed", "reader"])
def test_prefetch_returns_nothing_and_changes_nothing(make_table, open_table, ids, state):
    emb = make_table()
    if state != "new":
        emb(torch.tensor([1, 2])).sum().backward()
        emb.flush()
        emb(torch.tensor([2, 3])).sum().backward()
        emb.commit()
    if state == "reader":
        emb = open_table(emb.path, "r")
    before = emb.weight[:], emb.version[:], emb.step
    stats = emb.stats()
    assert emb.prefetch(ids) is None
    assert emb.stats() == stats
    assert torch.equal(emb.weight[:], before[0])
    assert torch.equal(emb.version[:], before[1])
    assert emb.step == before[2]


def test_prefetch_refuses_what_a_lookup_refuses(make_table):
    emb = make_table(10)
    for bad in (torch.tensor([10]), torch.tensor([-1])):
        with pytest.raises(IndexError, match="out of range for a table of 10 rows"):
            emb.prefetch(bad)
    with pytest.raises(TypeError, match=r"use ids.long\(\)"):
        emb.prefetch(torch.tensor([1.0]))
    with pytest.raises(TypeError, match="ids must be a tensor, got list"):
        emb.prefetch([1])
    emb.close()
    with pytest.raises(ooc_embed.StoreError, match="is closed"):
        emb.prefetch(torch.tensor([1]))


def test_prefetch_does_not_wait_for_an_operation_of_another_thread(make_table):
    emb = make_table()
    done = threading.Event()

    def prefetch() -> None:
        emb.prefetch(torch.arange(10))
        done.set()

    with emb._table.writing():
        thread = threading.Thread(target=prefetch)
        thread.start()
        assert done.wait(60)
        emb.prefetch(torch.arange(10))  # nor is it refused in the middle of one
    thread.join()


def test_prefetching_beside_evictions_commits_merges_and_close_disturbs_nothing(
    make_table, monkeypatch
):
    """The thread reads the map while it changes, and ends because the table was closed."""
    options = {"chunk_rows": 1024, "cache_bytes": 20_000, "init": torch.randn(5000, 2)}
    plain, beside = make_table(5000, **options), make_table(5000, **options)
    ended: list[str] = []

    def prefetch() -> None:
        generator = torch.Generator().manual_seed(5)
        try:
            while True:
                beside.prefetch(torch.randint(0, 5000, (500,), generator=generator))
        except ooc_embed.StoreError as error:
            ended.append(str(error))

    thread = threading.Thread(target=prefetch)
    thread.start()
    for number in range(60):
        ids = torch.randint(0, 5000, (300,))
        for emb in (plain, beside):
            emb(ids).square().sum().backward()
            if number % 7 == 0:
                emb.commit()
            if number % 15 == 0:
                emb.flush()
    assert thread.is_alive()
    assert torch.equal(plain.weight[:], beside.weight[:])
    for field in plain.state:
        assert torch.equal(plain.state[field][:], beside.state[field][:])
    beside.close()
    thread.join()
    assert [message.partition(" is closed")[0] for message in ended] == [str(beside.path)]


# Maps


ROWS, WIDTH = 1024, 4


def mapped_file(folder: Path) -> tuple[MappedRows, Path]:
    path = folder / "c.0.0"
    np.arange(ROWS * WIDTH, dtype="<f4").tofile(path)
    rows = MappedRows(1, ROWS, WIDTH, np.dtype("<f4"))
    rows.map_file(0, path)
    return rows, path


@linux
def test_memory_stays_mapped_while_it_is_announced_and_no_longer(tmp_path, monkeypatch):
    rows, path = mapped_file(tmp_path)
    real = mapped._advise
    during = []

    def close_first(ranges: np.ndarray) -> None:
        rows.close()
        during.append(str(path) in Path("/proc/self/maps").read_text())
        real(ranges)

    monkeypatch.setattr(mapped, "_advise", close_first)
    rows.announce(torch.tensor([1, 500]))
    assert during == [True]
    assert str(path) not in Path("/proc/self/maps").read_text()
    rows.announce(torch.tensor([1, 500]))
    assert during == [True]


@linux
def test_reads_of_another_thread_do_not_keep_a_gather_announcing(tmp_path, monkeypatch):
    rows, _ = mapped_file(tmp_path)
    other = tmp_path / "other"
    other.write_bytes(bytes(1 << 16))
    announced = []

    def read_elsewhere(_: torch.Tensor) -> None:
        announced.append(1)
        drop_from_cache(other)
        thread = threading.Thread(target=other.read_bytes)
        thread.start()
        thread.join()

    monkeypatch.setattr(rows, "announce", read_elsewhere)
    before = blocks_read()
    for _ in range(40):
        rows.gather(torch.arange(ROWS))
    if blocks_read() == before:
        pytest.skip("this file system keeps pages in memory though asked to drop them")
    assert len(announced) == 8
    rows.close()


def test_resident_rows_are_announced_again_now_and_then(tmp_path, monkeypatch):
    rows, _ = mapped_file(tmp_path)
    rows.gather(torch.arange(ROWS))
    announced = []
    monkeypatch.setattr(rows, "announce", lambda _: announced.append(1))
    for _ in range(400):
        rows.gather(torch.arange(ROWS))
    assert 8 < len(announced) < 40
    rows.close()
