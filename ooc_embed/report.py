"""What a store holds, and whether all of it is sound. Knows the formats; changes nothing."""

from __future__ import annotations

import zlib
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from .arrays import damage_for_others
from .durable import writes_directly
from .errors import CorruptStoreError, StoreError
from .log import SKIPPED, RecordLog
from .manifest import Manifest
from .mapped import announces_in_batches
from .merge import NewestRecords
from .store import Store, chunk_files, holder


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
        What is wrong, a line each; empty if all is sound.
    """
    store_path = Path(path)
    for _ in range(100):
        try:
            store = Store.open(store_path, "r")
        except (StoreError, FileNotFoundError) as error:
            return [str(error)]
        problems = _verify(store)
        if not problems or store.reread() == store.manifest:
            return problems
    return [f"{store_path} changed each time it was read"]


def _verify(store: Store) -> list[str]:
    manifest, layout = store.manifest, store.layout
    problems = damage_for_others(store.path, manifest, layout)
    sealed = None
    with ExitStack() as logs:
        for state in manifest.commit.logs:
            try:
                log = RecordLog(store.log_folder(state.generation), layout.log, state)
                logs.callback(log.close)
                log.check_prefixes(manifest.history.states_of(state.generation))
                _check_row_ids(log, layout.num_embeddings)
                if state is manifest.commit.sealed:
                    sealed = NewestRecords(log, layout.chunk_rows, layout.num_chunks)
            except CorruptStoreError as error:
                problems.append(str(error))
        return problems + _check_chunks(store, sealed)


def _check_row_ids(log: RecordLog, num_embeddings: int) -> None:
    for _, rows in log.blocks(log.committed.records):
        bad = rows[(rows != SKIPPED) & ((rows < 0) | (rows >= num_embeddings))]
        if len(bad):
            raise CorruptStoreError(
                f"{log.folder / 'rows'} names row {bad[0]}, the table has {num_embeddings}"
            )


def _check_chunks(store: Store, sealed: NewestRecords | None) -> list[str]:
    """Check the chunk files; those that have rows of a sealed log may be merged already."""
    problems = []
    manifest, layout = store.manifest, store.layout
    checksums = manifest.checksums | manifest.merged
    unsure = set(sealed.chunks()) - manifest.merged.keys() if sealed is not None else set()
    buffer: np.ndarray | None = None  # a manifest may ask for more than there is memory for
    for index, expected in sorted(checksums.items()):
        path = store.chunk_path(index)
        try:
            size = path.stat().st_size
            if size != layout.chunk_bytes:
                problems.append(f"{path} has {size:,} bytes, {layout.chunk_bytes:,} expected")
                continue
            if buffer is None:
                buffer = np.empty(layout.chunk_bytes, dtype=np.uint8)
            store.read_chunk(index, buffer)
        except FileNotFoundError:
            problems.append(f"{path} is missing; the manifest says that it was written")
            continue
        found = zlib.crc32(buffer.data)
        if found == expected:
            continue
        if sealed is not None and index in unsure:
            sealed.put(index, buffer.view(layout.dtype).reshape(layout.chunk_rows, layout.width))
            if zlib.crc32(buffer.data) == found:
                continue
        problems.append(
            f"{path} has the checksum {found:#010x}, the manifest says {expected:#010x}"
        )
    unnamed = sorted(set(chunk_files(store.path)) - set(checksums) - unsure)
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
