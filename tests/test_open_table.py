"""A table that is opened to read, without a module: one commit, no write, nothing left behind."""

from __future__ import annotations

import gc
import os
import pickle
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import small_store
import store_files
import torch
from ram_reference import read_rows

import ooc_embed
from ooc_embed import DiskEmbedding, StoreError, open_table

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def trained(store_path: Path) -> Path:
    """Some rows are in chunk files, some in the log."""
    return small_store.train(store_path)


def flushed(path: Path, copy: Path) -> Any:
    """All rows of a store, as plain zarr reads them from a copy that was flushed."""
    with DiskEmbedding.open(store_files.copied(path, copy)) as emb:
        emb.flush()
    return read_rows(copy)


def test_views_are_the_rows_of_the_store(trained: Path, tmp_path: Path) -> None:
    rows = flushed(trained, tmp_path / "copy.zarr")
    seen = rows.version > 0
    with open_table(trained) as table:
        assert torch.equal(table.version[:], rows.version.to(torch.int64))
        assert torch.equal(table.weight[seen], rows.weight[seen])
        assert list(table.state) == ["exp_avg", "exp_avg_sq"]
        assert torch.equal(table.state["exp_avg"][:], rows.exp_avg)
        assert torch.equal(table.state["exp_avg_sq"][:], rows.exp_avg_sq)
        assert isinstance(table.weight[2:5].numpy(), np.ndarray)


def test_facts_are_those_of_the_commit(store_path: Path) -> None:
    rule = ooc_embed.Adagrad(lr=0.5)
    with DiskEmbedding(50, 3, 4, path=store_path, optimizer=rule, dtype=torch.float64) as emb:
        small_store.step(emb, [1])
        emb.optimizer.param_groups[0]["lr"] = 0.25
    with open_table(str(store_path)) as table:
        assert (table.num_embeddings, table.embedding_dim, table.padding_idx) == (50, 3, 4)
        assert table.dtype == table.weight[0].dtype == torch.float64
        assert table.rule == "Adagrad"
        assert table.hyperparameters["lr"] == 0.25
        assert table.step == 1
        assert table.commits() == {1: 1}
        assert table.path == store_path
        assert not isinstance(table, torch.nn.Module)
        text = f"TableReader(50, 3, path={str(store_path)!r}, rule=Adagrad, step=1, commit=1"
        assert repr(table) == text + ")"
    assert repr(table) == text + ", closed)"


def test_rate_of_zero_that_a_scheduler_left_is_shown(store_path: Path) -> None:
    with DiskEmbedding(50, 3, path=store_path) as emb:
        emb.optimizer.param_groups[0]["lr"] = 0.0
    with open_table(store_path) as table:
        assert table.hyperparameters["lr"] == 0


def test_a_reader_stays_at_its_commit_while_a_writer_goes_on(trained: Path) -> None:
    with open_table(trained) as table, DiskEmbedding.open(trained) as emb:
        before, step = table.weight[:], table.step
        small_store.some_steps(emb, 7)
        emb.flush()
        assert torch.equal(table.weight[:], before)
        assert (table.step, emb.step) == (step, step + 3)
        assert not torch.equal(emb.weight[:], before)


def test_an_earlier_commit_that_is_kept_can_be_read(store_path: Path) -> None:
    with small_store.make(store_path, keep_commits=3) as emb:
        kept = {}
        for number in (1, 2, 3):
            small_store.step(emb, [number])
            assert emb.commit() == number
            kept[number] = emb.weight[:]
    for number, weight in kept.items():
        with open_table(store_path, commit=number) as table:
            assert torch.equal(table.weight[:], weight)
            assert list(table.commits())[-1] == number == table.step
            assert table._describe().rows_written == number
    with pytest.raises(StoreError, match=r"commit 0 of .* is not kept"):
        open_table(store_path, commit=0)
    with pytest.raises(TypeError, match="commit"):
        open_table(store_path, commit="1")


