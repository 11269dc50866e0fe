"""What outlives a module: a checkpoint's word for its table, a last commit. Knows no rows."""

from __future__ import annotations

import json
import warnings
from typing import Any

import torch

from .errors import StoreError
from .optimizer import TableOptimizer
from .table import Table


def describe(table: Table) -> torch.Tensor:
    """Which table a checkpoint belongs to, at which commit and step.

    Returns:
        ``(n,) uint8``, the bytes of a JSON text: what keeps tensors alone, as safetensors and with
        it ``save_pretrained`` of transformers, keeps that too.
    """
    commit = table.manifest.commit
    words = {"table_id": table.manifest.table_id, "commit": commit.number, "step": commit.step}
    return torch.tensor(list(json.dumps(words).encode()), dtype=torch.uint8, device="cpu")


def check(table: Table, state: Any) -> None:
    """Check that the table is where `describe` found it.

    Raises:
        StoreError: it is another table, or another step of it.
    """
    number, step = _read(table, state)
    history, path = table.manifest.history, table.store.path
    undone = history.was_undone(number)
    if step == table.step_count and not undone:
        return
    if number in history:
        remedy = f"emb.rollback({number}) returns to it"
    elif undone:
        remedy = "A rollback took that commit back: load a checkpoint of another one"
    else:
        remedy = "The store does not keep that commit any more: load a checkpoint of its own step"
    raise StoreError(
        f"the checkpoint was saved at commit {number}, step {step} of the table; {path} is at "
        f"commit {history.newest.number}, step {table.step_count}. {remedy}. To go on with the "
        f"table as it is, load without this key and with strict=False"
    )


def find_commit(table: Table, state: Any) -> int:
    """The number of the commit that `describe` found.

    Raises:
        StoreError: it was another table, or that commit is not kept.
    """
    number, _ = _read(table, state)
    return table.manifest.history.find(number).number


def _read(table: Table, state: Any) -> tuple[int, int]:
    """The commit and the step that `describe` found.

    Raises:
        StoreError: it was another table, or no table.
    """
    try:
        words = json.loads(bytes(state.tolist()))
        table_id, number, step = words["table_id"], int(words["commit"]), int(words["step"])
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise StoreError(f"the checkpoint holds no word of a table, but {state!r}") from error
    if table_id != table.manifest.table_id:
        raise StoreError(
            f"the checkpoint belongs to table {table_id}, {table.store.path} is table "
            f"{table.manifest.table_id}"
        )
    return number, step


def close_dropped(table: Table, optimizer: TableOptimizer) -> None:
    """Close a table whose module is gone: nobody is there to mend a hyper-parameter."""
    try:
        param_groups = optimizer.kept_param_groups()
    except ValueError as error:
        warnings.warn(f"{table.store.path}: {error}; the last ones stay", stacklevel=2)
        param_groups = table.manifest.commit.param_groups
    try:
        table.close(param_groups)
    except (OSError, StoreError):
        table.close()  # nobody can try again, but the store can be opened again
        raise
