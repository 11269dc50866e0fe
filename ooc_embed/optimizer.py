"""A table's face as a torch.optim.Optimizer. Knows param groups and steps; knows no store."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import torch

from . import rules


class TableOptimizer(torch.optim.Optimizer):
    """The optimizer of a `DiskEmbedding`: live ``param_groups`` for schedulers and for you.

    The table steps in ``loss.backward()``. That step runs through `step`, so schedulers see it, and
    it reads ``param_groups`` at that moment. Calling `step` yourself changes nothing.

    Args:
        rule: gives the defaults of the param group.
        dim: columns of the table.
        param_groups: what a store kept of an earlier run, or None.
    """

    def __init__(self, rule: rules.Rule, dim: int, param_groups: list[dict[str, Any]] | None):
        handle = torch.nn.Parameter(torch.empty(0, dim, device="cpu"))
        defaults = {field.name: getattr(rule, field.name) for field in fields(rule)}
        super().__init__([handle], defaults)
        for group, kept in zip(self.param_groups, param_groups or [], strict=False):
            group.update(rules.from_plain(kept))

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Let hooks and schedulers know of a step; the table itself has taken it in backward."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
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
