"""What layers over a table have in common: how they come into being, look up, and are searched.

Knows torch and a Table; knows no file and no slot, and has no forward.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import nn

from . import checkpoint, conversion, creation, passes, sources
from .errors import StoreError
from .ids import check_range, flat_ids
from .module import TableModule
from .optimizer import TableOptimizer
from .rule import Rule, check_same, hyperparameters
from .table import Table


class DiskLayer(TableModule):
    """A module over a table on disk; `DiskEmbedding` and `DiskEmbeddingBag` add ``forward``."""

    # What it takes the place of.
    _in_ram: ClassVar[type[nn.Embedding] | type[nn.EmbeddingBag]]

    @classmethod
    def open(
        cls,
        path: str | Path,
        mode: str = "r+",
        *,
        commit: int | None = None,
        optimizer: Rule | None = None,
        cache_bytes: int | str = "auto",
    ) -> Self:
        """Go on with the store at ``path``: same step, moments and hyper-parameters.

        Args:
            path: the folder of a store.
            mode: ``"r+"`` trains, one writer at a time. ``"r"`` reads exactly the commit that is
                the newest now, for as long as it is open, beside a writer or not.
            commit: the number of an earlier commit that is kept, to read; or, of a writer, to go
                back to, as `rollback` does.
            optimizer: the store's own rule, with hyper-parameters to take from now on; None keeps
                those of the store.
            cache_bytes: memory for hot rows of a writer.

        Raises:
            ValueError: the store has another rule, or other values of what stays fixed, as the
                curvature of a ball.
            FileNotFoundError: there is nothing.
            FormatError: there is something else.
            CorruptStoreError: a file is missing, short, or fails its checksum.
            LockedError: another writer has it open.
            StoreError: that commit is not kept.
        """
        creation.check_cache(cache_bytes)
        if commit is not None:
            creation.check_integer("commit", commit)
        self = cls.__new__(cls)
        self._begin(
            lambda: Table.open(Path(path).absolute(), mode, cache_bytes, commit),
            lambda: self._take_rates(optimizer),
        )
        return self

    def _take_rates(self, optimizer: Rule | None) -> None:
        """Go on with the hyper-parameters of a rule, if one is given."""
        if optimizer is not None:
            check_same(self._table.rule, optimizer)
            self.optimizer.param_groups[0].update(hyperparameters(optimizer))

    def _begin(self, make: Callable[[], Table], then: Callable[[], object] = lambda: None) -> None:
        """Be the layer of a table, which is let go of where that fails: after a Ctrl-C a notebook
        keeps the traceback, and what is in it would stay locked."""
        table = make()
        try:
            self._adopt(table)
            then()
        except BaseException:
            table.close()
            raise

    def _adopt(self, table: Table) -> None:
        super().__init__()
        manifest = table.manifest
        self._table = table
        self.embedding_dim = manifest.embedding_dim
        self.padding_idx = manifest.padding_idx
        self.max_norm = manifest.module.max_norm
        self.norm_type = manifest.module.norm_type
        self.scale_grad_by_freq = manifest.module.scale_grad_by_freq
        self.sparse = True
        self.optimizer = TableOptimizer(
            table, manifest.commit.param_groups, manifest.module.step_on
        )
        self.anchor = nn.Parameter(torch.empty(0, dtype=table.dtype))
        table_of = weakref.ref(table)
        # Frozen since the lookup is frozen: torch asks at this moment too.
        self._arm = lambda anchor: _arm(table_of() if anchor.requires_grad else None)
        self._hook_anchor()
        self.anchor.requires_grad_(not self.read_only)
        self._finalizer = weakref.finalize(self, checkpoint.close_dropped, table, self.optimizer)

    def _hook_anchor(self) -> None:
        """Have the anchor say which backward passes are steps; again if it was replaced.

        One that was computed from another parameter leads backward to that one's hook.
        """
        hooks = self.anchor._post_accumulate_grad_hooks or {}
        if self.anchor.is_leaf and self._arm not in hooks.values():
            self.anchor.register_post_accumulate_grad_hook(self._arm)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        # Where torch swaps what is under a parameter, the hooks are still listed but not called.
        self.anchor._post_accumulate_grad_hooks = self.anchor._post_accumulate_grad_hooks
        return self

    def __reduce__(self) -> Any:
        """Pickling carries the path: the copy opens read-only, at the newest commit, or at the one
        that a reader was opened at by its number. A writer commits for it."""
        if self._may_commit:
            self.commit()
        pinned = self._table.store.pinned
        commit = self._table.manifest.commit.number if pinned else None
        return (_reopen, (type(self), str(self.path), self.anchor.dtype, self.training, commit))

    # Coming from torch's layers, and going back

    @classmethod
    def from_pretrained(
        cls,
        embeddings: Any,
        freeze: bool = True,
        *,
        path: str | Path,
        key: str | None = None,
        **options: Any,
    ) -> Self:
        """Create a table of given rows, which are streamed in with progress.

        Args:
            embeddings: ``(N, D)``: a tensor, an array, a memmap, a zarr array; or the path of a
                ``.npy`` file, of a ``.safetensors`` file (extra ``safetensors``) or a zarr folder.
            freeze: do not train it, as ``torch.nn.Embedding.from_pretrained``;
                ``requires_grad_(True)`` changes that. The store does not keep it.
            path: the folder of the store.
            key: the tensor's name in its file, where there are several.
            options: the constructor's other arguments by name; ``dtype`` is float64 if the rows
                are, else float32. A padding row keeps its value.

        Raises:
            FileNotFoundError, ValueError, TypeError, ImportError: no ``(N, D)`` numbers there.
        """
        source = sources.open_source(embeddings, key, apart_from=Path(path))
        if len(source.shape) != 2:
            raise ValueError(f"embeddings must have the shape (N, D), got {tuple(source.shape)}")
        if str(getattr(source, "dtype", "")).endswith("float64"):
            options.setdefault("dtype", torch.float64)
        self = cls(*source.shape, path=path, init=source, **options)
        try:
            self.requires_grad_(not freeze)
        except BaseException:  # as in `_begin`
            self.close()
            raise
        return self

    @classmethod
    def from_embedding(
        cls,
        embedding: nn.Embedding | nn.EmbeddingBag,
        optimizer: torch.optim.Optimizer | Rule | None = None,
        *,
        path: str | Path,
        cache_bytes: int | str = "auto",
        keep_commits: int = 1,
        step_on: str = "backward",
        overwrite: bool = False,
        chunk_rows: int | None = None,
    ) -> Self:
        """Create a table that goes on where a layer in RAM is.

        Args:
            embedding: its weights and arguments are taken.
            optimizer: the ``torch.optim.SparseAdam`` that trained it, whose moments, step and
                hyper-parameters are taken too; or a rule to begin anew.
            path, cache_bytes, keep_commits, step_on, overwrite, chunk_rows: as of the constructor.

        Raises:
            TypeError: a layer of another kind, or an optimizer whose numbers no rule here has.
            ValueError: the optimizer does not have the layer's weight.
        """
        if not isinstance(embedding, cls._in_ram):
            raise TypeError(f"{cls.__name__} comes from {cls._in_ram.__name__}, got {embedding}")
        self = cls.__new__(cls)
        self._begin(
            lambda: conversion.to_disk(
                embedding,
                optimizer,
                Path(path).absolute(),
                cache_bytes=cache_bytes,
                keep_commits=keep_commits,
                step_on=step_on,
                overwrite=overwrite,
                chunk_rows=chunk_rows,
            ),
            lambda: self.train(embedding.training).requires_grad_(embedding.weight.requires_grad),
        )
        return self

    def reset_parameters(self) -> None:
        """Do nothing before the first step: the rows are those of ``init`` then, or assigned ones,
        which stay.

        Raises:
            StoreError: steps were taken. A new table begins anew, not one that was trained.
        """
        if self.step:
            raise StoreError(
                f"{self.path} was trained for {self.step:,} steps, which are not thrown away: make "
                f"a new table, with overwrite=True in the place of this one"
            )

    # Looking up

    def _look_up(
        self, ids: torch.Tensor, device: torch.device, stage: passes.StageGradient
    ) -> torch.Tensor:
        """Rows that backward trains.

        Args:
            ids: ``(n,) int64``, checked.
            device: where they are wanted.
            stage: what backward gives their gradients to.

        Returns:
            ``(n, embedding_dim)``, of the anchor's dtype.
        """
        # Evaluation must not write, and bringing rows into the cache can push others to disk.
        learning = self.training and torch.is_grad_enabled() and self.anchor.requires_grad
        if self.anchor.requires_grad:
            self._hook_anchor()
        table = self._table
        look_up = table.lookup if learning else table.weights
        rollbacks = table.rollbacks

        def stage_unless_gone_back(*staged: torch.Tensor) -> None:
            passes.check_not_gone_back(table, rollbacks)
            stage(*staged)

        out: torch.Tensor = passes.Lookup.apply(  # type: ignore[no-untyped-call]
            self.anchor, ids, device, self._renormalizing(look_up), stage_unless_gone_back
        )
        return out.to(self.anchor.dtype)

    def _renormalizing(self, look_up: Callable[..., torch.Tensor]) -> passes.FetchWeights:
        """A way to look rows up that scales them down to ``max_norm`` first, if there is one."""
        max_norm, table, norm_type = self.max_norm, self._table, self.norm_type
        if max_norm is None:
            return look_up

        def fetch(rows: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
            table.renormalize(rows, max_norm, norm_type)
            return look_up(rows, inverse, counted=False)

        return fetch

    def prefetch(self, rows: torch.Tensor) -> None:
        """Have rows that are not in the cache read from disk into the system's page cache.

        It returns before they are there, changes nothing, and does not wait for other threads that
        use the table. `lookahead` calls it.

        Args:
            rows: ``(*)`` int32 or int64 ids.

        Raises:
            TypeError, IndexError: as `forward`.
            StoreError: the table is closed, or this is a forked child.
        """
        ids = flat_ids(rows)
        check_range(ids, self.num_embeddings)
        self._table.prefetch(ids)

    def _stage(self, grads: torch.Tensor, rows: torch.Tensor, bounds: torch.Tensor) -> None:
        """Give a lookup's gradients, ``(m, D)``, to the running backward pass."""
        if self.padding_idx is not None:
            kept = rows != self.padding_idx
            if not kept.all():
                rows, grads = rows[kept], grads[kept]
        passes.stage(self.optimizer, rows, grads)


def _reopen(
    layer: type[DiskLayer],
    path: str,
    dtype: torch.dtype,
    training: bool,
    commit: int | None = None,
) -> DiskLayer:
    """Unpickle: open to read, with the casts and the mode that it had."""
    return layer.open(path, "r", commit=commit).to(dtype).train(training)


def _arm(table: Table | None) -> None:
    if table is not None:
        passes.arm(table)
