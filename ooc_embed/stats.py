"""Counts what a table did since it was opened. Knows numbers; knows no table and no disk."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field


@dataclass(frozen=True)
class Stats:
    """What a table did since this object was opened; `DiskEmbedding.stats` returns it.

    A list of them, one every so many steps, is a history: what happened between two is the
    difference, and `ooc_embed.plots.rates` draws it.

    Attributes:
        seconds: since it was opened. Two that differ only in it are equal: nothing was done.
        hits: rows that lookups found in the cache. Each unique row of a lookup counts once, in
            training and evaluation, also in batches larger than the cache; a step and the views
            count nothing.
        misses: those that they did not. A reader has no cache, so all its rows are misses.
        evictions: rows that left the cache to make room.
        bytes_read: records gathered from logs and table, from disk or page cache, by lookups,
            steps, assignments and views. Rows that were never written are among them.
        bytes_written: records appended to the logs, and chunks that merges wrote.
        log_records: records appended to the logs, by evictions and commits.
        commits: commits made; one that found no change is none.
        commit_seconds: time in them, without the merges that follow.
        merges: merges finished, that of an unfinished one at open too.
        merge_seconds: their time until the table used the last chunk.
    """

    seconds: float = field(compare=False)
    hits: int
    misses: int
    evictions: int
    bytes_read: int
    bytes_written: int
    log_records: int
    commits: int
    commit_seconds: float
    merges: int
    merge_seconds: float

    @property
    def hit_rate(self) -> float:
        """The share of looked-up rows that were in the cache; NaN before the first lookup."""
        rows = self.hits + self.misses
        return self.hits / rows if rows else float("nan")


@dataclass
class Counters:
    """The running counts behind `Stats`. They change under the table's lock."""

    opened: float = field(default_factory=time.perf_counter)
    hits: int = 0
    misses: int = 0
    evictions: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    log_records: int = 0
    commits: int = 0
    commit_seconds: float = 0.0
    merges: int = 0
    merge_seconds: float = 0.0

    def looked_up(self, rows: int, misses: int) -> None:
        self.hits += rows - misses
        self.misses += misses

    def appended(self, records: int, record_bytes: int) -> None:
        self.log_records += records
        self.bytes_written += records * record_bytes

    def committed(self, begin: float) -> None:
        """A commit that began at ``begin`` by ``time.perf_counter`` is done."""
        self.commits += 1
        self.commit_seconds += time.perf_counter() - begin

    def merged(self, seconds: float) -> None:
        """A merge that took so long is done."""
        self.merges += 1
        self.merge_seconds += seconds

    def now(self) -> Stats:
        counts = asdict(self)
        return Stats(seconds=time.perf_counter() - counts.pop("opened"), **counts)
