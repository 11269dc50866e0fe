"""Makes a new store of what is sound in a damaged one. Knows the formats; changes nothing there.

Each row of the new store is as some commit left it, or begins anew. What fails its checksum is not
taken; where a kill left a chunk file without one, it is taken if it has the merged log's rows.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from . import claim
from .errors import CorruptStoreError, StoreError
from .history import Commit, History
from .log import SKIPPED, LogState
from .manifest import Layout, Manifest
from .merge import NewestRecords
from .progress import progress
from .soundness import ChunkCheck, LogCheck, check_log, newest_records, row_ids
from .store import Store

_READ_ATTEMPTS = 100
_MOST_RANGES = 20


@dataclass(frozen=True)
class Salvage:
    """What became of a damaged store's rows.

    Args:
        path: the new store.
        layer: the class that opens it.
        commit, step: as of which commit of the damaged store it is.
        newest: the damaged store's newest commit.
        num_embeddings: rows of the table.
        lost: ``(n,) int64``, ascending: rows that begin anew.
        older: how many others may be older than the commit, None if that is not known.
        unchecked: chunk files without a checksum, which have their log's rows: of a killed merge.
    """

    path: Path
    layer: str
    commit: int
    step: int
    newest: int
    num_embeddings: int
    lost: np.ndarray
    older: int | None
    unchecked: int

    def __str__(self) -> str:
        good = self.num_embeddings - len(self.lost)
        lines = [
            f"{self.path} has {good:,} of {self.num_embeddings:,} rows, as of commit {self.commit} "
            f"(step {self.step:,})"
        ]
        if self.commit < self.newest:
            lines[0] += f"; what commit {self.newest} added is damaged"
        if self.older is None or self.older:
            count = "an unknown number" if self.older is None else f"up to {self.older:,}"
            lines.append(f"{count} of them are older: the log of what was trained since is damaged")
        if len(self.lost):
            lines.append(f"lost rows, which begin anew ({len(self.lost):,}): {_ranges(self.lost)}")
        if self.unchecked:
            lines.append(
                f"{self.unchecked:,} chunk files are of a merge that was killed, and have no "
                f"checksum: their rows that were not merged could not be checked"
            )
        lines.append(f"go on with ooc_embed.{self.layer}.open({str(self.path)!r})")
        return "\n".join(lines)


def salvage(path: str | Path, out: str | Path) -> Salvage:
    """Make a new store at ``out`` of what is sound in the one at ``path``, which is only read.

    The new store is the newest kept commit whose logs are sound. Where there is none, it is the
    newest commit without the logs that are damaged: rows that these have are as of the last merge.
    Rows of a damaged chunk file begin anew, with their initial values (zeros where the table was
    given its rows), version 0 and no moments, but for those that a sound log has.

    The new store has that one commit, under its number, and takes as much of the disk as its rows.
    Where all rows are as of that commit, checkpoints of it are the new store's, too; else of none
    is. In memory it takes a chunk, a byte a row, 8 bytes a lost row and 2 a record of the logs.

    Attributes that others put beside the manifest are left behind.

    A writer may have the store open: this is the store of the moment at which it was read; what a
    merge replaces meanwhile is read again.

    Raises:
        FileExistsError: something is at ``out``.
        ValueError: ``out`` is inside the store.
        FileNotFoundError, FormatError: there is no store, or its metadata are damaged.
        StoreError: the store changed each time it was read.
        OSError: the disk is full, or failed; nothing is left at ``out``.
    """
    path, out = Path(path), Path(out).resolve()
    check_target(path, out)
    for _ in range(_READ_ATTEMPTS):
        store = Store.open(path, "r")
        try:
            return _salvage(store, out)
        except CorruptStoreError:
            if not store.has_changed():
                raise
        except OSError as error:
            of_store = error.filename is not None and Path(error.filename).is_relative_to(path)
            if not of_store or not store.has_changed():
                raise
    raise StoreError(f"{path} changed {_READ_ATTEMPTS} times while it was being read")


def check_target(path: Path, out: Path) -> None:
    """Refuse a place for a new store before the damaged one is read, as `salvage` does."""
    if out.resolve().is_relative_to(path.resolve()):
        raise ValueError(f"{out} is the store or inside of it: choose a path beside {path}")
    claim.check_free(out, overwrite=False, remedy="choose another path for what is salvaged")


def _salvage(store: Store, out: Path) -> Salvage:
    manifest, sealed = store.manifest, store.manifest.commit.sealed
    checks = {log.generation: check_log(store, log.generation) for log in manifest.commit.logs}
    if any(check.problems for check in checks.values()):
        _see_that_it_stayed(store)
    commit, logs = _choose(manifest.history, checks)
    older = _older(store, commit, logs, checks)
    with ExitStack() as closing:
        records = {log: newest_records(store, log, closing) for log in logs if log.records}
        merged = records.get(sealed) if sealed is not None else None
        if sealed is not None and merged is None and checks[sealed.generation].readable:
            merged = newest_records(store, sealed, closing)
        # Those that the merge of a log brought into being have no other rows than that log.
        named = set(manifest.checksums if sealed in logs else manifest.checksums | manifest.merged)
        check = ChunkCheck(store, merged)
        rows = _SoundRows(store, list(records.values()), check, named)

        def finish(created: Manifest) -> Manifest:
            exact = len(rows.lost) == 0 and _count(older, rows.lost) == 0
            written = replace(commit, rows_written=rows.written)
            return replace(created, history=_history_of(manifest.history, commit, written, exact))

        alone = _history_of(manifest.history, commit, commit, exact=False)
        first = replace(manifest, history=alone, checksums={}, merged={})
        chunk_rows = store.layout.chunk_rows
        Store.create(out, first, chunk_rows, rows.chunks, overwrite=False, finish=finish).close()
    return Salvage(
        path=out,
        layer="DiskEmbedding" if manifest.module.bag is None else "DiskEmbeddingBag",
        commit=commit.number,
        step=commit.step,
        newest=manifest.commit.number,
        num_embeddings=commit.num_embeddings,
        lost=rows.lost,
        older=_count(older, rows.lost),
        unchecked=len(check.unchecked),
    )


def _see_that_it_stayed(store: Store) -> None:
    """Raise where damage may be what a writer did since the manifest was read."""
    if store.has_changed():
        raise CorruptStoreError(f"{store.path} was changed while it was being read")


def _choose(history: History, checks: dict[int, LogCheck]) -> tuple[Commit, tuple[LogState, ...]]:
    """The newest commit whose logs are sound, or the newest with those of its logs that are."""
    for commit in reversed(history.commits):
        if all(log in checks[log.generation].whole for log in commit.logs):
            return commit, commit.logs
    newest = history.newest
    return newest, tuple(log for log in newest.logs if log in checks[log.generation].whole)


def _older(
    store: Store, commit: Commit, logs: tuple[LogState, ...], checks: dict[int, LogCheck]
) -> np.ndarray | None:
    """Which rows have their newest record in a log that is left out: ``(N,) bool``, or None."""
    older = np.zeros(commit.num_embeddings, dtype=bool)
    if logs == commit.logs:
        return older
    for log in commit.logs:  # what the last one has is newest
        if log not in logs and not checks[log.generation].ids_whole:
            return None
        for rows in row_ids(store, log):
            older[rows[rows != SKIPPED]] = log not in logs
    return older


def _count(older: np.ndarray | None, lost: np.ndarray) -> int | None:
    """How many rows are older, and not lost."""
    return None if older is None else int(older.sum() - older[lost].sum())


def _history_of(history: History, commit: Commit, as_written: Commit, exact: bool) -> History:
    """The history of a store that has this commit alone, in no log.

    Checkpoints that name the commit are the new store's if it is ``exact``; else another word keeps
    them from it.
    """
    until = history.until(commit)
    return replace(
        until,
        commits=(replace(as_written, logs=(LogState(0),)),),
        checkpoints=tuple({commit.number} & set(until.checkpoints)) if exact else (),
        branches=until.branches if exact else ((commit.number, secrets.token_hex(8)),),
    )


class _SoundRows:
    """The rows of a store that are sound, by chunks.

    Args:
        store: the store.
        records: of the logs that are sound, the oldest first.
        check: reads chunk files.
        named: which there are.

    Attributes:
        written: how many rows are not as they began.
    """

    def __init__(
        self, store: Store, records: list[NewestRecords], check: ChunkCheck, named: set[int]
    ) -> None:
        self.written = 0
        self._lost = [np.empty(0, dtype=np.int64)]
        self._store = store
        self._records = [(log, set(log.chunks())) for log in records]
        self._check = check
        self._named = named

    @property
    def lost(self) -> np.ndarray:
        """As of `Salvage`, of the chunks that were read."""
        return np.concatenate(self._lost)

    def chunks(self, layout: Layout) -> Iterator[np.ndarray | None]:
        """Yield the content of every chunk, ``(chunk_rows, W)``; None where no row is written."""
        chunk = self._check.buffer.view(layout.dtype).reshape(layout.chunk_rows, layout.width)
        for index in progress(range(layout.num_chunks), "salvaging rows", "chunk"):
            rows = slice(index * len(chunk), min((index + 1) * len(chunk), layout.num_embeddings))
            sound = self._read(index)
            for log, chunks in self._records:
                if index in chunks:
                    log.put(index, chunk)
            written = chunk[: rows.stop - rows.start, -1] != 0  # the version
            self.written += int(written.sum())
            if not sound:
                self._lost.append(np.flatnonzero(~written) + rows.start)
            yield chunk if written.any() else None

    def _read(self, index: int) -> bool:
        """Read a chunk file, zeros where there is none; whether it is sound."""
        sound = index not in self._named or self._check.read(index) is None
        if not sound:
            _see_that_it_stayed(self._store)
        if not sound or index not in self._named:
            self._check.buffer[:] = 0
        return sound


def _ranges(rows: np.ndarray) -> str:
    """Ascending rows as ranges, in words; of many, the first, and how many more there are."""
    begins = np.flatnonzero(np.diff(rows, prepend=rows[0] - 2) > 1)
    ends = np.append(begins[1:], len(rows)) - 1
    pairs = zip(rows[begins[:_MOST_RANGES]], rows[ends[:_MOST_RANGES]], strict=True)
    text = ", ".join(f"{a:,} to {b:,}" if b > a else f"{a:,}" for a, b in pairs)
    more = len(begins) - _MOST_RANGES
    return text if more <= 0 else f"{text}, and {more:,} more"
