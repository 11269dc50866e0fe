"""Rows that DataLoader workers look up: read-only, at a commit, in processes of their own."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

from ooc_embed import DiskEmbedding, SparseAdam, StoreError

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:This process:DeprecationWarning"),  # a fork beside threads
    pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning"),
]

ROWS = 12


class Rows(Dataset):
    """Each item is a row and its id. A worker that is to read has a table given to it."""

    def __init__(self, path: Path, table: DiskEmbedding | None = None) -> None:
        self.path = path
        self.table = table

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, item: int) -> torch.Tensor:
        return self.table(torch.tensor(item))


class Refusals(Rows):
    """Each item is what looking its row up raises; a worker that raises costs seconds to end."""

    def __getitem__(self, item: int) -> str:
        try:
            return str(super().__getitem__(item))
        except StoreError as error:
            return str(error)


def give_table(worker: int) -> None:
    dataset = get_worker_info().dataset
    dataset.table = DiskEmbedding.open(dataset.path, mode="r")


class Collate:
    """Looks a whole batch up; opens at the first."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.table: DiskEmbedding | None = None

    def __call__(self, ids: list[int]) -> torch.Tensor:
        if self.table is None:
            self.table = DiskEmbedding.open(self.path, mode="r")
        return self.table.weight[ids]


@pytest.fixture
def emb(make_table: Callable[..., DiskEmbedding]) -> DiskEmbedding:
    """A table of zeros; after n commits each row is n times -0.1, as one Adam step says."""
    return make_table(ROWS, 2, init="zeros", optimizer=SparseAdam(lr=0.1))


def train(emb: DiskEmbedding) -> None:
    emb(torch.arange(ROWS)).sum().backward()


def load(dataset: Any, workers: int = 2, start: str = "fork", **options: Any) -> DataLoader:
    return DataLoader(
        dataset, batch_size=4, num_workers=workers, multiprocessing_context=start, **options
    )


def read(loader: DataLoader) -> torch.Tensor:
    return torch.cat(list(loader))


def steps(count: int) -> torch.Tensor:
    return torch.full((ROWS, 2), -0.1 * count)


@pytest.mark.parametrize("held", [False, True], ids=["nothing", "the writer"])
def test_forked_workers_open_the_table_and_read_its_last_commit(emb, held):
    train(emb)
    emb.commit()
    train(emb)  # is in memory only
    dataset = Rows(emb.path, emb if held else None)
    got = read(load(dataset, worker_init_fn=give_table))
    torch.testing.assert_close(got, steps(1))
    assert not got.requires_grad
    train(emb)
    assert emb.step == 3


def test_collate_function_that_opens_at_its_first_batch_reads_the_same(emb):
    train(emb)
    emb.commit()
    got = read(load(range(ROWS), collate_fn=Collate(emb.path)))
    torch.testing.assert_close(got, steps(1))


@pytest.mark.parametrize("mode", ["r+", "r"])
def test_forked_worker_with_its_parents_table_is_told_what_to_do(emb, open_table, mode):
    train(emb)
    emb.commit()
    table = emb if mode == "r+" else open_table(emb.path, mode="r")
    texts = [text for batch in load(Refusals(emb.path, table), workers=1) for text in batch]
    assert len(texts) == ROWS
    for text in texts:
        assert re.search(r"forked child.*mode='r' in the child.*'spawn'", text)
    assert torch.equal(table.weight[:], emb.weight[:])
    train(emb)
    assert emb.step == 2


def test_new_workers_see_the_newest_commit_and_persistent_ones_stay_at_theirs(emb):
    loaders = [
        load(Rows(emb.path), workers=1, worker_init_fn=give_table, persistent_workers=persistent)
        for persistent in (False, True)
    ]
    for epoch in range(3):
        new, persistent = (read(loader) for loader in loaders)
        torch.testing.assert_close(new, steps(epoch))
        torch.testing.assert_close(persistent, steps(0))
        train(emb)
        emb.commit()


def test_table_trains_commits_and_merges_while_workers_read_one_commit(emb):
    train(emb)
    emb.commit()
    loader = load(Rows(emb.path), worker_init_fn=give_table, prefetch_factor=1)
    batches = []
    for rows in loader:
        batches.append(rows)
        train(emb)
        emb.flush()
    assert emb.step == 1 + len(batches) == 4
    # Worker 0 had opened before its first batch came, and has the first and the third.
    torch.testing.assert_close(torch.cat(batches[::2]), steps(1)[:8])


def test_workers_that_live_on_do_not_keep_the_table_locked(emb, open_table):
    train(emb)
    emb.commit()
    loader = load(
        Rows(emb.path, emb),
        workers=1,
        worker_init_fn=give_table,
        persistent_workers=True,
    )
    torch.testing.assert_close(read(loader), steps(1))
    emb.close()
    again = open_table(emb.path)
    train(again)
    again.flush()
    assert again.step == 2
    torch.testing.assert_close(read(loader), steps(1))


def test_spawned_worker_gets_the_table_read_only_as_it_is_when_it_is_pickled(emb):
    train(emb)
    # What a worker that is spawned is given, without its seconds of importing torch.
    pickled = pickle.dumps(Rows(emb.path, emb))
    train(emb)
    dataset = pickle.loads(pickled)
    assert dataset.table.read_only
    torch.testing.assert_close(torch.stack([dataset[n] for n in range(ROWS)]), steps(1))
    dataset.table.close()
    got = read(load(Rows(emb.path, emb), workers=1, start="spawn"))
    torch.testing.assert_close(got, steps(2))
