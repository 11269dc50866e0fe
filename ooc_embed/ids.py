"""Row ids as users give them, checked. Knows tensors; knows no table."""

from __future__ import annotations

import torch


def flat_ids(ids: torch.Tensor) -> torch.Tensor:
    """The ids, flat, int64, on the CPU.

    Raises:
        TypeError: no tensor, or of another dtype.
    """
    if not isinstance(ids, torch.Tensor):
        raise TypeError(
            f"ids must be a tensor, got {type(ids).__name__}: torch.as_tensor(ids) makes one"
        )
    if ids.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"ids must be int32 or int64, got {ids.dtype}: use ids.long()")
    return ids.detach().reshape(-1).to(device="cpu", dtype=torch.int64)


def check_range(rows: torch.Tensor, size: int) -> None:
    """Raise an IndexError that names the first row outside ``0 … size - 1``."""
    if rows.numel():
        low, high = (int(bound) for bound in torch.aminmax(rows))
        if low < 0 or high >= size:
            bad = low if low < 0 else high
            raise IndexError(f"row {bad} is out of range for a table of {size} rows")
