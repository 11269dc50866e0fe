"""The optimizers' arithmetic on a block of unique rows. Knows no store and no autograd."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar

import numpy as np
import torch
from torch.optim.adam import adam


@dataclass(frozen=True)
class SparseAdam:
    """Adam on the rows of the batch, with the numbers of ``torch.optim.SparseAdam``.

    A row moves only in steps that looked it up. All rows share one step count, and ``eps`` is added
    before the bias correction (``torch.optim.Adam`` adds it after).

    Args:
        lr: learning rate, a float or a one-element tensor.
        betas: decay of the running averages of the gradient and of its square.
        eps: added to the root of the second moment.
        maximize: ascend instead of descend.

    Raises:
        ValueError: a value outside its range.

    Source: Kingma and Ba 2015; ``torch/optim/_functional.py``, ``sparse_adam``.
    """

    name: ClassVar[str] = "SparseAdam"
    lr: float | torch.Tensor = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    maximize: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.lr, torch.Tensor) and self.lr.numel() != 1:
            raise ValueError(f"a tensor lr must have one element, got {self.lr.numel()}")
        if not 0.0 < float(self.lr):
            raise ValueError(f"lr must be greater than 0, got {float(self.lr)}")
        self.check_ranges(self.betas, self.eps)

    @staticmethod
    def check_ranges(betas: tuple[float, float], eps: float) -> None:
        """Raise a ValueError unless these are values of the rule."""
        if not 0.0 < eps:
            raise ValueError(f"eps must be greater than 0, got {eps}")
        beta1, beta2 = betas
        if not (0.0 <= beta1 < 1.0 and 0.0 <= beta2 < 1.0):
            raise ValueError(f"betas must be two numbers in [0, 1), got {betas}")

    def fields(self, dim: int) -> dict[str, int]:
        """The state that a row of ``dim`` weights needs: field name to columns."""
        return {"exp_avg": dim, "exp_avg_sq": dim}

    def update(
        self,
        weight: torch.Tensor,
        grad: torch.Tensor,
        state: Mapping[str, torch.Tensor],
        step: int,
        group: Mapping[str, Any],
    ) -> None:
        """Step ``(n, dim)`` contiguous rows in place.

        Args:
            weight, grad: the rows and the summed gradients.
            state: the fields, each ``(n, dim)``.
            step: number of this step, from 1.
            group: the hyper-parameters in force, a param group of the table's optimizer.
        """
        beta1, beta2 = group["betas"]
        # The dense kernel adds eps after the bias correction: this eps makes it SparseAdam's.
        eps = group["eps"] / math.sqrt(1.0 - beta2**step)
        adam(
            [weight],
            [grad],
            [state["exp_avg"]],
            [state["exp_avg_sq"]],
            [],
            [torch.tensor(step - 1, dtype=torch.float32, device="cpu")],
            fused=True,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=float(group["lr"]),
            weight_decay=0.0,
            eps=eps,
            maximize=group["maximize"],
        )


Rule = SparseAdam
_RULES: dict[str, type[Rule]] = {SparseAdam.name: SparseAdam}


def to_json(rule: Rule) -> dict[str, Any]:
    return {"name": rule.name, **{key: plain(value) for key, value in asdict(rule).items()}}


def from_json(value: Mapping[str, Any]) -> Rule:
    """The rule that `to_json` described.

    Raises:
        KeyError: an unknown rule, or a hyper-parameter it does not have.
    """
    arguments = from_plain(value)
    return _RULES[arguments.pop("name")](**arguments)


def check_group(rule: Rule, group: Mapping[str, Any]) -> None:
    """See that a param group holds values of the rule's kinds and ranges; lr may have become 0.

    Raises:
        KeyError, TypeError, ValueError: it does not.
    """
    for field in fields(rule):
        _check_kind(field.name, group[field.name], getattr(rule, field.name))
    rule.check_ranges(group["betas"], group["eps"])


def _check_kind(key: str, value: Any, example: Any) -> None:
    if isinstance(example, tuple):
        if len(value) != len(example):
            raise ValueError(f"{key}={value!r} has not {len(example)} values")
        for item, of in zip(value, example, strict=True):
            _check_kind(key, item, of)
    elif isinstance(value, bool) != isinstance(example, bool) or not math.isfinite(value):
        raise ValueError(f"{key}={value!r} is no value like {example!r}")


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
