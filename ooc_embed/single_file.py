"""Writes fields into one .npy or .safetensors file. Knows these formats; knows no table.

Formats: ``numpy.lib.format``; https://github.com/huggingface/safetensors#format.
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from . import durable
from .archive import ARCHIVE, ArchiveDescription
from .lock import DirectoryLock

SAFETENSORS_TYPES = {"float16": "F16", "float32": "F32", "float64": "F64", "int64": "I64"}
# Gives the first row of each block, and its rows of all fields.
Blocks = Callable[[], Iterator[tuple[int, dict[str, np.ndarray]]]]


def write(out: Path, description: ArchiveDescription, blocks: Blocks, *, overwrite: bool) -> None:
    """Write all fields, aside first: the file is there whole or not at all.

    It is written in a folder beside it, ``out.tmp``, whose lock another export of it meets.

    Raises:
        ValueError: more than one field for a ``.npy`` file.
        FileExistsError: something is there that is not to be replaced.
        LockedError: another process writes it.
        OSError: the disk is full, or failed.
    """
    if out.suffix == ".npy" and len(description.fields) > 1:
        raise ValueError(
            f"a .npy file holds one array, got fields {', '.join(description.fields)}: choose one "
            f"of them, or a .safetensors file"
        )
    _check(out, overwrite=overwrite)
    header, places = (_npy if out.suffix == ".npy" else _safetensors)(description)
    size = len(header) + sum(_nbytes(description, name) for name in description.fields)
    aside = durable.temporary_for(out)
    durable.make_directory(aside)
    lock = DirectoryLock(aside, aside / "writer.json")
    try:
        _check(out, overwrite=overwrite)
        with durable.written_aside(out, size, aside / out.name) as file:
            file.write(0, np.frombuffer(header, np.uint8))
            for first, rows in blocks():
                for name, block in rows.items():
                    row_bytes = block.nbytes // len(block)
                    file.write(len(header) + places[name] + first * row_bytes, block)
        durable.sync_directory(out.parent)
    finally:
        durable.remove_empty(aside)
        lock.close()


def _check(out: Path, *, overwrite: bool) -> None:
    if out.is_dir() or (out.exists() and not overwrite):
        raise FileExistsError(
            f"{out} exists: choose another path, or replace it with overwrite=True (--overwrite)"
        )


def _nbytes(description: ArchiveDescription, name: str) -> int:
    return math.prod(description.shape(name)) * description.element(name).itemsize


def _npy(description: ArchiveDescription) -> tuple[bytes, dict[str, int]]:
    """The header, and where behind it each field begins."""
    (name,) = description.fields
    facts = {
        "descr": description.element(name).str,
        "fortran_order": False,
        "shape": description.shape(name),
    }
    buffer = io.BytesIO()
    np.lib.format.write_array_header_1_0(buffer, facts)
    return buffer.getvalue(), {name: 0}


def _safetensors(description: ArchiveDescription) -> tuple[bytes, dict[str, int]]:
    header: dict[str, Any] = {"__metadata__": {ARCHIVE: json.dumps(description.to_json())}}
    places, end = {}, 0
    # Larger elements first, so that all are aligned.
    for name in sorted(description.fields, key=lambda name: -description.element(name).itemsize):
        begin, end = end, end + _nbytes(description, name)
        header[name] = {
            "dtype": SAFETENSORS_TYPES[description.element(name).name],
            "shape": list(description.shape(name)),
            "data_offsets": [begin, end],
        }
        places[name] = begin
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, places
