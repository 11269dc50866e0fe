"""Writes a table's rows as an archive, a file of one kind, or a frozen store. Knows commits, rows
and how they are rounded; does not know how they are encoded.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from numcodecs.bitround import BitRound

from . import archive, archive_folder, creation, single_file
from .archive import CODECS, DTYPES, ArchiveDescription
from .history import History
from .layer import DiskLayer
from .log import LogState
from .manifest import VERSION_FIELD
from .progress import progress
from .rules import Frozen
from .table import Table

# Rows whose whole records are in memory at once.
_BLOCK_ROWS = 1 << 13
SINGLE_SUFFIXES = (".npy", ".safetensors")


def export_table(
    store: str | Path | DiskLayer,
    out: str | Path,
    *,
    fields: str | Sequence[str] = ("weight",),
    codec: str = "zstd",
    bitround: int | None = None,
    dtype: torch.dtype | None = None,
    chunk_rows: int | None = None,
    commit: int | None = None,
    overwrite: bool = False,
) -> None:
    """Write one commit of a table for other readers, rows in order, all with their values.

    ``out`` becomes a zarr group with a compressed array for each field; or, by its ending, a
    ``.safetensors`` file, whose tensors are the fields, or a ``.npy`` file of one field. ``weight``
    is ``(N, D)``, ``version`` ``(N,) int64``, and another field of one column ``(N,)``.

    A zarr group that was not finished, because the process was killed or the disk was full, is no
    group yet, and the same call goes on with it. A file is there whole or not at all.

    Args:
        store: a store's folder; or an open layer: a reader's commit, or what a writer commits now.
        out: where to write.
        fields: names, or ``"all"``, which `import_table` needs to resume training.
        codec: of a zarr group: ``"zstd"`` or ``"blosc-lz4"``, both in Blosc's container, with bits
            or bytes shuffled; or ``"none"``.
        bitround: bits of the mantissa to keep of each float: the others become 0, and compress.
        dtype: ``torch.float16``, ``float32`` or ``float64``, not wider than the table's, which is
            the default.
        chunk_rows: rows that are compressed, and read, together; None chooses about 256 KiB.
        commit: the number of an earlier commit of a store's folder that is kept.
        overwrite: replace an archive or a file that is at ``out``.

    Raises:
        ValueError, TypeError: an argument is wrong; nothing is written.
        OverflowError: a number is too large for ``dtype``; nothing is left at ``out``.
        FileExistsError: something is at ``out``, such as an unfinished export of something else.
        LockedError: another process writes this archive or file.
        OSError: the disk is full, or failed.
    """
    out = Path(out).absolute()
    with _reader(store, commit) as table:
        _check_beside(table, out)
        single = out.suffix in SINGLE_SUFFIXES
        described = _describe(table, fields, codec, bitround, dtype, chunk_rows, single=single)
        rows = _Rows(table, described)
        if single:
            single_file.write(out, described, rows.blocks, overwrite=overwrite)
        else:
            archive_folder.write(out, described, rows.shard, overwrite=overwrite)


def freeze_table(
    store: str | Path | DiskLayer,
    path: str | Path,
    *,
    dtype: torch.dtype | None = None,
    commit: int | None = None,
    overwrite: bool = False,
    chunk_rows: int | None = None,
) -> None:
    """Make a store of the weights alone, to be served: a third of the size, with Adam.

    ``DiskEmbedding.open(path, mode="r")`` and ``DiskEmbeddingBag.open`` read it as any store.
    It has no optimizer, and cannot be opened to write.

    Args:
        store, commit: as of `export_table`.
        path: the folder of the new store.
        dtype: ``torch.float32`` or ``float64``; the table's if not given.
        overwrite, chunk_rows: as of `DiskEmbedding`.

    Raises:
        ValueError, TypeError: an argument is wrong; nothing is written.
        OverflowError: a weight is too large for ``dtype``; nothing is left at ``path``.
        FileExistsError: something is at ``path``.
        OSError: the disk is full, or failed; nothing is left at ``path``.
    """
    path = Path(path).absolute()
    with _reader(store, commit) as table:
        _check_beside(table, path)
        manifest = table.manifest
        dtype = table.dtype if dtype is None else dtype
        weights = _Weights(table, creation.dtype_name(dtype))
        creation.create_table(
            path,
            (manifest.num_embeddings, manifest.embedding_dim),
            manifest.module,
            padding_idx=manifest.padding_idx,
            rule=Frozen(),
            group_options={},
            init=weights,
            seed=manifest.seed,
            dtype=dtype,
            cache_bytes=1,
            chunk_rows=chunk_rows,
            overwrite=overwrite,
            step=manifest.commit.step,
        ).close()


def _check_beside(table: Table, out: Path) -> None:
    if out.resolve().is_relative_to(table.store.path.resolve()):
        raise ValueError(f"{out} is the store or inside of it: choose a path beside it")


@contextmanager
def _reader(store: str | Path | DiskLayer, commit: int | None) -> Iterator[Table]:
    """A table that stays at one commit."""
    if commit is not None:
        creation.check_integer("commit", commit)
    if isinstance(store, DiskLayer):
        if commit is not None:
            raise ValueError("an open layer is at a commit: give its path to choose another one")
        if store.read_only:
            yield store.optimizer.table
            return
        commit = store.commit()
        store = store.path
    if not isinstance(store, (str, os.PathLike)):
        raise TypeError(f"the table is the path of a store or an open layer, got {store!r:.200}")
    table = Table.open(Path(store).absolute(), "r", "auto", commit)
    try:
        yield table
    finally:
        table.close()


def _describe(
    table: Table,
    fields: str | Sequence[str],
    codec: str,
    bitround: int | None,
    dtype: torch.dtype | None,
    chunk_rows: int | None,
    *,
    single: bool,
) -> ArchiveDescription:
    """The description of an archive that these arguments ask for.

    Raises:
        ValueError, TypeError: one is wrong.
    """
    manifest = table.manifest
    commit = manifest.commit
    if codec not in CODECS:
        raise ValueError(f"codec must be one of {', '.join(CODECS)}, got {codec!r}")
    name = _dtype_name(table, dtype)
    if bitround is not None:
        creation.check_integer("bitround", bitround)
        bits = np.finfo(name).nmant
        if not 1 <= bitround <= bits:
            raise ValueError(f"bitround must be from 1 to {bits} for {name}, got {bitround}")
        bitround = int(bitround)
    if chunk_rows is not None:
        creation.check_count("chunk_rows", chunk_rows)
        chunk_rows = int(chunk_rows)
    rows_of_chunk, rows_of_shard = archive.plan_rows(manifest, name, chunk_rows)
    alone = History((replace(commit, logs=(LogState(0),)),))
    return ArchiveDescription(
        manifest=replace(manifest, history=alone, checksums={}, merged={}),
        branch=manifest.history.branch_of(commit.number),
        fields=_field_names(list(manifest.fields), fields),
        codec="none" if single else codec,
        bitround=bitround,
        dtype=name,
        chunk_rows=rows_of_chunk,
        shard_rows=rows_of_shard,
    )


def _dtype_name(table: Table, dtype: torch.dtype | None) -> str:
    dtype = table.dtype if dtype is None else dtype
    name = {f"torch.{name}": name for name in DTYPES}.get(str(dtype))
    if name is None or dtype.itemsize > table.dtype.itemsize:
        raise ValueError(
            f"dtype must be one of {', '.join(f'torch.{name}' for name in DTYPES)} and not wider "
            f"than the table's {table.dtype}, got {dtype!r}"
        )
    return name


def _field_names(known: list[str], fields: str | Sequence[str]) -> tuple[str, ...]:
    """The chosen fields, in the record's order."""
    if fields == "all":
        return tuple(known)
    chosen = [fields] if isinstance(fields, str) else list(fields)
    if not chosen or not set(chosen) <= set(known):
        raise ValueError(f"fields must be some of {', '.join(known)}, or 'all', got {fields!r}")
    return tuple(name for name in known if name in chosen)


