"""Creating and opening stores where something is in the way; knows files."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import store_files
import torch
import zarr
from small_store import make, step, train

import ooc_embed
from ooc_embed import DiskEmbedding, durable

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    return train(tmp_path / "trained.zarr")


# Opening with the wrong mode, the wrong place, the wrong arguments


@pytest.mark.parametrize("dim", [4, 5])
@pytest.mark.parametrize("as_text", [True, False])
def test_constructor_refuses_an_existing_store_and_says_what_to_do(
    trained: Path, dim: int, as_text: bool
) -> None:
    with store_files.untouched(trained):
        with pytest.raises(FileExistsError, match="overwrite") as error:
            DiskEmbedding(5000, dim, path=str(trained) if as_text else trained)
        assert "open" in str(error.value)
        assert str(trained) in str(error.value)


@pytest.mark.parametrize("mode", ["w", "a", "w-", "x", "", "rb", "r+b", None])
def test_open_refuses_every_other_mode(trained: Path, mode: Any) -> None:
    with store_files.untouched(trained), pytest.raises((ValueError, TypeError), match="r\\+"):
        DiskEmbedding.open(trained, mode=mode)


@pytest.mark.parametrize("mode", ["r", "r+"])
def test_open_of_a_missing_path_creates_nothing(tmp_path: Path, mode: str) -> None:
    with pytest.raises(FileNotFoundError, match="missing.zarr"):
        DiskEmbedding.open(tmp_path / "missing.zarr", mode=mode)
    assert list(tmp_path.iterdir()) == []


def _plain_file(path: Path) -> None:
    path.write_text("mine")


def _notes(path: Path) -> None:
    path.mkdir()
    (path / "notes.txt").write_text("mine")


def _foreign_group(path: Path) -> None:
    group = zarr.open_group(path, mode="w")
    group.create_array("table", shape=(4,), dtype="f4")[:] = 1


def _foreign_array(path: Path) -> None:
    zarr.create_array(path, shape=(4,), dtype="f4")[:] = 1


def _notes_in_a_table_folder(path: Path) -> None:
    (path / "table").mkdir(parents=True)
    (path / "table" / "notes.txt").write_text("mine")


def _dangling_link(path: Path) -> None:
    path.symlink_to(path.parent / "nowhere")


def _training_logs(path: Path) -> None:
    (path / "log").mkdir(parents=True)
    (path / "log" / "events.csv").write_text("mine")


FOREIGN = [
    _plain_file,
    _notes,
    _foreign_group,
    _foreign_array,
    _notes_in_a_table_folder,
    _training_logs,
    _dangling_link,
]


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("put", FOREIGN)
def test_what_is_not_a_store_is_never_deleted(
    tmp_path: Path, put: Callable[[Path], None], overwrite: bool
) -> None:
    put(tmp_path / "x")
    with store_files.untouched(tmp_path), pytest.raises((OSError, ooc_embed.StoreError), match="x"):
        make(tmp_path / "x", overwrite=overwrite)
    assert os.path.lexists(tmp_path / "x")


@pytest.mark.parametrize("mode", ["r", "r+"])
@pytest.mark.parametrize("put", FOREIGN[:-1])
def test_open_of_what_is_not_a_store_says_so(
    tmp_path: Path, put: Callable[[Path], None], mode: str
) -> None:
    put(tmp_path / "x")
    with (
        store_files.untouched(tmp_path),
        pytest.raises((OSError, ooc_embed.FormatError), match="x"),
    ):
        DiskEmbedding.open(tmp_path / "x", mode=mode)


def test_overwrite_starts_a_new_table(trained: Path) -> None:
    old = store_files.manifest(trained)
    with make(trained, dim=3, overwrite=True) as emb:
        assert emb.step == 0
        assert int(emb.version[:].sum()) == 0
        assert store_files.chunk_files(trained) == []
        store_files.assert_every_reader_agrees(trained)
        step(emb, [1])
    assert store_files.manifest(trained)["embedding_dim"] == 3
    assert old["embedding_dim"] == 4


def test_overwrite_of_a_path_that_is_free_creates(tmp_path: Path) -> None:
    with make(tmp_path / "t.zarr", overwrite=True) as emb:
        assert emb.step == 0


def test_overwrite_spares_a_store_that_is_open_for_writing(trained: Path) -> None:
    with DiskEmbedding.open(trained) as emb:
        before = emb.step
        with store_files.untouched(trained), pytest.raises(ooc_embed.LockedError):
            make(trained, overwrite=True)
        step(emb, [1])
        assert emb.step == before + 1


BAD_ARGUMENTS: dict[str, dict[str, Any]] = {
    "no rows": {"rows": -1},
    "no columns": {"dim": 0},
    "half": {"dtype": torch.float16},
    "bfloat16": {"dtype": torch.bfloat16},
    "integers": {"dtype": torch.int64},
    "complex": {"dtype": torch.complex64},
    "padding too large": {"padding_idx": 5000},
    "padding too small": {"padding_idx": -5001},
    "odd chunk": {"chunk_rows": 1000},
    "no chunk": {"chunk_rows": 0},
    "unknown init": {"init": "normla"},
    "init of another shape": {"init": torch.zeros(5000, 5)},
    "unknown cache": {"cache_bytes": "lots"},
    "negative cache": {"cache_bytes": -1},
    "wrong optimizer": {"optimizer": "adam"},
    "torch's class": {"optimizer": torch.optim.SparseAdam},
}


@pytest.mark.parametrize("name", BAD_ARGUMENTS)
def test_a_wrong_argument_leaves_no_store_behind(tmp_path: Path, name: str) -> None:
    with pytest.raises((ValueError, TypeError, AssertionError, IndexError, RuntimeError)):
        make(tmp_path / "t.zarr", **BAD_ARGUMENTS[name])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", BAD_ARGUMENTS)
def test_a_wrong_argument_does_not_cost_the_store_that_overwrite_would_replace(
    trained: Path, name: str
) -> None:
    errors = (ValueError, TypeError, AssertionError, IndexError, RuntimeError)
    with store_files.untouched(trained), pytest.raises(errors):
        make(trained, overwrite=True, **BAD_ARGUMENTS[name])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int64])
def test_a_dtype_that_cannot_be_stored_is_named_with_the_reason(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    with pytest.raises((TypeError, ValueError), match="float32") as error:
        make(tmp_path / "t.zarr", dtype=dtype)
    assert str(dtype).removeprefix("torch.") in str(error.value)
    assert list(tmp_path.iterdir()) == []


def test_creation_in_a_missing_folder_names_it_or_makes_it(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "one" / "t.zarr"
    try:
        make(path).close()
    except FileNotFoundError as error:
        assert "runs" in str(error)
        assert list(tmp_path.iterdir()) == []
    else:
        assert (path / "zarr.json").exists()


@pytest.mark.parametrize("given", ["s3://bucket/t.zarr", "~/t.zarr"])
def test_an_address_or_a_tilde_does_not_become_a_folder_of_that_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="there is no folder .*(s3:|~): a table is on a local"):
        make(Path(given))
    assert list(tmp_path.iterdir()) == []
    (tmp_path / Path(given).parts[0]).mkdir()
    make(Path(given)).close()


# Creation that did not finish


def _unfinished(path: Path, keep: int) -> None:
    """A creation that was killed after `keep` of its files: zarr.json, written last, is missing."""
    make(path).close()
    (path / "zarr.json").unlink()
    files = sorted(file for file in path.rglob("*") if file.is_file())
    for file in files[keep:]:
        file.unlink()


@pytest.mark.parametrize("keep", [0, 1, 3, 6, 99])
def test_an_unfinished_creation_is_no_store_and_may_be_replaced(tmp_path: Path, keep: int) -> None:
    path = tmp_path / "t.zarr"
    _unfinished(path, keep)
    with pytest.raises((FileNotFoundError, ooc_embed.FormatError), match="t.zarr"):
        DiskEmbedding.open(path)
    with make(path, dim=2) as emb:
        step(emb, [1])
        emb.flush()
        store_files.assert_every_reader_agrees(path)
    assert store_files.metadata(path, "table")["shape"] == [5000, 7]


def test_an_unfinished_creation_with_half_written_metadata_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "t.zarr"
    _unfinished(path, 99)
    for folder in ("table", "log/0"):
        (path / folder / f"zarr.json{durable.TEMPORARY}").write_text("{")
    with make(path):
        store_files.assert_every_reader_agrees(path)


def test_a_folder_with_something_of_the_users_in_it_is_not_an_unfinished_creation(
    tmp_path: Path,
) -> None:
    path = tmp_path / "t.zarr"
    _unfinished(path, 99)
    (path / "thesis.tex").write_text("mine")
    with store_files.untouched(path), pytest.raises((OSError, ooc_embed.StoreError)):
        make(path)


def test_chunk_rows_beyond_the_table_make_one_chunk_of_its_size(make_table):
    emb = make_table(3000, 4, chunk_rows=1024 * 10**9)
    emb(torch.tensor([7])).sum().backward()
    emb.flush()
    assert zarr.open_group(emb.path, mode="r")["table"].chunks[0] == 3072
