"""A field of a table as something to index. Knows the table's fields; does not know autograd."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from .errors import StoreError
from .ids import check_range
from .manifest import VERSION_FIELD
from .table import Table

# Of an assignment, the rows that are sorted at once.
_SORTED_ROWS = 1 << 16
_RULE = "use an integer, a slice, a mask of all rows, or 1-d int32 or int64 ids"


class RowView:
    """A field of all rows, read and written by rows; never the whole table in memory.

    ``view[5]`` is one row, ``view[rows]`` (a 1-d integer tensor, array or list, or a mask of all
    rows) and ``view[a:b]`` are ``(n, D)`` tensors, copies. ``view[rows] = values`` writes; of a row
    that is named twice the last value stays. `blocks` walks over all rows.

    Attributes:
        shape: ``(N, D)``; ``(N,)`` for ``version``.
        dtype: of what indexing gives.
    """

    def __init__(self, table: Table, field: str, owner: object) -> None:
        self._table = table
        # The module closes its table when it goes: a view keeps it.
        self._owner = owner
        self._field = field
        span = table.spans[field]
        self._columns = span.stop - span.start
        # How often a row was written is a number, not a vector.
        self._counts = field == VERSION_FIELD
        self.dtype = torch.int64 if self._counts else table.dtype

    @property
    def shape(self) -> torch.Size:
        return torch.Size((len(self),) if self._counts else (len(self), self._columns))

    def __len__(self) -> int:
        return self._table.manifest.num_embeddings

    def size(self, dim: int | None = None) -> torch.Size | int:
        """``shape``, or one number of it, as ``torch.Tensor.size``."""
        return self.shape if dim is None else self.shape[dim]

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"RowView has no {name!r}: {_whole(self.__dict__.get('_field', ''))}")

    def __repr__(self) -> str:
        return f"RowView({self._field}, shape={tuple(self.shape)}, dtype={self.dtype})"

    def __getitem__(self, key: Any) -> torch.Tensor:
        rows = self._rows(key)
        if isinstance(rows, range):
            rows = _tensor(rows)
        values = self._table.read(rows.reshape(-1), self._field)
        if self._counts:
            values = values.squeeze(1).to(torch.int64)
        return values[0] if rows.dim() == 0 else values

    def __setitem__(self, key: Any, values: Any) -> None:
        if self._counts:
            raise TypeError("versions count writes and cannot be set")
        values = torch.as_tensor(values, dtype=self.dtype, device="cpu").detach()
        rows = self._rows(key)
        single = isinstance(rows, torch.Tensor) and rows.dim() == 0
        if isinstance(rows, torch.Tensor):
            rows = rows.reshape(-1)
        shape = self.shape[1:] if single else (len(rows), *self.shape[1:])
        try:
            values = values.expand(shape)
        except RuntimeError:
            raise ValueError(
                f"cannot write values of shape {tuple(values.shape)} to {tuple(shape)}"
            ) from None
        values = self._table.admit(self._field, values[None] if single else values)
        for part, places in _last_of_each(rows):
            self._table.assign(self._field, part, values[places])

    def blocks(self, block_rows: int = 1 << 16) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield ``(start, rows)`` from the first row to the last, ``block_rows`` at a time.

        Raises:
            StoreError: the table went back to another commit meanwhile.
        """
        if block_rows < 1:
            raise ValueError(f"block_rows must be at least 1, got {block_rows}")
        rollbacks = self._table.rollbacks
        for start in range(0, len(self), block_rows):
            if self._table.rollbacks != rollbacks:
                raise StoreError(
                    f"{self._table.store.path} went back to another commit while its rows were "
                    f"being walked over: begin anew"
                )
            yield start, self[start : start + block_rows]

    def __iter__(self) -> Iterator[torch.Tensor]:
        """Walk over the rows, one by one, as over a tensor."""
        for _, block in self.blocks():
            yield from block

    def __array__(self, *args: Any, **kwargs: Any) -> np.ndarray:
        raise TypeError(_whole(self._field))

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", str(func))
        raise TypeError(f"{name}: {_whole('weight')}")

    def _rows(self, key: Any) -> torch.Tensor | range:
        """Row ids that a key names: ``(n,)``, a scalar, or the range of a slice; checked."""
        size = len(self)
        if isinstance(key, slice):
            return range(*key.indices(size))
        if isinstance(key, (int, np.integer)) and not isinstance(key, bool):
            if not -size <= key < size:
                raise IndexError(f"row {key} is out of range for a table of {size} rows")
            return torch.tensor(int(key) % size, device="cpu")
        if isinstance(key, list) and not key:
            return torch.empty(0, dtype=torch.int64, device="cpu")
        if not isinstance(key, (torch.Tensor, np.ndarray, list)):
            raise TypeError(f"rows cannot be named by {key!r}: {_RULE}")
        rows = torch.as_tensor(key, device="cpu")
        if rows.dtype == torch.bool and rows.shape == self.shape[:1]:
            return rows.nonzero().squeeze(1)
        if rows.dtype not in (torch.int32, torch.int64) or rows.dim() > 1:
            raise TypeError(f"rows cannot be named by {rows.dim()}-d {rows.dtype}: {_RULE}")
        rows = rows.detach().cpu().to(torch.int64)
        check_range(rows, size)
        return rows


def _tensor(rows: range) -> torch.Tensor:
    return torch.from_numpy(np.arange(rows.start, rows.stop, rows.step))


def _last_of_each(rows: torch.Tensor | range) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield sorted unique rows and where each stands last among ``rows``, by blocks."""
    if isinstance(rows, range):
        for start in range(0, len(rows), _SORTED_ROWS):
            part, order = _tensor(rows[start : start + _SORTED_ROWS]).sort()
            yield part, order + start
        return
    part, order = rows.sort(stable=True)
    last = torch.ones(len(part), dtype=torch.bool, device="cpu")
    last[:-1] = part[1:] != part[:-1]
    yield from zip(part[last].split(_SORTED_ROWS), order[last].split(_SORTED_ROWS), strict=True)


def _whole(field: str) -> str:
    return (
        f"the table's {field} is on disk and no tensor. Index it ([rows], [a:b]), walk over its "
        f"blocks(), or write [rows] = values; init= of the constructor sets the first values"
    )
