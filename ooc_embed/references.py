"""Tables as one has them without this package, for comparison; knows no store."""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

MEMMAP_FIELDS = ("weight", "exp_avg", "exp_avg_sq")
_SYS_PROCESS_MADVISE = 440
_RANGES_PER_CALL = 1024


def train_step(embedding: nn.Module, ids: Tensor, target: Tensor) -> None:
    """Forward and backward of a loss whose gradient is ``target``, which costs next to nothing."""
    embedding(ids).mul(target).sum().backward()


class RamTable:
    """``nn.Embedding(sparse=True)`` with an optimizer of torch's, the table in RAM.

    Args:
        weight: the initial rows, (num_embeddings, embedding_dim); used in place.
        lr: learning rate.
        optimizer: one that takes sparse gradients.
    """

    def __init__(
        self,
        weight: Tensor,
        *,
        lr: float = 1e-3,
        optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.SparseAdam,
    ) -> None:
        self.embedding = nn.Embedding(len(weight), weight.shape[1], sparse=True, _weight=weight)
        self.optimizer = optimizer(self.embedding.parameters(), lr=lr)

    def step(self, ids: Tensor, target: Tensor) -> None:
        """One training step on ``ids`` (n,) with the gradient ``target`` (n, embedding_dim)."""
        train_step(self.embedding, ids, target)
        self.optimizer.step()
        self.optimizer.zero_grad()


class _Adam:
    """Adam as in ``torch.optim.SparseAdam``, on rows that were read for it.

    Args:
        lr: learning rate.
    """

    def __init__(self, lr: float) -> None:
        self.lr = lr
        self.betas = (0.9, 0.999)
        self.eps = 1e-8
        self.steps = 0

    def update(
        self,
        weight: NDArray[np.float32],
        exp_avg: NDArray[np.float32],
        exp_avg_sq: NDArray[np.float32],
        grad: NDArray[np.float32],
    ) -> None:
        """Takes one step on all of the rows, (n, embedding_dim) each, in place."""
        beta1, beta2 = self.betas
        self.steps += 1
        step_size = self.lr * math.sqrt(1 - beta2**self.steps) / (1 - beta1**self.steps)
        exp_avg += (grad - exp_avg) * np.float32(1 - beta1)
        exp_avg_sq += (grad * grad - exp_avg_sq) * np.float32(1 - beta2)
        weight -= np.float32(step_size) * exp_avg / (np.sqrt(exp_avg_sq) + np.float32(self.eps))


def _gradient(
    weight: NDArray[np.float32], inverse: NDArray[np.int64], target: Tensor
) -> NDArray[np.float32]:
    """The gradient of the rows ``weight`` of a batch, from torch, repetitions added up."""
    leaf = torch.from_numpy(weight).requires_grad_()
    loss = functional.embedding(torch.from_numpy(inverse), leaf).mul(target).sum()
    (grad,) = torch.autograd.grad(loss, leaf)
    return np.asarray(grad)


