"""Damaged stores: an error names the file, and a refused open writes nothing; trains nothing."""

from __future__ import annotations

import copy
import gc
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import store_files
import torch
import workload

import ooc_embed
from ooc_embed import CorruptStoreError, DiskEmbedding, FormatError, durable, report, soundness

pytestmark = pytest.mark.usefixtures("one_thread")

SEED = 5


def _build(path: Path, flush: bool) -> None:
    """Rows 0…2047 merged into two chunks when flushed; then rows of the log alone."""
    emb = DiskEmbedding(5000, 4, path=path, init="normal", chunk_rows=1024, dtype=torch.float64)
    generator = torch.Generator().manual_seed(SEED)
    for _ in range(3):
        emb(torch.randint(0, 2048, (300,), generator=generator)).square().sum().backward()
    if flush:
        emb.flush()
        emb(torch.randint(0, 5000, (300,), generator=generator)).square().sum().backward()
    emb.close()


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("template") / "t.zarr"
    _build(path, flush=True)
    return path


@pytest.fixture
def store(template: Path, tmp_path: Path) -> Path:
    return store_files.copied(template, tmp_path / "t.zarr")


def log_chunks(path: Path, kind: str) -> list[Path]:
    return [
        file for number in "01" for file in store_files.chunk_files(path, f"log/{number}/{kind}")
    ]


def a_table_chunk(path: Path) -> Path:
    return store_files.chunk_files(path)[1]


def the_log_rows(path: Path) -> Path:
    (file,) = log_chunks(path, "rows")
    return file


def the_log_records(path: Path) -> Path:
    (file,) = log_chunks(path, "records")
    return file


def committed_records(path: Path) -> int:
    (log,) = store_files.newest_commit(path)["logs"]
    return int(log["records"])


FILES = [a_table_chunk, the_log_rows, the_log_records]


def missing(file: Path) -> None:
    file.unlink()


def empty(file: Path) -> None:
    os.truncate(file, 0)


def a_byte_short(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 1)


def a_page_short(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 4096)


def a_page_long(file: Path) -> None:
    os.truncate(file, file.stat().st_size + 4096)


def a_folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


DAMAGES = [missing, empty, a_byte_short, a_page_short, a_page_long, a_folder]


def test_the_template_has_what_these_tests_damage(store: Path) -> None:
    assert [file.name for file in store_files.chunk_files(store)] == ["c.0.0", "c.1.0"]
    assert the_log_rows(store).stat().st_size % 4096 == 0
    assert the_log_records(store).stat().st_size % 4096 == 0
    assert report.verify(store) == []
    with DiskEmbedding.open(store) as emb:
        assert emb.step == 4


@pytest.mark.parametrize("mode", ["r", "r+"])
@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("find", FILES)
def test_a_missing_or_short_file_that_the_manifest_needs_is_named_at_open(
    store: Path, find: Callable[[Path], Path], damage: Callable[[Path], None], mode: str
) -> None:
    file = find(store)
    damage(file)
    with store_files.untouched(store), pytest.raises(CorruptStoreError) as error:
        DiskEmbedding.open(store, mode=mode)
    assert str(file.relative_to(store)) in str(error.value)


@pytest.mark.parametrize("damage", [empty, a_byte_short, a_page_short])
@pytest.mark.parametrize("find", FILES)
def test_the_error_for_a_short_file_shows_both_sizes(
    store: Path, find: Callable[[Path], Path], damage: Callable[[Path], None]
) -> None:
    file = find(store)
    whole = file.stat().st_size
    damage(file)
    with pytest.raises(CorruptStoreError) as error:
        DiskEmbedding.open(store)
    text = str(error.value).replace(",", "").replace("_", "")
    assert str(whole) in text
    assert str(file.stat().st_size) in text


@pytest.mark.parametrize("damage", [missing, a_page_short, a_page_long])
@pytest.mark.parametrize("mode", ["r", "r+"])
def test_opening_names_the_rows_of_a_chunk_and_how_to_keep_the_others(
    store: Path, mode: str, damage: Callable[[Path], None]
) -> None:
    damage(a_table_chunk(store))
    with pytest.raises(CorruptStoreError, match=r"c\.1\.0 .*\(rows 1,024 to 2,047\)") as caught:
        DiskEmbedding.open(store, mode=mode)
    assert "--salvage OUT" in caught.value.__notes__[0]
    assert "(rows 1,024 to 2,047)" in report.verify(store)[0]