class _Rows:
    """A table's rows as an archive has them.

    Args:
        table: whose.
        description: which fields, and how they are rounded.
    """

    def __init__(self, table: Table, description: ArchiveDescription) -> None:
        self._table = table
        self._description = description
        self._round = _rounding(description)

    def shard(self, index: int, fields: Sequence[str]) -> dict[str, np.ndarray]:
        """All rows of a shard, of these fields."""
        rows = self._description.shard_rows
        start, stop = index * rows, min((index + 1) * rows, self._table.manifest.num_embeddings)
        shapes = {name: (stop - start, *self._description.shape(name)[1:]) for name in fields}
        out = {name: np.empty(shapes[name], self._description.element(name)) for name in fields}
        for first in range(start, stop, _BLOCK_ROWS):
            for name, block in self._block(first, min(first + _BLOCK_ROWS, stop), fields):
                out[name][first - start : first - start + len(block)] = block
        return out

    def blocks(self) -> Iterator[tuple[int, dict[str, np.ndarray]]]:
        """Yield the first row of each block, and its rows of all fields."""
        rows, fields = self._table.manifest.num_embeddings, self._description.fields
        for first in progress(range(0, rows, _BLOCK_ROWS), "exporting rows", "block"):
            yield first, dict(self._block(first, min(first + _BLOCK_ROWS, rows), fields))

    def _block(
        self, start: int, stop: int, fields: Sequence[str]
    ) -> Iterator[tuple[str, np.ndarray]]:
        records = self._table.records(torch.arange(start, stop, device="cpu"))
        for name in fields:
            values = records[:, self._table.spans[name]].numpy()
            values = values.reshape(stop - start, *self._description.shape(name)[1:])
            if name == VERSION_FIELD:
                yield name, values.astype(np.int64)
            else:
                element = self._description.element(name)
                yield name, _narrowed(name, start, values, element, self._round)


