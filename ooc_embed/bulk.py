"""Streams an array of rows into the chunk files of a new table. Knows arrays; does not know logs.

Whole chunk files are written once, in order: the log is for rows that are touched at random.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from .manifest import Layout
from .memory import page_aligned
from .progress import progress
from .rule import Rule, tell_shifts

_CHECKED_ROWS = 1 << 16
# What becomes of given rows, (n, D).
Admit = Callable[[torch.Tensor], torch.Tensor]


def check_source(name: str, source: Any, shape: tuple[int, int]) -> None:
    """Refuse a field's source of another shape or of no numbers, before anything is written.

    Raises:
        ValueError: both shapes are named.
        TypeError: its elements are no real numbers.
    """
    found = tuple(source.shape)
    if found != shape and (*found, 1) != shape:
        raise ValueError(f"{name} has the shape {found}, the table has {shape}")
    block = _block(source, 0, 1)
    if block.dtype.kind not in "fiu":
        raise TypeError(f"{name} must hold real numbers, got {block.dtype}")


def check_rows(source: Any, rule: Rule, dtype: torch.dtype) -> None:
    """Refuse rows that the table's rule does not admit, before anything is written.

    Raises:
        ValueError: a row cannot be the table's.
    """
    shifts = [torch.empty(0)]
    count = source.shape[0]
    for start in range(0, count, _CHECKED_ROWS):
        block = _block(source, start, min(start + _CHECKED_ROWS, count))
        rows = torch.as_tensor(block, dtype=dtype, device="cpu")
        shifts.append(rule.shifts(rows, rule.admit(rows)))
    tell_shifts(torch.cat(shifts))


def chunks(
    sources: Sequence[tuple[slice, Any, Admit | None]],
    constants: Sequence[tuple[slice, float]],
    layout: Layout,
) -> Iterator[np.ndarray]:
    """Yield the content of every chunk file: these fields, the others zero, of every row.

    The same ``(chunk_rows, W)`` buffer is yielded again and again.

    Args:
        sources: columns of a field, its ``(N, columns)``, or ``(N,)`` where it is one: a tensor, an
            array, a memmap, a zarr array; each is read once, by slices; and what becomes of its
            rows.
        constants: columns, and the number that all rows have there.
        layout: the table's.
    """
    buffer = page_aligned(layout.chunk_bytes)
    chunk = buffer.view(layout.dtype).reshape(layout.chunk_rows, layout.width)
    starts = range(0, layout.num_embeddings, layout.chunk_rows)
    for start in progress(starts, "importing rows", "chunk"):
        stop = min(start + layout.chunk_rows, layout.num_embeddings)
        for span, value in constants:
            chunk[: stop - start, span] = value
        for span, source, admit in sources:
            chunk[: stop - start, span] = _block(source, start, stop)
            if admit is not None:
                rows = torch.from_numpy(chunk[: stop - start, span])
                rows.copy_(admit(rows))
        chunk[stop - start :] = 0
        yield chunk


def _block(source: Any, start: int, stop: int) -> np.ndarray:
    block = source[start:stop]
    if isinstance(block, torch.Tensor):
        block = block.detach().cpu()
        block = (block.float() if block.dtype == torch.bfloat16 else block).numpy()
    return np.asarray(block).reshape(stop - start, -1)
