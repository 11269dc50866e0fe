"""A scripted training run and its oracle in RAM: torch alone; does not know how a table stores.

Round i of a script is a pure function of (seed, i), so a process that was killed can go on where
its last commit left off, and a test can say what every row must be there.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import torch
import zarr
from numpy.typing import NDArray

ROWS = 6000
DIM = 4
WIDTH = 3 * DIM + 1
CHUNK_ROWS = 1024
LR = 0.1
FIELDS = ("weight", "exp_avg", "exp_avg_sq")
# Far fewer slots than a script touches, so that evictions append to the log between commits.
SMALL_CACHE = 512 * WIDTH * 8


@dataclasses.dataclass(frozen=True)
class Round:
    """What one round does, in this order; `then` is "commit", "flush" or "" and comes last."""

    ids: torch.Tensor
    grads: torch.Tensor
    lr: float | None
    assigned: tuple[torch.Tensor, torch.Tensor] | None
    then: str


def make_round(seed: int, index: int, flushes: bool = True) -> Round:
    rng = np.random.default_rng([seed, index])
    count = int(rng.integers(1, 400))
    ids = (ROWS * rng.random(count) ** 3).astype(np.int64)
    lr = float(rng.uniform(0.01, 0.2)) if rng.random() < 0.3 else None
    assigned = None
    if rng.random() < 0.3:
        rows = rng.choice(ROWS, size=7, replace=False)
        assigned = (torch.from_numpy(rows), torch.from_numpy(rng.standard_normal((7, DIM))))
    dice = rng.random()
    then = "flush" if dice < 0.15 and flushes else "commit" if dice < 0.6 else ""
    grads = torch.from_numpy(rng.standard_normal((count, DIM)))
    return Round(torch.from_numpy(ids), grads, lr, assigned, then)


def train(emb: Any, ids: torch.Tensor, grads: torch.Tensor) -> None:
    (emb(ids) * grads).sum().backward()


def play(emb: Any, played: Round) -> None:
    """The round on a table, without its `then`."""
    if played.lr is not None:
        emb.optimizer.param_groups[0]["lr"] = played.lr
    if played.assigned is not None:
        rows, values = played.assigned
        emb.weight[rows] = values
    train(emb, played.ids, played.grads)


@dataclasses.dataclass(frozen=True)
class State:
    """All that a commit holds, as numpy arrays (rows, dim) and (rows,)."""

    fields: dict[str, NDArray[np.float64]]
    version: NDArray[np.int64]
    step: int
    lr: float

    def records(self) -> NDArray[np.float64]:
        """The zarr table after a flush: a row that was never written is zeros."""
        whole = np.concatenate([*self.fields.values(), self.version[:, None]], axis=1)
        whole[self.version == 0] = 0
        return whole


class Shadow:
    """nn.Embedding(sparse=True) with torch.optim.SparseAdam, and a count of each row's writes."""

    def __init__(self, weight: torch.Tensor, lr: float = LR) -> None:
        self.module = torch.nn.Embedding.from_pretrained(weight.clone(), freeze=False, sparse=True)
        self.optimizer = torch.optim.SparseAdam(self.module.parameters(), lr=lr)
        self.version = np.zeros(len(weight), np.int64)
        self.step = 0

    def train(self, ids: torch.Tensor, grads: torch.Tensor) -> None:
        (self.module(ids) * grads).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.version[np.unique(ids.numpy())] += 1
        self.step += 1

    def play(self, played: Round) -> None:
        if played.lr is not None:
            self.optimizer.param_groups[0]["lr"] = played.lr
        if played.assigned is not None:
            rows, values = played.assigned
            self.module.weight.data[rows] = values
            self.version[rows.numpy()] += 1
        self.train(played.ids, played.grads)

    def grow(self, rows: torch.Tensor) -> None:
        """Have these new rows behind the others, without moments."""
        weight = self.module.weight
        state = self.optimizer.state[weight]
        for name in FIELDS[1:]:
            state[name] = torch.cat([state[name], torch.zeros_like(rows)])
        weight.data = torch.cat([weight.data, rows])
        self.module.num_embeddings = len(weight)
        self.version = np.concatenate([self.version, np.zeros(len(rows), np.int64)])

    def state(self) -> State:
        weight = self.module.weight.detach()
        moments = self.optimizer.state.get(self.module.weight, {})
        fields = {"weight": weight.numpy().copy()}
        for name in FIELDS[1:]:
            fields[name] = moments.get(name, torch.zeros_like(weight)).numpy().copy()
        lr = float(self.optimizer.param_groups[0]["lr"])
        return State(fields, self.version.copy(), self.step, lr)


def history(seed: int, rounds: int, weight: torch.Tensor, flushes: bool = True) -> list[State]:
    """The state after 0, 1, … rounds."""
    shadow = Shadow(weight)
    states = [shadow.state()]
    for index in range(rounds):
        shadow.play(make_round(seed, index, flushes))
        states.append(shadow.state())
    return states


def _same(got: NDArray[Any], want: NDArray[Any], name: str) -> None:
    # The fused kernel and torch's sparse arithmetic round in another order; a step more or less, or
    # a gradient lost, is larger than this by many orders of magnitude.
    np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-11, err_msg=name)


def assert_table_is(emb: Any, want: State) -> None:
    """Every field of every row, the step and the learning rate, through the table's own views."""
    assert emb.step == want.step
    assert float(emb.optimizer.param_groups[0]["lr"]) == want.lr
    np.testing.assert_array_equal(emb.version[:].numpy(), want.version)
    _same(emb.weight[:].numpy(), want.fields["weight"], "weight")
    for name in FIELDS[1:]:
        _same(emb.state[name][:].numpy(), want.fields[name], name)


def assert_zarr_is(path: Path, want: State) -> None:
    """The table as plain zarr reads it, which is whole only after a flush."""
    table = zarr.open_group(path, mode="r")["table"]
    assert isinstance(table, zarr.Array)
    _same(np.asarray(table[:]), want.records(), "table")
