"""Streams an array of rows into the chunk files of a new table. Knows arrays; does not know logs.

Whole chunk files are written once, in order: the log is for rows that are touched at random.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from .manifest import Layout
from .memory import page_aligned
from .progress import progress


def check_source(source: Any, shape: tuple[int, int]) -> None:
    """Refuse a source of another shape or of no numbers, before anything is written.

    Raises:
        ValueError: both shapes are named.
        TypeError: its elements are no real numbers.
    """
    found = tuple(source.shape)
    if found != shape:
        raise ValueError(f"init has the shape {found}, the table has {shape}")
    block = _block(source, 0, 1)
    if block.dtype.kind not in "fiu":
        raise TypeError(f"init must hold real numbers, got {block.dtype}")


def chunks(source: Any, layout: Layout, weight: slice, version: slice) -> Iterator[np.ndarray]:
    """Yield the content of every chunk file: these weights, state zero, version 1.

    The same ``(chunk_rows, W)`` buffer is yielded again and again.

    Args:
        source: ``(N, D)``: a tensor, an array, a memmap, a zarr array; read once, by slices.
        layout: the table's.
        weight, version: columns of these fields.
    """
    buffer = page_aligned(layout.chunk_bytes)
    chunk = buffer.view(layout.dtype).reshape(layout.chunk_rows, layout.width)
    starts = range(0, layout.num_embeddings, layout.chunk_rows)
    for start in progress(starts, "importing rows", "chunk"):
        stop = min(start + layout.chunk_rows, layout.num_embeddings)
        chunk[: stop - start, weight] = _block(source, start, stop)
        chunk[: stop - start, version] = 1
        chunk[stop - start :] = 0
        yield chunk


def _block(source: Any, start: int, stop: int) -> np.ndarray:
    block = source[start:stop]
    if isinstance(block, torch.Tensor):
        block = block.detach().cpu()
        return (block.float() if block.dtype == torch.bfloat16 else block).numpy()
    return np.asarray(block)
