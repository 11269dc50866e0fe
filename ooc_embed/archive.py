"""What an archive is: its description, its arrays, how their shards are encoded and opened again.

Knows zarr and the format of an archive; knows no table that is open, and writes no file.

An archive is a zarr v3 group with an array for each field, of core codecs only, so that any reader
has it. Chunks are small, for single rows, and lie in shards, for few files. A shard is written
once and whole; the group's ``zarr.json``, under another name until then, comes last of all.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import zarr
from zarr.codecs import BloscCodec, Crc32cCodec

from .arrays import read_metadata
from .errors import CorruptStoreError, FormatError
from .manifest import VERSION_FIELD, Manifest
from .parsing import chunk_index, integer, json_object, optional, text

# Of the group, under which its description is.
ARCHIVE = "ooc_embed_archive"
FORMAT = 1
# The group's zarr.json as long as shards are missing.
UNFINISHED = "unfinished.json"
CODECS = ("zstd", "blosc-lz4", "none")
DTYPES = ("float16", "float32", "float64")
_CHUNK_BYTES = 256 << 10
_SHARD_BYTES = 32 << 20
_KEYS: Any = {"name": "default", "configuration": {"separator": "."}}
# Fields of one column have larger chunks, which still are the smaller ones in bytes.
_MORE_ROWS = 8


@dataclass(frozen=True)
class ArchiveDescription:
    """What was exported, from which commit of which table, and how it is written.

    Args:
        manifest: the table's, with this commit alone.
        branch: the word of whoever made the commit.
        fields: which are in the archive.
        codec: one of `CODECS`.
        bitround: bits of the mantissa that were kept, None for all.
        dtype: of the floats in the archive.
        chunk_rows: rows that are compressed together, of fields with more than one column.
        shard_rows: rows in a file.
    """

    manifest: Manifest
    branch: str | None
    fields: tuple[str, ...]
    codec: str
    bitround: int | None
    dtype: str
    chunk_rows: int
    shard_rows: int

    @property
    def num_shards(self) -> int:
        return -(-self.manifest.num_embeddings // self.shard_rows)

    @property
    def missing(self) -> list[str]:
        """The table's fields that are not in the archive."""
        return [name for name in self.manifest.fields if name not in self.fields]

    @property
    def exact(self) -> bool:
        """Whether all numbers are the table's own."""
        return self.bitround is None and self.dtype == self.manifest.dtype

    def shape(self, field: str) -> tuple[int, ...]:
        """``(N, columns)``; ``(N,)`` of a field with one column, unless it is the weight."""
        rows, columns = self.manifest.num_embeddings, self.manifest.fields[field]
        return (rows,) if columns == 1 and field != "weight" else (rows, columns)

    def element(self, field: str) -> np.dtype:
        """The type of a field's elements: versions are counts."""
        return np.dtype("<i8" if field == VERSION_FIELD else self.dtype).newbyteorder("<")

    def to_json(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "fields": list(self.fields),
            "codec": self.codec,
            "bitround": self.bitround,
            "dtype": self.dtype,
            "chunk_rows": self.chunk_rows,
            "shard_rows": self.shard_rows,
            "branch": self.branch,
            "table": self.manifest.to_json(),
        }

    @classmethod
    def from_json(cls, value: Any) -> Self:
        """What `to_json` wrote.

        Raises:
            FormatError: something else.
        """
        try:
            if (found := value["format"]) != FORMAT:
                raise ValueError(f"format {found!r} is not {FORMAT}, which this version reads")
            description = cls(
                manifest=Manifest.from_json(value["table"]),
                branch=optional(text, value["branch"]),
                fields=tuple(map(text, value["fields"])),
                codec=text(value["codec"]),
                bitround=optional(integer, value["bitround"]),
                dtype=text(value["dtype"]),
                chunk_rows=integer(value["chunk_rows"], 1),
                shard_rows=integer(value["shard_rows"], 1),
            )
            description._check()
        except (KeyError, TypeError, ValueError) as error:
            raise FormatError(f"the description of the archive is damaged: {error!r}") from error
        return description

    def _check(self) -> None:
        """Raise a ValueError where it is none of an archive."""
        if unknown := set(self.fields) - set(self.manifest.fields):
            raise ValueError(f"the table has no {', '.join(sorted(unknown))}")
        if len(set(self.fields)) < len(self.fields):
            raise ValueError(f"{', '.join(self.fields)} are not all different")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype {self.dtype!r} is none of {', '.join(DTYPES)}")
        rows = self.manifest.num_embeddings
        if self.chunk_rows > rows or self.shard_rows > rows + self.chunk_rows * _MORE_ROWS:
            raise ValueError(
                f"chunks of {self.chunk_rows:,} rows, {self.shard_rows:,} in a file, are more than "
                f"the table's {rows:,}"
            )

    def __str__(self) -> str:
        commit = self.manifest.commit
        return (
            f"commit {commit.number} (step {commit.step:,}) of table {self.manifest.table_id} with "
            f"fields {', '.join(self.fields)}, codec {self.codec}, bitround {self.bitround}, dtype "
            f"{self.dtype}, chunk_rows {self.chunk_rows:,}"
        )


