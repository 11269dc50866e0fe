"""Tables as one has them without this package, for comparison; knows no store."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

MEMMAP_FIELDS = ("weight", "exp_avg", "exp_avg_sq")


def train_step(embedding: nn.Module, ids: Tensor, target: Tensor) -> None:
    """Forward and backward of a loss whose gradient is ``target``, which costs next to nothing."""
    embedding(ids).mul(target).sum().backward()


class RamTable:
    """``nn.Embedding(sparse=True)`` with ``torch.optim.SparseAdam``, the table in RAM.

    Args:
        weight: the initial rows, (num_embeddings, embedding_dim); used in place.
        lr: learning rate.
    """

    def __init__(self, weight: Tensor, *, lr: float = 1e-3) -> None:
        self.embedding = nn.Embedding(len(weight), weight.shape[1], sparse=True, _weight=weight)
        self.optimizer = torch.optim.SparseAdam(self.embedding.parameters(), lr=lr)

    def step(self, ids: Tensor, target: Tensor) -> None:
        """One training step on ``ids`` (n,) with the gradient ``target`` (n, embedding_dim)."""
        train_step(self.embedding, ids, target)
        self.optimizer.step()
        self.optimizer.zero_grad()


class MemmapTable:
    """Three ``np.memmap`` (weight, exp_avg, exp_avg_sq) and the loop one writes around them.

    The way of Disk Sparse Adam, but synchronous: its background writer lets the next step read rows
    whose write still waits, and drops writes when its queue is full. Adam as in
    ``torch.optim.SparseAdam``.

    Args:
        folder: holds the files weight, exp_avg and exp_avg_sq, which must exist.
        num_embeddings: rows of each file.
        embedding_dim: columns of each file, float32.
        lr: learning rate.
    """

    def __init__(
        self, folder: Path, num_embeddings: int, embedding_dim: int, *, lr: float = 1e-3
    ) -> None:
        shape = (num_embeddings, embedding_dim)
        self.weight, self.exp_avg, self.exp_avg_sq = (
            np.memmap(folder / field, dtype=np.float32, mode="r+", shape=shape)
            for field in MEMMAP_FIELDS
        )
        self.lr = lr
        self.betas = (0.9, 0.999)
        self.eps = 1e-8
        self.steps = 0

    @classmethod
    def create(cls, folder: Path, weight: NDArray[np.float32], *, lr: float = 1e-3) -> MemmapTable:
        """Writes the three files from initial rows, the moments zero."""
        for field in MEMMAP_FIELDS:
            content = weight if field == "weight" else np.zeros_like(weight)
            content.tofile(folder / field)
        return cls(folder, *weight.shape, lr=lr)

    def step(self, ids: Tensor, target: Tensor) -> None:
        """One training step on ``ids`` (n,) with the gradient ``target`` (n, embedding_dim)."""
        rows, inverse = np.unique(ids.numpy(), return_inverse=True)
        # Through a plain view: np.memmap runs Python code at every operation.
        leaf = torch.from_numpy(self.weight.view(np.ndarray)[rows]).requires_grad_()
        loss = functional.embedding(torch.from_numpy(inverse), leaf).mul(target).sum()
        (grad,) = torch.autograd.grad(loss, leaf)
        self._update(rows, leaf.detach().numpy(), grad.numpy())

    def _update(
        self, rows: NDArray[np.int64], weight: NDArray[np.float32], grad: NDArray[np.float32]
    ) -> None:
        beta1, beta2 = self.betas
        self.steps += 1
        step_size = self.lr * math.sqrt(1 - beta2**self.steps) / (1 - beta1**self.steps)
        exp_avg = self.exp_avg.view(np.ndarray)[rows]
        exp_avg += (grad - exp_avg) * np.float32(1 - beta1)
        exp_avg_sq = self.exp_avg_sq.view(np.ndarray)[rows]
        exp_avg_sq += (grad * grad - exp_avg_sq) * np.float32(1 - beta2)
        weight -= np.float32(step_size) * exp_avg / (np.sqrt(exp_avg_sq) + np.float32(self.eps))
        self.weight.view(np.ndarray)[rows] = weight
        self.exp_avg.view(np.ndarray)[rows] = exp_avg
        self.exp_avg_sq.view(np.ndarray)[rows] = exp_avg_sq
