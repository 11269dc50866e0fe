"""Gradients of lookups: summed to one a row, checked, clipped. Knows no table and no autograd."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

# What a param group has beside the rule's hyper-parameters.
GRADIENT_OPTIONS: Mapping[str, Any] = {
    "max_grad_norm": None,
    "max_grad_value": None,
    "nonfinite": "raise",
}


def segment_sum(values: torch.Tensor, order: torch.Tensor, bounds: torch.Tensor) -> torch.Tensor:
    """Sum rows of ``values`` over segments of ``order``, always in the same order.

    Args:
        values: ``(n, D)``.
        order: ``(n,)`` rows of ``values``.
        bounds: ``(m + 1,)`` where in ``order`` each segment begins, and its end.

    Returns:
        ``(m, D)``.
    """
    if len(bounds) == 1:
        return values.new_zeros(0, values.shape[1])
    return torch.nn.functional.embedding_bag(
        order, values, bounds, mode="sum", include_last_offset=True
    )


def sort_rows(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sort row ids and find equal ones.

    Args:
        rows: ``(n,) int64``, none negative.

    Returns:
        The unique rows ``(m,)``; for each id the index of its unique row ``(n,)``; the stable order
        ``(n,)`` that sorts the ids; where in it each unique row begins, and the end ``(m + 1,)``.
    """
    ordered, order = _stable_sort(rows.numpy())
    is_bound = np.ones(len(ordered) + 1, dtype=np.bool_)
    np.not_equal(ordered[1:], ordered[:-1], out=is_bound[1:-1])
    bounds = np.flatnonzero(is_bound)
    inverse = np.empty_like(order)
    inverse[order] = np.cumsum(is_bound[:-1]) - 1
    unique = ordered[bounds[:-1]]
    return (
        torch.from_numpy(unique),
        torch.from_numpy(inverse),
        torch.from_numpy(order),
        torch.from_numpy(bounds),
    )


def _stable_sort(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Sort ids and say from where each came, equal ones in their old order.

    Id and place in one integer sort several times faster than ids with an order beside them.
    """
    place_bits = len(rows).bit_length()
    if not len(rows) or int(rows.max()) >= 1 << (62 - place_bits):
        order = np.argsort(rows, kind="stable")
        return rows[order], order
    packed = (rows << place_bits) | np.arange(len(rows))
    packed.sort()
    return packed >> place_bits, packed & ((1 << place_bits) - 1)


def coalesce(
    blocks: list[tuple[torch.Tensor, torch.Tensor]],
) -> tuple[torch.Tensor, torch.Tensor]:
    """One gradient a row: the update is not linear in it, so duplicates must be summed first."""
    if len(blocks) == 1:
        return blocks[0]
    unique, _, order, bounds = sort_rows(torch.cat([rows for rows, _ in blocks]))
    return unique, segment_sum(torch.cat([grads for _, grads in blocks]), order, bounds)


def check_options(group: Mapping[str, Any]) -> None:
    """See that a param group's options for gradients make sense.

    Raises:
        TypeError, ValueError: one does not.
    """
    for name in ("max_grad_norm", "max_grad_value"):
        value = group[name]
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise TypeError(f"{name} must be a number or None, got {value!r}")
        if not 0 < value < math.inf:
            raise ValueError(f"{name} must be above 0 and finite, or None, got {value}")
    if group["nonfinite"] not in ("raise", "skip"):
        raise ValueError(f"nonfinite must be 'raise' or 'skip', got {group['nonfinite']!r}")


def are_finite(rows: torch.Tensor, grads: torch.Tensor, nonfinite: str) -> bool:
    """Whether all gradients are finite.

    Args:
        rows: ``(n,) int64``.
        grads: ``(n, D)``.
        nonfinite: ``"raise"`` or ``"skip"``, what is to come of others.

    Raises:
        FloatingPointError: one is not, and that is to raise.
    """
    # Where the sum is finite, all are: infinities and NaN do not leave a sum.
    if math.isfinite(grads.sum().item()):
        return True
    bad = rows[~torch.isfinite(grads).all(dim=1)]
    if len(bad) and nonfinite == "raise":
        raise FloatingPointError(
            f"the gradient of {len(bad)} rows is not finite (row {int(bad[0])} first). Their table "
            f"has not stepped, nor has another in the same backward; it would have kept NaN in its "
            f"moments for good. nonfinite='skip' leaves such steps out, emb.optimizer.zero_grad() "
            f"drops gradients that wait"
        )
    return not len(bad)


def clip(grads: torch.Tensor, group: Mapping[str, Any]) -> torch.Tensor:
    """Clip the summed gradients of a step: each element to ``max_grad_value``, then their common
    2-norm to ``max_grad_norm``, as ``torch.nn.utils.clip_grad_value_`` and ``clip_grad_norm_`` do.

    Args:
        grads: ``(n, D)``, kept as they are.
        group: the options.
    """
    if group["max_grad_value"] is not None:
        grads = grads.clamp(-group["max_grad_value"], group["max_grad_value"])
    if group["max_grad_norm"] is not None:
        scale = group["max_grad_norm"] / (torch.linalg.vector_norm(grads) + 1e-6)
        grads = grads * scale.clamp(max=1.0)
    return grads
