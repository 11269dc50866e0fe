"""The ids and rows that measurements are made on, from a seed; knows neither tables nor disks."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Draw = Callable[[int], NDArray[np.int64]]

DISTRIBUTIONS = ("uniform", "zipf")


def record_bytes(dim: int) -> int:
    """Bytes of a row with its two moments and its version, float32."""
    return 4 * (3 * dim + 1)


def batches(distribution: str, rows: int, batch: int, *, seed: int) -> Iterator[Tensor]:
    """Endless batches of row ids, (batch,) int64 each.

    Args:
        distribution: "uniform", or "zipf": the k-th most frequent row is drawn in proportion to
            1/k, and which rows are frequent is random, so that they are scattered over the table.
        rows: ids are 0 ... rows - 1.
        batch: ids a batch.
        seed: of the generator.
    """
    rng = np.random.default_rng(seed)
    draw = _zipf(rows, rng) if distribution == "zipf" else lambda n: rng.integers(rows, size=n)
    while True:
        yield torch.from_numpy(draw(batch))


@dataclass(frozen=True)
class Drawn:
    """Batches that were drawn before the time is taken, since drawing takes time as well.

    Attributes:
        ids: (steps, batch) int32.
        rows: (steps,) int64, how many different ids each batch has.
    """

    ids: NDArray[np.int32]
    rows: NDArray[np.int64]

    @classmethod
    def draw(cls, distribution: str, rows: int, batch: int, steps: int, *, seed: int) -> Drawn:
        """The first ``steps`` of `batches`."""
        drawn = itertools.islice(batches(distribution, rows, batch, seed=seed), steps)
        ids = np.stack([ids.numpy().astype(np.int32) for ids in drawn])
        return cls(ids, np.array([len(np.unique(step)) for step in ids]))

    def __iter__(self) -> Iterator[Tensor]:
        """Each batch, (batch,) int64."""
        for ids in self.ids:
            yield torch.from_numpy(ids.astype(np.int64))


def _zipf(rows: int, rng: np.random.Generator) -> Draw:
    cumulative = np.cumsum(1 / np.arange(1, rows + 1))
    row_of_rank = rng.permutation(rows)

    def draw(count: int) -> NDArray[np.int64]:
        drawn = rng.random(count) * cumulative[-1]
        ranks = np.searchsorted(cumulative, drawn, side="right")
        return np.asarray(row_of_rank[ranks], dtype=np.int64)

    return draw


def scattered_rows(rows: int, row_bytes: int, *, page_bytes: int, seed: int) -> Tensor:
    """Rows in random order, each once, no two on the same page: every one is a read of its own."""
    stride = page_bytes // row_bytes + 2
    rng = np.random.default_rng(seed)
    return torch.from_numpy(rng.permutation(np.arange(0, rows, stride)))


class RepeatedRows:
    """An array of any number of rows that takes the memory of one block; read by slices.

    Args:
        rows: how many rows it has.
        dim: how many columns.
        seed: of the block.
        scale: of its normally distributed numbers.
    """

    def __init__(self, rows: int, dim: int, *, seed: int = 0, scale: float = 1.0) -> None:
        self.shape = (rows, dim)
        self.ndim = 2
        self.dtype = np.dtype(np.float32)
        rng = np.random.default_rng(seed)
        self._block = rng.standard_normal((min(rows, 65536), dim), dtype=np.float32)
        self._block *= np.float32(scale)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, span: slice) -> NDArray[np.float32]:
        """The rows of a slice, (n, dim) float32."""
        rows = np.arange(*span.indices(self.shape[0]))
        return self._block[rows % len(self._block)]
