"""Reads the rows of the next batches ahead while one trains. Knows loaders; knows no disk."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sized
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Generic, TypeVar, cast

import torch

from .errors import StoreError
from .layer import DiskLayer

Batch = TypeVar("Batch")
_END: Any = object()


def lookahead(
    loader: Iterable[Batch],
    emb: DiskLayer,
    rows: Callable[[Batch], torch.Tensor] | None = None,
    depth: int = 2,
) -> Iterable[Batch]:
    """Go through a loader whose next batches are fetched, and their rows read ahead, meanwhile.

    Each ``for`` over the result is a pass over the loader: the same batches in the same order, with
    the same results. A thread takes the next ``depth`` batches from the loader and calls
    ``emb.prefetch`` for each while the current one trains, so that the disk and the step work at
    the same time. It is worth it where the table is larger than memory. The thread ends with the
    loop, also one that is left early, as soon as the loader has given the batch it is at.

    The loader runs in that thread, except its ``__iter__``. Its errors come where the batch would
    have come. Where it draws from torch's global random numbers, and so does the model, give it a
    generator of its own, or the draws mix in another order than without `lookahead`.

    Args:
        loader: a DataLoader, or anything to iterate over; a generator is closed at the end.
        emb: the table, open in either mode. If it is closed meanwhile, the batches still come, and
            looking them up says so.
        rows: finds the ids of a batch, int32 or int64, any shape; None if a batch is its ids. It
            runs in the thread, and must not change the batch. For a model with several tables, wrap
            once for each: ``lookahead(lookahead(loader, a, rows=f), b, rows=g)``.
        depth: how many batches to be ahead, at least 1. Each is kept in memory.

    Returns:
        An iterable, which has a length if the loader has one.

    Raises:
        ValueError, TypeError: ``depth`` is below 1, or no int; ``emb`` is no table, ``rows`` no
            function.
        IndexError, TypeError: in the loop, for ids that a lookup refuses.

    Examples::

        >>> import tempfile, torch, ooc_embed
        >>> folder = tempfile.TemporaryDirectory()
        >>> emb = ooc_embed.DiskEmbedding(1000, 4, path=f"{folder.name}/emb.zarr")
        >>> loader = [{"ids": torch.tensor([1, 2])}, {"ids": torch.tensor([2, 3])}]
        >>> for batch in ooc_embed.lookahead(loader, emb, rows=lambda batch: batch["ids"]):
        ...     emb(batch["ids"]).sum().backward()
        >>> emb.step
        2
        >>> emb.close()
        >>> folder.cleanup()
    """
    if type(depth) is not int:
        raise TypeError(f"depth must be an int, got {depth!r}")
    if depth < 1:
        raise ValueError(f"depth must be at least 1, got {depth}")
    if not hasattr(emb, "prefetch"):
        raise TypeError(
            f"emb must be a table, got {type(emb).__name__}: for a model with several, wrap the "
            f"loader once for each"
        )
    if rows is not None and not callable(rows):
        raise TypeError(f"rows must be a function from a batch to its ids, got {rows!r}")
    return _Lookahead(loader, emb, rows, depth)


class _Lookahead(Generic[Batch]):
    def __init__(
        self,
        loader: Iterable[Batch],
        emb: DiskLayer,
        rows: Callable[[Batch], torch.Tensor] | None,
        depth: int,
    ) -> None:
        self._loader = loader
        self._emb = emb
        self._rows = rows
        self._depth = depth

    def __len__(self) -> int:
        return len(cast(Sized, self._loader))

    def __iter__(self) -> Iterator[Batch]:
        # Here and not in the thread: a DataLoader forks its workers in this call.
        return self._pass(iter(self._loader))

    def _pass(self, source: Iterator[Batch]) -> Iterator[Batch]:
        # Threads of a pool are joined before anything is torn down at exit; daemons would run on
        # into it.
        pool = ThreadPoolExecutor(1, "ooc_embed-lookahead")
        batches = self._announced(source)

        def fetch() -> Batch:
            return next(batches, cast(Batch, _END))

        try:
            pending = deque(pool.submit(fetch) for _ in range(self._depth))
            while (batch := pending.popleft().result()) is not _END:
                pending.append(pool.submit(fetch))
                yield batch
        finally:
            pool.shutdown(cancel_futures=True)
            if isinstance(source, Generator):
                source.close()

    def _announced(self, source: Iterator[Batch]) -> Iterator[Batch]:
        for batch in source:
            ids = cast(torch.Tensor, batch) if self._rows is None else self._rows(batch)
            # Reading ahead is advice. A table that cannot be used says so at the lookup.
            with contextlib.suppress(StoreError):
                self._emb.prefetch(ids)
            yield batch
