"""Trains whole models, in RAM or with tables on disk, by one loop; knows no model and no store."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

LR = 0.05
# float64 all the way: what is left is the order in which the gradients of a row are added.
CLOSE = {"rtol": 1e-10, "atol": 1e-12}


def optimizers(
    model: nn.Module, dense: type[torch.optim.Optimizer] = torch.optim.Adam
) -> list[torch.optim.Optimizer]:
    """SparseAdam for rows in RAM whose gradients are sparse, `dense` for all other parameters.

    The same call serves the model with tables: of those it sees the parameter without elements.
    """
    rows = {
        id(layer.weight): layer.weight
        for layer in model.modules()
        if isinstance(layer, nn.Embedding | nn.EmbeddingBag) and layer.sparse
    }
    rest = [parameter for parameter in model.parameters() if id(parameter) not in rows]
    found = [torch.optim.SparseAdam(list(rows.values()), lr=LR)] if rows else []
    return [*found, dense(rest, lr=LR)]


def train(
    model: nn.Module,
    batches: Iterable[Any],
    loss_of: Callable[[nn.Module, Any], Tensor],
    optimizers: list[torch.optim.Optimizer],
) -> Tensor:
    """One loss a step: `(steps,)`. Dropout draws the same numbers for the same step."""
    losses = []
    for step, batch in enumerate(batches):
        torch.manual_seed(step)
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        losses.append(loss.detach().cpu())
    return torch.stack(losses)


def assert_same_losses(disk: Tensor, ram: Tensor) -> None:
    """Step by step, in float64, where no two losses are alike."""
    assert ram.dtype == torch.float64
    assert len(ram.unique()) == len(ram) > 4
    torch.testing.assert_close(disk, ram, **CLOSE)
