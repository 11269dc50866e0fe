"""What a run in the Poincaré ball is compared with: geoopt over rows in RAM. Knows no store."""

from __future__ import annotations

from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from .errors import StoreError
from .riemannian import RiemannianSGD


class RamTable(nn.Module):
    """Points in RAM that ``geoopt.optim.SparseRiemannianSGD`` steps.

    They begin where those of a table on disk with this seed begin.

    Args:
        num_nodes, dim: its shape.
        lr: learning rate.
        seed: of the first rows.

    Attributes:
        path: where they are, in words.

    Raises:
        StoreError: geoopt is not installed.
    """

    path = "RAM, stepped by geoopt"

    def __init__(self, num_nodes: int, dim: int, lr: float, seed: int) -> None:
        try:
            import geoopt
        except ImportError:
            raise StoreError("a run in RAM needs geoopt: pip install geoopt") from None
        super().__init__()
        start = RiemannianSGD().default_init()
        rows = start.rows(torch.arange(num_nodes), dim, seed, torch.float64)
        ball = geoopt.PoincareBall(c=torch.tensor(1.0, dtype=torch.float64))
        self.weight = geoopt.ManifoldParameter(rows, manifold=ball)
        self.optimizer: Any = geoopt.optim.SparseRiemannianSGD([self.weight], lr=lr)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return functional.embedding(ids, self.weight, sparse=True)

    def commit(self) -> None:
        """Do nothing: RAM keeps nothing."""

    def __enter__(self) -> RamTable:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """There is nothing to close."""
