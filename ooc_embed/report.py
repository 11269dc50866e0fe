"""What a store holds, and whether all of it is sound. Knows the formats; changes nothing."""

from __future__ import annotations

import errno
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path

from .arrays import damage_for_others
from .durable import writes_directly
from .errors import CorruptStoreError, StoreError
from .manifest import Manifest
from .mapped import announces_in_batches
from .merge import NewestRecords
from .soundness import ChunkCheck, check_log, newest_records
from .store import Store, chunk_files, holder

_OF_THE_PROCESS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)


def describe(path: str | Path) -> str:
    """An aligned table of facts about the store at ``path``, which a writer may have open.

    Raises:
        FileNotFoundError, FormatError: there is no store.
    """
    store = Store.open(Path(path), "r")
    manifest, layout, commit = store.manifest, store.layout, store.manifest.commit
    hyper = ", ".join(
        f"{name}={value}" for group in commit.param_groups for name, value in group.items()
    )
    fields = ", ".join(f"{name} {width}" for name, width in manifest.fields.items())
    start = ", ".join(f"{name}={value}" for name, value in manifest.init.items())
    written = commit.rows_written
    reading = "process_madvise" if announces_in_batches() else "madvise, a page range a call"
    direct = writes_directly(store.path / "table" / "zarr.json")
    writing = "O_DIRECT" if direct else "through the page cache"
    facts = {
        "path": str(store.path),
        "table": manifest.table_id,
        "rows": f"{manifest.num_embeddings:,}",
        "dim": f"{manifest.embedding_dim:,}",
        "dtype": manifest.dtype,
        "fields": fields,
        "padding_idx": str(manifest.padding_idx),
        "init": f"{start}, seed={manifest.seed}",
        "rule": f"{manifest.rule['name']}({hyper})",
        "step": f"{commit.step:,}",
        "commit": f"{commit.number:,}, {_time(commit.created)}, ooc_embed {commit.library}",
        "kept commits": _kept(manifest),
        "rows written": f"{written:,} ({written / manifest.num_embeddings:.1%})",
        "chunks": f"{len(manifest.checksums):,} of {layout.num_chunks:,}, "
        f"{layout.chunk_rows:,} rows and {layout.chunk_bytes:,} bytes each",
        "log records": _logs(manifest),
        "bytes on disk": f"{_bytes_on_disk(store.path):,}",
        "input and output": f"{reading}, {writing}",
        "writer": holder(store.path) or "none",
    }
    width = max(map(len, facts))
    return "\n".join(f"{name:<{width}}  {value}" for name, value in facts.items())


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


def _kept(manifest: Manifest) -> str:
    history = manifest.history
    text = ", ".join(f"{commit.number} (step {commit.step:,})" for commit in history.commits)
    if history.checkpoints:
        text += f"; checkpoints have {' and '.join(map(str, history.checkpoints))}"
    return f"{text}; the newest {history.keep:,} are kept"


def _logs(manifest: Manifest) -> str:
    *sealed, active = manifest.commit.logs
    text = f"{active.records:,}"
    waits = "waiting for kept commits" if manifest.history.unmerged else "in a merge"
    return text + "".join(f", and {log.records:,} {waits}" for log in sealed)


def _bytes_on_disk(path: Path) -> int:
    total = 0
    for file in path.rglob("*"):
        try:
            total += file.stat().st_blocks * 512
        except FileNotFoundError:  # a writer replaced it meanwhile
            continue
    return total


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
