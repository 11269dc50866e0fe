"""The store on disk: layout, manifest, creation, validation, lock and the commit's rename.

Knows files and metadata; does not know which row is where.
"""

from __future__ import annotations

import errno
import json
import os
import zlib
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from . import claim, durable
from .archive import ARCHIVE
from .arrays import array_facts, check_metadata, lengthen, make_arrays, read_metadata
from .disk_facts import free_bytes, warn_of_network
from .errors import CorruptStoreError, FormatError
from .lock import DirectoryLock, lock_holder
from .log import ALIGNMENT
from .manifest import ATTRIBUTE, Layout, Manifest
from .parsing import chunk_index, integer, json_object
from .warning import warn

# Each is mapped, and a process may have 65,530 maps on most systems.
_MOST_FILES = 32_768


class Store:
    """An open store. One writer at a time; readers take no lock.

    Attributes:
        path: the folder.
        manifest: the newest state that this object read or wrote.
        layout: sizes.
        writable: opened with ``"r+"`` or created.
        pinned: of a reader, whether it was asked for one commit by its number.
    """

    def __init__(self, path: Path, lock: DirectoryLock | None, commit: int | None = None) -> None:
        self.path = path
        self.pinned = commit is not None
        self._lock = lock
        # Whether the name of the manifest is known to be durable.
        self._synced = False
        self._found, self._written = self._read()
        self.manifest = self._found
        if commit is not None:
            history = self._found.history
            history = history.until(history.find(commit, path))
            self.manifest = replace(self._found, history=history)
        self.layout = self._read_layout()

    @property
    def writable(self) -> bool:
        return self._lock is not None

    @classmethod
    def create(
        cls,
        path: Path,
        manifest: Manifest,
        chunk_rows: int | None,
        rows: Callable[[Layout], Iterable[np.ndarray | None]] | None,
        *,
        overwrite: bool,
        finish: Callable[[Manifest], Manifest] = lambda manifest: manifest,
    ) -> Store:
        """Make a store, in a folder that does not exist yet or holds an unfinished creation.

        Args:
            path: the folder.
            manifest: its first state.
            chunk_rows: rows in a chunk file, or None to choose.
            rows: gives the content of every chunk file in order, ``(chunk_rows, W)`` each, or None
                where there is to be no file; None: there is to be none at all.
            overwrite: replace a store that is there.
            finish: what becomes of the manifest once all of them are written.

        Raises:
            ValueError: a table of that size cannot be mapped.
            FileExistsError: something is there.
            LockedError: a store is there and somebody writes to it.
            OSError: the disk is full, or failed.
        """
        claim.check_free(path, overwrite=overwrite)
        layout = Layout.plan(
            manifest.num_embeddings, manifest.width, manifest.numpy_dtype, chunk_rows
        )
        layout.check()
        _warn_if_short_of_space(path, layout)
        warn_of_network(path)

        def make(lock: DirectoryLock) -> Store:
            make_arrays(path, manifest, layout)
            checksums = {}
            for index, chunk in enumerate(rows(layout) if rows else ()):
                if chunk is not None:
                    checksums[index] = _write_chunk(path, index, chunk)
            durable.sync_tree(path)
            made = finish(replace(manifest, checksums=checksums))
            _rename_manifest(path, _metadata({}, made))
            durable.sync_directory(path)
            return cls(path, lock)

        return claim.claim(path, make, overwrite=overwrite)

    @classmethod
    def open(cls, path: Path, mode: str, commit: int | None = None) -> Store:
        """Open a store to write (``"r+"``) or to read (``"r"``).

        Args:
            path: the folder.
            mode: how.
            commit: of a reader, the number of the commit to read; None is the newest.

        Raises:
            ValueError: another mode.
            FileNotFoundError: there is nothing.
            FormatError: there is something else.
            LockedError: another writer has it open.
            PermissionError: it may not be written to.
            StoreError: that commit is not kept.
        """
        if mode not in ("r+", "r"):
            raise ValueError(f"mode must be 'r+' or 'r', got {mode!r}")
        if not path.exists():
            raise FileNotFoundError(f"{path} does not exist: DiskEmbedding(..., path=) creates it")
        if mode == "r":
            claim.check_kinds(path, links=True)
            return cls(path, None, commit)
        if not os.access(path, os.W_OK):
            raise PermissionError(
                errno.EACCES, "it cannot be written to: open it with mode='r'", str(path)
            )
        warn_of_network(path)
        lock = DirectoryLock(path, claim.holder_file(path))
        try:
            claim.check_kinds(path, links=False)
            return cls(path, lock)
        except BaseException:
            lock.close()
            raise

    def log_folder(self, generation: int) -> Path:
        return self.path / "log" / str(generation % 2)

    def chunk_path(self, index: int) -> Path:
        return _chunk_path(self.path, index)

    def reread(self) -> Manifest:
        """The manifest as it is on disk now."""
        return self._read()[0]

    def read_chunk(self, index: int, buffer: np.ndarray) -> None:
        """Read a chunk file into ``(chunk_bytes,) uint8``, best whole pages.

        Raises:
            CorruptStoreError: it is missing, or has another size.
            OSError: the disk cannot read it.
        """
        self.check_chunk_size(index)
        durable.read_file(self.chunk_path(index), buffer)

    def name_holder(self) -> None:
        """Say in the error of a second writer who has the store."""
        if self._lock is not None:
            self._lock.name_holder()

    def has_changed(self) -> bool:
        """Whether files of the commit that this object read may be others by now."""
        found, known = self.reread(), self._found
        if known is not self.manifest and self.manifest.commit.number not in found.history:
            return True
        return found.table_id != known.table_id or [
            log.generation for log in found.commit.logs
        ] != [log.generation for log in known.commit.logs]

    def write_chunk(self, index: int, chunk: np.ndarray) -> int:
        """Replace a chunk file by ``(chunk_rows, W)`` rows; return its checksum."""
        return _write_chunk(self.path, index, chunk)

    def sync_table(self) -> None:
        """Make the names of chunk files durable."""
        durable.sync_directory(self.path / "table")

    def write_manifest(self, manifest: Manifest) -> None:
        """Replace ``zarr.json``: the instant of a commit.

        Attributes that others put beside the manifest are kept. An older manifest that somebody put
        back is replaced, with a warning.
        """
        data = _metadata(self._foreign_attributes(), manifest)
        _rename_manifest(self.path, data)
        # From here on this is the state, though a power cut could still undo it.
        self._written, self._found, self.manifest = data, manifest, manifest
        self.layout = self._layout_of(manifest.num_embeddings)
        self._synced = False
        self.sync()

    def sync(self) -> None:
        """Make the newest manifest durable, where an earlier call failed to, or a kill came first.

        Before that nothing may be deleted that the one before it names.
        """
        if not self._synced:
            durable.sync_directory(self.path)
            self._synced = True

    def name_copy(self, path: Path) -> None:
        """Write the manifest into a copy of the files: that makes it a store."""
        _rename_manifest(path, _metadata(self._foreign_attributes(), self.manifest))
        durable.sync_directory(path)

    def grown(self, num_embeddings: int) -> Layout:
        """The layout with more rows; fewer are refused, and more than its files are good for.

        Raises:
            ValueError: both numbers are named.
        """
        rows, layout = self.manifest.num_embeddings, self._layout_of(num_embeddings)
        if num_embeddings < rows:
            raise ValueError(f"a table of {rows:,} rows cannot shrink to {num_embeddings:,}")
        if layout.num_files > _MOST_FILES:
            raise ValueError(
                f"{num_embeddings:,} rows would make up to {layout.num_files:,} files of "
                f"{layout.chunk_rows:,} rows each, {_MOST_FILES:,} are possible: make a new table "
                f"of that size, which has larger ones, and copy the rows"
            )
        layout.check()
        return layout

    def resize(self, manifest: Manifest) -> None:
        """Replace ``zarr.json`` by a manifest with another number of rows; arrays grow before."""
        lengthen(self.path, self._layout_of(manifest.num_embeddings))
        self.write_manifest(manifest)

    def _layout_of(self, num_embeddings: int) -> Layout:
        """The sizes with another number of rows, in files of the same size."""
        return replace(self.layout, num_embeddings=num_embeddings)

    def drop_leftovers(self) -> None:
        """Unlink temporary files of a killed writer, and chunk files it never came to name."""
        folder = self.path / "table"
        durable.remove_temporaries(folder)
        if self.manifest.commit.sealed is None:
            for index in set(chunk_files(self.path)) - set(self.manifest.checksums):
                durable.remove(self.chunk_path(index))

    def close(self) -> None:
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def _foreign_attributes(self) -> dict[str, Any]:
        path = self.path / "zarr.json"
        try:
            found = path.read_bytes()
            attributes = dict(json_object(found)["attributes"])
        except (OSError, ValueError, KeyError, TypeError):
            warn(f"{path} was damaged since the last commit: replaced")
            return {}
        written = json.loads(self._written)["attributes"][ATTRIBUTE]
        if found != self._written and attributes.get(ATTRIBUTE) != written:
            warn(f"{path} held another state than the last commit wrote: replaced")
        attributes.pop(ATTRIBUTE, None)
        return attributes

    def _read(self) -> tuple[Manifest, bytes]:
        path = self.path / "zarr.json"
        try:
            data = path.read_bytes()
            attributes = json_object(data)["attributes"]
            if ATTRIBUTE not in attributes and ARCHIVE in attributes:
                raise FormatError(
                    f"{self.path} is an archive, which `ooc-embed import` makes a store of, and "
                    f"ooc_embed.ArchiveEmbedding(path) reads as it is"
                )
            value = attributes[ATTRIBUTE]
        except (FileNotFoundError, NotADirectoryError):
            raise FormatError(f"{path} is missing: no store, or an unfinished creation") from None
        except (ValueError, KeyError, TypeError) as error:
            raise FormatError(f"{path} holds no ooc_embed manifest: no store") from error
        try:
            return Manifest.from_json(value), data
        except FormatError as error:
            raise FormatError(f"{path}: {error}") from error

    def _read_layout(self) -> Layout:
        manifest = self.manifest
        of_table = _rows_per_file(self.path / "table")
        of_ids = _rows_per_file(self.path / "log" / "0" / "rows")
        layout = Layout(
            manifest.num_embeddings, manifest.width, manifest.numpy_dtype, of_table, of_ids
        )
        try:
            layout.check()
        except ValueError as error:
            raise FormatError(f"{self.path / 'zarr.json'}: {error}") from error
        check_metadata(self.path, array_facts(layout))
        if any(log.records > layout.log.capacity for log in manifest.commit.logs):
            raise FormatError(f"{self.path}: a log of the manifest is longer than its array")
        if any(index >= layout.num_chunks for index in manifest.checksums | manifest.merged):
            raise FormatError(f"{self.path}: the manifest names a chunk behind the table's end")
        return layout

    def check_chunk_sizes(self) -> None:
        """Check that every chunk file of the manifest is there, and whole.

        Not those that a merge has brought into being so far: their rows are in its log, too.

        Raises:
            CorruptStoreError: one is not; the message names it.
        """
        for index in self.manifest.checksums:
            self.check_chunk_size(index)

    def check_chunk_size(self, index: int) -> None:
        """Check that a chunk file is there, and whole.

        Raises:
            CorruptStoreError: it is not; the message names it and its rows.
        """
        path, rows = self.chunk_path(index), self.layout.rows_of(index)
        try:
            size = os.stat(path).st_size
        except FileNotFoundError:
            raise CorruptStoreError(
                f"{path} is missing; the manifest says that it was written ({rows})"
            ) from None
        if size != self.layout.chunk_bytes:
            raise CorruptStoreError(
                f"{path} has {size:,} bytes, {self.layout.chunk_bytes:,} expected ({rows})"
            )


