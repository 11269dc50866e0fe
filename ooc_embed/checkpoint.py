"""What outlives a module: a checkpoint's word for its table, a last commit. Knows no rows."""

from __future__ import annotations

import json
from typing import Any

import torch

from .errors import StoreError
from .history import History
from .optimizer import TableOptimizer
from .parsing import integer, json_object, optional, text
from .table import Table
from .warning import warn

_NONE_OF_ITS_PAST = (
    "a rollback took it back, or a copy of the store made it, or a salvage lost rows of it. Load a "
    "checkpoint of another commit"
)


def describe(table: Table, number: int) -> torch.Tensor:
    """Which table a checkpoint belongs to, at which of its commits and at which step.

    Returns:
        ``(n,) uint8``, the bytes of a JSON text: what keeps tensors alone, as safetensors and with
        it ``save_pretrained`` of transformers, keeps that too.
    """
    history = table.manifest.history
    words = {
        "table_id": table.manifest.table_id,
        "commit": number,
        "branch": history.branch_of(number),
        "step": history.find(number, table.store.path).step,
    }
    return torch.tensor(list(json.dumps(words).encode()), dtype=torch.uint8, device="cpu")


def check(table: Table, state: Any) -> None:
    """Check that the table is where `describe` found it.

    Raises:
        StoreError: it is another table, or another step of it.
    """
    number, branch, step = _read(table, state)
    history, path = table.manifest.history, table.store.path
    in_past = _is_past(history, number, branch)
    if in_past and step == table.step_count:
        return
    if number > history.newest.number and table.read_only:
        remedy = "This reader is at an earlier commit: open the table again"
    elif not in_past:
        remedy = f"That commit is none of its past: {_NONE_OF_ITS_PAST}"
    elif number not in history:
        remedy = "The store does not keep that commit any more: load a checkpoint of its own step"
    elif table.read_only:
        remedy = f"DiskEmbedding.open(path, 'r', commit={number}) reads it"
    else:
        remedy = f"emb.rollback({number}) returns to it"
    raise StoreError(
        f"the checkpoint was saved at commit {number}, step {step} of the table; {path} is at "
        f"commit {history.newest.number}, step {table.step_count}. {remedy}. To go on with the "
        f"table as it is, load without this key and with strict=False"
    )


def _is_past(history: History, number: int, branch: str | None) -> bool:
    return number <= history.newest.number and branch == history.branch_of(number)


def find_commit(table: Table, state: Any) -> int:
    """The number of the commit that `describe` found.

    Raises:
        StoreError: it was another table, or that commit is not kept.
    """
    number, branch, _ = _read(table, state)
    history, path = table.manifest.history, table.store.path
    if not _is_past(history, number, branch):
        raise StoreError(
            f"the checkpoint names a commit {number} that is none of {path}: {_NONE_OF_ITS_PAST}"
        )
    return history.find(number, path).number


def _read(table: Table, state: Any) -> tuple[int, str | None, int]:
    """The commit, its branch and the step that `describe` found.

    Raises:
        StoreError: it was another table, or no table.
    """
    try:
        words = json_object(bytes(_byte_list(state)))
        table_id, branch = text(words["table_id"]), optional(text, words.get("branch"))
        number, step = integer(words["commit"]), integer(words["step"])
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise StoreError(
            f"the checkpoint holds {state!r:.200} where state_dict() of a table on disk would have "
            f"put its identity: load without this key and with strict=False"
        ) from error
    if table_id != table.manifest.table_id:
        raise StoreError(
            f"the checkpoint belongs to table {table_id}, {table.store.path} is table "
            f"{table.manifest.table_id}"
        )
    return number, branch, step


def _byte_list(state: Any) -> list[int]:
    values = state.tolist()
    if not isinstance(values, list):  # bytes(n) would be n zeros
        raise TypeError("one number is no text")
    return values


def close_dropped(table: Table, optimizer: TableOptimizer) -> None:
    """Close a table whose module is gone: nobody is there to mend a hyper-parameter."""
    try:
        param_groups = optimizer.kept_param_groups()
    except ValueError as error:
        problem = f"{table.store.path}: {error}; the last ones stay"
        table.close_for_good(table.manifest.commit.param_groups)
        warn(problem)
    else:
        table.close_for_good(param_groups)