def test_verify_goes_by_the_files_and_not_by_commits_that_a_writer_makes_meanwhile(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flip(a_table_chunk(store), 64)
    real, reads = soundness.ChunkCheck.read, []

    with DiskEmbedding.open(store) as emb:

        def read(check: soundness.ChunkCheck, index: int) -> str | None:
            reads.append(index)
            emb(torch.tensor([index])).sum().backward()
            emb.commit()
            return real(check, index)

        monkeypatch.setattr(soundness.ChunkCheck, "read", read)
        (problem,) = report.verify(store)
    assert "c.1.0 has the checksum" in problem
    assert reads == [0, 1]


@pytest.mark.parametrize("find", FILES)
def test_verify_names_a_missing_or_short_file_and_writes_nothing(
    store: Path, find: Callable[[Path], Path]
) -> None:
    for damage in (a_page_short, missing):
        damage(find(store))
        with store_files.untouched(store):
            problems = [str(problem) for problem in report.verify(store)]
        assert problems
        if damage is a_page_short:
            assert any(str(find(store).relative_to(store)) in problem for problem in problems)


def test_verify_names_every_damaged_file_not_only_the_first(store: Path) -> None:
    files = [file for find in FILES for file in [find(store)]]
    flip(files[0], 64)
    flip(files[2], 64)
    text = "\n".join(str(problem) for problem in report.verify(store))
    assert "table/c.1.0" in text
    assert str(files[2].parent.relative_to(store)) in text


def flip(file: Path, offset: int, mask: int = 0x10) -> None:
    with file.open("r+b") as stream:
        stream.seek(offset)
        (byte,) = stream.read(1)
        stream.seek(offset)
        stream.write(bytes([byte ^ mask]))


@pytest.mark.parametrize("mode", ["r", "r+"])
def test_a_flipped_bit_in_the_logs_row_ids_is_found_at_open(store: Path, mode: str) -> None:
    file = the_log_rows(store)
    flip(file, 8 * 5)
    with store_files.untouched(store), pytest.raises(CorruptStoreError) as error:
        DiskEmbedding.open(store, mode=mode)
    assert str(file.relative_to(store)) in str(error.value) or "log" in str(error.value)
    assert report.verify(store) != []


@pytest.mark.parametrize("place", ["first byte", "middle", "last byte"])
@pytest.mark.parametrize("find", [a_table_chunk, the_log_records])
def test_a_flipped_bit_in_any_record_is_found_by_verify(
    store: Path, find: Callable[[Path], Path], place: str
) -> None:
    file = find(store)
    end = file.stat().st_size
    if find is the_log_records:
        end = committed_records(store) * workload.WIDTH * 8
    flip(file, {"first byte": 0, "middle": end // 2, "last byte": end - 1}[place])
    problems = [str(problem) for problem in report.verify(store)]
    assert len(problems) == 1
    # A log has one checksum over all its files.
    named = file if find is a_table_chunk else file.parent
    assert str(named.relative_to(store)) in problems[0]


def test_bytes_of_the_log_behind_the_commit_are_nobodys(store: Path) -> None:
    behind = committed_records(store)
    for file, width in ((the_log_rows(store), 8), (the_log_records(store), workload.WIDTH * 8)):
        assert behind * width + 4096 < file.stat().st_size
        with file.open("r+b") as stream:
            stream.seek(behind * width)
            stream.write(os.urandom(4096))
    assert report.verify(store) == []
    with DiskEmbedding.open(store) as emb:
        emb(torch.arange(3000)).sum().backward()
        emb.flush()
    assert report.verify(store) == []


def test_a_listed_chunk_that_is_gone_is_never_read_as_zeros(store: Path) -> None:
    store_files.chunk_files(store)[0].unlink()
    for mode in ("r", "r+"):
        with pytest.raises(CorruptStoreError, match="c.0.0"):
            DiskEmbedding.open(store, mode=mode)
    with pytest.raises(CorruptStoreError, match="c.0.0"):
        # Again: the first refusal must not have repaired the manifest.
        DiskEmbedding.open(store)


def test_a_chunk_that_was_never_merged_may_be_absent(store: Path) -> None:
    assert not (store / "table" / "c.4.0").exists()
    with DiskEmbedding.open(store, mode="r") as emb:
        version = emb.version[:].numpy()
        assert (version[3 * 1024 :] <= 1).all()
        assert emb.weight[4999].abs().sum() > 0
    assert report.verify(store) == []


def test_a_chunk_that_the_manifest_does_not_list_is_not_taken_for_rows(store: Path) -> None:
    shutil.copy(a_table_chunk(store), store / "table" / "c.4.0")
    with DiskEmbedding.open(store, mode="r") as emb:
        assert int(emb.version[4 * 1024 :].max()) <= 1
    assert any("c.4.0" in str(problem) for problem in report.verify(store))


@pytest.mark.parametrize("find", FILES)
def test_the_store_opens_again_once_the_file_is_back(
    store: Path, find: Callable[[Path], Path]
) -> None:
    file = find(store)
    data = file.read_bytes()
    DiskEmbedding.open(store).close()
    gc.collect()  # what other tests left open
    descriptors = len(os.listdir("/proc/self/fd"))
    for mode in ("r", "r+", "r"):
        file.unlink()
        with pytest.raises(CorruptStoreError):
            DiskEmbedding.open(store, mode=mode)
        gc.collect()
        # Nothing of the refused open is left over: no lock, no mapping, no descriptor.
        assert str(store) not in Path("/proc/self/maps").read_text()
        assert len(os.listdir("/proc/self/fd")) == descriptors
        file.write_bytes(data)
        with DiskEmbedding.open(store) as emb:
            assert emb.step == 4


def test_a_flipped_bit_in_one_chunk_leaves_the_other_rows_readable(store: Path) -> None:
    with DiskEmbedding.open(store, mode="r") as emb:
        before = emb.weight[:].numpy()
    flip(a_table_chunk(store), 100)
    with DiskEmbedding.open(store, mode="r") as emb:
        after = emb.weight[:].numpy()
    np.testing.assert_array_equal(before[:1024], after[:1024])
    np.testing.assert_array_equal(before[2048:], after[2048:])


def test_temporary_files_of_a_killed_writer_are_left_by_readers_and_removed_by_a_writer(
    store: Path,
) -> None:
    known = set(store_files.contents(store))
    places = ("table/c.0.0", "table/zarr.json", "log/0/rows/c.0", "log/1/records/c.0.0")
    for place in places:
        (store / (place + durable.TEMPORARY)).write_bytes(b"half")
    with store_files.untouched(store), DiskEmbedding.open(store, mode="r") as emb:
        assert emb.step == 4
    assert report.verify(store) == []
    DiskEmbedding.open(store).close()
    assert set(store_files.contents(store)) == known


def test_files_whose_names_only_resemble_chunk_files_are_left_alone(store: Path) -> None:
    strangers = [
        store / folder / name
        for folder in ("table", "log/0/rows", "log/1/records")
        for name in ("c.old", "c.old.0", "c.9.0.bak", "c.09.0", "c.9.0.0")
    ]
    for path in strangers:
        path.write_bytes(b"somebody's")
    with DiskEmbedding.open(store) as emb:
        emb(torch.tensor([1])).sum().backward()
        emb.flush()
    assert report.verify(store) == []
    assert all(path.read_bytes() == b"somebody's" for path in strangers)


# The manifest


def _garbage(path: Path) -> None:
    path.write_bytes(b"\x00\xff\xfe not json")


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-40])


def _emptied(path: Path) -> None:
    path.write_bytes(b"")


def _a_list(path: Path) -> None:
    path.write_text("[1, 2]")


def _no_attributes(path: Path) -> None:
    path.write_text(json.dumps({"zarr_format": 3, "node_type": "group"}))


def _foreign_attributes(path: Path) -> None:
    path.write_text(json.dumps({"zarr_format": 3, "node_type": "group", "attributes": {"ooc": 1}}))


def _manifest_is_text(path: Path) -> None:
    _set(path, ["ooc_embed"], "hello")


def _empty_manifest(path: Path) -> None:
    _set(path, ["ooc_embed"], {})


MANGLED = [
    _garbage,
    _cut,
    _emptied,
    _a_list,
    _no_attributes,
    _foreign_attributes,
    _manifest_is_text,
    _empty_manifest,
]
DELETE = object()


def _set(file: Path, keys: list[Any], value: Any) -> None:
    whole = json.loads(file.read_text())
    target = whole["attributes"]
    for key in keys[:-1]:
        target = target[key]
    if value is DELETE:
        del target[keys[-1]]
    else:
        target[keys[-1]] = value
    if isinstance(whole["attributes"]["ooc_embed"], dict):
        store_files.state_checksum(whole["attributes"]["ooc_embed"])
    file.write_text(json.dumps(whole))


@pytest.mark.parametrize("mode", ["r", "r+"])
@pytest.mark.parametrize("mangle", MANGLED)
def test_a_mangled_manifest_is_a_format_error_that_names_the_file(
    store: Path, mangle: Callable[[Path], None], mode: str
) -> None:
    mangle(store / "zarr.json")
    with store_files.untouched(store), pytest.raises(FormatError, match="zarr.json|t.zarr"):
        DiskEmbedding.open(store, mode=mode)


def test_a_store_of_a_later_format_names_both_numbers(store: Path) -> None:
    found = store_files.manifest(store)
    (key,) = (key for key in found if "format" in key)
    _set(store / "zarr.json", ["ooc_embed", key], 999)
    with store_files.untouched(store), pytest.raises(FormatError, match="999") as error:
        DiskEmbedding.open(store)
    assert str(found[key]) in str(error.value)


def _paths(value: Any, prefix: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in the manifest; of long lists the first and the last element."""
    items: list[tuple[Any, Any]] = []
    if isinstance(value, dict):
        items = list(value.items())
    elif isinstance(value, list) and value:
        items = [(0, value[0]), (len(value) - 1, value[-1])]
    for key, inner in items:
        yield (*prefix, key)
        yield from _paths(inner, (*prefix, key))


WRONG = [DELETE, None, "x", -1, 1 << 62, 0.5, [], {}, [None], True]


def test_no_wrong_value_anywhere_in_the_manifest_escapes_as_another_error(store: Path) -> None:
    file = store / "zarr.json"
    whole = file.read_bytes()
    places = set(_paths(store_files.manifest(store)))
    assert len(places) > 20
    odd = []
    for place in sorted(places, key=str):
        for wrong in WRONG:
            file.write_bytes(whole)
            _set(
                file, ["ooc_embed", *place], copy.deepcopy(wrong) if wrong is not DELETE else DELETE
            )
            shown = (place, "deleted" if wrong is DELETE else wrong)
            before = store_files.contents(store)
            try:
                with DiskEmbedding.open(store, mode="r") as emb:
                    # Accepted: then it must be a value that may be so, and all of it works.
                    emb(torch.tensor([1]))
                    assert emb.weight[:].shape == (5000, 4)
                    repr(emb)
            except ooc_embed.StoreError:
                assert store_files.contents(store) == before, shown
            except Exception as error:
                odd.append((*shown, repr(error)))
    file.write_bytes(whole)
    assert odd == []


@pytest.mark.parametrize("key", ["num_embeddings", "embedding_dim", "dtype"])
def test_a_manifest_that_contradicts_the_arrays_is_refused(store: Path, key: str) -> None:
    other = {"num_embeddings": 5001, "embedding_dim": 3, "dtype": "float32"}[key]
    _set(store / "zarr.json", ["ooc_embed", key], other)
    if key == "num_embeddings":
        _set(store / "zarr.json", ["ooc_embed", "commits", -1, key], other)
    with store_files.untouched(store), pytest.raises(ooc_embed.StoreError):
        DiskEmbedding.open(store)


@pytest.mark.parametrize(
    "change", ["missing", "garbage", "shape", "chunks", "dtype", "codecs", "keys"]
)
@pytest.mark.parametrize("array", ["table", "log/0/rows", "log/1/records"])
def test_array_metadata_that_is_not_what_creation_wrote_is_refused(
    store: Path, array: str, change: str
) -> None:
    file = store / array / "zarr.json"
    described = json.loads(file.read_text())
    if change == "missing":
        file.unlink()
    elif change == "garbage":
        file.write_text("{")
    else:
        if change == "shape":
            described["shape"][0] -= 1
        elif change == "chunks":
            described["chunk_grid"]["configuration"]["chunk_shape"][0] *= 2
        elif change == "dtype":
            described["data_type"] = "float32" if array != "log/0/rows" else "int32"
        elif change == "codecs":
            described["codecs"].append(
                {"name": "zstd", "configuration": {"level": 1, "checksum": False}}
            )
        else:
            described["chunk_key_encoding"]["configuration"]["separator"] = "/"
        file.write_text(json.dumps(described))
    for mode in ("r", "r+"):
        # Chunks of another size are shown by the array that they no longer fit to.
        named = "table|log" if change == "chunks" else array
        with store_files.untouched(store), pytest.raises(ooc_embed.StoreError, match=named):
            DiskEmbedding.open(store, mode=mode)


def test_rows_of_the_log_outside_the_table_are_corruption(store: Path) -> None:
    """Even with a checksum that fits: a row id is an index into memory."""
    import zlib

    file = the_log_rows(store)
    rows = np.fromfile(file, "<i8")
    for bad in (5000, -2, 1 << 40):
        rows[0] = bad
        rows.tofile(file)
        crc = zlib.crc32(rows[: committed_records(store)].tobytes())
        _set(store / "zarr.json", ["ooc_embed", "commits", -1, "logs", 0, "rows_crc32"], crc)
        with pytest.raises(CorruptStoreError):
            DiskEmbedding.open(store)
        (problem,) = report.verify(store)
        assert f"{file} names row {bad}, the table has 5000; needed by commit" in problem


def test_a_store_of_a_table_without_rows_in_its_log_needs_no_log_file(tmp_path: Path) -> None:
    path = tmp_path / "t.zarr"
    _build(path, flush=False)
    with DiskEmbedding.open(path) as emb:
        emb.flush()
    assert log_chunks(path, "rows") == []
    assert log_chunks(path, "records") == []
    with DiskEmbedding.open(path, mode="r") as emb:
        assert emb.step == 3