class MemmapTable:
    """Three ``np.memmap`` (weight, exp_avg, exp_avg_sq) and the loop one writes around them.

    The way of Disk Sparse Adam, but synchronous: its background writer lets the next step read rows
    whose write still waits, and drops writes when its queue is full.

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
        self._adam = _Adam(lr)

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
        # Through plain views: np.memmap runs Python code at every operation.
        files = [file.view(np.ndarray) for file in (self.weight, self.exp_avg, self.exp_avg_sq)]
        weight = files[0][rows]
        grad = _gradient(weight, inverse, target)
        read = (weight, files[1][rows], files[2][rows])
        self._adam.update(*read, grad)
        for file, values in zip(files, read, strict=True):
            file[rows] = values


class MappedTable:
    """One file of whole records, mapped and changed in place; its pages are announced, and there is
    no cache of rows: the best that a mapped file can do.

    A record is ``[weight D | exp_avg D | exp_avg_sq D | version 1]``, float32. A step asks for all
    of its pages in a few calls (``process_madvise(MADV_WILLNEED)``), so that the disk has a full
    queue, and writes into the page cache, from where the kernel writes to the disk.

    Args:
        path: the file, which must exist.
        num_embeddings: rows of it.
        embedding_dim: D.
        lr: learning rate.

    Raises:
        OSError: the kernel takes no announcements (it needs Linux 5.10).
    """

    def __init__(
        self, path: Path, num_embeddings: int, embedding_dim: int, *, lr: float = 1e-3
    ) -> None:
        self.dim = embedding_dim
        self.record_bytes = 4 * (3 * embedding_dim + 1)
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), num_embeddings * self.record_bytes)
        self._memory.madvise(mmap.MADV_RANDOM)
        records = np.frombuffer(self._memory, np.float32).reshape(num_embeddings, -1)
        self.records = torch.from_numpy(records)
        self._adam = _Adam(lr)
        self._process = os.pidfd_open(os.getpid())
        self._libc = ctypes.CDLL(None, use_errno=True)

    @classmethod
    def create(cls, path: Path, weight: NDArray[np.float32], *, lr: float = 1e-3) -> MappedTable:
        """Writes the file from initial rows, the moments and versions zero."""
        rows, dim = weight.shape
        np.pad(weight, ((0, 0), (0, 2 * dim + 1))).tofile(path)
        return cls(path, rows, dim, lr=lr)

    def step(self, ids: Tensor, target: Tensor) -> None:
        """One training step on ``ids`` (n,) with the gradient ``target`` (n, embedding_dim)."""
        rows, inverse = np.unique(ids.numpy(), return_inverse=True)
        self._announce(rows)
        unique = torch.from_numpy(rows)
        records = self.records.index_select(0, unique)
        weight, exp_avg, exp_avg_sq, version = np.split(
            records.numpy(), [self.dim, 2 * self.dim, 3 * self.dim], axis=1
        )
        grad = _gradient(weight, inverse, target)
        self._adam.update(weight, exp_avg, exp_avg_sq, grad)
        version += 1
        self.records.index_copy_(0, unique, records)

    def flush(self) -> None:
        """Makes all steps durable."""
        self._memory.flush()

    def close(self) -> None:
        """Lets go of the file; a second call does nothing."""
        if self._process >= 0:
            os.close(self._process)
            self._process = -1
            del self.records
            self._memory.close()

    def _announce(self, rows: NDArray[np.int64]) -> None:
        page = mmap.PAGESIZE
        begin = self.records.data_ptr() + rows * self.record_bytes
        ranges = np.empty((len(rows), 2), dtype=np.uint64)
        ranges[:, 0] = begin & -page
        ranges[:, 1] = ((begin + self.record_bytes + page - 1) & -page) - (begin & -page)
        for start in range(0, len(rows), _RANGES_PER_CALL):
            part = ranges[start : start + _RANGES_PER_CALL]
            result = self._libc.syscall(
                ctypes.c_long(_SYS_PROCESS_MADVISE),
                ctypes.c_int(self._process),
                ctypes.c_void_p(part.ctypes.data),
                ctypes.c_size_t(len(part)),
                ctypes.c_int(mmap.MADV_WILLNEED),
                ctypes.c_uint(0),
            )
            if result < 0:
                code = ctypes.get_errno()
                raise OSError(code, f"process_madvise: {os.strerror(code)}")


class FbgemmTable:
    """FBGEMM's table for CPUs with its row-wise Adagrad, which is fused into backward.

    It moves a third of the data (one number of state a row) and is another rule than Adam; it has
    none for Adam on a CPU. One id a bag, since its path without bags is several times slower.

    Args:
        weight: the initial rows, (num_embeddings, embedding_dim), which are copied.
        lr: learning rate.

    Raises:
        ImportError: fbgemm_gpu is missing, or was built for another torch.
    """

    def __init__(self, weight: Tensor, *, lr: float = 1e-3) -> None:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # it warns of what only GPUs have
                from fbgemm_gpu import split_table_batched_embeddings_ops_common as common
                from fbgemm_gpu import split_table_batched_embeddings_ops_training as training
        except OSError as error:
            raise ImportError(f"it was built for another torch ({error})") from error
        on_cpu = (common.EmbeddingLocation.HOST, training.ComputeDevice.CPU)
        self.embedding: Any = training.SplitTableBatchedEmbeddingBagsCodegen(
            [(*weight.shape, *on_cpu)],
            optimizer=training.OptimType.EXACT_ROWWISE_ADAGRAD,
            learning_rate=lr,
            eps=1e-8,
            pooling_mode=common.PoolingMode.SUM,
            device=torch.device("cpu"),
        )
        self.weight: Tensor = self.embedding.split_embedding_weights()[0]
        self.weight.copy_(weight)

    def step(self, ids: Tensor, target: Tensor) -> None:
        """One training step on ``ids`` (n,) with the gradient ``target`` (n, embedding_dim)."""
        offsets = torch.arange(len(ids) + 1)
        self.embedding(ids, offsets).mul(target).sum().backward()
