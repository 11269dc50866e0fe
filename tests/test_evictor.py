"""Slots that a thread empties ahead of need: tables are as without it, whatever it meets."""

from __future__ import annotations

import errno
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from ram_reference import RamTable, assert_same, train_both

from ooc_embed import CorruptStoreError, DiskEmbedding, SparseAdam, evictor

pytestmark = pytest.mark.usefixtures("one_thread")

ROWS, DIM, SLOTS = 3000, 2, 640
RECORD_BYTES = 8 * (3 * DIM + 1)


@pytest.fixture(autouse=True)
def _small_caches_evict_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evictor, "_FEWEST_AHEAD", 4)


class Gate:
    """Holds copies of records back before they read any; what reads does so once it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached, self.open = threading.Event(), threading.Event()
        self.slots = torch.empty(0, dtype=torch.int64)
        fill = evictor._Copy._fill

        def held(copy: evictor._Copy, start: int, stop: int, out: torch.Tensor) -> None:
            self.slots = copy.slots
            self.reached.set()
            assert self.open.wait(60)
            fill(copy, start, stop, out)

        monkeypatch.setattr(evictor._Copy, "_fill", held)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate(monkeypatch)
    yield gate
    gate.open.set()


@pytest.fixture
def pair(make_table: Callable[..., DiskEmbedding]) -> tuple[DiskEmbedding, RamTable]:
    initial = torch.randn(ROWS, DIM, dtype=torch.float64)
    emb = make_table(
        ROWS,
        DIM,
        init=initial,
        dtype=torch.float64,
        optimizer=SparseAdam(lr=0.1),
        cache_bytes=SLOTS * (RECORD_BYTES + 25),
        chunk_rows=1024,
    )
    return emb, RamTable(initial, lr=0.1)


def train(pair: tuple[DiskEmbedding, RamTable], ids: torch.Tensor) -> None:
    grads = torch.randn(len(ids), DIM, dtype=torch.float64)
    train_both(*pair, lambda look_up: (look_up(ids) * grads).sum())


def fill_cache(pair: tuple[DiskEmbedding, RamTable]) -> None:
    """Steps on rows that leave so few slots free that a thread begins."""
    for ids in torch.arange(SLOTS - 10).split(90):
        train(pair, ids)


def test_training_beside_evictions_ahead_is_training_in_ram(pair):
    emb, _ = pair
    generator = torch.Generator().manual_seed(1)
    for step in range(300):
        ids = (torch.rand(60, generator=generator) ** 2 * ROWS).to(torch.int64)
        train(pair, ids)
        if step % 37 == 36:
            emb.commit()
    assert emb.stats().evictions > 3 * SLOTS
    assert_same(*pair)


def test_a_row_that_is_stepped_while_it_is_copied_stays_and_its_newest_record_counts(pair, gate):
    emb, ram = pair
    fill_cache(pair)
    assert gate.reached.wait(60)
    stepped = emb._table.cache.row[gate.slots[::2]].clone()
    train(pair, stepped)
    before = emb.stats().evictions
    gate.open.set()
    emb._table._evictor.finish()
    assert emb.stats().evictions - before == len(gate.slots[1::2])
    places = emb._table.cache.find(stepped)
    assert bool((places > 0).all())
    torch.testing.assert_close(emb.weight[stepped], ram.weight[stepped])
    train(pair, torch.arange(ROWS - 500, ROWS))
    assert_same(*pair)


def test_a_crash_after_a_copy_that_a_step_overtook_opens_at_the_commit(pair, gate, tmp_path: Path):
    emb, ram = pair
    fill_cache(pair)
    assert gate.reached.wait(60)
    stepped = emb._table.cache.row[gate.slots].clone()
    train(pair, stepped)
    gate.open.set()
    emb.commit()
    expected = ram.weight[stepped].clone()
    train(pair, stepped)
    crashed = tmp_path / "crashed.zarr"
    shutil.copytree(emb.path, crashed)
    with DiskEmbedding.open(crashed) as again:
        assert again.step == emb.step - 1
        torch.testing.assert_close(again.weight[stepped], expected)


@pytest.mark.parametrize("call", ["commit", "flush", "close"])
def test_what_appends_too_waits_for_the_thread(pair, gate, call: str):
    emb, _ = pair
    fill_cache(pair)
    assert gate.reached.wait(60)
    caller = threading.Thread(target=getattr(emb, call))
    caller.start()
    caller.join(0.2)
    assert caller.is_alive()
    gate.open.set()
    caller.join(60)
    assert not caller.is_alive()


def test_a_batch_larger_than_the_cache_waits_for_the_thread(pair, gate):
    fill_cache(pair)
    assert gate.reached.wait(60)
    opener = threading.Timer(0.1, gate.open.set)
    opener.start()
    train(pair, torch.arange(SLOTS + 100))
    opener.join()
    assert_same(*pair)


@pytest.mark.filterwarnings("error")  # a thread that ends with a traceback is one
@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        CorruptStoreError("No space left, or something else"),
        MemoryError("No space left, of memory"),
    ],
)
def test_what_fails_in_the_thread_is_told_by_the_step_that_needs_room(pair, monkeypatch, error):
    emb, ram = pair
    write = emb._table._storage.write

    def full(*args: object) -> object:
        raise error

    monkeypatch.setattr(emb._table._storage, "write", full)
    fill_cache(pair)
    ids = torch.arange(ROWS - 500, ROWS)
    with pytest.raises(type(error), match="No space left"):
        emb(ids)
    assert emb.step == ram.step
    monkeypatch.setattr(emb._table._storage, "write", write)
    train(pair, ids)
    assert_same(*pair)


def test_clean_rows_leave_ahead_without_a_write(pair):
    emb, _ = pair
    for ids in torch.arange(SLOTS - 40).split(90):
        train(pair, ids)
    emb.commit()
    before = emb.stats()
    train(pair, torch.arange(ROWS - 30, ROWS))
    after = emb.stats()
    assert after.evictions > before.evictions
    assert after.log_records == before.log_records
    assert_same(*pair)


def test_small_caches_use_no_thread(make_table, monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(evictor._Copy, "begin", lambda copy: pytest.fail("a thread began"))
    emb = make_table(ROWS, DIM, cache_bytes=SLOTS * (RECORD_BYTES + 25))
    for ids in torch.arange(ROWS).split(90):
        emb(ids).sum().backward()
    assert emb.stats().evictions
