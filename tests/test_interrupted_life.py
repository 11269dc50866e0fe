"""Ctrl-C where a table begins and ends: whatever it cuts off, the lock goes and the rows stay."""

from __future__ import annotations

import errno
import gc
import math
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import system_calls
import torch

from ooc_embed import DiskEmbedding, checkpoint, report
from ooc_embed.merging import Worker
from ooc_embed.opened import OpenTable
from ooc_embed.storage import Storage
from ooc_embed.store import Store

CALLS = (*system_calls.WRITES, *system_calls.SYNCS, *system_calls.NAMES, "open")


def make(path: Path) -> DiskEmbedding:
    emb = DiskEmbedding(50, 2, path=path)
    emb(torch.tensor([1])).sum().backward()
    emb.commit()
    emb(torch.tensor([1])).sum().backward()
    return emb


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_ctrl_c_at_any_call_of_a_dropped_tables_last_commit_frees_the_store(quick: Path) -> None:
    number, interrupted = 0, True
    steps = set()
    while interrupted:
        path = quick / f"{number}.zarr"
        tables = [make(path)]
        calls = iter(range(1 << 30))
        interrupted = False

        def interrupt(*_: Any, calls: Any = calls, number: int = number) -> None:
            if next(calls) == number:
                nonlocal interrupted
                interrupted = True
                raise KeyboardInterrupt

        with system_calls.watched(path, interrupt, names=CALLS):
            tables.clear()
            gc.collect()
        with DiskEmbedding.open(path) as again:
            steps.add(again.step)
        assert report.verify(path) == []
        number += 1
    assert number > 8
    assert steps == {1, 2}


def _interrupt(*_: Any, **__: Any) -> Any:
    raise KeyboardInterrupt


def test_ctrl_c_ahead_of_the_last_commit_frees_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The finalizer is called, and nothing in it."""
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint.close_dropped, "__code__", _interrupt.__code__)
        patch.setattr(sys, "unraisablehook", _interrupt)  # pytest's keeps what is on the stack
        tables = [make(tmp_path / "t.zarr")]
        tables.clear()
        gc.collect()
    with DiskEmbedding.open(tmp_path / "t.zarr") as again:
        assert again.step == 1


@pytest.mark.parametrize("ending", ["interrupt", "warning"])
def test_a_merge_that_goes_on_does_not_keep_a_dropped_table_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    """Its threads have the store, and wait for somebody to settle what they finished."""
    path = tmp_path / "t.zarr"
    tables = [DiskEmbedding(50_000, 2, path=path, chunk_rows=1024, cache_bytes=1 << 22)]
    tables[0](torch.arange(50_000)).sum().backward()
    tables[0].commit()
    assert tables[0]._table._storage._chunks.merge is not None
    tables[0](torch.arange(5)).sum().backward()
    with monkeypatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("error")
        patch.setattr(sys, "unraisablehook", lambda *_: None)
        if ending == "interrupt":
            patch.setattr(checkpoint.close_dropped, "__code__", _interrupt.__code__)
        else:
            tables[0].optimizer.param_groups[0]["lr"] = math.nan
        tables.clear()
        gc.collect()
    for thread in threading.enumerate():
        if isinstance(thread, Worker):
            thread.join(60)
    gc.collect()
    assert str(path) not in Path("/proc/self/maps").read_text()
    with DiskEmbedding.open(path) as again:
        assert again.step == (1 if ending == "interrupt" else 2)
    assert report.verify(path) == []


def test_a_table_that_a_merge_thread_drops_is_released_though_its_last_commit_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "t.zarr"
    tables = [make(path)]
    failed = threading.Event()

    def fail(*_: Any, **__: Any) -> None:
        failed.set()
        raise OSError(errno.ENOSPC, "no room, on purpose")

    def drop() -> None:
        tables.clear()
        gc.collect()

    with monkeypatch.context() as patch:
        patch.setattr(Storage, "commit", fail)
        patch.setattr(threading, "excepthook", lambda *_: None)
        worker = Worker(target=drop)
        worker.start()
        worker.join()
        assert failed.wait(60)
        for thread in threading.enumerate():
            if thread is not threading.current_thread():
                thread.join(1)
    with DiskEmbedding.open(path) as again:
        assert again.step == 1


@pytest.mark.parametrize(
    ("owner", "name"),
    [(Store, "_read"), (Store, "_read_layout"), (OpenTable, "_load"), (Store, "name_holder")],
)
@pytest.mark.parametrize(
    "begin", [DiskEmbedding.open, lambda path: DiskEmbedding(50, 2, path=path)]
)
def test_ctrl_c_while_a_store_is_opened_or_made_frees_it(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    owner: type,
    name: str,
    begin: Callable[[Path], DiskEmbedding],
) -> None:
    path = tmp_path / "t.zarr"
    if begin == DiskEmbedding.open:
        make(path).close()
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, _interrupt)
        with pytest.raises(KeyboardInterrupt):
            begin(path)
    gc.collect()
    with begin(path) if not path.exists() else DiskEmbedding.open(path) as again:
        assert again.num_embeddings == 50
