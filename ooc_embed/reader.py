"""A store as something to look at: opened to read without a module, and described.

Knows paths and a Table; does not know torch.nn, and writes nothing.
"""

from __future__ import annotations

import os
import weakref
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch

from .creation import check_integer
from .description import Description, in_force
from .inspectable import Inspectable
from .table import Table


class TableReader(Inspectable):
    """A table at one commit, to read; `open_table` returns it. A context manager.

    It has no module, no gradient and no cache, and takes no lock: a writer may go on meanwhile.

    Attributes:
        weight: the rows, a `RowView` of shape (num_embeddings, embedding_dim).
        state: the optimizer's fields, name to `RowView`.
        version: how often each row was written, a `RowView` of shape (num_embeddings,).
        num_embeddings, embedding_dim, padding_idx: as of the layer.
        dtype: of the rows.
        rule, hyperparameters: the optimizer's name, and its values at this commit.
        step: optimizer steps taken.
        path: the folder of the store.
        closed: whether `close` was called.
    """

    def __init__(self, table: Table) -> None:
        self._table = table
        self._finalizer = weakref.finalize(self, table.close)

    @property
    def embedding_dim(self) -> int:
        return self._table.dim

    @property
    def padding_idx(self) -> int | None:
        return self._table.manifest.padding_idx

    @property
    def dtype(self) -> torch.dtype:
        return self._table.dtype

    @property
    def rule(self) -> str:
        return self._table.rule.name

    @property
    def hyperparameters(self) -> dict[str, Any]:
        return in_force(self._param_group())

    def close(self) -> None:
        """Let go of the store's files. A second call does nothing."""
        self._table.close()
        self._finalizer.detach()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __reduce__(self) -> Any:
        """Pickling carries the path, as of a layer that was opened with ``mode="r"``."""
        pinned = self._table.store.pinned
        commit = self._table.manifest.commit.number if pinned else None
        return (partial(open_table, commit=commit), (self.path,))

    def __repr__(self) -> str:
        return (
            f"TableReader({self.num_embeddings}, {self.embedding_dim}, path={str(self.path)!r}, "
            f"rule={self.rule}, step={self.step}, commit={self._table.manifest.commit.number}"
            f"{', closed' if self.closed else ''})"
        )


def open_table(path: str | Path, *, commit: int | None = None) -> TableReader:
    """Open the store at ``path`` to read exactly one commit of it, without a module.

    Args:
        path: the folder of a store, which may be written to meanwhile, or be read-only.
        commit: the number of an earlier commit that is kept; None is the newest now.

    Raises:
        FileNotFoundError: there is nothing.
        FormatError: there is something else.
        CorruptStoreError: a file is missing, short, or fails its checksum.
        StoreError: that commit is not kept.

    Examples::

        >>> import torch, ooc_embed
        >>> with ooc_embed.DiskEmbedding(1000, 4, path="read.zarr", init="zeros") as emb:
        ...     emb(torch.tensor([1, 2])).sum().backward()
        >>> with ooc_embed.open_table("read.zarr") as table:
        ...     table.weight[1], table.version[:4].numpy(), table.step
        (tensor([-0.0010, -0.0010, -0.0010, -0.0010]), array([0, 1, 1, 0]), 1)
    """
    if commit is not None:
        check_integer("commit", commit)
    return TableReader(Table.open(Path(path).absolute(), "r", "auto", commit))


def describe(store: str | Path | Inspectable) -> Description:
    """Facts about a table: size against memory, optimizer, commits, log, cache, written rows.

    ``print`` of them is a table; a notebook shows a card, as it does for an open layer itself.

    Args:
        store: the folder of a store, which is opened to read; or a `DiskEmbedding`, a
            `DiskEmbeddingBag` or what `open_table` returned, which is described as it is now, with
            what is not committed. Neither changes by it, and nothing is counted in its `Stats`.

    Raises:
        FileNotFoundError, FormatError, CorruptStoreError: as `open_table`.
        StoreError: the object is closed.
        TypeError: something else was given.

    Examples::

        >>> import torch, ooc_embed
        >>> with ooc_embed.DiskEmbedding(1000, 4, path="described.zarr") as emb:
        ...     emb(torch.arange(50)).sum().backward()
        >>> facts = ooc_embed.describe("described.zarr")
        >>> facts.rows_written, facts.touched[0].share, facts.weight_bytes, facts.ram_bytes
        (50, 0.05, 16000, 48000)
    """
    if isinstance(store, Inspectable):
        return store._describe()
    if not isinstance(store, (str, os.PathLike)):
        raise TypeError(f"describe takes the path of a store or an open table, got {store!r:.200}")
    with open_table(store) as table:
        return table._describe("store")
