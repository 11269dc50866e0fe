"""What `stats` counts, against counts made by hand and by sets of rows; knows no file format."""

from __future__ import annotations

import dataclasses
import math
import time

import pytest
import torch

import ooc_embed
from ooc_embed.stats import Counters

# Two columns of weight and of each moment, and the version, in float32.
RECORD = 4 * (2 + 2 + 2 + 1)
# A record and what a slot has beside it, four times.
FOUR_SLOTS = 4 * (RECORD + 25)


def train(emb: ooc_embed.DiskEmbedding, *ids: int) -> None:
    emb(torch.tensor(ids)).sum().backward()


def changes(emb: ooc_embed.DiskEmbedding, before: ooc_embed.Stats) -> dict[str, float]:
    """The counts that have changed, and by how much; times left out."""
    after = dataclasses.asdict(emb.stats())
    differences = {name: after[name] - old for name, old in dataclasses.asdict(before).items()}
    return {name: n for name, n in differences.items() if n and not name.endswith("seconds")}


def test_nothing_is_counted_before_anything_is_done(make_table):
    stats = make_table().stats()
    counts = dataclasses.asdict(stats)
    assert counts.pop("seconds") > 0
    assert set(counts.values()) == {0}
    assert math.isnan(stats.hit_rate)


def test_lookup_counts_each_unique_row_once_and_its_step_nothing(make_table):
    emb = make_table(cache_bytes=FOUR_SLOTS)
    start = emb.stats()
    train(emb, 0, 1, 1, 2)
    assert changes(emb, start) == {"misses": 3, "bytes_read": 3 * RECORD}
    train(emb, 0, 1, 2, 3)
    assert changes(emb, start) == {"hits": 3, "misses": 4, "bytes_read": 4 * RECORD}
    assert emb.stats().hit_rate == 3 / 7


def test_rows_that_make_room_are_evicted_and_appended_where_they_are_dirty(make_table):
    emb = make_table(cache_bytes=FOUR_SLOTS)
    emb(torch.tensor([0, 1]))  # looked up for a step that does not come: clean
    train(emb, 2, 3)
    before = emb.stats()
    train(emb, 4, 5, 6, 7)
    assert changes(emb, before) == {
        "misses": 4,
        "evictions": 4,
        "bytes_read": 4 * RECORD,
        "log_records": 2,
        "bytes_written": 2 * RECORD,
    }


def test_batch_larger_than_the_cache_counts_too(make_table):
    emb = make_table(cache_bytes=FOUR_SLOTS)
    train(emb, 4, 5, 6, 7)
    before = emb.stats()
    out = emb(torch.arange(10))
    assert changes(emb, before) == {"hits": 4, "misses": 6, "bytes_read": 6 * RECORD}
    before = emb.stats()
    out.sum().backward()  # it reads the six again, and writes all ten
    assert changes(emb, before) == {
        "bytes_read": 6 * RECORD,
        "log_records": 10,
        "bytes_written": 10 * RECORD,
    }


def test_evaluation_counts_and_views_only_read(make_table):
    emb = make_table()
    train(emb, 0, 1)
    before = emb.stats()
    with torch.no_grad():
        emb(torch.tensor([1, 2, 2, 3]))
    assert changes(emb, before) == {"hits": 1, "misses": 2, "bytes_read": 2 * RECORD}
    before = emb.stats()
    _ = emb.weight[[1, 5, 6]]  # row 1 is in the cache
    assert changes(emb, before) == {"bytes_read": 2 * RECORD}


@pytest.mark.parametrize("learning", [True, False])
def test_lookup_with_max_norm_counts_its_rows_once(make_table, learning):
    emb = make_table(max_norm=0.1).train(learning)
    emb(torch.tensor([0, 1, 2]))
    assert (emb.stats().hits, emb.stats().misses) == (0, 3)
    emb(torch.tensor([1, 2, 3]))
    assert (emb.stats().hits, emb.stats().misses) == (2, 4)


def test_lookup_with_max_norm_of_more_rows_than_the_cache_has_counts_them_once(make_table):
    emb = make_table(max_norm=0.1, cache_bytes=FOUR_SLOTS)
    emb(torch.arange(10))
    assert emb.stats().hits + emb.stats().misses == 10


def test_commits_and_merges_count_where_something_has_changed(make_table):
    emb = make_table(chunk_rows=1024)
    train(emb, 0, 1, 2)
    before = emb.stats()
    begin = time.perf_counter()
    emb.commit()
    emb.commit()
    assert changes(emb, before) == {
        "commits": 1,
        "log_records": 3,
        "bytes_written": 3 * RECORD,
    }
    before = emb.stats()
    emb.flush()
    assert changes(emb, before) == {"merges": 1, "bytes_written": 1024 * RECORD}
    stats = emb.stats()
    assert 0 < stats.commit_seconds
    assert 0 < stats.merge_seconds
    assert stats.commit_seconds + stats.merge_seconds <= time.perf_counter() - begin


def test_hits_of_random_batches_are_the_rows_seen_before(make_table):
    emb = make_table(500)
    generator = torch.Generator().manual_seed(1)
    seen: set[int] = set()
    hits = misses = 0
    for _ in range(30):
        ids = torch.randint(0, 500, (40,), generator=generator)
        rows = set(ids.tolist())
        hits += len(rows & seen)
        misses += len(rows - seen)
        seen |= rows
        train(emb, *ids.tolist())
    assert (emb.stats().hits, emb.stats().misses) == (hits, misses)
    assert emb.stats().hit_rate == hits / (hits + misses)


def test_counts_begin_anew_when_a_table_is_opened_and_stay_when_it_is_closed(
    make_table, open_table
):
    emb = make_table()
    train(emb, 0, 1)
    emb.close()
    assert (emb.stats().misses, emb.stats().commits) == (2, 1)
    again = open_table(emb.path).stats()
    assert (again.misses, again.commits, again.log_records) == (0, 0, 0)


def test_reader_counts_what_it_reads_and_writes_nothing(make_table, open_table):
    emb = make_table()
    train(emb, 0, 1)
    emb.commit()
    reader = open_table(emb.path, "r")
    start = reader.stats()
    for _ in range(2):
        reader(torch.tensor([0, 1, 5]))
    assert changes(reader, start) == {"misses": 6, "bytes_read": 6 * RECORD}


def test_stats_are_a_frozen_copy_of_the_counters(make_table):
    emb = make_table()
    stats = emb.stats()
    with pytest.raises(dataclasses.FrozenInstanceError):
        stats.hits = 5
    train(emb, 0)
    assert stats.misses == 0
    names = [field.name for field in dataclasses.fields(ooc_embed.Stats)]
    assert names[0] == "seconds"
    assert ["opened", *names[1:]] == [field.name for field in dataclasses.fields(Counters)]


def test_seconds_are_those_since_the_table_was_opened(make_table):
    begin = time.perf_counter()
    emb = make_table()
    made = time.perf_counter()
    stats, again = emb.stats(), emb.stats()
    assert stats == again  # nothing was done between them
    assert 0 <= stats.seconds <= again.seconds <= time.perf_counter() - begin
    emb.close()
    assert time.perf_counter() - made <= emb.stats().seconds
