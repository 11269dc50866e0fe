"""What every object with a table open shows of it: fields as views, commits, a card in a notebook.

Knows a Table; does not know torch.nn, how the table is opened, or who may write.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from . import search
from .card import problem_html
from .description import Description, describe_table, in_force
from .errors import StoreError
from .manifest import VERSION_FIELD
from .progress import progress
from .table import Table
from .views import RowView

_SEARCHED_ROWS = 1 << 15


class Inspectable:
    """An object that has a table open."""

    _table: Table

    @property
    def num_embeddings(self) -> int:
        return self._table.manifest.num_embeddings

    @property
    def weight(self) -> RowView:
        return RowView(self._table, "weight", self)

    @property
    def state(self) -> dict[str, RowView]:
        names = (name for name in self._table.spans if name not in ("weight", VERSION_FIELD))
        return {name: RowView(self._table, name, self) for name in names}

    @property
    def version(self) -> RowView:
        return RowView(self._table, VERSION_FIELD, self)

    @property
    def step(self) -> int:
        return self._table.step_count

    @property
    def path(self) -> Path:
        return self._table.store.path

    @property
    def closed(self) -> bool:
        return self._table.closed

    def commits(self) -> dict[int, int]:
        """The commits that are kept: number to step, oldest first."""
        return {commit.number: commit.step for commit in self._table.manifest.history.commits}

    # Reading all of it

    def blocks(self, block_rows: int = 1 << 16) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield ``(start, weights)`` from the first row to the last, in bounded memory.

        Neither the cache nor the disk change, and no gradient comes back.

        Args:
            block_rows: rows in a block; the last may have fewer.
        """
        return self.weight.blocks(block_rows)

    def topk(
        self, query: torch.Tensor, k: int, metric: str = "dot"
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The k rows nearest to each query, of all rows, read by `blocks` with progress.

        Args:
            query: ``(D,)`` or ``(Q, D)``, on the device that is to compare.
            k: how many.
            metric: ``"dot"`` and ``"cosine"``, the largest; ``"l2"``, the smallest distances.

        Returns:
            Products, cosines or distances, the best first, and row ids: ``(k,)`` or ``(Q, k)``.

        Raises:
            ValueError: a query of another shape, ``k`` beyond the rows, another metric.
        """
        dim = self._table.dim
        search.check_query(query, dim, k, self.num_embeddings, metric)
        queries = query.detach().reshape(-1, dim)
        total = -(-self.num_embeddings // _SEARCHED_ROWS)
        blocks = progress(self.blocks(_SEARCHED_ROWS), "searching", "block", total)
        scores, ids = search.topk(blocks, queries, k, metric)
        shape = (*query.shape[:-1], k)
        return scores.reshape(shape), ids.reshape(shape)

    # What it shows

    def _param_group(self) -> dict[str, Any]:
        """The hyper-parameters in force."""
        return self._table.manifest.commit.param_groups[0]

    def _describe(self, opened: str = "") -> Description:
        opened = opened or type(self).__name__
        return describe_table(self._table, opened, in_force(self._param_group()))

    def _repr_html_(self) -> str:
        try:
            return self._describe()._repr_html_()
        except (StoreError, OSError) as error:  # or a notebook shows a traceback in its place
            tag = "closed" if self.closed else "not readable"
            shape = (
                f"{self.num_embeddings:,} rows of {self._table.dim:,} {self._table.manifest.dtype}"
            )
            return problem_html(type(self).__name__, shape, str(self.path), tag, str(error))