def chunk_files(path: Path) -> list[int]:
    """Which chunk files of the table exist."""
    indices = (chunk_index(entry.name, 2) for entry in os.scandir(path / "table"))
    return sorted(index for index in indices if index >= 0)


def holder(path: Path) -> str | None:
    """Who has the store open for writing, in words, or None."""
    return lock_holder(path, claim.holder_file(path))


def _rows_per_file(folder: Path) -> int:
    try:
        grid = read_metadata(folder)["chunk_grid"]
        rows = integer(grid["configuration"]["chunk_shape"][0])
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise FormatError(f"{folder / 'zarr.json'} is damaged: {error!r}") from error
    if rows < 1 or rows % ALIGNMENT:
        raise FormatError(
            f"{folder / 'zarr.json'} has chunks of {rows} rows, no multiple of {ALIGNMENT}"
        )
    return rows


def _chunk_path(path: Path, index: int) -> Path:
    return path / "table" / f"c.{index}.0"


def _write_chunk(path: Path, index: int, chunk: np.ndarray) -> int:
    data = chunk.reshape(-1).view(np.uint8)
    crc = zlib.crc32(data.data)
    durable.write_file(_chunk_path(path, index), data)
    return crc


def _metadata(attributes: dict[str, Any], manifest: Manifest) -> bytes:
    value = {
        "zarr_format": 3,
        "node_type": "group",
        "attributes": {**attributes, ATTRIBUTE: manifest.to_json()},
    }
    # Others may have put NaN beside the manifest, which holds none.
    return json.dumps(value, indent=1).encode()


def _rename_manifest(path: Path, data: bytes) -> None:
    # The temporary file lies inside an array's folder: zarr warns about strangers in a group.
    durable.replace(path / "zarr.json", data, path / "table" / f"zarr.json{durable.TEMPORARY}")


def _warn_if_short_of_space(path: Path, layout: Layout) -> None:
    table = layout.table_bytes
    log = 2 * layout.log_limit * layout.record_bytes
    free = free_bytes(path)
    if free < table + log:
        warn(
            f"{path}: once all rows are trained the table takes {table / 1e9:.1f} GB and its logs "
            f"up to {log / 1e9:.1f} GB, the disk has {free / 1e9:.1f} GB free"
        )
