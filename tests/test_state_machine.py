"""Any order of operations: a table is at every moment what NumPy's arithmetic says.

`--hypothesis-profile=nightly` runs 2,000 examples, not a few.
"""

from __future__ import annotations

import copy
import dataclasses
import shutil
import tempfile
from pathlib import Path
from typing import Any

import going_back
import hypothesis.strategies as st
import numpy as np
import pytest
import store_files
import torch
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from numpy.typing import NDArray

import ooc_embed
from ooc_embed import DiskEmbedding, report

ROWS, DIM, CHUNK_ROWS = 1500, 2, 1024
# Far fewer slots than rows.
CACHE = 100 * (3 * DIM + 1) * 8
BETA1, BETA2, EPS = 0.9, 0.999, 1e-8


@dataclasses.dataclass
class Oracle:
    """Rows, moments and versions of a table, stepped by Adam's formula for the rows of a batch."""

    records: NDArray[np.float64]
    lr: float
    step: int = 0

    def train(self, ids: NDArray[np.int64], grads: NDArray[np.float64]) -> None:
        self.step += 1
        rows = np.unique(ids)
        grad = np.zeros((len(self.records), DIM))
        np.add.at(grad, ids, grads)
        weight, first, second, version = np.split(self.records[rows], (DIM, 2 * DIM, 3 * DIM), 1)
        first = BETA1 * first + (1 - BETA1) * grad[rows]
        second = BETA2 * second + (1 - BETA2) * grad[rows] ** 2
        rate = self.lr * np.sqrt(1 - BETA2**self.step) / (1 - BETA1**self.step)
        weight = weight - rate * first / (np.sqrt(second) + EPS)
        self.records[rows] = np.concatenate((weight, first, second, version + 1), 1)

    def assign(self, rows: NDArray[np.int64], values: NDArray[np.float64]) -> None:
        self.records[rows, :DIM] = values
        self.records[rows, -1] += 1

    def grow(self, rows: int) -> None:
        more = np.zeros((rows - len(self.records), self.records.shape[1]))
        self.records = np.concatenate((self.records, more))


def same(found: NDArray[np.float64], want: NDArray[np.float64]) -> None:
    np.testing.assert_allclose(found, want, rtol=1e-9, atol=1e-11)