def plan_rows(manifest: Manifest, dtype: str, chunk_rows: int | None) -> tuple[int, int]:
    """Choose rows of a chunk and of a shard: about 256 KiB and at most 32 MiB of weights.

    Args:
        manifest: of the table.
        dtype: of the archive.
        chunk_rows: rows of a chunk, or None to choose.
    """
    rows, row_bytes = manifest.num_embeddings, manifest.embedding_dim * np.dtype(dtype).itemsize
    if chunk_rows is None:
        fitting = max(_CHUNK_BYTES // row_bytes, 1)
        chunk_rows = 1 << (min(fitting, rows).bit_length() - 1)
    chunk_rows = min(chunk_rows, rows)
    most = max(_SHARD_BYTES // row_bytes, 1)
    even = -(-rows // -(-rows // most))  # shards of one size, so that the last is not mostly empty
    unit = chunk_rows * _MORE_ROWS
    return chunk_rows, -(-even // unit) * unit


def group_metadata(description: ArchiveDescription) -> bytes:
    """The ``zarr.json`` of an archive's group."""
    value = {
        "zarr_format": 3,
        "node_type": "group",
        "attributes": {ARCHIVE: description.to_json()},
    }
    return json.dumps(value, indent=1).encode()


def shard_name(field_shape: tuple[int, ...], index: int) -> str:
    return f"c.{index}" + ".0" * (len(field_shape) - 1)


class ShardEncoder:
    """Encodes the shards of an archive in memory.

    Args:
        description: of the archive.
    """

    def __init__(self, description: ArchiveDescription) -> None:
        self._description = description
        self._memory: dict[str, Any] = {}
        store = zarr.storage.MemoryStore(self._memory)
        self._arrays = {name: self._create(store, name) for name in description.fields}
        self.metadata = {
            name: self._memory.pop(f"{name}/zarr.json").to_bytes() for name in self._arrays
        }

    def _create(self, store: Any, name: str) -> Any:
        description = self._description
        shape, element = description.shape(name), description.element(name)
        columns = shape[1:]
        more = 1 if columns else _MORE_ROWS
        return zarr.create_array(
            store=store,
            name=name,
            shape=shape,
            chunks=(description.chunk_rows * more, *columns),
            shards=(description.shard_rows, *columns),
            dtype=element,
            compressors=[*_compressors(description.codec, element), Crc32cCodec()],
            filters=None,
            fill_value=0,
            chunk_key_encoding=_KEYS,
            dimension_names=("row", "column")[: len(shape)],
            # So that all files are there, and one that is missing is no zeros.
            config={"write_empty_chunks": True},
            zarr_format=3,
        )

    def encode(self, name: str, index: int, rows: np.ndarray) -> bytes:
        """A shard's bytes.

        Args:
            name: the field.
            index: which shard.
            rows: all of its rows, ``(n, columns)`` or ``(n,)``.
        """
        start = index * self._description.shard_rows
        self._arrays[name][start : start + len(rows)] = rows
        key = f"{name}/{shard_name(rows.shape, index)}"
        data: bytes = self._memory.pop(key).to_bytes()
        return data


def _compressors(codec: str, element: np.dtype) -> list[Any]:
    size = element.itemsize
    if codec == "zstd":
        # Bits of one kind side by side: rounded floats take a quarter less than without.
        return [BloscCodec(cname="zstd", clevel=3, shuffle="bitshuffle", typesize=size)]
    if codec == "blosc-lz4":
        return [BloscCodec(cname="lz4", clevel=5, shuffle="shuffle", typesize=size)]
    return []


class StoredField:
    """A field of an archive, read by slices or by ascending rows.

    Args:
        folder: of its zarr array.

    Raises:
        FormatError: zarr cannot read it.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        try:
            self._array: Any = zarr.open_array(folder, mode="r", zarr_format=3)
        except (TypeError, ValueError, KeyError) as error:
            raise FormatError(f"{folder / 'zarr.json'} is damaged: {error}") from error
        self.shape, self.dtype = self._array.shape, self._array.dtype

    def __getitem__(self, rows: slice | np.ndarray) -> np.ndarray:
        """Rows as they are in the archive.

        Raises:
            CorruptStoreError: a chunk fails its checksum.
        """
        try:
            found: np.ndarray = self._array.oindex[rows]
        except ValueError as error:
            raise CorruptStoreError(f"{self._folder} is damaged: {error}") from error
        return found


@dataclass(frozen=True)
class Archive:
    """An archive that is open to read.

    Args:
        path: the folder, or the safetensors file.
        description: what it says of itself.
        arrays: field to what gives its rows by slices.
    """

    path: Path
    description: ArchiveDescription
    arrays: Mapping[str, Any]


def find(path: Path) -> tuple[str, ArchiveDescription | None]:
    """What is at a path: ``"nothing"``, something ``"foreign"``, or an archive's description.

    Returns:
        One of these, ``"unfinished"`` or ``"finished"``, and the description of these two.

    Raises:
        FormatError: the description is damaged.
    """
    if not path.exists():
        return "nothing", None
    if not path.is_dir():
        return "foreign", None
    for file, state in (("zarr.json", "finished"), (UNFINISHED, "unfinished")):
        if (path / file).is_file():
            found = _describe(path / file)
            return ("foreign", None) if found is None else (state, found)
    # What a kill leaves ahead of the first name.
    left = [entry.name for entry in os.scandir(path) if entry.name != f"{UNFINISHED}.tmp"]
    return ("foreign" if left else "nothing"), None


def _describe(file: Path) -> ArchiveDescription | None:
    """The description in a group's metadata; None where it is no archive."""
    try:
        value = json_object(file.read_bytes())["attributes"][ARCHIVE]
    except (KeyError, TypeError, ValueError):
        return None
    try:
        return ArchiveDescription.from_json(value)
    except FormatError as error:
        raise FormatError(f"{file}: {error}") from error


def open_archive(path: Path, needed: Sequence[str] = ()) -> Archive:
    """Open an archive to read.

    Args:
        path: the folder.
        needed: fields that it must have.

    Raises:
        FileNotFoundError: there is nothing.
        FormatError: it is no archive, or an unfinished one, or lacks a field; or its metadata
            contradict each other.
        CorruptStoreError: a file is missing.
    """
    state, description = find(path)
    if state == "nothing":
        raise FileNotFoundError(f"{path} does not exist: `ooc-embed export` makes an archive")
    if state == "unfinished":
        raise FormatError(
            f"{path} is an unfinished export of {description}: the same `ooc-embed export` again "
            f"goes on with it"
        )
    if description is None:
        raise FormatError(f"{path} is no archive that `ooc-embed export` made")
    if lacking := [name for name in needed if name not in description.fields]:
        raise FormatError(f"{path} has {', '.join(description.fields)}, and no {lacking[0]}")
    arrays = {}
    for name in description.fields:
        _check_metadata(path / name, description)
        _check_files(path / name, description)
        arrays[name] = StoredField(path / name)
    return Archive(path, description, arrays)


def _check_metadata(folder: Path, description: ArchiveDescription) -> None:
    """See that an array has its rows where `_check_files` looks for them, and of their type.

    Others would be zeros to zarr, without an error.
    """
    shape = description.shape(folder.name)
    grid = {"chunk_shape": [description.shard_rows, *shape[1:]]}
    wanted = {
        "shape": list(shape),
        "data_type": description.element(folder.name).name,
        "chunk_grid": {"name": "regular", "configuration": grid},
        "chunk_key_encoding": _KEYS,
    }
    metadata = read_metadata(folder)
    for key, value in wanted.items():
        if (found := metadata.get(key)) != value:
            raise FormatError(
                f"{folder / 'zarr.json'} has {key} {found!r:.200}, the archive's description asks "
                f"for {value!r}"
            )


def _check_files(folder: Path, description: ArchiveDescription) -> None:
    shape = description.shape(folder.name)
    files = [entry.name for entry in os.scandir(folder) if entry.is_file()]
    present = {chunk_index(name, len(shape)) for name in files}
    for index in range(description.num_shards):
        if index not in present:
            raise CorruptStoreError(
                f"{folder / shard_name(shape, index)} is missing: export the table again, or put "
                f"the file back from a copy"
            )
