"""What a store looks like, and what other zarr readers see in it; knows files."""

from __future__ import annotations

import json
import os
import random
import shutil
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import crash_child
import numpy as np
import pytest
import store_files
import torch
import workload
import xarray
import zarr
from small_store import make, some_steps, step, train

import ooc_embed
from ooc_embed import DiskEmbedding

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    return train(tmp_path / "trained.zarr")


# Creation and layout


def test_creating_a_large_table_takes_no_time_and_no_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store_files.pretend_free(monkeypatch, 1 << 50)
    began = time.perf_counter()
    with DiskEmbedding(10_000_000, 128, path=tmp_path / "t.zarr", cache_bytes=1 << 20):
        # Milliseconds are promised; a disk that is busy otherwise may take a while to sync.
        assert time.perf_counter() - began < 5
        used = sum(file.stat().st_blocks * 512 for file in (tmp_path / "t.zarr").rglob("*"))
        assert used < 1 << 20
        assert store_files.chunk_files(tmp_path / "t.zarr") == []


@pytest.mark.parametrize(
    ("rows", "dim"), [(100, 3), (1_000_000, 16), (10_000_000, 128), (3_000_000, 2048)]
)
def test_chunk_files_are_whole_pages_of_a_sensible_size_and_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: int, dim: int
) -> None:
    store_files.pretend_free(monkeypatch, 1 << 50)
    DiskEmbedding(rows, dim, path=tmp_path / "t.zarr", cache_bytes=1 << 20).close()
    described = store_files.metadata(tmp_path / "t.zarr", "table")
    chunk_rows, width = described["chunk_grid"]["configuration"]["chunk_shape"]
    chunk_bytes = chunk_rows * width * 4
    assert described["shape"] == [rows, 3 * dim + 1]
    assert width == 3 * dim + 1
    assert chunk_rows % 1024 == 0
    assert chunk_bytes % 4096 == 0
    assert -(-rows // chunk_rows) <= 4096
    assert chunk_bytes <= 64 << 20 or rows * width * 4 > 4096 * (64 << 20)
    assert chunk_bytes >= 16 << 20 or chunk_rows < rows + 1024


def test_a_table_too_large_for_4096_chunks_gets_larger_chunks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store_files.pretend_free(monkeypatch, 1 << 50)
    DiskEmbedding(20_000_000, 2048, path=tmp_path / "t.zarr", cache_bytes=1 << 20).close()
    described = store_files.metadata(tmp_path / "t.zarr", "table")
    chunk_rows, width = described["chunk_grid"]["configuration"]["chunk_shape"]
    assert chunk_rows * width * 4 > 64 << 20
    assert chunk_rows % 1024 == 0
    assert -(-20_000_000 // chunk_rows) <= 4096


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_fresh_store_has_the_documented_arrays(tmp_path: Path, dtype: torch.dtype) -> None:
    path = tmp_path / "t.zarr"
    make(path, dtype=dtype).close()
    name = str(dtype).removeprefix("torch.")
    assert sorted(os.listdir(path)) == ["column", "log", "table", "zarr.json"]
    table = store_files.metadata(path, "table")
    assert (table["shape"], table["data_type"]) == ([5000, 13], name)
    for number in "01":
        rows = store_files.metadata(path, f"log/{number}/rows")
        records = store_files.metadata(path, f"log/{number}/records")
        assert rows["data_type"] == "int64"
        assert records["data_type"] == name
        assert records["shape"] == [*rows["shape"], 13]
    for array in store_files.ARRAYS:
        described = store_files.metadata(path, array)
        assert described["zarr_format"] == 3
        assert len(described["dimension_names"]) == len(described["shape"])
        assert all(described["dimension_names"])
    for array in store_files.NUMBERS:
        described = store_files.metadata(path, array)
        assert described["codecs"] == [{"name": "bytes", "configuration": {"endian": "little"}}]
        assert described["chunk_key_encoding"]["configuration"]["separator"] == "."
    assert store_files.metadata(path, "table")["fill_value"] == 0
    columns = zarr.open_array(path / "column", mode="r")[...]
    assert list(columns) == ["weight"] * 4 + ["exp_avg"] * 4 + ["exp_avg_sq"] * 4 + ["version"]


def test_no_consolidated_metadata_and_no_second_zarr_format(tmp_path: Path) -> None:
    make(tmp_path / "t.zarr").close()
    assert "consolidated_metadata" not in json.loads((tmp_path / "t.zarr/zarr.json").read_text())
    names = {file.name for file in (tmp_path / "t.zarr").rglob("*")}
    assert not names & {".zarray", ".zgroup", ".zattrs", ".zmetadata"}


def test_the_manifest_says_what_the_table_is(tmp_path: Path) -> None:
    path = tmp_path / "t.zarr"
    adam = ooc_embed.SparseAdam(lr=0.25, betas=(0.5, 0.75), eps=1e-3)
    with make(path, padding_idx=-1, optimizer=adam, seed=11):
        found = store_files.manifest(path)
        commit = store_files.newest_commit(path)
    assert found["num_embeddings"] == 5000
    assert found["embedding_dim"] == 4
    assert found["padding_idx"] == 4999
    assert "float32" in json.dumps(found["dtype"])
    assert found["seed"] == 11 or '"seed": 11' in json.dumps(found)
    assert "SparseAdam" in json.dumps(found["rule"])
    assert commit["step"] == 0
    assert commit["param_groups"][0]["lr"] == 0.25
    assert commit["param_groups"][0]["betas"] == [0.5, 0.75]
    assert commit["param_groups"][0]["eps"] == 1e-3


def test_two_stores_have_different_ids(tmp_path: Path) -> None:
    ids = []
    for name in ("a.zarr", "b.zarr"):
        make(tmp_path / name).close()
        ids.append(json.dumps(store_files.manifest(tmp_path / name)))
    assert ids[0] != ids[1]


# Other readers


@pytest.fixture(scope="module")
def nursery() -> crash_child.Nursery:
    return crash_child.nursery()


def _fresh(emb: DiskEmbedding) -> None:
    pass


def _mid_training(emb: DiskEmbedding) -> None:
    some_steps(emb, 1)


def _committed(emb: DiskEmbedding) -> None:
    some_steps(emb, 1)
    emb.commit()


def _flushed(emb: DiskEmbedding) -> None:
    some_steps(emb, 1)
    emb.flush()


def _training_after_a_flush(emb: DiskEmbedding) -> None:
    _flushed(emb)
    some_steps(emb, 2)
    emb.commit()
    some_steps(emb, 3)


def _sealed_many_times(emb: DiskEmbedding) -> None:
    for seed in range(12):
        some_steps(emb, seed)
        emb.commit()


@pytest.mark.parametrize(
    "prepare",
    [_fresh, _mid_training, _committed, _flushed, _training_after_a_flush, _sealed_many_times],
)
def test_zarr_xarray_and_tensorstore_read_it_while_it_is_open_and_after_it_is_closed(
    tmp_path: Path, prepare: Callable[[DiskEmbedding], None]
) -> None:
    path = tmp_path / "t.zarr"
    emb = make(path, cache_bytes=300 * 13 * 4)
    prepare(emb)
    if prepare is _sealed_many_times:
        emb.flush()  # no merge may replace a chunk between two readers' looks
    with store_files.untouched(path):
        store_files.assert_every_reader_agrees(path)
    emb.close()
    store_files.assert_every_reader_agrees(path)


def test_zarr_xarray_and_tensorstore_read_it_after_kill_9(
    tmp_path: Path, nursery: crash_child.Nursery
) -> None:
    rng = random.Random(5)
    path = tmp_path / "t.zarr"
    for _ in range(5):
        nursery.run_and_kill(
            "train",
            rng,
            12,
            0.005,
            path=str(path),
            seed=3,
            rounds=200,
            cache_bytes=1 << 16,
            flushes=True,
        )
        store_files.assert_every_reader_agrees(path)


def test_zarr_lists_it_without_a_warning_at_every_moment_of_training(tmp_path: Path) -> None:
    path = tmp_path / "t.zarr"
    with make(path, cache_bytes=300 * 13 * 4) as emb, warnings.catch_warnings():
        warnings.simplefilter("error")
        for seed in range(15):
            some_steps(emb, seed, 1)
            if seed % 2:
                emb.commit()
            members = list(zarr.open_group(path, mode="r").members(max_depth=None))
            assert len(members) == 9
            assert sorted(os.listdir(path)) == ["column", "log", "table", "zarr.json"]
            assert sorted(os.listdir(path / "log")) == ["0", "1", "zarr.json"]
            for number in "01":
                assert sorted(os.listdir(path / "log" / number)) == ["records", "rows", "zarr.json"]


def test_xarray_selects_a_field_by_its_name(tmp_path: Path) -> None:
    path = tmp_path / "t.zarr"
    values = np.arange(40, dtype=np.float32).reshape(10, 4)
    with make(path, rows=10, init=torch.from_numpy(values)) as emb:
        emb.flush()
        with xarray.open_zarr(path, consolidated=False) as data:
            np.testing.assert_array_equal(data.table.sel(column="weight").values, values)
            assert (data.table.sel(column="exp_avg").values == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_json_and_fromfile_read_what_sparse_adam_computes(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    path = tmp_path / "t.zarr"
    weight = torch.randn(3000, 4, dtype=dtype, generator=torch.Generator().manual_seed(3))
    shadow = workload.Shadow(weight, lr=0.05)
    with make(path, 3000, init=weight, optimizer=ooc_embed.SparseAdam(lr=0.05), dtype=dtype) as emb:
        for index in range(6):
            generator = torch.Generator().manual_seed(index)
            ids = torch.randint(0, 3000, (500,), generator=generator)
            grads = torch.randn(500, 4, dtype=dtype, generator=generator)
            workload.train(emb, ids, grads)
            shadow.train(ids, grads)
        emb.flush()
    table = store_files.read_by_hand(path, "table")
    np.testing.assert_array_equal(table, zarr.open_group(path, mode="r")["table"][...])
    tolerance = 1e-5 if dtype == torch.float32 else 1e-9
    want = shadow.state().fields
    for column, name in ((0, "weight"), (4, "exp_avg"), (8, "exp_avg_sq")):
        got = table[:, column : column + 4]
        np.testing.assert_allclose(got, want[name], rtol=tolerance, atol=tolerance / 100)


def test_last_chunk_file_has_full_size_and_zarr_agrees_on_its_end(tmp_path: Path) -> None:
    path = tmp_path / "t.zarr"
    with make(path, rows=1030) as emb:
        step(emb, [0, 1029])
        emb.flush()
    sizes = [file.stat().st_size for file in store_files.chunk_files(path)]
    assert sizes == [1024 * 13 * 4] * 2
    assert zarr.open_group(path, mode="r")["table"].shape == (1030, 13)
    assert (store_files.read_by_hand(path, "table")[[0, 1029], 12] == 1).all()


# Which chunks exist


def test_only_chunks_with_a_trained_row_come_into_being(tmp_path: Path) -> None:
    path = tmp_path / "t.zarr"
    with make(path) as emb:
        step(emb, [1, 2100])
        emb.flush()
        assert [file.name for file in store_files.chunk_files(path)] == ["c.0.0", "c.2.0"]
        emb(torch.tensor([4999]))
        emb.flush()
        assert len(store_files.chunk_files(path)) == 2
        step(emb, [4999])
        emb.flush()
        assert len(store_files.chunk_files(path)) == 3
    versions = zarr.open_group(path, mode="r")["table"][:, 12]
    assert np.flatnonzero(versions).tolist() == [1, 2100, 4999]


def test_a_chunk_that_becomes_all_zero_stays(tmp_path: Path) -> None:
    path = tmp_path / "t.zarr"
    with make(path, init="zeros") as emb:
        emb.weight[[5]] = torch.ones(1, 4)
        emb.flush()
        emb.weight[[5]] = torch.zeros(1, 4)
        emb.flush()
    assert [file.name for file in store_files.chunk_files(path)] == ["c.0.0"]
    assert zarr.open_group(path, mode="r")["table"][5, 12] == 2
    with DiskEmbedding.open(path) as emb:
        assert emb.weight[5].tolist() == [0, 0, 0, 0]


def test_rows_are_read_and_written_without_zarr(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("zarr was called between opening and closing")

    emb = make(tmp_path / "t.zarr", cache_bytes=300 * 13 * 4)
    for name in (
        "__getitem__",
        "__setitem__",
        "get_orthogonal_selection",
        "set_orthogonal_selection",
    ):
        monkeypatch.setattr(zarr.Array, name, refuse)
    for name in ("open_group", "open_array", "open", "create_array", "create_group"):
        monkeypatch.setattr(zarr, name, refuse)
    some_steps(emb, 1, 5)
    emb.commit()
    emb.flush()
    some_steps(emb, 2, 5)
    emb.close()


def _bytes_written() -> int:
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["wchar"])


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="counts bytes with /proc/self/io")
def test_a_commit_writes_little_more_than_the_rows_that_changed(tmp_path: Path) -> None:
    with DiskEmbedding(200_000, 128, path=tmp_path / "t.zarr", cache_bytes=64 << 20) as emb:
        step(emb, [0])
        emb.commit()
        rows = torch.randperm(200_000, generator=torch.Generator().manual_seed(1))[:1000]
        emb(rows).sum().backward()
        before = _bytes_written()
        emb.commit()
        assert 1000 * 385 * 4 <= _bytes_written() - before < 1000 * 3 * 4096


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="counts bytes with /proc/self/io")
def test_steps_of_a_table_larger_than_its_cache_write_no_more_than_the_rows_they_moved(
    tmp_path: Path,
) -> None:
    """No step writes all that is dirty: it would wait for the disk, whatever the disk."""
    rows, record_bytes = 100_000, 49 * 4
    cache_bytes = rows * record_bytes // 4
    written, moved = [], 0
    with DiskEmbedding(rows, 16, path=tmp_path / "t.zarr", cache_bytes=cache_bytes) as emb:
        for seed in range(200):
            generator = torch.Generator().manual_seed(seed)
            ids = torch.randint(0, rows, (512,), generator=generator)
            before = _bytes_written()
            emb(ids).sum().backward()
            written.append(_bytes_written() - before)
            moved += len(ids.unique())
        assert emb.stats().evictions > 0
    assert 0 < sum(written) <= moved * (record_bytes + 8)  # a row's id goes to the log too
    assert max(written) <= cache_bytes / 8


# The manifest and foreign hands


def test_attributes_that_a_notebook_adds_are_kept_by_later_commits(trained: Path) -> None:
    with DiskEmbedding.open(trained) as emb:
        zarr.open_group(trained, mode="r+").attrs["note"] = "entities of run 7"
        step(emb, [1])
        emb.commit()
        assert zarr.open_group(trained, mode="r").attrs["note"] == "entities of run 7"
        zarr.open_group(trained, mode="r+").attrs["second"] = [1, 2]
        step(emb, [2])
        emb.flush()
        steps = emb.step
    attributes = zarr.open_group(trained, mode="r").attrs
    assert (attributes["note"], attributes["second"]) == ("entities of run 7", [1, 2])
    assert store_files.newest_commit(trained)["step"] == steps
    with DiskEmbedding.open(trained, mode="r") as emb:
        assert emb.step == steps


def test_an_older_manifest_that_a_notebook_put_back_is_replaced_with_a_warning(
    trained: Path,
) -> None:
    with DiskEmbedding.open(trained) as emb:
        old = (trained / "zarr.json").read_bytes()
        step(emb, [1])
        emb.commit()
        (trained / "zarr.json").write_bytes(old)
        step(emb, [2])
        with pytest.warns(UserWarning, match="zarr.json"):
            emb.commit()
        steps = emb.step
    assert store_files.newest_commit(trained)["step"] == steps
    with DiskEmbedding.open(trained, mode="r") as emb:
        assert emb.step == steps


def test_a_chunk_that_was_written_through_zarr_is_found_by_verify(trained: Path) -> None:
    from ooc_embed import report

    with DiskEmbedding.open(trained) as emb:
        emb.flush()
    assert report.verify(trained) == []
    table = zarr.open_group(trained, mode="r+")["table"]
    assert isinstance(table, zarr.Array)
    table[0, 0] = 42.0
    problems = report.verify(trained)
    assert len(problems) == 1
    assert "c.0.0" in str(problems[0])


def test_an_edit_through_zarr_beside_an_open_table_is_refused_by_the_merge_that_meets_it(
    trained: Path,
) -> None:
    """zarr replaces the file that is mapped: the table still sees the old one, others the new."""
    with DiskEmbedding.open(trained) as emb:
        emb.flush()
        rows = emb.weight[:3]
        table = zarr.open_group(trained, mode="r+")["table"]
        assert isinstance(table, zarr.Array)
        original = float(table[0, 0])
        table[0, 0] = 42.0
        assert torch.equal(emb.weight[:3], rows)
        step(emb, [1])
        with pytest.raises(ooc_embed.CorruptStoreError, match=r"c\.0\.0 was changed"):
            emb.flush()
        assert table[0, 0] == 42.0  # nothing of the edit was lost either
        steps, stepped = emb.step, emb.weight[1]
        table[0, 0] = original
        emb.flush()
        assert torch.equal(torch.from_numpy(table[1, :4]), stepped)
        assert not torch.equal(stepped, rows[1])
    assert store_files.newest_commit(trained)["step"] == steps


# Values that zarr gets wrong in an index


def test_a_row_assigned_twice_in_one_assignment_holds_the_last_value(tmp_path: Path) -> None:
    with make(tmp_path / "t.zarr", init="zeros") as emb:
        want = np.zeros((5000, 4), np.float32)
        index = [1, 7, 1, 1]
        values = np.arange(16, dtype=np.float32).reshape(4, 4)
        want[index] = values
        emb.weight[index] = torch.from_numpy(values)
        np.testing.assert_array_equal(emb.weight[:].numpy(), want)
        emb.flush()
        stored = zarr.open_group(tmp_path / "t.zarr", mode="r")["table"][:, :4]
        np.testing.assert_array_equal(stored, want)


def test_adding_to_a_row_that_is_named_twice_adds_once(tmp_path: Path) -> None:
    with make(tmp_path / "t.zarr", rows=8, init="zeros") as emb:
        emb.weight[[1, 1, 1]] = torch.tensor([1.0, 2.0, 3.0])[:, None]
        assert emb.weight[1].tolist() == [3.0] * 4
        emb.weight[[1, 1]] += 1.0
        assert emb.weight[1].tolist() == [4.0] * 4
        assert int(emb.version[1]) == 2


@pytest.mark.parametrize("index", [8, -9, [8], [-9], [0, 8], [np.iinfo(np.int64).min]])
def test_a_row_outside_the_table_is_an_index_error_for_views(tmp_path: Path, index: Any) -> None:
    path = tmp_path / "t.zarr"
    with make(path, rows=8, init="zeros") as emb:
        emb.commit()
        with store_files.untouched(path):
            with pytest.raises(IndexError, match="8"):
                emb.weight[index]
            with pytest.raises(IndexError, match="8"):
                emb.weight[index] = 1.0
            emb.commit()
        assert int(emb.version[:].sum()) == 0


@pytest.mark.parametrize(
    "dtype", [np.uint8, np.uint16, np.uint32, np.uint64, np.int8, np.int32, np.int64]
)
def test_an_integer_dtype_indexes_a_view_as_numpy_would_or_is_named_in_the_error(
    tmp_path: Path, dtype: Any
) -> None:
    values = np.arange(32, dtype=np.float32).reshape(8, 4)
    with make(tmp_path / "t.zarr", rows=8, init=values) as emb:
        index = np.array([5, 0, 5, 7], dtype)
        if dtype in (np.int32, np.int64):
            np.testing.assert_array_equal(emb.weight[index].numpy(), values[index])
            return
        try:
            np.testing.assert_array_equal(emb.weight[index].numpy(), values[index])
        except TypeError as error:
            assert np.dtype(dtype).name in str(error)


def test_an_empty_index_of_any_kind_is_no_rows(tmp_path: Path) -> None:
    with make(tmp_path / "t.zarr", rows=8) as emb:
        for index in ([], np.zeros(0, np.int64), torch.zeros(0, dtype=torch.int64), slice(3, 3)):
            assert emb.weight[index].shape == (0, 4)
            emb.weight[index] = torch.zeros(0, 4)
        assert int(emb.version[:].sum()) == 0


@pytest.mark.parametrize(
    "index", [slice(None), slice(2, 5), slice(6, 20), slice(-3, None), slice(5, 2), slice(None, -9)]
)
def test_a_slice_of_a_view_is_what_it_is_in_numpy(tmp_path: Path, index: slice) -> None:
    values = np.arange(32, dtype=np.float32).reshape(8, 4)
    with make(tmp_path / "t.zarr", rows=8, init=values) as emb:
        np.testing.assert_array_equal(emb.weight[index].numpy(), values[index])


def test_assigning_to_a_view_of_versions_is_refused(tmp_path: Path) -> None:
    with make(tmp_path / "t.zarr", rows=8) as emb, pytest.raises((TypeError, AttributeError)):
        emb.version[[1]] = torch.tensor([5])


# Paths and space


def test_a_relative_path_still_works_when_the_working_directory_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    with make(Path("t.zarr"), cache_bytes=300 * 13 * 4) as emb:
        monkeypatch.chdir(tmp_path / "elsewhere")
        some_steps(emb, 1)
        emb.flush()
        some_steps(emb, 2)
        steps = emb.step
    assert list((tmp_path / "elsewhere").iterdir()) == []
    assert store_files.newest_commit(tmp_path / "t.zarr")["step"] == steps


@pytest.mark.parametrize(
    "name", ["with space.zarr", "ünï-çødé.zarr", "no_suffix", "a%20b#c?.zarr", "it's.zarr"]
)
def test_any_name_works_as_a_path(tmp_path: Path, name: str) -> None:
    with make(tmp_path / name) as emb:
        step(emb, [1])
        emb.flush()
    store_files.assert_every_reader_agrees(tmp_path / name)
    with DiskEmbedding.open(str(tmp_path / name)) as emb:
        assert emb.step == 1
        assert emb.path == tmp_path / name


def test_a_moved_store_opens_at_its_new_place(trained: Path, tmp_path: Path) -> None:
    shutil.move(trained, tmp_path / "moved.zarr")
    with DiskEmbedding.open(tmp_path / "moved.zarr") as emb:
        assert emb.step == 6
        step(emb, [1])
        emb.flush()
        store_files.assert_every_reader_agrees(tmp_path / "moved.zarr")


def test_creation_warns_when_the_disk_is_too_small_for_what_it_can_grow_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table_bytes = 1_000_000 * 25 * 4
    store_files.pretend_free(monkeypatch, table_bytes)
    with pytest.warns(UserWarning, match="free") as caught:
        DiskEmbedding(1_000_000, 8, path=tmp_path / "t.zarr", cache_bytes=1 << 20).close()
    assert len(caught) == 1
    assert "log" in str(caught[0].message)
    store_files.pretend_free(monkeypatch, 8 * table_bytes)
    DiskEmbedding(1_000_000, 8, path=tmp_path / "enough.zarr", cache_bytes=1 << 20).close()
