"""What the process of a soak does that is killed: rounds of training, and all that a table can do.

Round n is a pure function of the seed and of n, so what the table is after n rounds does not depend
on kills and rollbacks. The rest is drawn anew in each life. Knows the format by json alone.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import random
import shutil
import signal
import sys
import traceback
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
import workload
from crash_child import report
from numpy.typing import NDArray

import ooc_embed
from ooc_embed.memory_limit import terminated_as_exit
from ooc_embed.workloads import RepeatedRows

LR = 0.003
# It has no common divisor with a number of rows below it: frequent rows are all over the table.
PRIME = 2654435761
KEEP = 2
# How often each is chosen between rounds; all of them commit but for the last one.
OPERATIONS = {
    "commit": 60,
    "state_dict": 12,
    "read": 8,
    "reopen": 6,
    "snapshot": 4,
    "flush": 2,
    "rollback": 6,
}
METADATA = {
    "zarr.json",
    "table/zarr.json",
    "column/zarr.json",
    "column/c/0",
    "log/zarr.json",
    *(f"log/{log}/zarr.json" for log in "01"),
    *(f"log/{log}/{name}/zarr.json" for log in "01" for name in ("rows", "records")),
}


@dataclasses.dataclass(frozen=True)
class Work:
    """The table and what is done with it; `pause` is the mean of rounds between operations."""

    path: str
    rows: int = 4_000_000
    dim: int = 128
    batch: int = 8192
    cache_bytes: int = 512 << 20
    chunk_rows: int | None = None
    pause: float = 20.0
    seed: int = 0


def initial(work: Work) -> RepeatedRows:
    return RepeatedRows(work.rows, work.dim, seed=work.seed)


@functools.cache
def _noise(work: Work) -> NDArray[np.float32]:
    rng = np.random.default_rng(work.seed)
    return rng.standard_normal((1021, work.dim), dtype=np.float32)


def frequent(work: Work, ranks: NDArray[np.int64]) -> NDArray[np.int64]:
    """The rows of these ranks, 0 the most frequent."""
    return ranks * PRIME % work.rows


def make_round(work: Work, index: int) -> workload.Round:
    """Half of the ids by Zipf's law, half uniform; sometimes another rate, or assigned rows."""
    rng = np.random.default_rng([work.seed, index])
    skewed = frequent(work, (work.rows ** rng.random(work.batch // 2)).astype(np.int64) - 1)
    ids = np.concatenate((skewed, rng.integers(work.rows, size=work.batch - len(skewed))))
    grads = _noise(work)[(int(rng.integers(1021)) + np.arange(work.batch)) % 1021]
    lr = float(rng.uniform(0.3, 3) * LR) if rng.random() < 0.03 else None
    assigned = None
    if rng.random() < 0.05:
        rows = np.unique(skewed[:64])
        values = rng.standard_normal((len(rows), work.dim), dtype=np.float32)
        assigned = (torch.from_numpy(rows), torch.from_numpy(values))
    return workload.Round(torch.from_numpy(ids), torch.from_numpy(grads), lr, assigned, "")


def live(life: int, **arguments: Any) -> None:
    """One life: recover the store, see that no file is left over, train until killed.

    An interrupt closes the table as a `with` statement does; a fault leaves it as it is.
    """
    warnings.filterwarnings("ignore", ".*gives up commit")
    signal.signal(signal.SIGINT, signal.default_int_handler)
    life_ = Life(Work(**arguments), life)
    try:
        with terminated_as_exit():
            life_.run()
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        traceback.print_exc()
        report("fault", f"{type(error).__name__}: {error}"[:2000])
        os._exit(1)


class Life:
    """An open table, and what happens to it in one life."""

    def __init__(self, work: Work, life: int) -> None:
        self.work = work
        self.path = Path(work.path)
        self.rng = random.Random(f"{work.seed} {life}")
        self.snapshot_path = self.path.with_name("snapshot.zarr")

    def run(self) -> None:
        report("opening", os.getpid())
        if self.snapshot_path.exists():  # a killed life's
            shutil.rmtree(self.snapshot_path)
        if not (self.path / "zarr.json").exists():
            self.create()
        emb = self.open()
        emb.close()
        check_files(self.path)
        self.emb = self.open()
        report("opened", self.newest, self.emb.step)
        try:
            while True:
                self.play()
                if self.rng.random() * self.work.pause < 1:
                    (name,) = self.rng.choices([*OPERATIONS], [*OPERATIONS.values()])
                    self.operate(name)
        except (KeyboardInterrupt, SystemExit):
            report("begin", "close", self.emb.step, -1)
            self.emb.close()
            report("done", "close", self.emb.step, self.newest)
            raise

    def create(self) -> None:
        ooc_embed.DiskEmbedding(
            self.work.rows,
            self.work.dim,
            path=self.path,
            optimizer=ooc_embed.SparseAdam(lr=LR),
            init=initial(self.work),
            cache_bytes=self.work.cache_bytes,
            chunk_rows=self.work.chunk_rows,
            keep_commits=KEEP,
        ).close()

    def open(self) -> ooc_embed.DiskEmbedding:
        self.evictions = 0
        return ooc_embed.DiskEmbedding.open(self.path, cache_bytes=self.work.cache_bytes)

    @property
    def newest(self) -> int:
        return max(self.emb.commits())

    def play(self) -> None:
        played = make_round(self.work, self.emb.step)
        if played.assigned is not None:
            rows, values = played.assigned
            if torch.equal(self.emb.weight[rows], values):
                # An interrupt came between them and the step: it must not count twice.
                played = dataclasses.replace(played, assigned=None)
        workload.play(self.emb, played)
        stats = self.emb.stats()
        report("step", self.emb.step, stats.evictions > self.evictions, stats.merges)

    def operate(self, name: str) -> None:
        """Tell of an operation before and after it: name, step, number of the newest commit.

        Before it, that number is only known of a rollback.
        """
        if name == "rollback":
            number = self.rng.choice(sorted(self.emb.commits()))
            report("begin", name, self.emb.commits()[number], number)
            self.emb.rollback(number)
            self.evictions = self.emb.stats().evictions  # the cache is empty
        else:
            report("begin", name, self.emb.step, -1)
            getattr(self if hasattr(self, name) else self.emb, name)()
        report("done", name, self.emb.step, self.newest)

    def reopen(self) -> None:
        self.emb.close()
        check_files(self.path)
        self.emb = self.open()

    def read(self) -> None:
        self.emb.commit()
        self.assert_same(self.path)

    def snapshot(self) -> None:
        self.emb.snapshot(self.snapshot_path)
        self.assert_same(self.snapshot_path)
        shutil.rmtree(self.snapshot_path)

    def assert_same(self, path: Path) -> None:
        """A reader of what was just committed sees it."""
        emb, rows = self.emb, make_round(self.work, self.emb.step).ids.unique()
        with ooc_embed.DiskEmbedding.open(path, mode="r") as reader:
            assert (reader.step, max(reader.commits())) == (emb.step, self.newest)
            assert torch.equal(reader.version[rows], emb.version[rows])
            assert torch.equal(reader.weight[rows], emb.weight[rows])
            assert torch.equal(reader.state["exp_avg_sq"][rows], emb.state["exp_avg_sq"][rows])


def check_files(path: Path) -> None:
    """Of a store that nobody has open: its files are those that its manifest explains."""
    found = {str(file.relative_to(path)) for file in path.rglob("*") if not file.is_dir()}
    wanted = expected_files(path)
    assert found == wanted, (
        f"{path}: left over are {sorted(found - wanted)}, missing are {sorted(wanted - found)}"
    )


def expected_files(path: Path) -> set[str]:
    manifest = json.loads((path / "zarr.json").read_text())["attributes"]["ooc_embed"]
    chunks = manifest["chunk_crc32"] | manifest["merged_crc32"]
    files = METADATA | {f"table/c.{index}.0" for index in chunks}
    for log in manifest["commits"][-1]["logs"]:
        for name, ending in (("rows", ""), ("records", ".0")):
            array = f"log/{log['generation'] % 2}/{name}"
            described = json.loads((path / array / "zarr.json").read_text())
            (size, *_) = described["chunk_grid"]["configuration"]["chunk_shape"]
            files |= {f"{array}/c.{i}{ending}" for i in range(-(-log["records"] // size))}
    return files
