"""Whether all of a store is sound. Knows the formats; changes nothing."""

from __future__ import annotations

import errno
from contextlib import ExitStack
from pathlib import Path

from .arrays import damage_for_others
from .errors import CorruptStoreError, StoreError
from .merge import NewestRecords
from .soundness import ChunkCheck, check_log, newest_records
from .store import Store, chunk_files

_OF_THE_PROCESS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)


def verify(path: str | Path) -> list[str]:
    """Check every byte that the newest commit names: sizes, checksums, row ids, versions.

    May run while a writer has the store open; what a merge replaces meanwhile is read again. Of the
    earlier commits that are kept it checks the logs, too. A chunk file that an unfinished merge has
    replaced since the last manifest has no checksum in it: it is seen to have the merged rows.

    Returns:
        What is wrong, a line each; empty if all is sound. Lines name files, and of chunk files the
        rows, of logs the commits that need them.

    Raises:
        OSError: this process has no memory, or no file descriptors, for it.
    """
    store_path = Path(path)
    for _ in range(100):
        try:
            store = Store.open(store_path, "r")
            problems = _verify(store)
            if not problems or not store.has_changed():
                return problems
        except (StoreError, OSError) as error:
            if isinstance(error, OSError) and error.errno in _OF_THE_PROCESS:
                raise
            return [str(error)]
    return [f"{store_path} changed each time it was read"]


def _verify(store: Store) -> list[str]:
    commit = store.manifest.commit
    problems = damage_for_others(store.path, store.manifest, store.layout)
    sealed = None
    with ExitStack() as closing:
        for state in commit.logs:
            log = check_log(store, state.generation)
            problems += log.problems
            if state is commit.sealed and log.readable:
                try:
                    sealed = newest_records(store, state, closing)
                except CorruptStoreError as error:  # it was sound just now
                    problems.append(str(error))
        return problems + _check_chunks(store, sealed)


def _check_chunks(store: Store, sealed: NewestRecords | None) -> list[str]:
    """Check the chunk files; those that have rows of a sealed log may be merged already."""
    manifest = store.manifest
    chunks = ChunkCheck(store, sealed)
    named = sorted(manifest.checksums.keys() | manifest.merged.keys())
    found = (chunks.read(index) for index in named)
    problems = [problem for problem in found if problem is not None]
    if sealed is None and manifest.commit.sealed is not None:
        return problems  # any other may be of the merge of that log, which is damaged
    unnamed = sorted(set(chunk_files(store.path)) - set(named) - chunks.unsure)
    return problems + [f"{store.chunk_path(i)} is not named by the manifest" for i in unnamed]
