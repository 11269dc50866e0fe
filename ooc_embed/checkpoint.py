"""What outlives a module: a checkpoint's word for its table, a last commit. Knows no rows."""

from __future__ import annotations

import warnings
from typing import Any

from .errors import StoreError
from .optimizer import TableOptimizer
from .table import Table


def describe(table: Table) -> dict[str, Any]:
    """Which table a checkpoint belongs to, at which commit and step."""
    commit = table.manifest.commit
    return {
        "table_id": table.manifest.table_id,
        "commit": commit.number,
        "step": commit.step,
    }


def check(table: Table, state: Any) -> None:
    """Check that the table is where `describe` found it.

    Raises:
        StoreError: it is another table, or another step of it.
    """
    manifest, path = table.manifest, table.store.path
    if state["table_id"] != manifest.table_id:
        raise StoreError(
            f"the checkpoint belongs to table {state['table_id']}, {path} is table "
            f"{manifest.table_id}"
        )
    if state["step"] != table.step_count:
        raise StoreError(
            f"the checkpoint was saved at step {state['step']} of the table, {path} is at "
            f"step {table.step_count}. Load the checkpoint of that step; to go on with the table "
            "as it is, delete the checkpoint's '_extra_state' key and load with strict=False"
        )


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
