"""A table of rows that are in the cache, in the logs or in the zarr table: fetch, step, commit.

The only module that knows all three places. Knows rows and records; does not know autograd, modules
or schedulers.
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

from . import initializers, rules
from ._version import __version__
from .blocks import BlockUpdate, count_versions
from .cache import RowCache, slots_for
from .errors import CorruptStoreError, StoreError
from .guard import Guard
from .interrupts import uninterrupted
from .manifest import VERSION_FIELD, Commit, Manifest
from .merging import Worker
from .storage import Run, Storage
from .store import Store

_READ_ATTEMPTS = 100
# Whole records that go through memory at once, where many rows are read.
_PIECE_BYTES = 32 << 20
_FEWEST_ROWS = 1024


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
        self._init = initializers.from_json(manifest.init)
        self._update = BlockUpdate(self.rule, self.spans, self.dtype)
        self._version = self.spans[VERSION_FIELD].start
        slots = 0
        if store.writable:
            slots = slots_for(cache_bytes, layout.num_embeddings, layout.record_bytes)
        self.cache = RowCache(
            layout.num_embeddings, slots, layout.width, self.dtype, 2 * layout.log.capacity
        )
        self._piece = max(_PIECE_BYTES // layout.record_bytes, _FEWEST_ROWS)
        self._storage = Storage(store, self.cache)

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
            except CorruptStoreError:
                if store.writable or not store.logs_changed():
                    store.close()
                    raise
                continue
            except BaseException:
                store.close()
                raise
            if store.writable:
                table._storage.begin_merge()
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

    def lookup(self, rows: torch.Tensor) -> torch.Tensor:
        """Weights of rows that a step may follow: they are brought into the cache.

        Args:
            rows: ``(n,) int64``, sorted and unique.

        Returns:
            ``(n, D)``.
        """
        with self.writing():
            span = self.spans["weight"]
            if len(rows) > self.cache.slots:
                return self._read(rows, span)
            return self.cache.records[:, span].index_select(0, self._fetch(rows))

    def read(self, rows: torch.Tensor, field: str) -> torch.Tensor:
        """A field of ``(n,) int64`` rows, in any order; neither cache nor disk change.

        Returns:
            ``(n, columns of the field)``.
        """
        with self._guard.reading():
            return self._read(rows, self.spans[field])

    def _read(self, rows: torch.Tensor, span: slice) -> torch.Tensor:
        places = self.cache.find(rows).to(torch.int64)
        missing = (places <= 0).nonzero().squeeze(1)
        if not len(missing):
            return self.cache.records[:, span].index_select(0, places - 1)
        out = torch.empty(len(rows), span.stop - span.start, dtype=self.dtype, device="cpu")
        for part in range(0, len(rows), self._piece):
            block = slice(part, part + self._piece)
            out[block] = self._records_of(rows[block])[:, span]
        return out

    def _records_of(self, rows: torch.Tensor) -> torch.Tensor:
        """The newest records of rows, wherever they are: ``(n, W)``."""
        places = self.cache.find(rows)
        hits = (places > 0).nonzero().squeeze(1)
        if not len(hits):
            return self._stored(rows, places)
        misses = (places <= 0).nonzero().squeeze(1)
        out = torch.empty(len(rows), self.store.layout.width, dtype=self.dtype, device="cpu")
        out[hits] = self.cache.records.index_select(0, places[hits].to(torch.int64) - 1)
        if len(misses):
            out[misses] = self._stored(rows[misses], places[misses])
        return out

    def _stored(self, rows: torch.Tensor, homes: torch.Tensor) -> torch.Tensor:
        """Records from disk, with initial values where there is none: ``(n, W)``."""
        records = self._storage.read(rows, homes)
        fresh = (records[:, self._version] == 0).nonzero().squeeze(1)
        if len(fresh):
            new = rows.index_select(0, fresh)
            manifest = self.manifest
            values = self._init.rows(new, self.dim, manifest.seed, self.dtype)
            if manifest.padding_idx is not None:
                values[new == manifest.padding_idx] = 0
            records[fresh, self.spans["weight"]] = values
        return records

    # The cache

    def _fetch(self, rows: torch.Tensor) -> torch.Tensor:
        """Bring sorted unique rows, no more than slots, into the cache: ``(n,)`` slots."""
        places = self.cache.find(rows).to(torch.int64)
        missing = (places <= 0).nonzero().squeeze(1)
        if not len(missing):
            self.cache.begin_batch(places - 1)
            return places - 1
        self.cache.begin_batch(places[places > 0] - 1)
        self._make_room(len(missing))
        for part in missing.split(self._piece):
            wanted = rows.index_select(0, part)
            homes = self.cache.find(wanted)
            records = self._stored(wanted, homes)
            slots = self.cache.free_slots(len(part))
            with uninterrupted():
                self.cache.records[slots] = records
                self.cache.insert(slots, wanted, homes)
            places[part] = slots + 1
        return places - 1

    def _make_room(self, count: int) -> None:
        """Evict until ``count`` slots are free; dirty rows go to the log as one sorted run."""
        missing = count - self.cache.num_free
        if missing <= 0:
            return
        self._storage.make_room(self.cache.slots)
        victims = self.cache.victims(missing)
        self._storage.append_slots(victims[self.cache.dirty[victims]])
        with uninterrupted():
            self.cache.release(victims)

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
            return Prepared(rows, grads, self._fetch(rows))
        # A batch that does not fit is stepped on its way into the log, as one sorted run.
        self._storage.make_room(len(rows))
        fresh = 0

        def fill(start: int, stop: int, out: torch.Tensor) -> None:
            nonlocal fresh
            out.copy_(self._records_of(rows[start:stop]))
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
            for start in range(0, len(rows), piece := min(self.cache.slots, self._piece)):
                part = slice(start, start + piece)
                self._write(self._fetch(rows[part]), field, values[part].to(self.dtype))

    def renormalize(self, rows: torch.Tensor, max_norm: float, norm_type: float) -> None:
        """Scale those of the sorted unique rows whose norm is above ``max_norm`` down to it.

        As torch does: by ``max_norm / (norm + 1e-7)``, in place, moments untouched.
        """
        if not self._guard.writer:
            raise StoreError(
                f"{self.store.path} is open to read, and max_norm={max_norm} would scale rows in "
                f"it: open it with mode='r+', or read emb.weight[rows]"
            )
        with self.writing():
            for start in range(0, len(rows), piece := min(self.cache.slots, self._piece)):
                slots = self._fetch(rows[start : start + piece])
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
        """
        with self.writing():
            self._commit(param_groups, flush=flush)
            self._storage.begin_merge()
            return self.manifest.commit.number

    def _commit(self, param_groups: list[dict[str, Any]], *, flush: bool) -> None:
        commit = Commit(
            number=0,
            step=self.step_count,
            rows_written=self.rows_written,
            param_groups=param_groups,
            logs=(),
            created=time.time(),
            library=__version__,
        )
        self._storage.commit(commit, flush=flush)

    @property
    def mode(self) -> str:
        """``"r+"`` for a writer, ``"r"`` for a reader."""
        return "r+" if self._guard.writer else "r"

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

        A merge stops after the chunks in flight, and opening again goes on with it.

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
                self._commit(param_groups, flush=flush)
            self._storage.stop_merge()
            with uninterrupted():
                self._guard.closed = True
                self._storage.close()
                self.store.close()
                del self.cache.records
        self._storage.check()


def field_spans(fields: Mapping[str, int]) -> dict[str, slice]:
    """Field name to its columns in a record."""
    spans, start = {}, 0
    for name, width in fields.items():
        spans[name] = slice(start, start + width)
        start += width
    return spans