def test_every_write_is_refused_and_nothing_changes(trained: Path) -> None:
    with store_files.untouched(trained), open_table(trained) as table:
        for view in (table.weight, *table.state.values()):
            with pytest.raises(StoreError, match="open to read"):
                view[[1]] = torch.zeros(1, 4)
        with pytest.raises(TypeError, match="versions"):
            table.version[[1]] = 5
        for name in ("weight", "state", "version", "step"):
            with pytest.raises(AttributeError):
                setattr(table, name, None)
        table.topk(torch.ones(4), 3)
        table._repr_html_()


def test_a_folder_without_permission_to_write_is_read(trained: Path) -> None:
    """Root may write all the same; then only that nothing changes is tested."""
    places = [trained, *trained.rglob("*")]
    for place in places:
        place.chmod(0o555 if place.is_dir() else 0o444)
    try:
        with store_files.untouched(trained), open_table(trained) as table:
            assert table.weight[:].isfinite().all()
            assert ooc_embed.describe(table).rows_written == int((table.version[:] > 0).sum())
    finally:
        for place in places:
            place.chmod(0o755 if place.is_dir() else 0o644)


def test_blocks_and_topk_are_those_of_all_rows(trained: Path) -> None:
    with open_table(trained) as table:
        weight = table.weight[:]
        assert torch.equal(torch.cat([rows for _, rows in table.blocks(700)]), weight)
        scores, ids = table.topk(weight[9], 4, "l2")
        expected = (weight - weight[9]).norm(dim=1).sort(stable=True)
        torch.testing.assert_close(scores, expected.values[:4])
        assert torch.equal(ids, expected.indices[:4])
        assert table.topk(weight[:2], 3)[1].shape == (2, 3)
        with pytest.raises(ValueError, match=r"\(4,\) or \(Q, 4\)"):
            table.topk(torch.ones(5), 1)


def test_closing_twice_is_closing_once_and_views_raise_then(trained: Path) -> None:
    table = open_table(trained)
    view = table.weight
    assert not table.closed
    table.close()
    table.close()
    assert table.closed
    for use in (lambda: view[0], lambda: table.weight[0], lambda: next(table.blocks())):
        with pytest.raises(StoreError, match="is closed"):
            use()


def test_a_dropped_reader_is_closed_once_its_views_are_gone(trained: Path) -> None:
    table = open_table(trained)
    kept, view = table._table, table.weight
    gone = weakref.ref(table)
    del table
    gc.collect()
    assert view[0].isfinite().all()
    del view
    gc.collect()
    assert gone() is None
    assert kept.closed


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # a fork beside threads
def test_a_forked_child_is_told_what_to_do(trained: Path) -> None:
    with open_table(trained) as table:
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                table.weight[0]
            except StoreError as error:
                os.write(writing, str(error).encode())
            table.close()
            os._exit(0)
        os.close(writing)
        with os.fdopen(reading) as answer:
            assert "a forked child cannot use it" in answer.read()
        assert os.waitpid(child, 0)[1] == 0
        assert table.weight[0].isfinite().all()


def test_a_pickled_reader_opens_where_it_was(store_path: Path) -> None:
    with small_store.make(store_path, keep_commits=2) as emb:
        small_store.step(emb, [1])
        emb.commit()
        small_store.step(emb, [1])
    with open_table(store_path, commit=1) as early, open_table(store_path) as newest:
        for table in (early, newest):
            with pickle.loads(pickle.dumps(table)) as copy:
                assert copy.step == table.step
                assert torch.equal(copy.weight[:2], table.weight[:2])


def test_what_is_no_sound_store_raises(tmp_path: Path, trained: Path, stores) -> None:
    with pytest.raises(FileNotFoundError, match="does not exist"):
        open_table(tmp_path / "nowhere.zarr")
    with pytest.raises(ooc_embed.FormatError):
        open_table(tmp_path)
    store_files.chunk_files(trained)[0].unlink()
    stores.expect_damage(trained)
    with pytest.raises(ooc_embed.CorruptStoreError, match=r"c\.0\.0 is missing"):
        open_table(trained)
