"""A table of rows that are in the cache, in the logs or in the zarr table: lookups and steps.

Knows rows and records; does not know autograd, modules or schedulers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from .blocks import count_versions
from .errors import StoreError
from .interrupts import uninterrupted
from .opened import OpenTable
from .rule import tell_shifts
from .storage import Run
from .touched import Touched, count_touched


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


class Table(OpenTable):
    """Rows of a store, looked up and stepped."""

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

    def touched(self) -> tuple[Touched, ...]:
        """How many rows of each part were ever written. Nothing is counted or changed by it."""
        with self._guard.reading():
            stored, layout = self._storage.stored, self.store.layout
            return count_touched(self.cache, stored, layout, self._version)

    def records(self, rows: torch.Tensor) -> torch.Tensor:
        """All fields of ``(n,) int64`` rows, in any order; neither cache nor disk change.

        Returns:
            ``(n, W)``.
        """
        with self._guard.reading():
            return self._rows.records_of(rows)

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

    def admit(self, field: str, values: torch.Tensor) -> torch.Tensor:
        """What becomes of values, ``(n, columns of the field)``, that are to be assigned.

        Raises:
            ValueError: they cannot be rows under the table's rule.
        """
        if field != "weight":
            return values
        admitted = self.rule.admit(values)
        tell_shifts(self.rule.shifts(values, admitted))
        return admitted

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
