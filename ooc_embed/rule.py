"""What an optimizer's rule is, and how its hyper-parameters are checked. Knows no formula."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from .errors import StoreError
from .initializers import Initializer, Normal
from .warning import warn


@dataclass(frozen=True)
class Rule:
    """What a table does with the gradients of a batch. Use one of its subclasses.

    Attributes:
        name: what a store calls it.
        padded: whether `update` takes rows padded to whole vectors, see `blocks`.
        fixed: hyper-parameters that stay as the table was made with them.
        restricts: whether `admit` refuses or changes any rows.
        trains: whether its tables can be opened to write.
    """

    name: ClassVar[str] = ""
    padded: ClassVar[bool] = False
    fixed: ClassVar[tuple[str, ...]] = ()
    restricts: ClassVar[bool] = False
    trains: ClassVar[bool] = True
    lr: float | torch.Tensor = 1e-3

    def __post_init__(self) -> None:
        for field in fields(self):
            _check_kind(field.name, getattr(self, field.name), field.default)
        if not 0.0 < float(self.lr):
            raise ValueError(f"lr must be greater than 0, got {float(self.lr)}")
        self.check(hyperparameters(self))

    def check(self, values: Mapping[str, Any]) -> None:
        """See that hyper-parameters other than lr are in their ranges.

        Raises:
            ValueError: one is not.
        """

    def fields(self, dim: int) -> dict[str, int]:
        """The state that a row of ``dim`` weights needs: field name to columns."""
        raise NotImplementedError

    def initial(self) -> dict[str, float]:
        """The fields that do not begin as zeros, and as what."""
        return {}

    def default_init(self) -> Initializer:
        """What rows begin as, if nothing is said."""
        return Normal()

    def check_init(self, init: Initializer, dim: int, dtype: torch.dtype) -> None:
        """See that rows of ``dim`` weights may begin so.

        Raises:
            ValueError: they may not.
        """

    def admit(self, weight: torch.Tensor) -> torch.Tensor:
        """What becomes of given rows, ``(n, dim)``, before they are the table's.

        Raises:
            ValueError: they cannot be.
        """
        return weight

    def shifts(self, given: torch.Tensor, admitted: torch.Tensor) -> torch.Tensor:
        """How far `admit` moved rows, ``(k,)``, of those for whom that is to be told."""
        return given.new_empty(0)

    def confine(self, weight: torch.Tensor) -> torch.Tensor:
        """What becomes of initial rows, ``(n, dim)``."""
        return weight

    def update(
        self,
        weight: torch.Tensor,
        grad: torch.Tensor,
        state: Mapping[str, torch.Tensor],
        step: int,
        group: Mapping[str, Any],
    ) -> None:
        """Step ``(n, dim)`` rows in place.

        Args:
            weight, grad: the rows and the summed gradients; the gradients stay as they are.
            state: the fields, each ``(n, columns)``.
            step: number of this step, from 1.
            group: the hyper-parameters in force, a param group of the table's optimizer.
        """
        raise NotImplementedError


def tell_shifts(shifts: torch.Tensor) -> None:
    """Warn of given rows that had to be moved, by these distances."""
    if len(shifts):
        warn(
            f"{len(shifts):,} given rows lie where a table of this dtype keeps none: they were "
            f"moved, by a distance of up to {float(shifts.max()):.3g}. dtype=torch.float64 keeps "
            f"most"
        )


def hyperparameters(rule: Rule) -> dict[str, Any]:
    """A rule's own values, as a param group holds them."""
    return {field.name: getattr(rule, field.name) for field in fields(rule)}


def check_is_rule(given: object) -> None:
    """Raise a TypeError where something else is given as a rule."""
    if not isinstance(given, Rule):
        # An optimizer of torch shows all of its groups.
        what = type(given) if isinstance(given, torch.optim.Optimizer) else given
        raise TypeError(
            f"optimizer must be a rule such as ooc_embed.SparseAdam(lr=1e-3), got {what!r}"
        )