class Machine(RuleBasedStateMachine):
    """A table and its oracle, and the commits that can be gone back to."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
        self.path = self.folder / "t.zarr"
        self.readers: list[tuple[DiskEmbedding, Oracle]] = []
        self.copies = 0

    @initialize(keep=st.integers(1, 4))
    def create(self, keep: int) -> None:
        self.emb = DiskEmbedding(
            ROWS,
            DIM,
            path=self.path,
            optimizer=ooc_embed.SparseAdam(lr=0.1),
            init="zeros",
            dtype=torch.float64,
            chunk_rows=CHUNK_ROWS,
            cache_bytes=CACHE,
            keep_commits=keep,
        )
        self.now = Oracle(np.zeros((ROWS, 3 * DIM + 1)), 0.1)
        self.commits = {0: copy.deepcopy(self.now)}

    def committed(self) -> None:
        self.commits[max(self.emb.commits())] = copy.deepcopy(self.now)

    def went_back(self, number: int) -> None:
        self.now = copy.deepcopy(self.commits[number])

    # What changes rows

    @rule(seed=st.integers(0, 2**32 - 1), count=st.sampled_from([1, 7, 90, 400, 1400]))
    def train(self, seed: int, count: int) -> None:
        rng = np.random.default_rng(seed)
        ids, grads = rng.integers(0, len(self.now.records), count), rng.normal(size=(count, DIM))
        out = self.emb(torch.from_numpy(ids))
        same(out.detach().numpy(), self.now.records[ids, :DIM])
        (out * torch.from_numpy(grads)).sum().backward()
        self.now.train(ids, grads)

    @rule(seed=st.integers(0, 2**32 - 1), count=st.integers(1, 50))
    def assign(self, seed: int, count: int) -> None:
        rng = np.random.default_rng(seed)
        rows = rng.choice(len(self.now.records), count, replace=False)
        values = rng.normal(size=(count, DIM))
        self.emb.weight[rows] = torch.from_numpy(values)
        self.now.assign(rows, values)

    @rule(lr=st.floats(0.001, 0.5))
    def set_rate(self, lr: float) -> None:
        self.emb.optimizer.param_groups[0]["lr"] = self.now.lr = lr

    @precondition(lambda self: len(self.now.records) < 4000)
    @rule(more=st.integers(1, 900))
    def resize(self, more: int) -> None:
        self.emb.resize(len(self.now.records) + more)
        self.now.grow(len(self.now.records) + more)
        self.committed()

    # What makes commits, and goes back

    @rule(how=st.sampled_from(["commit", "flush", "state_dict"]))
    def commit(self, how: str) -> None:
        getattr(self.emb, how)()
        self.committed()

    @rule(data=st.data())
    def rollback(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.emb.commits())))
        self.emb.rollback(number)
        self.went_back(number)

    @rule(flush=st.booleans())
    def reopen(self, flush: bool) -> None:
        self.emb.close(flush=flush)
        self.emb = DiskEmbedding.open(self.path, cache_bytes=CACHE)
        self.committed()

    @rule()
    def crash(self) -> None:
        number = max(self.emb.commits())
        going_back.abandon(self.emb)
        self.emb = DiskEmbedding.open(self.path, cache_bytes=CACHE)
        assert max(self.emb.commits()) == number
        self.went_back(number)

    # Who looks on

    @precondition(lambda self: len(self.readers) < 3)
    @rule(data=st.data())
    def read_beside(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.emb.commits())))
        reader = DiskEmbedding.open(self.path, mode="r", commit=number)
        self.readers.append((reader, copy.deepcopy(self.commits[number])))

    @rule()
    def snapshot(self) -> None:
        self.copies += 1
        target = self.folder / f"s{self.copies}.zarr"
        self.emb.snapshot(target)
        self.committed()
        self.assert_is_whole(target)
        shutil.rmtree(target)

    @rule()
    def verify(self) -> None:
        self.assert_is_whole(self.path)

    def assert_is_whole(self, path: Path) -> None:
        assert report.verify(path) == []
        for number in going_back.named(path):
            same(going_back.records_by_hand(path, number), self.commits[number].records)

    @invariant()
    def table_is_the_oracles(self) -> None:
        if not hasattr(self, "now"):
            return
        self.assert_is(self.emb, self.now)
        for reader, want in self.readers:
            self.assert_is(reader, want)

    def assert_is(self, emb: DiskEmbedding, want: Oracle) -> None:
        assert (emb.step, emb.num_embeddings) == (want.step, len(want.records))
        fields: list[Any] = [emb.weight[:], *(view[:] for view in emb.state.values())]
        same(torch.cat([*fields, emb.version[:][:, None].double()], 1).numpy(), want.records)

    def teardown(self) -> None:
        if hasattr(self, "emb"):
            self.emb.flush()
            self.committed()
            same(
                store_files.read_by_hand(self.path, "table")[: len(self.now.records)],
                self.now.records,
            )
            self.emb.close()
            assert report.verify(self.path) == []
        for reader, _ in self.readers:
            reader.close()
        shutil.rmtree(self.folder)


# Each is many operations, and takes as long as several examples of others.
EXAMPLES = settings.default.max_examples * 2 // 5
Machine.TestCase.settings = settings(max_examples=EXAMPLES, stateful_step_count=40)
TestMachine = pytest.mark.timeout(7200 if EXAMPLES > 100 else 300)(Machine.TestCase)
TestMachine = pytest.mark.filterwarnings("ignore:.*gives up commit")(TestMachine)
