"""What a table says of itself, against plain zarr, the files and torch; and how that is shown."""

from __future__ import annotations

import html.parser
import math
import os
import shutil
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import crash_child
import numpy as np
import pytest
import small_store
import store_files
import torch
import zarr
from numpy.typing import NDArray

import ooc_embed
from ooc_embed import DiskEmbedding, DiskEmbeddingBag, StoreError, describe, touched
from ooc_embed.places import StoredRecords

pytestmark = pytest.mark.usefixtures("one_thread")

ROWS, CHUNK = 5000, 1024


@pytest.fixture
def trained(store_path: Path) -> Path:
    """Some rows are in chunk files, some in the log."""
    return small_store.train(store_path)


@pytest.fixture(scope="module")
def nursery() -> crash_child.Nursery:
    return crash_child.nursery()


@pytest.fixture
def emb(store_path: Path) -> Iterator[DiskEmbedding]:
    with small_store.make(store_path) as made:
        yield made


def written(path: Path) -> NDArray[np.bool_]:
    """Which rows a store has, by its files alone."""
    mask = store_files.read_by_hand(path, "table")[:, -1] > 0
    for log in store_files.newest_commit(path)["logs"]:
        rows = store_files.read_by_hand(path, f"log/{log['generation'] % 2}/rows")
        rows = rows[: log["records"]]
        mask[rows[rows >= 0]] = True
    return mask


def by_chunks(mask: NDArray[np.bool_]) -> list[tuple[int, int, int, bool]]:
    starts = range(0, len(mask), CHUNK)
    return [(s, min(s + CHUNK, len(mask)), int(mask[s : s + CHUNK].sum()), True) for s in starts]


def parts(facts: ooc_embed.Description) -> list[tuple[int, int, int, bool]]:
    return [(part.start, part.stop, part.written, part.exact) for part in facts.touched]


# Facts


