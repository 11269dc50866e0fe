"""A table of rows that are in the cache, in the logs or in the zarr table: fetch, step, commit.

Knows rows and records, and who may use them when; does not know autograd, modules or schedulers.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from . import rules
from ._version import __version__
from .blocks import BlockUpdate, count_versions
from .cache import RowCache, slots_for
from .errors import CorruptStoreError, StoreError
from .evictor import Evictor
from .fetcher import RowFetcher
from .guard import Guard
from .interrupts import uninterrupted
from .manifest import VERSION_FIELD, Commit, Manifest
from .merging import Worker
from .stats import Counters
from .storage import Run, Storage
from .store import Store

_READ_ATTEMPTS = 100


@dataclass(frozen=True)
class Prepared:
    """A step for which all that can fail has been done.

    Args:
        rows: ``(n,) int64``, sorted and unique.
        grads: ``(n, D)``.
        slots: where the rows are in the cache; None if the batch does not fit into it.
        run: then the stepped records, which are written but do not count yet.
        fresh: and how many rows were written for the first time.
    """

    rows: torch.Tensor
    grads: torch.Tensor
    slots: torch.Tensor | None
    run: Run | None = None
    fresh: int = 0


class Table:
    """Rows of a store, with the optimizer's rule.

    Args:
        store: an open store.
        cache_bytes: memory for hot rows, or ``"auto"``; readers have no cache.

    Attributes:
        step_count: optimizer steps taken.
        counters: what it did since it was opened.
    """

    @torch.inference_mode(False)  # such a mode may be on, and its tensors could never be stepped
    def __init__(self, store: Store, cache_bytes: int | str) -> None:
        manifest, layout = store.manifest, store.layout
        self.store = store
        self._guard = Guard(store.path, writer=store.writable)
        self.dtype: torch.dtype = getattr(torch, manifest.dtype)
        self.dim = manifest.embedding_dim
        self.rule = rules.from_json(manifest.rule)
        self.spans = field_spans(manifest.fields)
        self.step_count = manifest.commit.step
        self.rows_written = manifest.commit.rows_written
        self._update = BlockUpdate(self.rule, self.spans, self.dtype)
        self._version = self.spans[VERSION_FIELD].start
        slots = 0
        if store.writable:
            slots = slots_for(cache_bytes, layout.num_embeddings, layout.record_bytes)
        self.cache = RowCache(
            layout.num_embeddings, slots, layout.width, self.dtype, 2 * layout.log.capacity
        )
        self.counters = Counters()
        self._storage = Storage(store, self.cache, self.counters)
        self._evictor = Evictor(self.cache, self._storage, self.counters)
        self._rows = RowFetcher(
            self.cache,
            self._storage,
            self._evictor,
            self.spans["weight"],
            self._version,
            [(self.spans[name], value) for name, value in self.rule.initial().items()],
            self.counters,
        )

    @classmethod
    def open(cls, path: Path, mode: str, cache_bytes: int | str) -> Table:
        """Open a store: to write, after a crash too, or to read exactly one commit of it.

        Raises:
            CorruptStoreError: a file is missing, short, or fails its checksum.
            LockedError, FormatError, FileNotFoundError: as `Store.open`.
        """
        for _ in range(_READ_ATTEMPTS):
            store = Store.open(path, mode)
            try:
                table = cls(store, cache_bytes)
                if store.writable:
                    table._storage.recover()
                    store.name_holder()
                    table._storage.begin_merge()
            except CorruptStoreError:
                if store.writable or not store.logs_changed():
                    store.close()
                    raise
                continue
            except BaseException:
                store.close()
                raise
            if store.writable:
                return table
            # A reader took no lock: a merge may have replaced files while they were being mapped.
            if not store.logs_changed():
                return table
            table.close()
        raise StoreError(f"{path} changed {_READ_ATTEMPTS} times while it was being opened")

    @property
    def manifest(self) -> Manifest:
        """The newest commit that this object made or opened."""
        return self._storage.manifest

    # Reading

    def prefetch(self, rows: torch.Tensor) -> None:
        """Have those of ``(n,) int64`` rows that are not in the cache read ahead of a lookup.

        It does not take the lock, or it would wait for the step that it runs beside.
        """
        self._guard.check()
        self._rows.prefetch(rows)

    def lookup(
        self, rows: torch.Tensor, inverse: torch.Tensor, *, counted: bool = True
    ) -> torch.Tensor:
        """Weights of a batch that a step may follow: its rows are brought into the cache.

        Args:
            rows: ``(m,) int64``, sorted and unique.
            inverse: ``(n,) int64``, the index in ``rows`` of each of the batch's ids.
            counted: whether hits and misses count; not after `renormalize`, which counts them.

        Returns:
            ``(n, D)``.
        """
        with self.writing():
            span = self.spans["weight"]
            if len(rows) > self.cache.slots:
                return self._rows.read(rows, span, counted=counted).index_select(0, inverse)
            slots = self._rows.fetch(rows, counted=counted).index_select(0, inverse)
            return self.cache.records[:, span].index_select(0, slots)

    def weights(
        self, rows: torch.Tensor, inverse: torch.Tensor, *, counted: bool = True
    ) -> torch.Tensor:
        """As `lookup`, but neither cache nor disk change."""
        return self.read(rows, "weight", counted=counted).index_select(0, inverse)

    def read(self, rows: torch.Tensor, field: str, *, counted: bool = False) -> torch.Tensor:
        """A field of ``(n,) int64`` rows, in any order; neither cache nor disk change.

        Returns:
            ``(n, columns of the field)``.
        """
        with self._guard.reading():
            return self._rows.read(rows, self.spans[field], counted=counted)

    # Stepping

    def prepare(
        self, rows: torch.Tensor, grads: torch.Tensor, group: Mapping[str, Any]
    ) -> Prepared:
        """Do all of a step that can fail. To be called, with `apply`, inside `writing`.

        Args:
            rows: ``(n,) int64``, sorted and unique.
            grads: ``(n, D)``.
            group: hyper-parameters.

        Raises:
            OSError: the disk is full, or failed.
            StoreError: the table is closed, read-only, forked or has failed.
        """
        if len(rows) <= self.cache.slots:
            return Prepared(rows, grads, self._rows.fetch(rows))
        # A batch that does not fit is stepped on its way into the log, as one sorted run.
        self._evictor.finish()
        self._storage.make_room(len(rows))
        fresh = 0

        def fill(start: int, stop: int, out: torch.Tensor) -> None:
            nonlocal fresh
            out.copy_(self._rows.records_of(rows[start:stop]))
            slots = torch.arange(stop - start, device="cpu")
            fresh += self._update.step(out, slots, grads[start:stop], self.step_count + 1, group)

        return Prepared(rows, grads, None, self._storage.write(rows, fill), fresh)

    def apply(self, prepared: Prepared, group: Mapping[str, Any]) -> None:
        """Take the step: memory only. To be called inside `uninterrupted`, so that it is whole."""
        slots, run = prepared.slots, prepared.run
        if slots is not None:
            self.rows_written += self._update.step(
                self.cache.records, slots, prepared.grads, self.step_count + 1, group
            )
            self.cache.mark_dirty(slots)
        elif run is not None:
            self.cache.rehome(run.rows, self._storage.accept(run))
            self.rows_written += prepared.fresh
        self.step_count += 1

    def assign(self, field: str, rows: torch.Tensor, values: torch.Tensor) -> None:
        """Set a field of sorted unique rows; counts as one write of each.

        Args:
            field: any but ``version``.
            rows: ``(n,) int64``.
            values: ``(n, columns of the field)``.
        """
        with self.writing():
            for start in range(0, len(rows), piece := min(self.cache.slots, self._rows.piece)):
                part = slice(start, start + piece)
                self._write(self._rows.fetch(rows[part]), field, values[part].to(self.dtype))

    def renormalize(self, rows: torch.Tensor, max_norm: float, norm_type: float) -> None:
        """Scale those of the sorted unique rows whose norm is above ``max_norm`` down to it.

        As torch does: by ``max_norm / (norm + 1e-7)``, in place, moments untouched. Hits and misses
        of the lookup that follows are counted here.
        """
        if not self._guard.writer:
            raise StoreError(
                f"{self.store.path} is open to read, and max_norm={max_norm} would scale rows in "
                f"it: open it with mode='r+', or read emb.weight[rows]"
            )
        with self.writing():
            for start in range(0, len(rows), piece := min(self.cache.slots, self._rows.piece)):
                slots = self._rows.fetch(rows[start : start + piece], counted=True)
                weights = self.cache.records[:, self.spans["weight"]].index_select(0, slots)
                norms = weights.norm(norm_type, dim=1, keepdim=True)
                large = (norms > max_norm).squeeze(1)
                if large.any():
                    scale = max_norm / (norms[large] + 1e-7)
                    self._write(slots[large], "weight", weights[large] * scale)

    def _write(self, slots: torch.Tensor, field: str, values: torch.Tensor) -> None:
        with uninterrupted():
            self.cache.records[slots, self.spans[field]] = values
            self.rows_written += count_versions(self.cache.records, slots, self._version)
            self.cache.mark_dirty(slots)

    # Life

    def commit(self, param_groups: list[dict[str, Any]], *, flush: bool = False) -> int:
        """Make all steps durable; return the commit's number.

        Args:
            param_groups: the hyper-parameters in force.
            flush: merge too, so that the zarr table has every row.

        Raises:
            OSError: the disk is full, or failed. Nothing is lost, and a later call may succeed.
            CorruptStoreError: a merge found a damaged chunk file.
        """
        with self.writing():
            self._commit(param_groups, flush=flush)
            self._storage.begin_merge()
            return self.manifest.commit.number

    def _commit(
        self, param_groups: list[dict[str, Any]], *, flush: bool, closing: bool = False
    ) -> None:
        self._evictor.finish()
        commit = Commit(
            number=0,
            step=self.step_count,
            rows_written=self.rows_written,
            param_groups=param_groups,
            logs=(),
            created=time.time(),
            library=__version__,
        )
        self._storage.commit(commit, flush=flush, closing=closing)

    @property
    def kernel(self) -> str:
        """What steps the rows, as `BlockUpdate.kernel` names it."""
        return self._update.kernel

    @property
    def read_only(self) -> bool:
        return not self._guard.writer

    @property
    def closed(self) -> bool:
        return self._guard.closed

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Do something that changes the table, alone.

        Raises:
            StoreError: this process may not write the table, or is in the middle of doing so, or
                the disk has failed for good.
        """
        with self._guard.writing():
            self._storage.check()
            self._storage.settle()
            yield

    def close(
        self, param_groups: list[dict[str, Any]] | None = None, *, flush: bool = False
    ) -> None:
        """Commit (a writer, given ``param_groups``) and release; once closed it does nothing.

        A merge stops after the chunks in flight, and opening again goes on with it. One that failed
        is a warning, unless ``flush`` asks for it.

        Raises:
            StoreError: the disk had failed for good. The table is closed, at its last commit.
        """
        if self._guard.closed or self._guard.forked:
            return
        if isinstance(threading.current_thread(), Worker):
            # The cyclic collector ran a finalizer here, and a thread cannot wait for itself.
            close = partial(self.close, param_groups, flush=flush)
            threading.Thread(target=close, daemon=False).start()
            return
        with self._guard.reading():
            if param_groups is not None and self._guard.writer and not self._storage.failed:
                self._commit(param_groups, flush=flush, closing=True)
            self._release()
        self._storage.check()

    def _release(self) -> None:
        self._evictor.finish()
        self._storage.stop_merge()
        with uninterrupted():
            self._guard.closed = True
            self._storage.close()
            self.store.close()
            del self.cache.records


def field_spans(fields: Mapping[str, int]) -> dict[str, slice]:
    """Field name to its columns in a record."""
    spans, start = {}, 0
    for name, width in fields.items():
        spans[name] = slice(start, start + width)
        start += width
    return spans
