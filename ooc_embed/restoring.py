"""Returns the tables of a model to a checkpoint. Knows modules and state dicts; knows no store."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from .module import TableModule


def rollback(model: nn.Module, state_dict: Mapping[str, Any]) -> None:
    """Return every table of a model to the commit that a checkpoint names.

    ``model.load_state_dict(state_dict)`` brings the rest back. All tables are looked at before the
    first one moves.

    Args:
        model: has tables open to write.
        state_dict: what ``model.state_dict()`` was.

    Raises:
        TypeError: the checkpoint is no mapping.
        KeyError: it does not have one of the tables.
        StoreError: a table does not keep that commit, is another one, or cannot be written to.
        OSError: the disk is full, or failed; tables before that one have moved.
    """
    if not isinstance(state_dict, Mapping):
        raise TypeError(f"a checkpoint is what model.state_dict() was, got {state_dict!r:.200}")
    tables = {
        f"{name}._extra_state" if name else "_extra_state": module
        for name, module in model.named_modules()
        if isinstance(module, TableModule)
    }
    if tables and not tables.keys() & state_dict.keys():
        raise KeyError(
            f"the checkpoint has no table of the model: {', '.join(tables)} are not among its keys "
            f"{', '.join(map(str, state_dict)):.200}. Give what model.state_dict() was"
        )
    targets = []
    for key, table in tables.items():
        if key not in state_dict:
            raise KeyError(
                f"the checkpoint has no {key!r}, but the model has a table there: roll the others "
                f"back one by one, with table.rollback(table.commit_of(state_dict[key]))"
            )
        targets.append((table, table.commit_of(state_dict[key])))
    for table, number in targets:
        table.rollback(number)
