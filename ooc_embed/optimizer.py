"""A table's face as a torch.optim.Optimizer. Knows param groups and steps; knows no store."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from . import rules


class TableOptimizer(torch.optim.Optimizer):
    """The optimizer of a `DiskEmbedding`: live ``param_groups`` for schedulers and for you.

    The table steps in ``loss.backward()``. That step runs through `step`, so schedulers see it, and
    it reads ``param_groups`` at that moment. Calling `step` yourself between two backwards changes
    nothing.

    Args:
        rule: gives the defaults of the param group.
        dim: columns of the table.
        param_groups: what a store kept of an earlier run, or None.
    """

    def __init__(self, rule: rules.Rule, dim: int, param_groups: list[dict[str, Any]] | None):
        self._work: Callable[[dict[str, Any]], None] | None = None
        handle = torch.nn.Parameter(torch.empty(0, dim))
        defaults = {key: getattr(rule, key) for key in rule.__dataclass_fields__ if key != "name"}
        super().__init__([handle], defaults)
        for group, kept in zip(self.param_groups, param_groups or [], strict=False):
            group.update(rules.from_plain(kept))

    def run(self, work: Callable[[dict[str, Any]], None]) -> None:
        """Take one step, which is ``work`` on the param group."""
        self._work = work
        try:
            self.step()
        finally:
            self._work = None

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Do nothing: the table's step is part of backward (see the class)."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._work is not None:
            self._work(self.param_groups[0])
        return loss

    def kept_param_groups(self) -> list[dict[str, Any]]:
        """The hyper-parameters as a store keeps them.

        Raises:
            TypeError: a value that a store cannot keep.
        """
        return [
            {key: rules.plain(value) for key, value in group.items() if key != "params"}
            for group in self.param_groups
        ]
