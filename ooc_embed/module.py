"""A module's table as others meet it: its rows and commits, and what a model asks of a module.

Knows torch.nn and a Table; does not know lookups, how a table comes into being, or any file.
"""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any, Self

import torch
from torch import nn

from . import checkpoint
from .errors import StoreError
from .gradients import GRADIENT_OPTIONS
from .manifest import VERSION_FIELD
from .optimizer import TableOptimizer
from .stats import Stats
from .table import Table
from .views import RowView


class TableModule(nn.Module):
    """A module that has a table open."""

    num_embeddings: int
    embedding_dim: int
    padding_idx: int | None
    max_norm: float | None
    norm_type: float
    scale_grad_by_freq: bool
    optimizer: TableOptimizer
    _table: Table
    _finalizer: weakref.finalize[..., Any]

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
    def step_on(self) -> str:
        return self.optimizer.step_on

    @property
    def grad_scaler(self) -> torch.amp.GradScaler | None:
        return self.optimizer.grad_scaler

    @grad_scaler.setter
    def grad_scaler(self, scaler: torch.amp.GradScaler | None) -> None:
        if scaler is not None and not isinstance(scaler, torch.amp.GradScaler):
            raise TypeError(f"grad_scaler must be a torch.amp.GradScaler, got {scaler!r}")
        self.optimizer.grad_scaler = scaler

    @property
    def read_only(self) -> bool:
        return self._table.read_only

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

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients that wait for ``optimizer.step()``. A model's own ``zero_grad`` does
        not come here: call ``emb.optimizer.zero_grad()``, as of any optimizer."""
        super().zero_grad(set_to_none)
        self.optimizer.zero_grad()

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
        hidden = {"params", *GRADIENT_OPTIONS}
        hyper = ", ".join(f"{key}={value}" for key, value in group.items() if key not in hidden)
        text += f", path={str(self.path)!r}, optimizer={self._table.rule.name}({hyper})"
        for name, usual in GRADIENT_OPTIONS.items():
            if group[name] != usual:
                text += f", {name}={group[name]!r}"
        if self.step_on != "backward":
            text += f", step_on={self.step_on!r}"
        return text + (", read_only=True" if self.read_only else "")

    def get_extra_state(self) -> dict[str, Any]:
        """What a checkpoint keeps of a table: which commit belongs to it. A writer commits."""
        if not self.read_only:
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

    def _replicate_for_data_parallel(self) -> Self:
        raise TypeError(
            "DataParallel would copy the table to every device: use DistributedDataParallel"
        )
