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
from .creation import check_count, check_integer
from .errors import StoreError
from .gradients import GRADIENT_OPTIONS
from .inspectable import Inspectable
from .optimizer import TableOptimizer
from .stats import Stats


class TableModule(Inspectable, nn.Module):
    """A module that has a table open."""

    embedding_dim: int
    padding_idx: int | None
    max_norm: float | None
    norm_type: float
    scale_grad_by_freq: bool
    optimizer: TableOptimizer
    _finalizer: weakref.finalize[..., Any]

    # The table

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

        Earlier commits cannot be returned to then: a warning names those that were kept.

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

    # Going back

    @property
    def keep_commits(self) -> int:
        return self._table.manifest.history.keep

    @keep_commits.setter
    def keep_commits(self, count: int) -> None:
        check_count("keep_commits", count)
        self._table.keep_commits(int(count))

    def rollback(self, commit: int | None = None) -> None:
        """Return to a commit: rows, moments, step and hyper-parameters. What came after it is lost.

        It takes as long as opening the store. Gradients that wait for ``optimizer.step()`` are
        dropped, and the cache is empty.

        Args:
            commit: one of `commits`; None is the newest, which drops what was not committed.

        Raises:
            TypeError: no integer.
            StoreError: it is not kept, or the table is closed or read-only.
            OSError: the disk is full, or failed; nothing has changed. If it failed while the store
                was read anew, the table is closed; if it failed to make the change durable, the
                table is at that commit all the same.
        """
        if commit is not None:
            check_integer("commit", commit)
        self._table.rollback(commit, self.optimizer.restore)

    def snapshot(self, path: str | Path) -> None:
        """Commit, and make a copy of the store, with the commits that it keeps.

        On the same file system its large files are the store's own under second names, and it takes
        no space until one of the two changes; on another one all is copied.

        Args:
            path: a folder that does not exist.

        Raises:
            FileExistsError: something is there.
            ValueError: it is inside of the store.
            OSError: as `commit`, or the other disk is too small; nothing is left at ``path``. A
                process that is killed leaves a folder without ``zarr.json``: delete it, or make the
                snapshot there again.
        """
        self._table.snapshot(Path(path).resolve(), self.optimizer.kept_param_groups())

    def resize(self, num_embeddings: int) -> None:
        """Commit, with a larger number of rows. The new ones begin as all rows do.

        The store is read anew: the cache is empty then.

        Args:
            num_embeddings: not fewer than there are.

        Raises:
            ValueError: fewer, or too many for the size of the store's files.
            OSError: as `commit`, or there is no memory for the map of so many rows. If it failed
                while the store was read anew, the table is closed, with the larger number.
            StoreError: as `commit`.
        """
        check_count("num_embeddings", num_embeddings)
        self._table.resize(int(num_embeddings), self.optimizer.kept_param_groups())

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

    def _param_group(self) -> dict[str, Any]:
        group: dict[str, Any] = self.optimizer.param_groups[0]
        return group

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

    def get_extra_state(self) -> torch.Tensor:
        """What a checkpoint keeps of a table: which commit belongs to it.

        A writer commits, and keeps this commit and the one that it handed out before beyond all
        others: the newest checkpoint may not be a file yet.
        """
        number = self._table.manifest.commit.number
        if self._may_commit:
            number = self._table.commit(self.optimizer.kept_param_groups(), checkpoint=True)
        return checkpoint.describe(self._table, number)

    @property
    def _may_commit(self) -> bool:
        return not (self.read_only or self.closed or self._table.forked)

    def commit_of(self, extra_state: torch.Tensor) -> int:
        """The number of the commit that a checkpoint's word for this table names.

        Raises:
            StoreError: it is another table, that commit is not kept, or the table is closed or
                read-only.
        """
        with self._table.writing():
            return checkpoint.find_commit(self._table, extra_state)

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
                # With strict=False too, which torch does not tell modules of.
                error_msgs.append(f"{key}: {error}")
        others = [name for name in state_dict if name.startswith(prefix) and name != key]
        # A module that was added to this one loads its own.
        known = tuple(f"{prefix}{name}." for name in self._modules)
        unexpected_keys += [name for name in others if not name.startswith(known)]

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
            f"a table on disk cannot be copied like a module: open {self.path} with mode='r' to "
            f"read it beside this one, or train a copy that snapshot(path) makes"
        )

    def _replicate_for_data_parallel(self) -> Self:
        raise TypeError(
            "DataParallel would copy the table to every device: use DistributedDataParallel"
        )
