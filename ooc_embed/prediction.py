"""How fast a table will train, from what its disk and a step reach. Arithmetic; measures nothing.

The mean time of a step is the sum of four terms:

- compute: a step that finds all of its rows in the cache; a copy out of the page cache for each
  row that it does not find; the way into the log and back into memory for each changed row that
  leaves the cache;
- disk: a random read for each row that is in no memory. With look-ahead the disk and the compute
  go on side by side, which takes as long as the longer one and three tenths of the other;
- a part of a commit, which writes the rows that changed since the last one;
- a part of a merge, which reads the table and its log and writes the table.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from .manifest import Layout

# What these reach of the disk's own rates, as `bench commit`, `bench merge` and `bench lookahead`
# have measured it: a commit writes so much slower, a merge takes so much longer, and so much of
# the shorter one of disk and compute is not hidden.
_COMMIT_SHARE = 0.65
_MERGE_FACTOR = 1.3
_NOT_HIDDEN = 0.3
# An eighth of the cache is emptied at once, so that this part of it is occupied on average.
_OCCUPIED = 15 / 16
# Rows of about the same frequency are counted as one.
_GROUPS = 4000


@dataclass(frozen=True)
class Rates:
    """What a disk and this machine reach, as ``ooc_embed.plan(..., disk=folder)`` measures them.

    Attributes:
        record_bytes, batch: of the rows and steps that were measured.
        write, read: bytes a second of large blocks, past the page cache.
        mixed: bytes a second that are read while as many are written.
        reads: rows a second that lookups get from the disk.
        cached_reads: rows a second that they get from the page cache.
        steps: seconds of a step that finds all rows in the table's cache, forward, backward and the
            rule, by the distribution of its ids.
    """

    record_bytes: int
    batch: int
    write: float
    read: float
    mixed: float
    reads: float
    cached_reads: float
    steps: Mapping[str, float]


@dataclass(frozen=True)
class Traffic:
    """How many rows move, on average, once the cache is full.

    Attributes:
        rows: different ones in a batch.
        misses: those of them that are not in the cache.
        evicted: rows that leave the cache in a step and have changed since they were stored.
        committed: rows that a commit stores.
        appended: records that the log grows by in a step.
    """

    rows: float
    misses: float
    evicted: float
    committed: float
    appended: float

    @property
    def hit_rate(self) -> float:
        """The part of a batch's rows that is in the cache."""
        return 1 - self.misses / self.rows


@dataclass(frozen=True)
class Speed:
    """What training comes to in the long run, with commits and merges.

    Attributes:
        ids: how they are distributed: "uniform" or "zipf".
        lookahead: whether the next batches are read ahead.
        rows_per_second: an id that a batch has twice counts once.
        samples_per_second: ids.
        compute_seconds, disk_seconds, commit_seconds, merge_seconds: the terms of a step's mean
            time, see the module.
    """

    ids: str
    lookahead: bool
    rows_per_second: float
    samples_per_second: float
    compute_seconds: float
    disk_seconds: float
    commit_seconds: float
    merge_seconds: float


def traffic(ids: str, num_rows: int, batch: int, slots: int, commit_every: int) -> Traffic:
    """What batches of independent ids do to a cache that drops the longest unused rows.

    A row stays for the same time behind its last use, whichever it is: the time in which as many
    rows are used as there are slots (Che, Tung and Wang, IEEE JSAC 20 (7), 2002).

    Args:
        ids: "uniform", or "zipf": the k-th most frequent row is drawn in proportion to 1/k.
        num_rows: of the table.
        batch: ids of a step.
        slots: rows that the cache can hold.
        commit_every: steps.
    """
    count, share = _frequencies(ids, num_rows)
    # The logarithm of the chance that a step is without a row.
    absent = batch * np.log1p(-np.minimum(share, 1 - 1e-12))
    used = -np.expm1(absent)

    def rows_used(steps: float) -> float:
        return float(count @ -np.expm1(steps * absent))

    rows = rows_used(1)
    if slots >= num_rows:
        stay, misses = math.inf, 0.0
    else:
        stay = _solve(rows_used, _OCCUPIED * slots)
        misses = float(count @ (used * np.exp(stay * absent)))
    # Rows whose last use lies before a commit were stored by it.
    evicted = misses * max(0.0, 1 - stay / commit_every)
    committed = rows_used(min(commit_every, stay))
    return Traffic(rows, misses, evicted, committed, evicted + committed / commit_every)


def _frequencies(ids: str, num_rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Groups of equally frequent rows: how many each has, and the part of the ids that a row is."""
    if ids == "uniform":
        return np.array([float(num_rows)]), np.array([1 / num_rows])
    ranks = np.geomspace(1, num_rows + 1, _GROUPS).astype(np.int64)
    first = np.unique(np.append(ranks, num_rows + 1))
    count = np.diff(first).astype(np.float64)
    # Nearly the sum of 1/k over a group's ranks, and exactly so for one.
    total = np.log((first[1:] - 0.5) / (first[:-1] - 0.5))
    total = np.where(count == 1, 1 / first[:-1], total)
    return count, total / total.sum() / count


def _solve(grows: Callable[[float], float], value: float) -> float:
    """Where a function that grows from 0 has a value, by bisection."""
    low, high = 0.0, 1.0
    while grows(high) < value:
        low, high = high, 2 * high
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if grows(middle) < value else (low, middle)
    return high


def predict(
    ids: str,
    layout: Layout,
    rates: Rates,
    *,
    batch: int,
    slots: int,
    page_cache_bytes: int,
    commit_every: int,
) -> tuple[Speed, Speed]:
    """Without and with look-ahead.

    Args:
        ids: see `traffic`.
        layout: of the table.
        rates: of the disk and the machine.
        batch: ids of a step.
        slots: rows that the cache can hold.
        page_cache_bytes: memory that is left for the files' pages.
        commit_every: steps.
    """
    moved = traffic(ids, layout.num_embeddings, batch, slots, commit_every)
    record = layout.record_bytes
    # Half a log is what there is of one on average.
    stored = layout.table_bytes + layout.log_limit * record / 2
    unread = moved.misses * max(0.0, 1 - page_cache_bytes / stored)
    disk = unread * max(0.0, 1 / rates.reads - 1 / rates.cached_reads)
    compute = (
        rates.steps[ids]
        + moved.misses / rates.cached_reads
        + moved.evicted * record * (1 / rates.write + 1 / rates.read)
    )
    commit = moved.committed * record / (_COMMIT_SHARE * rates.write) / commit_every
    # The first commit behind the log's limit seals it, or the step that finds no room in it.
    commits = math.ceil(layout.log_limit / moved.appended / commit_every)
    period = min(commits * commit_every, layout.log.capacity / moved.appended)
    read_by_merge = layout.table_bytes + period * moved.appended * record
    merge = _MERGE_FACTOR * read_by_merge / rates.mixed / period

    def speed(step: float, *, lookahead: bool) -> Speed:
        seconds = step + commit + merge
        per_second = moved.rows / seconds, batch / seconds
        return Speed(ids, lookahead, *per_second, compute, disk, commit, merge)

    hidden = max(compute, disk) + _NOT_HIDDEN * min(compute, disk)
    return speed(compute + disk, lookahead=False), speed(hidden, lookahead=True)
