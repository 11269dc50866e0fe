"""The zarr arrays of a store: their metadata and creation. Knows zarr; knows no rows.

The only importer of zarr, which describes the arrays in memory: files are written as all others of
a store, here and when a table grows.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import zarr

from . import durable
from .errors import FormatError
from .manifest import Layout, Manifest

# All files of a new store but its manifest.
METADATA = (
    *(f"{name}/zarr.json" for name in ("table", "column", "log", "log/0", "log/1")),
    *(f"log/{number}/{name}/zarr.json" for number in "01" for name in ("rows", "records")),
    "column/c/0",
)


def _array_shapes(layout: Layout) -> dict[str, tuple[tuple[int, ...], tuple[int, ...], str]]:
    """Name to (shape, chunks, dtype) of each array but ``column``."""
    dtype, log = layout.dtype.str, layout.log
    shapes: dict[str, tuple[tuple[int, ...], tuple[int, ...], str]] = {
        "table": (
            (layout.num_embeddings, layout.width),
            (layout.chunk_rows, layout.width),
            dtype,
        )
    }
    for number in "01":
        shapes[f"log/{number}/rows"] = ((log.capacity,), (log.rows_per_file,), "<i8")
        shapes[f"log/{number}/records"] = (
            (log.capacity, log.width),
            (log.records_per_file, log.width),
            dtype,
        )
    return shapes


def make_arrays(path: Path, manifest: Manifest, layout: Layout) -> None:
    """Write the metadata of all arrays, and the names of the table's columns."""
    described = _described(manifest, layout)
    for name in METADATA:
        target = path / name
        durable.make_directory(target.parent)
        data = described[name].to_bytes()
        durable.replace(target, data, durable.temporary_for(target))


def _described(manifest: Manifest, layout: Layout) -> dict[str, Any]:
    """What zarr makes of it: keys of a store to buffers of bytes."""
    memory: dict[str, Any] = {}
    store = zarr.storage.MemoryStore(memory)
    for name in ("log", "log/0", "log/1"):
        zarr.create_group(store=store, path=name, zarr_format=3)
    dimensions = {"table": ("row", "column"), "rows": ("position",)}
    for name, (shape, chunks, dtype) in _array_shapes(layout).items():
        kind = name.rsplit("/", 1)[-1]
        zarr.create_array(
            store=store,
            name=name,
            shape=shape,
            chunks=chunks,
            dtype=dtype,
            compressors=None,
            filters=None,
            fill_value=-1 if kind == "rows" else 0,
            chunk_key_encoding={"name": "default", "separator": "."},
            dimension_names=dimensions.get(kind, ("position", "column")),
            zarr_format=3,
        )
    names = [name for name, width in manifest.fields.items() for _ in range(width)]
    column = zarr.create_array(
        store=store,
        name="column",
        shape=(layout.width,),
        chunks=(layout.width,),
        dtype="str",
        compressors=None,
        dimension_names=("column",),
        zarr_format=3,
    )
    column[:] = np.array(names, dtype=np.dtypes.StringDType())
    return memory


def lengthen(path: Path, layout: Layout) -> None:
    """Give the arrays the layout's lengths, the table first; one that is longer stays as it is.

    Each step is durable, and a store may have longer arrays than its manifest asks for.
    """
    for name, (shape, _, _) in _array_shapes(layout).items():
        metadata = read_metadata(path / name)
        if metadata["shape"][0] < shape[0]:
            metadata["shape"][0] = shape[0]
            target = path / name / "zarr.json"
            data = json.dumps(metadata, indent=1).encode()
            durable.replace(target, data, durable.temporary_for(target))
            durable.sync_directory(path / name)


def array_facts(layout: Layout) -> dict[str, dict[str, Any]]:
    """What the metadata of each array must say, so that rows are where we look for them."""
    return {
        name: {
            "zarr_format": 3,
            "node_type": "array",
            "shape": list(shape),
            "data_type": np.dtype(dtype).name,
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(chunks)}},
            "chunk_key_encoding": {"name": "default", "configuration": {"separator": "."}},
            "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}],
        }
        for name, (shape, chunks, dtype) in _array_shapes(layout).items()
    }


def read_metadata(folder: Path) -> dict[str, Any]:
    path = folder / "zarr.json"
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise FormatError(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise FormatError(f"{path} holds {value!r}")
    return value


def open_arrays(folder: Path) -> dict[str, Any]:
    """The arrays of any zarr group, or a zarr array under the name ``""``, to read.

    Raises:
        ValueError: there is neither.
    """
    try:
        found = zarr.open(folder, mode="r")
    except FileNotFoundError:
        raise ValueError(f"{folder} is a folder, and no zarr array or group") from None
    if isinstance(found, zarr.Array):
        return {"": found}
    return dict(found.arrays())
