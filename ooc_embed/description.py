"""What there is to say of an open table: sizes against memory, commits, log, cache, written rows.

Knows a Table and what its store says; changes neither, and does not know modules.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from . import card
from .cache import SLOT_BYTES
from .card import Card, Chart, Meter, in_bytes, in_percent
from .cgroups import usable_memory
from .durable import writes_directly
from .gradients import GRADIENT_OPTIONS
from .mapped import announces_in_batches
from .rule import from_plain
from .store import holder
from .table import Table
from .touched import Touched

_LISTED_COMMITS = 6


@dataclass(frozen=True)
class CacheUse:
    """The hot rows of a table that is open to write.

    Attributes:
        slots, used: rows that it can hold, and holds.
        dirty: rows of these that no log has yet.
        cache_bytes: memory that it takes once all slots are used.
        looked_up: rows that lookups asked for.
        hit_rate: the share of them that was in the cache; NaN before the first lookup.
    """

    slots: int
    used: int
    dirty: int
    cache_bytes: int
    looked_up: int
    hit_rate: float


@dataclass(frozen=True)
class Description:
    """Facts about a table, of the moment when `describe` was called.

    ``print`` shows them as a table, a notebook as a card.

    Attributes:
        path: the store.
        opened: the class of the object that was described, ``"store"`` of a path.
        read_only: whether it reads one commit.
        table_id: stays with the table.
        num_embeddings, embedding_dim, padding_idx, dtype: of the layer.
        fields: columns of a record, by name.
        init, seed: what rows begin as.
        rule, hyperparameters: the optimizer, with what is in force.
        step: optimizer steps taken.
        commit, committed_step, created, library: the newest commit's number, its step, when it was
            made (UTC) and by which version.
        commits: those that are kept, number to step.
        keep_commits, checkpoints: how many of the newest are kept, and which for checkpoints.
        rows_written: rows whose version is above 0.
        touched: how many rows of each part of the table these are; parts are whole chunks, and at
            most 60. Estimates, where ``exact`` is false.
        weight_bytes: of all weights.
        ram_bytes: of all weights and moments, what ``nn.Embedding`` and its optimizer would keep in
            RAM.
        disk_bytes: that the store takes on the disk now.
        memory_bytes: memory that this process may use.
        map_bytes: memory for the map of rows to places, of an open table.
        chunks, num_chunks, chunk_rows, chunk_bytes: chunk files that there are, that there can be,
            and their size.
        log_records, log_limit: records in the log, and at how many it is merged.
        sealed_records: records that are being merged, or wait for it.
        unmerged: whether they wait for commits that are kept.
        cache: None of a reader, which has none.
        reads, writes: how the store's files are read and written here.
        writer: who has the store open to write, in words, or None.
    """

    path: Path
    opened: str
    read_only: bool
    table_id: str
    num_embeddings: int
    embedding_dim: int
    padding_idx: int | None
    dtype: str
    fields: Mapping[str, int]
    init: Mapping[str, Any]
    seed: int
    rule: str
    hyperparameters: Mapping[str, Any]
    step: int
    commit: int
    committed_step: int
    created: datetime
    library: str
    commits: Mapping[int, int]
    keep_commits: int
    checkpoints: tuple[int, ...]
    rows_written: int
    touched: tuple[Touched, ...]
    weight_bytes: int
    ram_bytes: int
    disk_bytes: int
    memory_bytes: int
    map_bytes: int
    chunks: int
    num_chunks: int
    chunk_rows: int
    chunk_bytes: int
    log_records: int
    log_limit: int
    sealed_records: int
    unmerged: bool
    cache: CacheUse | None
    reads: str
    writes: str
    writer: str | None

    @property
    def share_written(self) -> float:
        """The share of rows that were ever written."""
        return self.rows_written / self.num_embeddings

    @property
    def exact(self) -> bool:
        """Whether ``touched`` was counted, not estimated."""
        return all(part.exact for part in self.touched)

    def __str__(self) -> str:
        return card.to_text(_card(self))

    def _repr_html_(self) -> str:
        return card.to_html(_card(self))


def describe_table(table: Table, opened: str, hyperparameters: Mapping[str, Any]) -> Description:
    """Describe an open table.

    Args:
        table: it is only looked at; nothing is counted.
        opened: the class of the object that has it.
        hyperparameters: those in force.

    Raises:
        StoreError: the table is closed, or this is a forked child.
    """
    touched = table.touched()  # first: of a table that cannot be used it raises
    manifest, layout, path = table.manifest, table.store.layout, table.store.path
    commit, history = manifest.commit, manifest.history
    rows, itemsize = manifest.num_embeddings, manifest.numpy_dtype.itemsize
    return Description(
        path=path,
        opened=opened,
        read_only=table.read_only,
        table_id=manifest.table_id,
        num_embeddings=rows,
        embedding_dim=manifest.embedding_dim,
        padding_idx=manifest.padding_idx,
        dtype=manifest.dtype,
        fields=dict(manifest.fields),
        init=dict(manifest.init),
        seed=manifest.seed,
        rule=table.rule.name,
        hyperparameters=dict(hyperparameters),
        step=table.step_count,
        commit=commit.number,
        committed_step=commit.step,
        created=datetime.fromtimestamp(commit.created, UTC),
        library=commit.library,
        commits={kept.number: kept.step for kept in history.commits},
        keep_commits=history.keep,
        checkpoints=history.checkpoints,
        rows_written=table.rows_written,
        touched=touched,
        weight_bytes=rows * manifest.embedding_dim * itemsize,
        ram_bytes=rows * (manifest.width - 1) * itemsize,
        disk_bytes=_bytes_on_disk(path),
        memory_bytes=usable_memory(),
        map_bytes=table.cache.where.nbytes,
        chunks=len(manifest.checksums | manifest.merged),
        num_chunks=layout.num_chunks,
        chunk_rows=layout.chunk_rows,
        chunk_bytes=layout.chunk_bytes,
        log_records=commit.logs[-1].records,
        log_limit=layout.log_limit,
        sealed_records=commit.sealed.records if commit.sealed else 0,
        unmerged=bool(history.unmerged),
        cache=_cache_use(table),
        reads="process_madvise" if announces_in_batches() else "madvise, a page range a call",
        writes="O_DIRECT"
        if writes_directly(path / "table" / "zarr.json")
        else "through the page cache",
        writer=holder(path) if table.read_only else "this object",
    )


def _cache_use(table: Table) -> CacheUse | None:
    cache, stats = table.cache, table.counters.now()
    if not cache.slots:
        return None
    return CacheUse(
        slots=cache.slots,
        used=cache.slots - cache.num_free,
        dirty=int(cache.dirty.count_nonzero()),
        cache_bytes=cache.slots * (table.store.layout.record_bytes + SLOT_BYTES),
        looked_up=stats.hits + stats.misses,
        hit_rate=stats.hit_rate,
    )


def _bytes_on_disk(path: Path) -> int:
    total = 0
    for file in path.rglob("*"):
        try:
            total += file.stat().st_blocks * 512
        except FileNotFoundError:  # a writer replaced it meanwhile
            continue
    return total


def in_force(group: Mapping[str, Any]) -> dict[str, Any]:
    """The hyper-parameters of a param group, without its parameter."""
    return {name: value for name, value in from_plain(group).items() if name != "params"}


# In words


def _card(facts: Description) -> Card:
    shape = f"{facts.num_embeddings:,} rows of {facts.embedding_dim:,} {facts.dtype}"
    return Card(
        title=facts.opened,
        subtitle=shape,
        path=str(facts.path),
        tag="read-only" if facts.read_only else "open to write",
        figures=_figures(facts),
        meters=_meters(facts),
        chart=_chart(facts),
        facts=_facts(facts),
        more=_more(facts),
    )


def _figures(facts: Description) -> dict[str, tuple[str, str]]:
    """What matters most: name to value and note."""
    ahead = facts.step != facts.committed_step
    hits = ("none", "a reader has no cache")
    if cache := facts.cache:
        rate = f"{cache.hit_rate:.1%}" if cache.looked_up else "none yet"
        hits = (rate, f"of {cache.looked_up:,} rows")
    return {
        "step": (f"{facts.step:,}", f"committed: {facts.committed_step:,}" if ahead else ""),
        "commit": (f"{facts.commit:,}", f"{facts.created:%Y-%m-%d %H:%M} UTC"),
        "rows written": (in_percent(facts.share_written), f"{facts.rows_written:,} rows"),
        "cache hits": hits,
    }


def _meters(facts: Description) -> list[Meter]:
    """Sizes against memory."""
    share = facts.ram_bytes / facts.memory_bytes
    held = facts.map_bytes + (facts.cache.cache_bytes if facts.cache else 0)
    what = "cache and map of rows, at most" if facts.cache else "map of rows, at most"
    return card.meters(
        ("weights", facts.weight_bytes, ""),
        ("all in RAM", facts.ram_bytes, f"nn.Embedding and {facts.rule}"),
        ("on disk", facts.disk_bytes, "now"),
        ("taken here", held, what),
        ("memory here", facts.memory_bytes, f"all in RAM is {in_percent(share)} of it"),
    )


def _facts(facts: Description) -> dict[str, str]:
    cache = {}
    if use := facts.cache:
        cache["cache"] = f"{use.used:,} of {use.slots:,} slots used, {use.dirty:,} dirty"
    return {
        "fields": ", ".join(f"{name} {columns}" for name, columns in facts.fields.items()),
        "rule": f"{facts.rule}({_arguments(facts.hyperparameters)})",
        "kept commits": _kept(facts),
        "log": _log(facts),
        **cache,
        "writer": facts.writer or "none",
    }


def _more(facts: Description) -> dict[str, str]:
    start = ", ".join(f"{name}={value}" for name, value in facts.init.items() if name != "name")
    return {
        "padding_idx": str(facts.padding_idx),
        "init": f"{facts.init['name']}({start}), seed={facts.seed}",
        "chunks": f"{facts.chunks:,} of {facts.num_chunks:,} files, {facts.chunk_rows:,} rows and "
        f"{in_bytes(facts.chunk_bytes)} each",
        "input, output": f"{facts.reads}, {facts.writes}",
        "table": f"{facts.table_id}, last written by ooc_embed {facts.library}",
    }


def _arguments(hyperparameters: Mapping[str, Any]) -> str:
    """Of a rule, and of what is done to gradients where that is anything."""
    return ", ".join(
        f"{name}={value}"
        for name, value in hyperparameters.items()
        if name not in GRADIENT_OPTIONS or value != GRADIENT_OPTIONS[name]
    )


def _kept(facts: Description) -> str:
    kept = [f"{number} (step {step:,})" for number, step in facts.commits.items()]
    if len(kept) > _LISTED_COMMITS:
        text = f"{len(kept):,} from {kept[0]} to {kept[-1]}"
    else:
        text = ", ".join(kept)
    if facts.checkpoints:
        text += f"; checkpoints have {' and '.join(map(str, facts.checkpoints))}"
    newest = "is" if facts.keep_commits == 1 else f"{facts.keep_commits:,} are"
    return f"{text}; the newest {newest} kept"


def _log(facts: Description) -> str:
    text = f"{facts.log_records:,} records, to be merged above {facts.log_limit:,}"
    if facts.sealed_records:
        waits = "waiting for kept commits" if facts.unmerged else "sealed, for a merge"
        text += f"; {facts.sealed_records:,} {waits}"
    return text


def _chart(facts: Description) -> Chart:
    chunks = -(-(facts.touched[0].stop - facts.touched[0].start) // facts.chunk_rows)
    each = "a bar for each chunk" if chunks == 1 else f"a bar for each {chunks:,} chunks"
    return Chart(
        name="touched",
        note=f"share of rows ever written, {each}"
        + ("" if facts.exact else ", estimated from a sample"),
        shares=[part.share for part in facts.touched],
        labels=[
            f"rows {part.start:,} to {part.stop - 1:,}: {'' if part.exact else 'about '}"
            f"{in_percent(part.share)}"
            for part in facts.touched
        ],
        ends=("row 0", f"row {facts.num_embeddings - 1:,}"),
    )
