"""What tests compare with: a table in RAM by torch, stores read by plain zarr; never our reader."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import zarr
from torch import Tensor, nn

LossOf = Callable[[Callable[[Tensor], Tensor]], Tensor]


class RamTable:
    """`nn.Embedding(sparse=True)` and `torch.optim.SparseAdam` over given initial weights.

    `version` counts the steps in which a row was in the gradient.
    """

    def __init__(
        self,
        initial: Tensor,
        *,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        **hyper: object,
    ) -> None:
        self.initial = initial.clone()
        self.embedding = nn.Embedding.from_pretrained(
            initial.clone(),
            freeze=False,
            padding_idx=padding_idx,
            max_norm=max_norm,
            norm_type=norm_type,
            sparse=True,
        )
        self.optimizer = torch.optim.SparseAdam(self.embedding.parameters(), **hyper)
        self.version = torch.zeros(initial.shape[0], dtype=torch.int64)

    def __call__(self, ids: Tensor) -> Tensor:
        return self.embedding(ids)

    def train(self, loss_of: LossOf) -> None:
        """One `backward(); step(); zero_grad()`."""
        loss_of(self).backward()
        self.step_and_zero()

    def step_and_zero(self) -> None:
        grad = self.embedding.weight.grad
        if grad is not None:
            self.version[grad.coalesce().indices()[0]] += 1
        self.optimizer.step()
        self.optimizer.zero_grad()

    @property
    def weight(self) -> Tensor:
        return self.embedding.weight.detach()

    @property
    def step(self) -> int:
        return int(self._state.get("step", 0))

    @property
    def exp_avg(self) -> Tensor:
        return self._state.get("exp_avg", torch.zeros_like(self.initial))

    @property
    def exp_avg_sq(self) -> Tensor:
        return self._state.get("exp_avg_sq", torch.zeros_like(self.initial))

    @property
    def _state(self) -> dict:
        return self.optimizer.state.get(self.embedding.weight, {})


@dataclass(frozen=True)
class StoredRows:
    """The fields of all rows, as plain zarr reads them; `version` 0: nothing is stored."""

    weight: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    version: Tensor


def read_rows(path: Path) -> StoredRows:
    """Reads a flushed table of SparseAdam's by `zarr.open_group(path)["table"]`."""
    table = torch.from_numpy(zarr.open_group(path, mode="r")["table"][:])
    dim, odd = divmod(table.shape[1] - 1, 3)
    assert odd == 0
    weight, exp_avg, exp_avg_sq, version = table.split([dim, dim, dim, 1], dim=1)
    return StoredRows(weight, exp_avg, exp_avg_sq, version[:, 0].to(torch.int64))


def tolerances(dtype: torch.dtype) -> dict[str, float]:
    """1e-12 in float64, torch's defaults in float32."""
    return {"rtol": 1e-12, "atol": 1e-12} if dtype == torch.float64 else {}


def assert_stored_equal(path: Path, ram: RamTable, imported: bool = False) -> None:
    """The flushed store holds what the table in RAM does, field by field and row by row.

    `imported`: every row was given at creation, which counts one version; else the initial
    rows are seeded and a row that no step touched must not be stored.
    """
    stored = read_rows(path)
    assert torch.equal(stored.version, ram.version + int(imported))
    written = stored.version > 0
    close = tolerances(ram.initial.dtype)
    torch.testing.assert_close(stored.weight[written], ram.weight[written], **close)
    torch.testing.assert_close(stored.exp_avg, ram.exp_avg, **close)
    # Second moments may be as small as the square of a tiny gradient: only their ratio tells.
    ratio = 1e-11 if ram.initial.dtype == torch.float64 else 1e-4
    torch.testing.assert_close(stored.exp_avg_sq, ram.exp_avg_sq, rtol=ratio, atol=0)
    for field in (stored.weight, stored.exp_avg, stored.exp_avg_sq):
        assert not field[~written].any()


def assert_same(emb: nn.Module, ram: RamTable) -> None:
    """Flushes a table that began with given rows: its step and its store are those of `ram`."""
    emb.flush()
    assert emb.step == ram.step
    assert_stored_equal(emb.path, ram, imported=True)


def assert_untrained(emb: nn.Module, before: dict) -> None:
    """No step was taken, and the store's files have the `fingerprint` they had."""
    assert emb.step == 0
    assert not emb.state["exp_avg"][:].any()
    assert fingerprint(emb.path) == before


def train_both(disk: nn.Module, ram: RamTable, loss_of: LossOf) -> None:
    """The same batch through both: `loss_of` maps a lookup function to a loss."""
    loss_of(disk).backward()
    ram.train(loss_of)


def weighted_sum(ids: Tensor, grad: Tensor) -> LossOf:
    """A loss whose gradient with respect to the looked-up rows is `grad`."""
    return lambda lookup: (lookup(ids) * grad).sum()


def leaf(shape: tuple[int, ...] = (4, 2)) -> Tensor:
    """Another input of a model, float64, whose gradient can be asked for."""
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


def fingerprint(path: Path) -> dict[str, tuple[str, int]]:
    """Content hash and modification time of each file of a store."""
    return {
        str(file.relative_to(path)): (
            hashlib.sha256(file.read_bytes()).hexdigest(),
            file.stat().st_mtime_ns,
        )
        for file in sorted(path.rglob("*"))
        if file.is_file()
    }
