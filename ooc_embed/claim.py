"""A folder for a new store: what is there already, and that nothing is left where making it fails.

Knows the names of a store's files; does not know what is in them, but for the manifest's place.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from . import durable
from .errors import FormatError
from .lock import DirectoryLock
from .manifest import ATTRIBUTE
from .parsing import json_object

_Made = TypeVar("_Made")
_FOLDERS = ("table", "column", "log")
_INNER = ("column/c", *(f"log/{n}{name}" for n in "01" for name in ("", "/rows", "/records")))
# All files that a creation, finished or not, puts into its folder.
_OURS = re.compile(
    r"(table|column|log|log/[01]|log/[01]/(rows|records))"
    r"/(zarr\.json|writer\.json|c\.\d+(\.0)?|c/0)(\.tmp)?"
)
_OPEN_OR_OVERWRITE = (
    "DiskEmbedding.open(path) goes on with it, overwrite=True (--overwrite) replaces it"
)


def is_store(path: Path) -> bool:
    """Whether a folder is a store, sound or not."""
    return _what_is_there(path) == "store"


def check_free(path: Path, *, overwrite: bool, remedy: str = _OPEN_OR_OVERWRITE) -> None:
    """Refuse a path where something is, but for an unfinished creation.

    Args:
        path: where a store is to be.
        overwrite: a store may be there, too.
        remedy: what to do where it may not.

    Raises:
        ValueError: it would be a folder named as a scheme, or ``~``, by mistake.
        FileExistsError: something is there.
    """
    for folder in path.parents:
        if (folder.name == "~" or folder.name.endswith(":")) and not folder.exists():
            raise ValueError(
                f"there is no folder {folder}: a table is on a local file system, not behind an "
                f"address, and ~ is not replaced (pathlib.Path(path).expanduser() does it)"
            )
    existing = _what_is_there(path)
    if existing == "store" and not overwrite:
        raise FileExistsError(f"{path} is a store already: {remedy}")
    if existing == "foreign":
        raise FileExistsError(f"{path} exists and is no ooc_embed store: choose another path")


def claim(path: Path, make: Callable[[DirectoryLock], _Made], *, overwrite: bool) -> _Made:
    """Make it an empty folder, with the writer's lock, and make a store in it.

    Where that fails nothing is left. It is no ``with``, whose ``__exit__`` Ctrl-C may keep from all
    that it would do.

    Args:
        path: the folder.
        make: makes the store, and keeps the lock or closes it.
        overwrite: as of `check_free`.

    Returns:
        What was made.

    Raises:
        FileExistsError: as `check_free`; another process was faster.
        LockedError: a store is there and somebody writes to it.
    """
    new = not path.exists()
    try:
        durable.make_directory(path)
        lock = DirectoryLock(path, holder_file(path))
    except OSError:
        if new:
            durable.remove_empty(path)
        raise
    try:
        check_free(path, overwrite=overwrite)
    except BaseException:
        lock.close()
        raise
    try:
        _clear(path)
        return make(lock)
    except BaseException:
        try:
            _clear(path)
            if new:
                durable.remove_tree(path)
        finally:
            lock.close()
        raise


def check_kinds(path: Path, *, links: bool) -> None:
    """See that a store is made of files and folders.

    Args:
        path: of the store, which may be a link itself.
        links: whether symbolic links may be among them: a writer would delete, and append to, what
            is outside of the store.

    Raises:
        FormatError: it is made of something else.
    """
    for folder in ("", *_FOLDERS, *_INNER):
        with suppress(FileNotFoundError, NotADirectoryError), os.scandir(path / folder) as entries:
            for entry in entries:
                if folder or entry.name in ("zarr.json", *_FOLDERS):
                    _check_kind(entry, links=links)


def _check_kind(entry: os.DirEntry[str], *, links: bool) -> None:
    if not links and entry.is_symlink():
        raise FormatError(
            f"{entry.path} is a symbolic link, and a writer may not change what it leads to: put "
            f"the file itself there (cp -rL copies a whole store so), or open with mode='r'"
        )
    if not (entry.is_file() or entry.is_dir()) and os.path.exists(entry):
        raise FormatError(f"{entry.path} is neither a file nor a folder")


def holder_file(path: Path) -> Path:
    """Where a store's writer says who it is."""
    return path / "table" / "writer.json"


def _what_is_there(path: Path) -> str:
    """``"nothing"``, ``"unfinished"`` creation, a ``"store"``, or something ``"foreign"``."""
    if not path.exists():
        return "nothing"
    if not path.is_dir():
        return "foreign"
    if (path / "zarr.json").exists():
        if not (path / "zarr.json").is_file():
            return "foreign"
        try:
            attributes = json_object((path / "zarr.json").read_bytes())["attributes"]
            return "store" if ATTRIBUTE in dict(attributes) else "foreign"
        except (OSError, ValueError, KeyError, TypeError):
            return "foreign"
    files = (file for file in path.rglob("*") if file.is_symlink() or not file.is_dir())
    names = (str(file.relative_to(path)) for file in files)
    return "unfinished" if all(map(_OURS.fullmatch, names)) else "foreign"


def _clear(path: Path) -> None:
    """Remove what an earlier store left, its manifest first: without it, it is no store."""
    if (path / "zarr.json").exists():
        durable.remove(path / "zarr.json")
        durable.sync_directory(path)
    for name in _FOLDERS:
        if os.path.lexists(path / name):
            durable.remove_tree(path / name)
