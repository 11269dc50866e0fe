"""A store seen from outside: its files, its bytes, and what other zarr readers make of it.

Knows the format of docs/store-format.md and plain json, numpy, zarr, xarray and tensorstore; never
ours.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import tempfile
import warnings
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorstore
import xarray
import zarr
from numpy.typing import NDArray

ARRAYS = ("table", "column", "log/0/rows", "log/0/records", "log/1/rows", "log/1/records")
NUMBERS = tuple(name for name in ARRAYS if name != "column")


def contents(path: Path) -> dict[str, tuple[int, bytes]]:
    """Time of last change and bytes of each file, and the time of each folder."""
    found = {}
    for folder, _, names in os.walk(path):
        found[os.path.relpath(folder, path) + "/"] = (os.stat(folder).st_mtime_ns, b"")
        for name in names:
            file = Path(folder, name)
            data = os.readlink(file).encode() if file.is_symlink() else file.read_bytes()
            found[os.path.relpath(file, path)] = (file.lstat().st_mtime_ns, data)
    return found


@contextlib.contextmanager
def untouched(path: Path) -> Iterator[None]:
    """Nothing inside the block changes a byte or a time of last change below `path`."""
    before = contents(path)
    yield
    assert contents(path) == before


def manifest(path: Path) -> dict[str, Any]:
    attributes = json.loads((path / "zarr.json").read_text())["attributes"]
    found: dict[str, Any] = attributes["ooc_embed"]
    return found


def edit_manifest(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the manifest, and its own checksum with it, if the change leaves it one."""
    metadata = json.loads((path / "zarr.json").read_text())
    found = metadata["attributes"]["ooc_embed"]
    change(found)
    if "crc32" in found:
        state_checksum(found)
    (path / "zarr.json").write_text(json.dumps(metadata))


def state_checksum(found: dict[str, Any]) -> None:
    """Give a manifest the checksum that fits to the rest of it, of which whole numbers are one."""
    found.pop("crc32", None)
    whole = json.loads(json.dumps(found), parse_float=_number)
    found["crc32"] = zlib.crc32(json.dumps(whole, sort_keys=True).encode())


def _number(text: str) -> float:
    value = float(text)
    return int(value) if value.is_integer() else value


def newest_commit(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = manifest(path)["commits"][-1]
    return found


def metadata(path: Path, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((path / name / "zarr.json").read_text())
    return found


def chunk_files(path: Path, name: str = "table") -> list[Path]:
    files = (file for file in (path / name).iterdir() if re.fullmatch(r"c(\.\d+)+", file.name))
    return sorted(files, key=lambda file: int(file.name.split(".")[1]))


def read_by_hand(path: Path, name: str, stop: int | None = None) -> NDArray[Any]:
    """An array of numbers by json and np.fromfile: absent chunks are the fill value.

    Chunks from element `stop` on are left out.
    """
    described = metadata(path, name)
    shape = described["shape"]
    chunk = described["chunk_grid"]["configuration"]["chunk_shape"]
    dtype = np.dtype(described["data_type"]).newbyteorder("<")
    count = -(-shape[0] // chunk[0])
    whole = np.full([count * chunk[0], *shape[1:]], described["fill_value"], dtype)
    for file in chunk_files(path, name):
        index = int(file.name.split(".")[1])
        if stop is not None and index * chunk[0] >= stop:
            continue
        block = np.fromfile(file, dtype).reshape(chunk)
        whole[index * chunk[0] : (index + 1) * chunk[0]] = block
    return whole[: shape[0]]


def open_with_tensorstore(path: Path, name: str) -> Any:
    store = {"driver": "file", "path": str(path / name)}
    return tensorstore.open({"driver": "zarr3", "kvstore": store}, open=True, read=True).result()


def assert_every_reader_agrees(path: Path) -> None:
    """zarr, xarray and tensorstore read all of it without a warning, and read the same."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        group = zarr.open_group(path, mode="r")
        names = [name for name, _ in group.members(max_depth=None)]
        assert sorted(names) == sorted([*ARRAYS, "log", "log/0", "log/1"])
        assert sorted(group.array_keys()) == ["column", "table"]
        for name in NUMBERS:
            by_hand = read_by_hand(path, name)
            np.testing.assert_array_equal(np.asarray(group[name][...]), by_hand, name)
            seen = open_with_tensorstore(path, name)
            np.testing.assert_array_equal(seen.read().result(), by_hand, name)
        columns = np.asarray(group["column"][...])
        data = xarray.open_zarr(path, consolidated=False)
        assert list(data.table.column.values) == list(columns)
        weight = data.table.sel(column="weight")
        want = read_by_hand(path, "table")[:, columns == "weight"]
        np.testing.assert_array_equal(weight.values, want)


@contextlib.contextmanager
def quick_folder(otherwise: Path) -> Iterator[Path]:
    """A folder in memory where there is one: for tests that fail calls, not disks."""
    memory = Path("/dev/shm")
    if not (memory.is_dir() and os.access(memory, os.W_OK)):
        yield otherwise
        return
    with tempfile.TemporaryDirectory(dir=memory) as name:
        yield Path(name)


def copied(source: Path, target: Path) -> Path:
    shutil.copytree(source, target)
    return target


def pretend_free(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    """The disk claims `free` free bytes, whichever call asks."""
    real = os.statvfs("/")
    fields = list(real[:10])
    fields[0] = fields[1] = 1  # bsize, frsize: then blocks are bytes
    fields[2] = 1 << 60
    fields[3] = fields[4] = free
    answer = os.statvfs_result(fields)
    monkeypatch.setattr(os, "statvfs", lambda *_: answer)
    monkeypatch.setattr(os, "fstatvfs", lambda *_: answer)
    usage = type(shutil.disk_usage("/"))(1 << 60, (1 << 60) - free, free)
    monkeypatch.setattr(shutil, "disk_usage", lambda *_: usage)
