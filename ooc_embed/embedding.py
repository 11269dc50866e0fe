"""DiskEmbedding: torch at one end, a Table at the other. Knows no file and no slot."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import torch
from torch import nn

from . import checkpoint, creation, passes, rules
from .errors import StoreError
from .ids import check_range, flat_ids
from .manifest import VERSION_FIELD
from .optimizer import TableOptimizer
from .stats import Stats
from .table import Table
from .views import RowView


class DiskEmbedding(nn.Module):
    """An embedding table on disk that takes the place of ``torch.nn.Embedding``.

    ``forward`` fetches the rows of the batch, and ``loss.backward()`` runs the optimizer on them:
    the table takes one step for each backward, over all its lookups in that pass. Rows in frequent
    use stay in a cache in RAM. What was committed (`commit`, `flush`, `close`, ``state_dict``)
    survives a kill or a power cut at any moment.

    The constructor creates the store at ``path``; `open` goes on with one.

    Args:
        num_embeddings: rows of the table.
        embedding_dim: columns of a weight.
        padding_idx: a row that is not trained, and is zero at the start. Negative counts from the
            end.
        max_norm: rows that are looked up and have a larger norm are scaled down to it, in the
            table, also under ``no_grad`` and ``eval``, as torch does.
        norm_type: p of that norm.
        scale_grad_by_freq: divide a row's gradient by how often the row is in the lookup.
        sparse: accepted for compatibility; only rows that were looked up move either way.
        path: the folder of the store, a zarr group.
        optimizer: the rule of the step, with its hyper-parameters.
        init: ``"normal"`` (N(0, 1), as nn.Embedding), ``"uniform"``, ``"zeros"``, or `Normal`,
            `Uniform`, `Zeros` with parameters; rows then cost nothing until they are trained. Or a
            tensor or array of the full shape, which is streamed in.
        seed: of the initial rows.
        cache_bytes: memory for hot rows; ``"auto"`` is a quarter of what this process may use.
        dtype: ``torch.float32`` or ``torch.float64``.
        overwrite: replace a store that is at ``path``.
        chunk_rows: rows in a file of the store, a multiple of 1024, no more than the table needs;
            None chooses about 32 MiB.

    Attributes:
        weight: the rows, a `RowView` of shape (num_embeddings, embedding_dim).
        state: the optimizer's fields, name to `RowView`.
        version: how often each row was written, a `RowView` of shape (num_embeddings,).
        optimizer: a ``torch.optim.Optimizer`` with live ``param_groups``, for schedulers.
        step: optimizer steps taken.
        kernel: what steps the rows, ``"numba"`` (with the extra ``fast``) or ``"torch"``.

    Shape:
        - Input: ``(*)`` int32 or int64 ids, on any device.
        - Output: ``(*, embedding_dim)``, on the ids' device. ``model.half()`` and ``.to(dtype)``
          cast the output, never the table.

    Raises:
        ValueError, TypeError: an argument is wrong; nothing is written.
        FileExistsError: ``path`` exists.
        OSError: the disk is full, or failed.

    Examples::

        >>> import tempfile, torch, ooc_embed
        >>> folder = tempfile.TemporaryDirectory()
        >>> emb = ooc_embed.DiskEmbedding(1000, 4, path=f"{folder.name}/emb.zarr", init="zeros")
        >>> emb(torch.tensor([[1, 2], [2, 3]])).sum().backward()
        >>> emb.weight[2]
        tensor([-0.0010, -0.0010, -0.0010, -0.0010])
        >>> emb.step
        1
        >>> emb.close()
        >>> folder.cleanup()
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = True,
        *,
        path: str | Path,
        optimizer: rules.Rule | None = None,
        init: Any = "normal",
        seed: int = 0,
        cache_bytes: int | str = "auto",
        dtype: torch.dtype = torch.float32,
        overwrite: bool = False,
        chunk_rows: int | None = None,
    ) -> None:
        rule = rules.SparseAdam() if optimizer is None else optimizer
        table = creation.create_table(
            Path(path).absolute(),
            (num_embeddings, embedding_dim),
            padding_idx=padding_idx,
            rule=rule,
            init=init,
            seed=seed,
            dtype=dtype,
            max_norm=max_norm,
            norm_type=norm_type,
            scale_grad_by_freq=scale_grad_by_freq,
            cache_bytes=cache_bytes,
            chunk_rows=chunk_rows,
            overwrite=overwrite,
        )
        self._adopt(table)

    @classmethod
    def open(cls, path: str | Path, mode: str = "r+", *, cache_bytes: int | str = "auto") -> Self:
        """Go on with the store at ``path``: same step, moments and hyper-parameters.

        Args:
            path: the folder of a store.
            mode: ``"r+"`` trains, one writer at a time. ``"r"`` reads exactly the commit that is
                the newest now, for as long as it is open, beside a writer or not.
            cache_bytes: memory for hot rows of a writer.

        Raises:
            FileNotFoundError: there is nothing.
            FormatError: there is something else.
            CorruptStoreError: a file is missing, short, or fails its checksum.
            LockedError: another writer has it open.
        """
        creation.check_cache(cache_bytes)
        self = cls.__new__(cls)
        self._adopt(Table.open(Path(path).absolute(), mode, cache_bytes))
        return self

    def _adopt(self, table: Table) -> None:
        super().__init__()
        manifest = table.manifest
        self._table = table
        self.num_embeddings = manifest.num_embeddings
        self.embedding_dim = manifest.embedding_dim
        self.padding_idx = manifest.padding_idx
        self.max_norm: float | None = manifest.module["max_norm"]
        self.norm_type: float = manifest.module["norm_type"]
        self.scale_grad_by_freq: bool = manifest.module["scale_grad_by_freq"]
        self.sparse = True
        self.optimizer = TableOptimizer(
            table.rule, self.embedding_dim, manifest.commit.param_groups
        )
        self.anchor = nn.Parameter(torch.empty(0, dtype=table.dtype))
        self._hook_anchor()
        self.anchor.requires_grad_(table.mode == "r+")
        self._finalizer = weakref.finalize(self, checkpoint.close_dropped, table, self.optimizer)

    def _hook_anchor(self) -> None:
        """Have the anchor say which backward passes are steps; again if it was replaced."""
        self._hooked = weakref.ref(self.anchor)
        table_of = weakref.ref(self._table)
        self.anchor.register_post_accumulate_grad_hook(lambda anchor: _arm(table_of()))

    # Looking up

    @passes.uncompiled
    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - nn.Embedding's name
        """Look rows up.

        Args:
            input: ``(*)`` int32 or int64 ids.

        Returns:
            ``(*, embedding_dim)``.

        Raises:
            TypeError: no tensor, or of another dtype.
            IndexError: an id below 0 or not below ``num_embeddings``.
        """
        ids = flat_ids(input)
        check_range(ids, self.num_embeddings)
        # Evaluation must not write, and bringing rows into the cache can push others to disk.
        learning = self.training and torch.is_grad_enabled() and self.anchor.requires_grad
        if self.anchor.requires_grad and self._hooked() is not self.anchor:
            self._hook_anchor()
        look_up = self._table.lookup if learning else self._table.weights
        out: torch.Tensor = passes.Lookup.apply(  # type: ignore[no-untyped-call]
            self.anchor, ids, input.device, self._renormalizing(look_up), self._stage
        )
        out = out.reshape(*input.shape, self.embedding_dim)
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
        if self.scale_grad_by_freq:
            grads /= bounds.diff().to(grads.device).unsqueeze(1)
        if self.padding_idx is not None:
            kept = rows != self.padding_idx
            if not kept.all():
                rows, grads = rows[kept], grads[kept]
        passes.stage(self._table, self.optimizer, rows, grads)

    # The table

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
    def mode(self) -> str:
        return self._table.mode

    @property
    def closed(self) -> bool:
        return self._table.closed

    @property
    def kernel(self) -> str:
        return self._table.kernel

    def stats(self) -> Stats:
        """Hits, evictions, bytes, commits and merges since this object was opened."""
        return self._table.counters.now()

    def commit(self) -> int:
        """Make all steps and hyper-parameters durable.

        Returns:
            The number of the commit; that of the last one where nothing has changed since.

        Raises:
            OSError: the disk is full, or failed. Nothing is lost: call again once there is room.
                Where a merge in the background failed, a note says so: then this commit was made.
            CorruptStoreError: that merge found a damaged chunk file.
            StoreError: the table is closed or read-only.
        """
        return self._table.commit(self.optimizer.kept_param_groups())

    def flush(self) -> None:
        """Commit, and bring every row into the zarr array ``table``, for any zarr reader.

        Raises:
            OSError, StoreError: as `commit`.
        """
        self._table.commit(self.optimizer.kept_param_groups(), flush=True)

    def close(self, flush: bool = False) -> None:
        """Commit and let go of the store; `open` goes on with it. A second call does nothing.

        Args:
            flush: bring every row into the zarr array too.

        Raises:
            OSError: as `commit`; the table stays open, and close can be called again.
        """
        self._table.close(self.optimizer.kept_param_groups(), flush=flush)
        self._finalizer.detach()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # Living in a model

    def extra_repr(self) -> str:
        text = f"{self.num_embeddings}, {self.embedding_dim}"
        if self.padding_idx is not None:
            text += f", padding_idx={self.padding_idx}"
        if self.max_norm is not None:
            text += f", max_norm={self.max_norm}"
        if self.norm_type != 2:
            text += f", norm_type={self.norm_type}"
        if self.scale_grad_by_freq:
            text += f", scale_grad_by_freq={self.scale_grad_by_freq}"
        group = self.optimizer.param_groups[0]
        hyper = ", ".join(f"{key}={value}" for key, value in group.items() if key != "params")
        text += f", path={str(self.path)!r}, optimizer={self._table.rule.name}({hyper})"
        return text + ("" if self.mode == "r+" else f", mode={self.mode!r}")

    def get_extra_state(self) -> dict[str, Any]:
        """What a checkpoint keeps of a table: which commit belongs to it. A writer commits."""
        if self.mode == "r+":
            self.commit()
        return checkpoint.describe(self._table)

    def set_extra_state(self, state: Any) -> None:
        """Check that the store is where the checkpoint left it.

        Raises:
            StoreError: it is another table, or another step of it.
        """
        checkpoint.check(self._table, state)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination[f"{prefix}_extra_state"] = self.get_extra_state()

    def _load_from_state_dict(
        self,
        state_dict: Any,
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        key = f"{prefix}_extra_state"
        if key not in state_dict:
            missing_keys.append(key)
        else:
            try:
                self.set_extra_state(state_dict[key])
            except StoreError as error:
                error_msgs.append(str(error))
        unexpected_keys += [name for name in state_dict if name.startswith(prefix) and name != key]

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("weight", "state", "version"):
            raise AttributeError(
                f"{name} is on disk and cannot be replaced: write rows with "
                f"emb.{'weight' if name == 'version' else name}[rows] = values"
            )
        super().__setattr__(name, value)

    def __deepcopy__(self, memo: Any) -> Self:
        return self.__copy__()

    def __copy__(self) -> Self:
        raise TypeError(
            f"a table on disk cannot be copied like a module; open {self.path} with mode='r', or "
            f"copy the folder after close()"
        )

    def __reduce__(self) -> Any:
        """Pickling carries the path: the copy opens read-only, at the newest commit."""
        return (type(self).open, (str(self.path), "r"))

    def _replicate_for_data_parallel(self) -> Self:
        raise TypeError(
            "DataParallel would copy the table to every device: use DistributedDataParallel"
        )


def _arm(table: Table | None) -> None:
    if table is not None:
        passes.arm(table)
