"""Links, pipes and names that lead out of a store: nothing outside of it is changed or deleted."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import small_store
import store_files
import torch

from ooc_embed import DiskEmbedding, FormatError, StoreError, describe, durable, report

pytestmark = pytest.mark.usefixtures("one_thread")

FOLDERS = ["table", "column", "column/c", "log", "log/0", "log/1", "log/1/rows", "log/0/records"]


@pytest.fixture
def store(quick: Path) -> Path:
    return small_store.train(quick / "t.zarr")


@pytest.fixture
def outside(quick: Path) -> Path:
    folder = quick / "outside"
    folder.mkdir()
    return folder


def _names(path: Path) -> list[str]:
    names = [str(file.relative_to(path)) for file in path.rglob("*") if file.is_file()]
    return sorted([*names, *FOLDERS])


def _lead_out(path: Path, outside: Path, name: str) -> None:
    """Move a part of a store away, and leave a link to it."""
    target = outside / "moved"
    (path / name).rename(target)
    (path / name).symlink_to(target)


def _put_back(path: Path, outside: Path, name: str) -> None:
    (path / name).unlink()
    (outside / "moved").rename(path / name)


def test_a_writer_refuses_links_and_a_reader_follows_them(store: Path, outside: Path) -> None:
    """As of a copy that a download cache made of links."""
    with DiskEmbedding.open(store, mode="r") as emb:
        before = emb.weight[:]
    names = _names(store)
    assert len(names) > 20
    for name in names:
        _lead_out(store, outside, name)
        with store_files.untouched(outside), store_files.untouched(store):
            with pytest.raises(FormatError, match="is a symbolic link") as error:
                DiskEmbedding.open(store)
            assert str(store / name) in str(error.value)
            with DiskEmbedding.open(store, mode="r") as emb:
                assert torch.equal(emb.weight[:], before)
            assert report.verify(store) == []
        _put_back(store, outside, name)
    with DiskEmbedding.open(store) as emb:
        small_store.some_steps(emb, 1, 1)


@pytest.mark.parametrize("name", ["table/writer.json", "table/zarr.json.tmp", "log/0/rows/c.0.tmp"])
def test_what_a_writer_makes_on_its_way_is_not_written_through_a_link(
    store: Path, outside: Path, name: str
) -> None:
    (outside / "mine").write_text("mine")
    (store / name).symlink_to(outside / "mine")
    with store_files.untouched(outside), pytest.raises(FormatError, match=name):
        DiskEmbedding.open(store)


def test_the_store_itself_may_be_a_link(store: Path, quick: Path) -> None:
    (quick / "link").symlink_to(store)
    with DiskEmbedding.open(quick / "link") as emb:
        small_store.some_steps(emb, 1, 1)
        emb.flush()
    assert report.verify(store) == []


def test_overwriting_removes_links_and_leaves_what_they_lead_to(store: Path, outside: Path) -> None:
    kept = store_files.copied(store, outside / "kept")
    for name in _names(store):
        shutil.rmtree(store)
        store_files.copied(kept, store)
        _lead_out(store, outside, name)
        with store_files.untouched(outside):
            small_store.make(store, overwrite=True).close()
        assert not any(file.is_symlink() for file in store.rglob("*"))
        assert report.verify(store) == []
        moved = outside / "moved"
        shutil.rmtree(moved) if moved.is_dir() else moved.unlink()


def test_overwriting_makes_nothing_where_a_dangling_link_leads(store: Path, outside: Path) -> None:
    shutil.rmtree(store / "log")
    (store / "log").symlink_to(outside / "nowhere")
    with store_files.untouched(outside):
        small_store.make(store, overwrite=True).close()
    assert not (store / "log").is_symlink()
    assert report.verify(store) == []


def test_a_creation_that_fails_leaves_what_links_lead_to(
    store: Path, outside: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _lead_out(store, outside, "log")

    def fail(*_: Any) -> None:
        raise OSError("on purpose")

    monkeypatch.setattr("ooc_embed.store.make_arrays", fail)
    with store_files.untouched(outside), pytest.raises(OSError, match="on purpose"):
        small_store.make(store, overwrite=True)


@pytest.mark.parametrize("name", ["table", "log", "log/0"])
def test_a_folder_of_links_to_folders_is_no_unfinished_creation(
    store: Path, quick: Path, outside: Path, name: str
) -> None:
    (outside / "c.0.0").write_text("mine")
    path = quick / "other.zarr"
    (path / name).parent.mkdir(parents=True)
    (path / name).symlink_to(outside)
    with store_files.untouched(quick):
        for overwrite in (False, True):
            with pytest.raises(FileExistsError, match="is no ooc_embed store"):
                small_store.make(path, overwrite=overwrite)
        another = pytest.raises(FileExistsError, match="choose another path")
    with DiskEmbedding.open(store) as emb, store_files.untouched(outside), another:
        emb.snapshot(path)


def test_an_unfinished_creation_with_a_link_in_the_place_of_a_file_is_replaced(
    quick: Path, outside: Path
) -> None:
    (outside / "mine").write_text("mine")
    path = quick / "t.zarr"
    (path / "table").mkdir(parents=True)
    (path / "table" / "c.0.0").symlink_to(outside / "mine")
    with store_files.untouched(outside), small_store.make(path) as emb:
        small_store.some_steps(emb, 1, 1)
        emb.flush()
    assert report.verify(path) == []


def test_a_tree_is_removed_without_what_its_links_lead_to(quick: Path, outside: Path) -> None:
    (outside / "mine").write_text("mine")
    tree = quick / "tree"
    (tree / "inner").mkdir(parents=True)
    (tree / "inner" / "link").symlink_to(outside)
    (quick / "link").symlink_to(outside)
    with store_files.untouched(outside):
        durable.remove_tree(tree)
        durable.remove_tree(quick / "link")
    assert not tree.exists()
    assert not (quick / "link").is_symlink()


EVIL = "../../../outside/evil"
STRINGS: dict[str, Any] = {
    "table_id": lambda m: m.update(table_id=EVIL),
    "library": lambda m: m["commits"][-1].update(library=EVIL),
    "branch": lambda m: m["branches"][-1].__setitem__(1, EVIL),
    "rule": lambda m: m["rule"].update(name=EVIL),
    "init": lambda m: m["init"].update(name=EVIL),
    "dtype": lambda m: m.update(dtype=EVIL),
    "field": lambda m: m["fields"][1].__setitem__(0, EVIL),
    "chunk": lambda m: m["chunk_crc32"].update({EVIL: 1}),
    "step_on": lambda m: m["module"].update(step_on=EVIL),
    "bag": lambda m: m["module"].update(bag=EVIL),
}


@pytest.mark.parametrize("name", STRINGS)
def test_no_word_of_the_manifest_becomes_a_name_outside_of_the_store(
    store: Path, quick: Path, outside: Path, name: str
) -> None:
    store_files.edit_manifest(store, STRINGS[name])
    with store_files.untouched(outside):
        try:
            with DiskEmbedding.open(store) as emb:
                describe(store)
                small_store.some_steps(emb, 1, 2)
                emb.flush()
                emb.snapshot(quick / "copy.zarr")
        except StoreError as error:
            assert "zarr.json" in str(error)
            assert name not in ("table_id", "library", "branch")
        else:
            assert name in ("table_id", "library", "branch")
    assert {entry.name for entry in quick.iterdir()} <= {"t.zarr", "outside", "copy.zarr"}