def check_trains(rule: Rule, path: Path) -> None:
    """See that a table can be opened to write.

    Raises:
        StoreError: its rule is none to train with.
    """
    if not rule.trains:
        raise StoreError(
            f"{path} is a frozen store, of weights without an optimizer: open it with mode='r', or "
            f"make a table to train of its weights, DiskEmbedding.from_pretrained(reader.weight, "
            f"path=...)"
        )


def check_same(kept: Rule, given: Rule) -> None:
    """See that a table of one rule can go on with another: the same with other hyper-parameters.

    Raises:
        TypeError: it is no rule.
        ValueError: it is another one, or differs in what is fixed.
    """
    check_is_rule(given)
    if type(kept) is not type(given) or any(
        getattr(kept, name) != getattr(given, name) for name in kept.fixed
    ):
        raise ValueError(f"the table was made with {kept}, and cannot go on with {given}")


def check_group(rule: Rule, group: Mapping[str, Any]) -> None:
    """See that a param group holds values of the rule's kinds and ranges; lr may have become 0.

    Raises:
        KeyError, TypeError, ValueError: it does not.
    """
    for field in fields(rule):
        value, first = group[field.name], getattr(rule, field.name)
        _check_kind(field.name, value, first)
        if field.name in rule.fixed and value != first:
            raise ValueError(
                f"{field.name} was {first!r} when the table was created, got {value!r}"
            )
    if float(group["lr"]) < 0:
        raise ValueError(f"lr must be 0 or greater, got {float(group['lr'])}")
    rule.check(group)


def _check_kind(key: str, value: Any, example: Any) -> None:
    if isinstance(example, tuple):
        if not isinstance(value, (tuple, list)) or len(value) != len(example):
            raise ValueError(f"{key} must be {len(example)} numbers, got {value!r}")
        for item, of in zip(value, example, strict=True):
            _check_kind(key, item, of)
    elif isinstance(example, (str, bool)):
        if not isinstance(value, type(example)):
            raise TypeError(f"{key} must be like {example!r}, got {value!r}")
    elif isinstance(value, torch.Tensor) and value.numel() != 1:
        raise ValueError(f"a tensor {key} must have one element, got {value.numel()}")
    elif isinstance(value, bool) or not isinstance(value, (int, float, np.generic, torch.Tensor)):
        raise TypeError(f"{key} must be a number, got {value!r}")
    elif not math.isfinite(value):
        raise ValueError(f"{key} must be finite, got {value!r}")


def plain(value: Any) -> Any:
    """A hyper-parameter as JSON holds it.

    Raises:
        TypeError, ValueError: a value that JSON cannot hold.
    """
    if isinstance(value, (torch.Tensor, np.generic)):
        return plain(value.item())
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"a store cannot keep the hyper-parameter {value}")
    if isinstance(value, (tuple, list)):
        return [plain(item) for item in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(f"a store cannot keep a hyper-parameter of type {type(value).__name__}")


def from_plain(value: Mapping[str, Any]) -> dict[str, Any]:
    """Hyper-parameters that came from JSON, with tuples where optimizers have them."""
    return {k: tuple(v) if isinstance(v, list) else v for k, v in value.items()}


def check_adam(values: Mapping[str, Any]) -> None:
    """Raise a ValueError where ``eps`` or ``betas`` are outside of their ranges."""
    if not 0.0 < values["eps"]:
        raise ValueError(f"eps must be greater than 0, got {values['eps']}")
    beta1, beta2 = values["betas"]
    if not (0.0 <= beta1 < 1.0 and 0.0 <= beta2 < 1.0):
        raise ValueError(f"betas must be two numbers in [0, 1), got {values['betas']}")


def check_not_negative(values: Mapping[str, Any], name: str) -> None:
    """Raise a ValueError where a hyper-parameter is below 0."""
    if not 0.0 <= values[name]:
        raise ValueError(f"{name} must be 0 or greater, got {values[name]}")


def ascending(grad: torch.Tensor, group: Mapping[str, Any]) -> torch.Tensor:
    """The gradient to descend by."""
    return -grad if group["maximize"] else grad
