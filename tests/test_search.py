"""`blocks` and `topk` walk over the whole table: as torch over all rows, and nothing changes."""

from __future__ import annotations

import pytest
import torch
from ram_reference import fingerprint
from torch.nn import functional

from ooc_embed import inspectable

ROWS = torch.randn(300, 4, generator=torch.Generator().manual_seed(0))


def brute(query: torch.Tensor, metric: str) -> torch.Tensor:
    if metric == "dot":
        return query @ ROWS.T
    if metric == "cosine":
        return functional.cosine_similarity(query[:, None], ROWS[None], dim=2)
    return (query[:, None] - ROWS[None]).norm(dim=2)


@pytest.fixture
def trained(make_table, monkeypatch):
    """A table of `ROWS`, some in the cache, some in the log; searched by small blocks."""
    monkeypatch.setattr(inspectable, "_SEARCHED_ROWS", 64)
    emb = make_table(300, 4, cache_bytes=40 * 100)
    for start in range(0, 300, 30):
        emb(torch.arange(start, start + 30)).sum().backward()
    emb.weight[:] = ROWS
    return emb


@pytest.mark.parametrize("metric", ["dot", "cosine", "l2"])
@pytest.mark.parametrize("k", [1, 5, 100, 300])
def test_topk_is_that_of_all_rows_at_once(trained, metric, k):
    query = torch.randn(7, 4)
    scores, ids = trained.topk(query, k, metric)
    expected = brute(query, metric).sort(dim=1, descending=metric != "l2")
    torch.testing.assert_close(scores, expected.values[:, :k])
    assert torch.equal(ids, expected.indices[:, :k])
    one_score, one_ids = trained.topk(query[2], k, metric)
    torch.testing.assert_close(one_score, scores[2])
    assert torch.equal(one_ids, ids[2])


def test_searching_changes_neither_files_nor_cache(trained):
    before, held = fingerprint(trained.path), trained._table.cache.where.clone()
    evictions = trained.stats().evictions
    trained.topk(torch.randn(3, 4), 5)
    assert sum(len(rows) for _, rows in trained.blocks(7)) == 300
    assert fingerprint(trained.path) == before
    assert torch.equal(trained._table.cache.where, held)
    assert trained.stats().evictions == evictions


def test_blocks_are_all_rows_in_their_order(trained):
    starts = []
    for start, rows in trained.blocks(128):
        starts.append(start)
        assert torch.equal(rows, ROWS[start : start + 128])
    assert starts == [0, 128, 256]


def test_rows_that_were_never_written_are_found_by_their_initial_values(make_table):
    emb = make_table(50, 4)
    scores, ids = emb.topk(emb.weight[17], 1, "cosine")
    assert ids.tolist() == [17]
    torch.testing.assert_close(scores, torch.ones(1))


@pytest.mark.parametrize(
    ("shape", "k", "metric"),
    [
        ((5,), 1, "dot"),
        ((), 1, "dot"),
        ((2, 2, 4), 1, "dot"),
        ((4,), 0, "dot"),
        ((4,), 301, "dot"),
        ((4,), 1, "manhattan"),
    ],
)
def test_searches_that_make_no_sense_are_refused(trained, shape, k, metric):
    with pytest.raises(ValueError, match="query|k must|metric"):
        trained.topk(torch.zeros(shape), k, metric)


def test_a_row_id_in_the_place_of_a_query_is_refused(trained):
    with pytest.raises(TypeError, match=r"a query is a tensor, such as emb.weight\[row\], got int"):
        trained.topk(7, 1)
