"""Clips the gradients of a model with tables in it by their common norm. Knows no step."""

from __future__ import annotations

import torch
from torch import nn

from .layer import DiskLayer


def clip_grad_norm_(
    model: nn.Module,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """Clip the gradients of a model's parameters and tables, all together, to a norm.

    As ``torch.nn.utils.clip_grad_norm_(model.parameters(), ...)``, with the gradients that wait for
    the optimizers of its tables among them. Under a ``torch.amp.GradScaler``, call
    ``scaler.unscale_`` for every optimizer before.

    Args:
        model: with tables that have ``step_on="optimizer"``.
        max_norm, norm_type, error_if_nonfinite, foreach: as there.

    Returns:
        The norm before, a tensor of one element.

    Raises:
        TypeError: not a model.
        ValueError: a table that trains steps in backward, so that its gradients are gone.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"give the model itself, not its parameters, got {type(model).__name__}")
    handles = []
    for layer in model.modules():
        if not isinstance(layer, DiskLayer) or not layer.anchor.requires_grad:
            continue
        if layer.step_on != "optimizer":
            raise ValueError(
                f"{layer.path} steps in backward, before anything can be clipped together: create "
                f"it with step_on='optimizer', or clip its own gradients by max_grad_norm"
            )
        if (waiting := layer.optimizer.waiting) is not None:
            handles.append(waiting)
    return nn.utils.clip_grad_norm_(
        [*model.parameters(), *handles], max_norm, norm_type, error_if_nonfinite, foreach
    )
