"""Every file of a store, damaged in every way: it is named, nothing is written, and once it is back
the table opens. Which files there are is read off the disk, so that none is forgotten."""

from __future__ import annotations

import json
import os
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import small_store
import store_files
from test_corruption import a_byte_short, a_folder, a_page_long, empty, missing

from ooc_embed import DiskEmbedding, StoreError, report

pytestmark = pytest.mark.usefixtures("one_thread")

HOLDER = small_store.HOLDER
# What other zarr readers and this package need of the metadata of an array or a group.
NEEDED = (
    "zarr_format",
    "node_type",
    "shape",
    "data_type",
    "chunk_grid",
    "chunk_key_encoding",
    "codecs",
    "dimension_names",
)


@pytest.fixture(scope="module")
def templates(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Path]]:
    with store_files.quick_folder(tmp_path_factory.mktemp("stores")) as folder:
        yield (
            small_store.in_a_merge(folder / "t.zarr", 5),
            small_store.in_a_merge(folder / "twin.zarr", 6),
        )


@pytest.fixture
def store(templates: tuple[Path, Path], quick: Path) -> Path:
    return store_files.copied(templates[0], quick / "t.zarr")


def files(path: Path) -> list[Path]:
    return sorted(file for file in path.rglob("*") if not file.is_dir())


def name_of(path: Path, file: Path) -> str:
    return str(file.relative_to(path))


def named_prefix(path: Path, file: Path) -> int:
    """How many bytes of a file are the store's: those of a log behind its commit are nobody's."""
    whole = file.stat().st_size
    if file.parent.name not in ("rows", "records") or file.name == "zarr.json":
        return whole
    described = store_files.metadata(path, name_of(path, file.parent))
    chunk = described["chunk_grid"]["configuration"]["chunk_shape"][0]
    logs = store_files.newest_commit(path)["logs"]
    (records,) = (
        log["records"] for log in logs if log["generation"] % 2 == int(file.parent.parent.name)
    )
    rows = min(records - int(file.name.split(".")[1]) * chunk, chunk)
    return rows * whole // chunk


def kind_of(file: Path) -> str:
    return file.name if file.name == "zarr.json" else file.parent.name


def said(path: Path) -> str:
    """What opening and `verify` say of it: neither writes, and no other exception comes."""
    words = []
    with store_files.untouched(path):
        try:
            DiskEmbedding.open(path, mode="r").close()
        except (StoreError, OSError) as error:
            words.append(str(error))
            with pytest.raises((StoreError, OSError)):
                DiskEmbedding.open(path)
        try:
            words += report.verify(path)
        except OSError as error:
            words.append(str(error))
    return "\n".join(words)


def assert_named(path: Path, *damaged: Path) -> None:
    words = said(path)
    names = [name_of(path, file) for file in damaged]
    # A log has one checksum for all its files, and a manifest of another table fits to none.
    names += [
        name_of(path, file.parent) for file in damaged if kind_of(file) in ("rows", "records")
    ]
    assert words, (names, [file.read_bytes() for file in damaged if file.name == "zarr.json"])
    assert any(name in words for name in names), (names, words)


def assert_sound(path: Path) -> None:
    with store_files.untouched(path), DiskEmbedding.open(path, mode="r"):
        assert report.verify(path) == []


def a_page_short(file: Path) -> None:
    os.truncate(file, max(file.stat().st_size - 4096, 0))


def a_byte_long(file: Path) -> None:
    os.truncate(file, file.stat().st_size + 1)


def a_link_to_nothing(file: Path) -> None:
    file.unlink()
    file.symlink_to("nowhere")


DAMAGES = [
    missing,
    empty,
    a_byte_short,
    a_page_short,
    a_byte_long,
    a_page_long,
    a_folder,
    a_link_to_nothing,
]


def put_back(file: Path, data: bytes) -> None:
    if file.is_dir() and not file.is_symlink():
        file.rmdir()
    else:
        file.unlink(missing_ok=True)
    file.write_bytes(data)


def test_the_store_has_all_that_these_tests_damage(store: Path) -> None:
    manifest = store_files.manifest(store)
    logs = store_files.newest_commit(store)["logs"]
    assert len(manifest["commits"]) == 3
    assert len({commit["logs"][1]["records"] for commit in manifest["commits"]}) == 3
    assert len(manifest["chunk_crc32"]) == 5
    assert len(manifest["merged_crc32"]) >= 2
    assert "3" not in manifest["merged_crc32"]
    assert logs[0]["records"] > 2 * 1024
    names = [name_of(store, file) for file in files(store)]
    assert {name.split("/")[0] for name in names} == {"zarr.json", "table", "column", "log"}
    assert sum("records/c." in name for name in names) >= 4
    assert len(names) >= 24
    assert_sound(store)