def test_a_store_is_described_as_its_manifest_and_its_files_are(trained: Path) -> None:
    facts = describe(trained)
    manifest, commit = store_files.manifest(trained), store_files.newest_commit(trained)
    assert facts.path == trained
    assert facts.opened == "store"
    assert facts.read_only
    for name in ("table_id", "num_embeddings", "embedding_dim", "padding_idx", "dtype", "seed"):
        assert getattr(facts, name) == manifest[name]
    assert facts.fields == dict(manifest["fields"])
    assert facts.init == {"name": "normal", "mean": 0.0, "std": 1.0}
    assert facts.rule == "SparseAdam"
    assert facts.hyperparameters["lr"] == 1e-3
    assert facts.hyperparameters["betas"] == (0.9, 0.999)
    assert (facts.step, facts.committed_step) == (commit["step"], commit["step"])
    assert (facts.commit, facts.library) == (commit["commit"], ooc_embed.__version__)
    assert facts.created == datetime.fromtimestamp(commit["created"], UTC)
    assert facts.commits == {c["commit"]: c["step"] for c in manifest["commits"]}
    assert (facts.keep_commits, facts.checkpoints) == (1, ())
    assert facts.chunks == len(store_files.chunk_files(trained))
    assert (facts.num_chunks, facts.chunk_rows, facts.chunk_bytes) == (5, CHUNK, CHUNK * 13 * 4)
    assert facts.log_records == commit["logs"][-1]["records"] > 0
    assert (facts.log_limit, facts.sealed_records, facts.unmerged) == (ROWS // 2, 0, False)
    assert facts.cache is None
    assert facts.writer is None
    assert facts.disk_bytes == sum(512 * f.stat().st_blocks for f in trained.rglob("*"))


def test_written_rows_are_those_of_table_and_log_by_chunks(trained: Path) -> None:
    mask = written(trained)
    facts = describe(trained)
    assert parts(facts) == by_chunks(mask)
    assert facts.exact
    assert facts.rows_written == mask.sum()
    assert facts.share_written == mask.mean()
    assert [part.share for part in facts.touched] == [
        mask[start : start + CHUNK].mean() for start in range(0, ROWS, CHUNK)
    ]


def test_written_rows_of_an_unfinished_merge_are_those_of_both_logs(store_path: Path) -> None:
    path = small_store.in_a_merge(store_path, 3)
    assert store_files.manifest(path)["merged_crc32"]
    commit = store_files.newest_commit(path)
    with store_files.untouched(path):
        facts = describe(path)
    assert parts(facts) == by_chunks(written(path))
    assert facts.sealed_records == commit["logs"][0]["records"] > 0
    assert facts.log_records == commit["logs"][1]["records"]
    assert "sealed, for a merge" in str(facts)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_bytes_in_ram_are_those_that_torch_keeps(make_table, dtype: torch.dtype) -> None:
    emb = make_table(700, 3, dtype=dtype)
    module = torch.nn.Embedding(700, 3, sparse=True, dtype=dtype)
    optimizer = torch.optim.SparseAdam(list(module.parameters()))
    module(torch.tensor([1])).sum().backward()
    optimizer.step()
    state = optimizer.state[module.weight]
    facts = describe(emb)
    assert facts.weight_bytes == module.weight.nbytes
    assert facts.ram_bytes == sum(
        t.nbytes for t in (module.weight, state["exp_avg"], state["exp_avg_sq"])
    )


@pytest.mark.parametrize(
    ("rule", "columns"),
    [
        (ooc_embed.SGD(), {"weight": 3, "version": 1}),
        (
            ooc_embed.RiemannianAdam(lr=0.25, curvature=0.5),
            {"weight": 3, "exp_avg": 3, "exp_avg_sq": 1, "version": 1},
        ),
    ],
    ids=["SGD", "RiemannianAdam"],
)
def test_each_rule_is_described_with_its_fields(
    make_table, rule: Any, columns: dict[str, int]
) -> None:
    emb = make_table(100, 3, optimizer=rule)
    facts = describe(emb)
    assert facts.fields == columns
    assert facts.ram_bytes == 100 * 4 * (sum(columns.values()) - 1)
    assert facts.rule == type(rule).__name__
    assert facts.hyperparameters["lr"] == rule.lr
    assert f"{facts.rule}(lr={rule.lr}, " in str(facts)
    assert f"{facts.rule}(lr={rule.lr}, " in facts._repr_html_()


def test_options_of_gradients_are_shown_where_they_do_something(make_table) -> None:
    assert "max_grad" not in str(describe(make_table()))
    assert "max_grad_norm=0.5" in str(describe(make_table(max_grad_norm=0.5)))


def test_a_table_that_grew_is_described_with_its_new_rows(emb: DiskEmbedding) -> None:
    small_store.step(emb, [0, ROWS - 1])
    emb.resize(3 * CHUNK + ROWS)
    facts = describe(emb)
    assert facts.num_embeddings == 3 * CHUNK + ROWS
    mask = np.zeros(3 * CHUNK + ROWS, dtype=bool)
    mask[[0, ROWS - 1]] = True
    assert parts(facts) == by_chunks(mask)


def test_many_kept_commits_are_told_by_their_ends(make_table) -> None:
    emb = make_table(keep_commits=9)
    for _ in range(12):
        small_store.step(emb, [1])
        emb.commit()
    facts = describe(emb)
    assert facts.commits == {number: number for number in range(4, 13)} == emb.commits()
    assert "9 from 4 (step 4) to 12 (step 12); the newest 9 are kept" in str(facts)


def test_a_commit_for_a_checkpoint_is_named(emb: DiskEmbedding) -> None:
    small_store.step(emb, [1])
    emb.state_dict()
    facts = describe(emb)
    assert facts.checkpoints == (1,)
    assert "1 (step 1); checkpoints have 1; the newest is kept" in str(facts)


# Objects that are open


def test_an_open_writer_is_described_with_what_is_not_committed(emb: DiskEmbedding) -> None:
    small_store.step(emb, [3])
    emb.flush()
    emb.optimizer.param_groups[0]["lr"] = 0.5
    small_store.step(emb, [3, 1500, 4999])
    for facts, rows, step, rate in (
        (describe(emb), [3, 1500, 4999], 2, 0.5),
        (describe(emb.path), [3], 1, 1e-3),
    ):
        mask = np.zeros(ROWS, dtype=bool)
        mask[rows] = True
        assert parts(facts) == by_chunks(mask)
        assert facts.rows_written == len(rows)
        assert (facts.step, facts.committed_step) == (step, 1)
        assert facts.hyperparameters["lr"] == rate
    assert describe(emb).opened == "DiskEmbedding"
    assert describe(emb).writer == "this object"
    assert f"this same process (pid {os.getpid()})" in str(describe(emb.path))


def test_rows_that_were_evicted_and_not_committed_are_counted(make_table) -> None:
    emb = make_table(ROWS, 2, chunk_rows=CHUNK, cache_bytes=300 * (7 * 4 + 25))
    mask = np.zeros(ROWS, dtype=bool)
    for ids in torch.randperm(ROWS)[:1600].split(200):
        small_store.step(emb, ids.tolist())
        mask[ids.numpy()] = True
        assert parts(describe(emb)) == by_chunks(mask)
    assert emb.stats().evictions > 0


def test_describing_a_writer_changes_neither_files_nor_cache_nor_counts(trained: Path) -> None:
    with DiskEmbedding.open(trained, cache_bytes=400 * (13 * 4 + 25)) as emb:
        small_store.some_steps(emb, 5, 4)
        emb(torch.arange(50))
        cache = emb._table.cache
        before, stats = cache.where.clone(), emb.stats()
        with store_files.untouched(trained):
            for _ in range(2):
                describe(emb)
                emb._repr_html_()
        assert torch.equal(cache.where, before)
        assert emb.stats() == stats


def test_cache_is_described_as_its_lookups_were(make_table) -> None:
    emb = make_table(100, 2, cache_bytes=8 * (7 * 4 + 25))
    facts = describe(emb)
    assert facts.cache is not None
    assert (facts.cache.slots, facts.cache.used, facts.cache.looked_up) == (8, 0, 0)
    assert math.isnan(facts.cache.hit_rate)
    assert "none yet" in str(facts)
    small_store.step(emb, [1, 2, 3])
    emb(torch.tensor([3, 4]))
    facts = describe(emb)
    assert facts.cache is not None
    assert (facts.cache.slots, facts.cache.used, facts.cache.dirty) == (8, 4, 3)
    assert facts.cache.cache_bytes == 8 * (7 * 4 + 25)
    assert (facts.cache.looked_up, facts.cache.hit_rate) == (5, 1 / 5)
    assert "20.0% (of 5 rows)" in str(facts)
    assert facts.map_bytes == 100 * 4


def test_a_bag_and_a_reader_are_described_as_what_they_are(store_path: Path) -> None:
    with DiskEmbeddingBag(50, 2, path=store_path) as bag:
        bag(torch.tensor([[1, 2]])).sum().backward()
        assert describe(bag).opened == "DiskEmbeddingBag"
        assert describe(bag).rows_written == 2
        assert "DiskEmbeddingBag" in bag._repr_html_()
    with ooc_embed.open_table(store_path) as table, DiskEmbedding.open(store_path, "r") as emb:
        for opened, name in ((table, "TableReader"), (emb, "DiskEmbedding")):
            facts = describe(opened)
            assert (facts.opened, facts.read_only, facts.cache) == (name, True, None)
            assert facts.touched[0].written == 2


def test_a_store_that_another_process_has_open_is_described(
    store_path: Path, nursery: crash_child.Nursery
) -> None:
    crash_child.create(str(store_path), 1 << 20).close()
    pid = nursery.start("hold", path=str(store_path))
    try:
        assert nursery.next_event()
        with store_files.untouched(store_path):
            facts = describe(store_path)
        assert facts.writer
        assert facts.writer.startswith(f"process {pid} on ")
    finally:
        os.kill(pid, 9)
        nursery.rest()


def test_a_store_that_commits_and_merges_meanwhile_is_described(
    store_path: Path, nursery: crash_child.Nursery
) -> None:
    with crash_child.create(str(store_path), 1 << 15) as emb:
        crash_child.write_pattern(emb, 1)
    nursery.start("write patterns", path=str(store_path), seed=4, rounds=12)
    assert nursery.next_event() == ["opened"]
    described = [describe(store_path) for _ in range(8)]
    nursery.rest()
    rows = [part.written for part in described[0].touched]
    assert sum(rows) == described[0].num_embeddings  # each of its commits has written all rows
    assert all([part.written for part in facts.touched] == rows for facts in described)


# Samples


def test_a_sample_of_each_chunk_is_read_where_all_would_be_too_much(
    emb: DiskEmbedding, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(0)
    mask = rng.random(ROWS) < np.repeat([0.0, 0.3, 1.0, 0.7, 0.0], CHUNK)[:ROWS]
    mask[0] = True  # or there were no file
    emb.weight[mask] = torch.zeros(int(mask.sum()), 4)
    emb.flush()
    read = []
    in_chunks = StoredRecords.in_chunks

    def counting(self: StoredRecords, rows: torch.Tensor) -> torch.Tensor:
        read.append(len(rows))
        return in_chunks(self, rows)

    monkeypatch.setattr(StoredRecords, "in_chunks", counting)
    monkeypatch.setattr(touched, "_READ_BYTES", 1600 * 13 * 4)  # 400 rows of each file
    facts = describe(emb.path)
    assert sum(read) == 1600
    assert not facts.exact
    assert [part.exact for part in facts.touched] == [False] * 4 + [True]
    shares = [part.share for part in facts.touched]
    assert shares[0] <= 1 / 400
    assert shares[2] == 1
    assert shares[4] == 0
    for place in (1, 3):  # four standard deviations of a share among 400
        truth = mask[place * CHUNK : (place + 1) * CHUNK].mean()
        assert abs(shares[place] - truth) < 4 * math.sqrt(0.25 / 400)
    assert describe(emb.path).touched == facts.touched
    assert "estimated from a sample" in str(facts)
    assert "estimated from a sample" in facts._repr_html_()
    assert facts.rows_written == mask.sum()  # which the store knows


def test_rows_of_the_log_are_counted_beside_a_sample_of_the_chunks(
    emb: DiskEmbedding, monkeypatch: pytest.MonkeyPatch
) -> None:
    emb.weight[:CHUNK] = torch.zeros(CHUNK, 4)
    emb.flush()
    small_store.step(emb, [5, *range(2000, 2010)])
    emb.commit()
    monkeypatch.setattr(touched, "_READ_BYTES", 30 * 13 * 4)
    facts = describe(emb.path)
    assert [part.written for part in facts.touched] == [CHUNK, 10, 0, 0, 0]
    assert [part.exact for part in facts.touched] == [False, True, True, True, True]


def test_many_chunks_share_bars(make_table) -> None:
    emb = make_table(130 * CHUNK - 7, 1, chunk_rows=CHUNK)
    small_store.step(emb, [0, 3 * CHUNK, 130 * CHUNK - 8])
    facts = describe(emb)
    assert facts.num_chunks == 130
    assert len(facts.touched) <= 60
    assert facts.touched[0].start == 0
    assert facts.touched[-1].stop == 130 * CHUNK - 7
    for part, following in zip(facts.touched, facts.touched[1:], strict=False):
        assert part.stop == following.start
        assert part.stop % CHUNK == 0
    assert [part.written for part in facts.touched] == [1, 1, *[0] * 41, 1]
    assert "a bar for each 3 chunks" in str(facts)


# As text


def test_text_is_a_table_of_two_columns(trained: Path) -> None:
    for text in (str(describe(trained)), str(describe(small_store.in_a_merge(trained / "2", 1)))):
        head, *lines = text.splitlines()
        assert head.startswith("store, 5,000 rows of 4 float32, read-only")
        column = lines[0].index(lines[0].split()[1])
        names = [line[:column].strip() for line in lines]
        assert names[:4] == ["path", "step", "commit", "rows written"]
        assert all(line[column - 2 : column].strip() == "" for line in lines)
        assert all(line == line.rstrip() for line in lines)
        assert max(map(len, lines[8:10])) <= 100


def test_bars_of_a_terminal_are_as_high_as_the_shares(emb: DiskEmbedding) -> None:
    emb.weight[:CHUNK] = torch.zeros(CHUNK, 4)
    emb.weight[CHUNK : CHUNK + CHUNK // 2] = torch.zeros(CHUNK // 2, 4)
    emb.weight[2 * CHUNK] = torch.zeros(4)
    lines = str(describe(emb)).splitlines()[-6:-2]
    begin = lines[0].index("█")
    columns = ["".join(line.ljust(200)[begin + 12 * bar] for line in lines) for bar in range(5)]
    assert columns == ["████", "  ██", "   ▁", "    ", "    "]
    assert [line[:begin].split()[-1:] for line in lines] == [["100%"], [], [], ["0%"]]


def test_small_shares_have_a_scale_of_their_own(make_table) -> None:
    emb = make_table(1000, 1)
    small_store.step(emb, [1, 2, 3])
    assert "1% " in str(describe(emb))
    assert "scale to 1%" in emb._repr_html_()


# As HTML


class Page(html.parser.HTMLParser):
    """Fails where tags do not close in order; keeps texts, bars and attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.texts: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.open.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1] != "style":
            self.texts.append(data)


def test_card_is_whole_html_that_needs_nothing_from_elsewhere(trained: Path) -> None:
    text = describe(trained)._repr_html_()
    page = Page(text)
    for word in ("step", "rows written", "cache hits", "fields", "rule", "log", str(trained)):
        assert word in page.texts
    assert {name for name, _ in page.attributes} <= {"class", "style", "title"}
    assert not any(word in text for word in ("http", "url(", "@import", "<script", "<link"))


def test_bars_of_a_card_are_as_high_as_the_shares(trained: Path) -> None:
    facts = describe(trained)
    page = Page(facts._repr_html_())
    heights = [value for name, value in page.attributes if name == "style" and "height" in value]
    most = 10.0 ** math.ceil(math.log10(max(part.share for part in facts.touched)))
    assert heights == [f"height:{part.share / most:.1%}" for part in facts.touched]
    titles = [value for name, value in page.attributes if name == "title"]
    assert titles[0].startswith("rows 0 to 1,023: ")


def test_whatever_a_path_is_called_a_card_shows_it(tmp_path: Path) -> None:
    path = tmp_path / "<b>&\"'</div>.zarr"
    emb = DiskEmbedding(10, 2, path=path)
    for _ in range(2):
        page = Page(emb._repr_html_())
        assert str(path) in page.texts
        assert "b" not in page.open
        emb.close()


# What cannot be described


def _closed(emb: DiskEmbedding) -> None:
    emb.close()


def _gone(emb: DiskEmbedding) -> None:
    emb.commit()
    shutil.rmtree(emb.path)


@pytest.mark.parametrize(
    ("spoil", "mode", "word"),
    [(_closed, "r+", "is closed"), (_closed, "r", "is closed"), (_gone, "r", "No such file")],
)
def test_card_of_what_cannot_be_described_says_why(
    tmp_path: Path, spoil: Callable[[DiskEmbedding], None], mode: str, word: str
) -> None:
    path = tmp_path / "t.zarr"
    emb = small_store.make(path)
    emb.commit()
    reader = DiskEmbedding.open(path, "r") if mode == "r" else emb
    spoil(reader if spoil is _closed else emb)
    page = Page(reader._repr_html_())
    assert any(word in text for text in page.texts)
    assert "5,000 rows of 4 float32" in page.texts
    assert repr(reader).startswith("DiskEmbedding(5000, 4, path=")
    with pytest.raises((StoreError, OSError), match=word):
        describe(reader)
    reader.close()


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # a fork beside threads
def test_card_in_a_forked_child_says_so(emb: DiskEmbedding) -> None:
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writing, emb._repr_html_().encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as answer:
        assert "a forked child cannot use it" in answer.read()
    assert os.waitpid(child, 0)[1] == 0


def test_card_in_the_middle_of_another_call_says_so(emb: DiskEmbedding) -> None:
    with emb._table.writing():
        assert "in the middle of another" in emb._repr_html_()


def test_card_shows_a_hyperparameter_that_no_step_could_use(emb: DiskEmbedding) -> None:
    emb.optimizer.param_groups[0]["lr"] = "<high>"
    assert "SparseAdam(lr=&lt;high&gt;" in emb._repr_html_()
    emb.optimizer.param_groups[0]["lr"] = 0.1


def test_paths_that_hold_no_sound_store_raise_as_opening_them_does(
    tmp_path: Path, trained: Path, stores
) -> None:
    with pytest.raises(FileNotFoundError, match=r"nowhere.zarr does not exist"):
        describe(tmp_path / "nowhere.zarr")
    with pytest.raises(ooc_embed.FormatError):
        describe(tmp_path)
    store_files.chunk_files(trained)[0].unlink()
    stores.expect_damage(trained)
    with pytest.raises(ooc_embed.CorruptStoreError, match=r"c\.0\.0 is missing"):
        describe(str(trained))


def test_what_is_neither_path_nor_table_raises() -> None:
    for wrong in (5, None, torch.nn.Embedding(3, 2)):
        with pytest.raises(TypeError, match="path of a store or an open table"):
            describe(wrong)


def test_a_model_around_a_table_shows_itself_as_ever(emb: DiskEmbedding) -> None:
    model = torch.nn.Sequential(emb, torch.nn.Linear(4, 1))
    assert not hasattr(model, "_repr_html_")
    assert repr(model).splitlines()[1].startswith("  (0): DiskEmbedding(5000, 4, path=")


def test_plain_zarr_agrees_after_a_flush(emb: DiskEmbedding) -> None:
    small_store.some_steps(emb, 1)
    emb.flush()
    versions = np.asarray(zarr.open_group(emb.path, mode="r")["table"][:, -1])
    assert parts(describe(emb.path)) == by_chunks(versions > 0)
