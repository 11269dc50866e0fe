"""Writes an archive's files, and goes on where it was stopped. Knows files; knows no row.

``unfinished.json`` is the group's metadata under another name. It is the first file and says what
is being written; then come the shards, each whole or not there; then the arrays' metadata, without
which no zarr reader finds them; at last it is renamed to ``zarr.json``. That is the instant.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from . import durable
from .archive import UNFINISHED, ArchiveDescription, ShardEncoder, find, group_metadata, shard_name
from .errors import FormatError
from .lock import DirectoryLock
from .progress import progress

# All files of an archive's arrays, finished or not.
_OURS = re.compile(r"(zarr\.json|c\.\d+(\.0)?)(\.tmp)?")
# Takes which shard and fields of it; gives its rows.
ReadShard = Callable[[int, Sequence[str]], dict[str, np.ndarray]]


def write(out: Path, description: ArchiveDescription, read: ReadShard, *, overwrite: bool) -> None:
    """Write an archive, or what is missing of an unfinished one.

    Args:
        out: the folder.
        description: of the archive.
        read: gives the rows of a shard.
        overwrite: replace another archive that is there.

    Raises:
        FileExistsError: something else is there.
        LockedError: another process writes it.
        OverflowError: rows cannot be written so; nothing is left.
        OSError: the disk is full, or failed; what was written so far is gone on with.
    """
    _check(out, description, overwrite=overwrite)
    durable.make_directory(out)
    lock = DirectoryLock(out, out / UNFINISHED)
    try:
        if _check(out, description, overwrite=overwrite):
            return
        _begin(out, description)
        _write_shards(out, description, read)
        _finish(out)
    except OverflowError:
        _empty(out)
        durable.remove(out / UNFINISHED)
        durable.remove_empty(out)
        raise
    finally:
        lock.close()


def _check(out: Path, description: ArchiveDescription, *, overwrite: bool) -> bool:
    """Whether the archive is there already, and finished.

    Raises:
        FileExistsError: something else is there, which is not to be replaced.
    """
    try:
        state, found = find(out)
    except FormatError:
        if not overwrite:
            raise
        return False
    if state == "foreign":
        raise FileExistsError(f"{out} exists and is no archive: choose another path")
    if found is None or overwrite:
        return False
    if found == description:
        return state == "finished"
    what = "an unfinished export" if state == "unfinished" else "an archive"
    raise FileExistsError(
        f"{out} is {what} of {found}; this one is of {description}. Choose another path, or "
        f"replace it with overwrite=True (--overwrite)"
        + (", or ask for the same, by commit= (--commit)" if state == "unfinished" else "")
    )


def _begin(out: Path, description: ArchiveDescription) -> None:
    """Say what is being written, in a folder that holds nothing else, or a part of the same."""
    plan = out / UNFINISHED
    metadata = group_metadata(description)
    if plan.is_file() and plan.read_bytes() == metadata:
        return
    if (out / "zarr.json").is_file():
        # What is emptied is no archive any more, and still one of ours.
        durable.rename(out / "zarr.json", plan)
        durable.sync_directory(out)
    _empty(out)
    durable.sync_directory(out)
    durable.replace(plan, metadata, durable.temporary_for(plan))
    durable.sync_directory(out)


def _empty(out: Path) -> None:
    """Remove the arrays of an archive, and nothing that others put beside them."""
    for entry in os.scandir(out):
        if entry.is_dir(follow_symlinks=False) and all(map(_OURS.fullmatch, os.listdir(entry))):
            durable.remove_tree(Path(entry.path))


def _write_shards(out: Path, description: ArchiveDescription, read: ReadShard) -> None:
    encoder = ShardEncoder(description)
    for name in description.fields:
        durable.make_directory(out / name)
        durable.remove_temporaries(out / name)
    for index in progress(range(description.num_shards), "exporting rows", "shard"):
        files = {
            name: out / name / shard_name(description.shape(name), index)
            for name in description.fields
        }
        missing = [name for name, file in files.items() if not file.exists()]
        if not missing:
            continue
        rows = read(index, missing)
        for name in missing:
            file = files[name]
            data = encoder.encode(name, index, rows.pop(name))
            durable.replace(file, data, durable.temporary_for(file))
    for name, metadata in encoder.metadata.items():
        file = out / name / "zarr.json"
        durable.replace(file, metadata, durable.temporary_for(file))
        durable.sync_directory(out / name)


def _finish(out: Path) -> None:
    durable.sync_directory(out)  # folders, too, that a killed export made
    durable.rename(out / UNFINISHED, out / "zarr.json")
    durable.sync_directory(out)
    durable.sync_directory(out.parent)