@pytest.mark.parametrize("damage", DAMAGES)
def test_every_file_that_is_damaged_is_named_and_the_table_opens_once_it_is_back(
    store: Path, damage: Callable[[Path], None]
) -> None:
    for file in files(store):
        data = file.read_bytes()
        damage(file)
        if name_of(store, file) != HOLDER:
            assert_named(store, file)
        else:  # it is a hint of who has the store, and nothing depends on it
            assert said(store) == ""
        put_back(file, data)
        assert_sound(store)
    DiskEmbedding.open(store).close()
    assert report.verify(store) == []


@pytest.mark.timeout(30)
def test_a_pipe_in_the_place_of_a_file_is_named_and_nobody_waits_for_it(store: Path) -> None:
    for file in files(store):
        data = file.read_bytes()
        file.unlink()
        os.mkfifo(file)
        for mode in ("r", "r+"):
            with pytest.raises(StoreError, match=re.escape(f"{file} is neither a file nor")):
                DiskEmbedding.open(store, mode=mode)
        (problem,) = report.verify(store)
        assert str(file) in problem
        put_back(file, data)
    assert_sound(store)


def test_whatever_is_where_the_holder_is_named_a_writer_opens(store: Path) -> None:
    for damage in (missing, empty, a_byte_short, a_folder):
        if not (store / HOLDER).exists():
            (store / HOLDER).write_text("{}")
        damage(store / HOLDER)
        DiskEmbedding.open(store).close()
        put_back(store / HOLDER, b"{}")


def test_two_files_of_one_kind_that_changed_places_are_named(store: Path) -> None:
    alike = set()
    for first in files(store):
        for second in files(store):
            if second <= first or kind_of(second) != kind_of(first) or HOLDER in str(second):
                continue
            one, other = first.read_bytes(), second.read_bytes()
            if one == other:
                alike.add(first.name)
                continue
            first.write_bytes(other)
            second.write_bytes(one)
            assert_named(store, first, second)
            first.write_bytes(one)
            second.write_bytes(other)
    assert alike == {"zarr.json"}  # those of the two logs, and of groups, say the same
    assert_sound(store)


def test_a_file_of_another_table_of_equal_shape_is_named(
    templates: tuple[Path, Path], store: Path
) -> None:
    twin, others = templates[1], 0
    for file in files(store):
        data, other = file.read_bytes(), (twin / file.relative_to(store)).read_bytes()
        if data == other:
            assert file.name in ("zarr.json", "0", "writer.json")
            continue
        others += 1
        file.write_bytes(other)
        if file == store / "zarr.json":  # whose checksums fit to none of the files
            assert "table/c.0.0" in said(store)
        else:
            assert_named(store, file)
        file.write_bytes(data)
    assert others >= 12
    assert_sound(store)


def flipped(data: bytes, place: int, bit: int = 4) -> bytes:
    return data[:place] + bytes([data[place] ^ 1 << bit]) + data[place + 1 :]


def test_a_flipped_bit_at_either_end_or_in_the_middle_is_named(store: Path) -> None:
    for file in files(store):
        if file.name in ("zarr.json", "writer.json"):
            continue
        data, end = file.read_bytes(), named_prefix(store, file)
        for place in (0, end // 2, end - 1):
            file.write_bytes(flipped(data, place))
            assert_named(store, file)
        if end < len(data):  # bytes behind the commit's end are no part of the store
            file.write_bytes(flipped(data, end))
            assert_sound(store)
        file.write_bytes(data)


def needed(data: bytes, name: str) -> Any:
    """What is read of a metadata file, or None where it is damaged beyond reading."""
    try:
        whole = json.loads(data)
        found = {key: whole.get(key) for key in NEEDED}
        if name == "zarr.json":
            found["manifest"] = {**whole["attributes"]["ooc_embed"], "crc32": None}
        elif whole["node_type"] == "array" and name != "column/zarr.json":
            found["fill_value"] = whole["fill_value"]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    return found


def without_surplus(shape: Any, wanted: list[int] | None) -> Any:
    """A shape, no longer than wanted."""
    if wanted and isinstance(shape, list) and len(shape) == len(wanted) and shape[0] > wanted[0]:
        return wanted[:1] + shape[1:]
    return shape


def test_a_flipped_bit_of_the_metadata_is_named_unless_nobody_reads_it(store: Path) -> None:
    """Not read are attributes of others, and lists that zarr leaves empty."""
    draw = random.Random(0)
    for file in files(store):
        if file.name != "zarr.json":
            continue
        data, name = file.read_bytes(), name_of(store, file)
        wanted = needed(data, name)
        assert wanted is not None
        places = range(len(data)) if len(data) < 100 else draw.sample(range(len(data)), 25)
        for place in places:
            changed = flipped(data, place, draw.randrange(8))
            found = needed(changed, name)
            file.write_bytes(changed)
            if found is not None and name not in ("zarr.json", "column/zarr.json"):
                # A growth that was stopped leaves longer arrays, and they are no damage.
                found["shape"] = without_surplus(found["shape"], wanted["shape"])
            if found is not None and all(found[key] == wanted[key] for key in wanted):
                assert said(store) == "", (name, place)
            else:
                assert_named(store, file)
        file.write_bytes(data)
    assert_sound(store)