def _narrowed(
    name: str,
    start: int,
    values: np.ndarray,
    element: np.dtype,
    rounded: Callable[[np.ndarray], np.ndarray],
) -> np.ndarray:
    """Values of a field, from row ``start`` on, as elements of another type, and rounded.

    Raises:
        OverflowError: one is too large for that.
    """
    with np.errstate(over="ignore"):
        out = rounded(values.astype(element))
    lost = np.isfinite(values) & ~np.isfinite(out)
    if lost.any():
        place = np.unravel_index(int(lost.argmax()), lost.shape)
        raise OverflowError(
            f"{name} of row {start + int(place[0]):,} has {values[place]:.6g}, "
            f"{np.finfo(out.dtype).max:.6g} is the largest {out.dtype}: choose a wider dtype"
        )
    return out


def _rounding(description: ArchiveDescription) -> Callable[[np.ndarray], np.ndarray]:
    """What rounds floats to the bits that are to be kept; infinities and NaN stay."""
    if description.bitround is None:
        return lambda values: values
    codec = BitRound(description.bitround)

    def rounded(values: np.ndarray) -> np.ndarray:
        out = codec.encode(np.ascontiguousarray(values)).view(values.dtype).reshape(values.shape)
        return np.where(np.isfinite(values), out, values)

    return rounded


class _Weights:
    """A table's weights, as an array of another type that gives rows by slices."""

    def __init__(self, table: Table, dtype: str) -> None:
        self._table = table
        self._element = np.dtype(dtype)
        self.shape = (table.manifest.num_embeddings, table.dim)

    def __getitem__(self, rows: slice) -> np.ndarray:
        wanted = torch.arange(*rows.indices(self.shape[0]), device="cpu")
        values = self._table.read(wanted, "weight").numpy()
        return _narrowed("weight", int(wanted[0]), values, self._element, lambda values: values)
