"""Copies a store at one moment, by second names for its files. Knows files; knows no row.

A file that is never written to again, a chunk or a full file of a log, is the same file in both
stores: neither changes it, and the disk frees it when both have let it go. The rest is copied.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path

from . import claim, durable
from .arrays import METADATA
from .disk_facts import free_bytes, warn_of_network
from .lock import DirectoryLock
from .log import files_of
from .progress import progress
from .store import Store


def snapshot(store: Store, path: Path) -> None:
    """Make a store at ``path`` that is what the store's manifest says.

    Args:
        store: open to write; nobody may change it meanwhile.
        path: a folder that is not there yet, or holds an unfinished creation; without links.

    Raises:
        FileExistsError: something is there.
        ValueError: it is inside the store.
        OSError: the disk is full, or too small, or failed; nothing is left at ``path``.
    """
    if path.is_relative_to(store.path.resolve()):
        raise ValueError(f"{path} is the store or inside of it: choose a path beside {store.path}")
    claim.check_free(path, overwrite=False, remedy="choose another path for the snapshot")
    files = list(_files(store))
    warn_of_network(path)

    def make(lock: DirectoryLock) -> None:
        links = True
        for place, (file, may_link) in enumerate(progress(files, "making a snapshot", "file")):
            target = path / file.relative_to(store.path)
            durable.make_directory(target.parent)
            if may_link and durable.link(file, target):
                continue
            if may_link and links:  # the first that has no second name: none will
                links = False
                _check_space(path, sum(left.stat().st_size for left, _ in files[place:]))
            durable.copy(file, target)
        durable.sync_tree(path)
        store.name_copy(path)
        lock.close()

    claim.claim(path, make, overwrite=False)


def _check_space(path: Path, nbytes: int) -> None:
    free = free_bytes(path)
    if free < nbytes:
        raise OSError(
            errno.ENOSPC,
            f"without links a snapshot is a copy of {nbytes:,} bytes, {free:,} bytes are free: "
            f"give a path on the store's own disk, or make room",
            str(path),
        )


def _files(store: Store) -> Iterator[tuple[Path, bool]]:
    """Yield each file of a store but its manifest, and whether it is written for good."""
    path = store.path
    for name in METADATA:
        yield path / name, False
    for index in store.manifest.checksums | store.manifest.merged:
        yield store.chunk_path(index), True
    for log in store.manifest.commit.logs:
        yield from files_of(store.log_folder(log.generation), store.layout.log, log.records)
