"""Opens what whole tables are read from, without reading it. Knows files; knows no table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from . import arrays
from .archive import ARCHIVE, Archive, ArchiveDescription, find, open_archive
from .errors import FormatError
from .parsing import json_object
from .single_file import SAFETENSORS_TYPES


def open_source(source: Any, key: str | None, *, apart_from: Path) -> Any:
    """An array that gives rows by slices.

    Args:
        source: a tensor or array, which is given back; or the path of a ``.npy`` file, of a
            ``.safetensors`` file (with the extra ``safetensors``), or of a zarr array or group.
        key: the tensor's name, or the array's in a group; None where there is only one.
        apart_from: a folder that the source must not lie in.

    Raises:
        FileNotFoundError: there is nothing.
        ValueError: a file of another kind, or a key that it needs, or does not have.
        FormatError, CorruptStoreError: an archive is unfinished, or damaged.
        ImportError: the extra is not installed.
    """
    if not isinstance(source, (str, Path)):
        if not hasattr(source, "shape"):
            raise TypeError(f"a source is a tensor, an array or a path, got {source!r}")
        _no_key(key)
        return source
    path = Path(source)
    check_apart(path, apart_from)
    if path.is_dir():
        archive = open_if_archive(path)
        found = arrays.open_arrays(path) if archive is None else archive.arrays
        return found[_only(path, key, list(found))]
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist")
    if path.suffix == ".npy":
        _no_key(key)
        return _open_npy(path)
    if path.suffix == ".safetensors":
        return _Safetensors(path, key)
    raise ValueError(f"{path} is no .npy or .safetensors file and no zarr folder")


def check_apart(path: Path, folder: Path) -> None:
    """Refuse a source that lies in a folder which is to be made.

    Raises:
        ValueError: it does; both are named.
    """
    if path.resolve().is_relative_to(folder.resolve()):
        raise ValueError(f"{path} lies in {folder}, which would be replaced before it is read")


def _open_npy(path: Path) -> np.ndarray:
    try:
        found = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise ValueError(f"{path} is no .npy file of numbers: {error}") from error
    if not isinstance(found, np.ndarray):
        raise ValueError(f"{path} is no .npy file, but an archive of some")
    return found


def _no_key(key: str | None) -> None:
    if key is not None:
        raise ValueError(f"there is one array only, and none is named {key!r}: leave key= out")


def _only(path: Path, key: str | None, names: list[str]) -> str:
    if key is None and len(names) == 1:
        return names[0]
    if key not in names:
        raise ValueError(f"{path} has {', '.join(sorted(names))}: say which by key=, got {key!r}")
    return key


def open_if_archive(path: Path) -> Archive | None:
    """A folder or ``.safetensors`` file that `export_table` wrote; None if another one did.

    Raises:
        ValueError: it is no ``.safetensors`` file.
        FormatError: it is unfinished, or damaged.
        CorruptStoreError: a file is missing.
        ImportError: the extra is not installed.
    """
    if path.suffix == ".safetensors" and path.is_file():
        return _safetensors_archive(path)
    return open_archive(path) if find(path)[0] in ("finished", "unfinished") else None


def _safetensors_archive(path: Path) -> Archive | None:
    file = _open_safetensors(path)
    metadata = file.metadata() or {}
    if ARCHIVE not in metadata:
        return None
    try:
        description = ArchiveDescription.from_json(json_object(metadata[ARCHIVE].encode()))
    except (ValueError, FormatError) as error:
        raise FormatError(f"{path}: {error}") from error
    names = set(description.fields) & set(file.keys())
    found = {name: _Safetensors(path, name) for name in names}
    for name in description.fields:
        wanted = description.shape(name), SAFETENSORS_TYPES[description.element(name).name]
        if name not in found or (found[name].shape, found[name].element) != wanted:
            raise FormatError(f"{path} has no {name} of the shape and type {wanted}, as it says")
    return Archive(path, description, found)


def _open_safetensors(path: Path) -> Any:
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise ImportError(
            f"{path} needs safetensors: pip install 'ooc_embed[safetensors]'"
        ) from error
    try:
        return safe_open(path, framework="pt")
    except SafetensorError as error:
        raise ValueError(f"{path} is no .safetensors file: {error}") from error


class _Safetensors:
    """A tensor of a safetensors file, read by slices of rows."""

    def __init__(self, path: Path, key: str | None) -> None:
        file = _open_safetensors(path)
        self._slices = file.get_slice(_only(path, key, list(file.keys())))
        self.shape = tuple(self._slices.get_shape())
        self.element = self._slices.get_dtype()
        self.dtype = "float64" if self.element == "F64" else "float32"  # of the table it becomes

    def __getitem__(self, rows: slice) -> Any:
        return self._slices[rows]
