"""The zarr arrays of a store: their metadata and creation. Knows zarr; knows no rows.

The only importer of zarr beside `archive`. It describes the arrays in memory: files are written as
all others of a store, here and when a table grows.
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
from .parsing import json_object

_GROUPS = ("log", "log/0", "log/1")
# All files of a new store but its manifest.
METADATA = (
    *(f"{name}/zarr.json" for name in ("table", "column", *_GROUPS)),
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


def _fill_value(name: str) -> int:
    return -1 if name.endswith("rows") else 0


def _dimension_names(name: str) -> tuple[str, ...]:
    if name.endswith("rows"):
        return ("position",)
    return ("row" if name == "table" else "position", "column")


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
    for name in _GROUPS:
        zarr.create_group(store=store, path=name, zarr_format=3)
    for name, (shape, chunks, dtype) in _array_shapes(layout).items():
        zarr.create_array(
            store=store,
            name=name,
            shape=shape,
            chunks=chunks,
            dtype=dtype,
            compressors=None,
            filters=None,
            fill_value=_fill_value(name),
            chunk_key_encoding={"name": "default", "separator": "."},
            dimension_names=_dimension_names(name),
            zarr_format=3,
        )
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
    names = [name for name, width in manifest.fields.items() for _ in range(width)]
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


def check_metadata(path: Path, facts: dict[str, dict[str, Any]]) -> None:
    """See that the metadata of arrays and groups say what they must.

    Args:
        path: the store.
        facts: name to what must be there.

    Raises:
        FormatError: both values are named.
    """
    for name, wanted in facts.items():
        found = read_metadata(path / name)
        for key, value in wanted.items():
            # A table that was about to grow, or went back to fewer rows, has longer arrays.
            if key == "shape" and name != "column" and _is_longer(found.get(key), value):
                continue
            if found.get(key) != value:
                raise FormatError(
                    f"{path / name / 'zarr.json'} has {key} {found.get(key)!r:.200}, the manifest "
                    f"asks for {value!r}"
                )


def _is_longer(found: Any, shape: list[int]) -> bool:
    """Whether an array's shape differs from what it must be at least by its length alone."""
    return (
        isinstance(found, list)
        and len(found) == len(shape)
        and found[1:] == shape[1:]
        and type(found[0]) is int
        and found[0] > shape[0]
    )


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


def damage_for_others(path: Path, manifest: Manifest, layout: Layout) -> list[str]:
    """What is wrong with what other zarr readers need, and this package does not, a line each."""
    group = {"zarr_format": 3, "node_type": "group"}
    column = {
        "zarr_format": 3,
        "node_type": "array",
        "shape": [layout.width],
        "data_type": "string",
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [layout.width]}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "codecs": [{"name": "vlen-utf8", "configuration": {}}],
        "dimension_names": ["column"],
    }
    of_arrays = {
        name: {
            "fill_value": _fill_value(name),
            "dimension_names": list(_dimension_names(name)),
        }
        for name in _array_shapes(layout)
    }
    wanted = {"": group, **dict.fromkeys(_GROUPS, group), "column": column, **of_arrays}
    problems = []
    for name, facts in wanted.items():
        try:
            check_metadata(path, {name: facts})
        except FormatError as error:
            problems.append(str(error))
    file = path / "column" / "c" / "0"
    try:
        found = file.read_bytes()
    except OSError as error:
        return [*problems, f"{file} cannot be read: {error}"]
    if found != _described(manifest, layout)["column/c/0"].to_bytes():
        problems.append(f"{file} does not name the columns of {', '.join(manifest.fields)}")
    return problems


def read_metadata(folder: Path) -> dict[str, Any]:
    path = folder / "zarr.json"
    try:
        return json_object(path.read_bytes())
    except (OSError, ValueError) as error:
        raise FormatError(f"{path} cannot be read: {error}") from error


def open_arrays(folder: Path) -> dict[str, Any]:
    """The arrays of any zarr group, or a zarr array under the name ``""``, to read.

    Raises:
        ValueError: there is neither, or an array whose chunks are pickled: to read them would run
            whatever code they name.
    """
    try:
        found = zarr.open(folder, mode="r")
    except FileNotFoundError:
        raise ValueError(f"{folder} is a folder, and no zarr array or group") from None
    arrays = {"": found} if isinstance(found, zarr.Array) else dict(found.arrays())
    for name, array in arrays.items():
        codecs = (*array.filters, *array.compressors)
        if any(getattr(codec, "codec_id", None) == "pickle" for codec in codecs):
            raise ValueError(f"{folder / name} holds pickled objects, which are not read")
    return arrays
