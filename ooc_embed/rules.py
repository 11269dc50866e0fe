"""The optimizers' arithmetic on a block of unique rows. Knows no store and no autograd."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.optim.adam import adam

from .riemannian import RiemannianAdam, RiemannianSGD
from .rule import (
    Rule,
    ascending,
    check_adam,
    check_not_negative,
    from_plain,
    hyperparameters,
    plain,
)


@dataclass(frozen=True)
class SparseAdam(Rule):
    """Adam on the rows of the batch, with the numbers of ``torch.optim.SparseAdam``.

    A row moves only in steps that looked it up. All rows share one step count, and ``eps`` is added
    before the bias correction (``torch.optim.Adam`` adds it after).

    Args:
        lr: learning rate, a float or a one-element tensor.
        betas: decay of the running averages of the gradient and of its square.
        eps: added to the root of the second moment.
        maximize: ascend instead of descend.
        row_weight_decay: each step shrinks the rows of its batch, and no others, by ``lr`` times
            this, before all else, as ``torch.optim.AdamW`` does with every row.
        bias_correction: ``"table"``, by the table's steps, as torch; or ``"row"``, by the steps of
            each row, which a field ``step`` counts: a rare row's first step is as large as any.

    Raises:
        ValueError: a value outside its range.

    Source: Kingma and Ba 2015; ``torch/optim/_functional.py``, ``sparse_adam``.
    """

    name: ClassVar[str] = "SparseAdam"
    padded: ClassVar[bool] = True
    fixed: ClassVar[tuple[str, ...]] = ("bias_correction",)
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    maximize: bool = False
    row_weight_decay: float = 0.0
    bias_correction: str = "table"

    def check(self, values: Mapping[str, Any]) -> None:
        check_adam(values)
        check_not_negative(values, "row_weight_decay")
        if values["bias_correction"] not in ("table", "row"):
            raise ValueError(
                f"bias_correction must be 'table' or 'row', got {values['bias_correction']!r}"
            )

    def fields(self, dim: int) -> dict[str, int]:
        own = {"step": 1} if self.bias_correction == "row" else {}
        return {"exp_avg": dim, "exp_avg_sq": dim, **own}

    def update(
        self,
        weight: torch.Tensor,
        grad: torch.Tensor,
        state: Mapping[str, torch.Tensor],
        step: int,
        group: Mapping[str, Any],
    ) -> None:
        lr = float(group["lr"])
        if group["row_weight_decay"]:
            weight.mul_(1 - lr * group["row_weight_decay"])
        if self.bias_correction == "row":
            self._update_by_row(weight, grad, state, group)
            return
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
            lr=lr,
            weight_decay=0.0,
            eps=eps,
            maximize=group["maximize"],
        )

    @staticmethod
    def _update_by_row(
        weight: torch.Tensor,
        grad: torch.Tensor,
        state: Mapping[str, torch.Tensor],
        group: Mapping[str, Any],
    ) -> None:
        beta1, beta2 = group["betas"]
        steps = state["step"][:, :1]
        steps += 1
        number = steps.double()
        size = float(group["lr"]) * (1 - beta2**number).sqrt() / (1 - beta1**number)
        grad = ascending(grad, group)
        first, second = state["exp_avg"], state["exp_avg_sq"]
        first.add_(grad - first, alpha=1 - beta1)
        second.add_(grad * grad - second, alpha=1 - beta2)
        weight.sub_(size.to(weight.dtype) * (first / (second.sqrt() + group["eps"])))


@dataclass(frozen=True)
class SGD(Rule):
    """Stochastic gradient descent on the rows of the batch, as ``torch.optim.SGD``.

    With momentum a row's buffer decays and moves it only in steps that looked it up.

    Args:
        lr: learning rate, a float or a one-element tensor.
        momentum: decay of the running sum of gradients; 0 keeps no such field.
        nesterov: look ahead along the momentum.
        maximize: ascend instead of descend.

    Raises:
        ValueError: a value outside its range.

    Source: ``torch/optim/sgd.py``.
    """

    name: ClassVar[str] = "SGD"
    momentum: float = 0.0
    nesterov: bool = False
    maximize: bool = False

    def check(self, values: Mapping[str, Any]) -> None:
        check_not_negative(values, "momentum")
        if values["nesterov"] and not values["momentum"]:
            raise ValueError("nesterov needs a momentum greater than 0")
        if values["momentum"] and not self.momentum:
            raise ValueError(
                f"the table was created without momentum and has no field for {values['momentum']}"
            )

    def fields(self, dim: int) -> dict[str, int]:
        return {"momentum_buffer": dim} if self.momentum else {}

    def update(
        self,
        weight: torch.Tensor,
        grad: torch.Tensor,
        state: Mapping[str, torch.Tensor],
        step: int,
        group: Mapping[str, Any],
    ) -> None:
        grad = ascending(grad, group)
        if self.momentum:
            momentum = state["momentum_buffer"].mul_(group["momentum"]).add_(grad)
            grad = grad.add(momentum, alpha=group["momentum"]) if group["nesterov"] else momentum
        weight.add_(grad, alpha=-float(group["lr"]))


@dataclass(frozen=True)
class Adagrad(Rule):
    """Adagrad on the rows of the batch, with the numbers of ``torch.optim.Adagrad``.

    Args:
        lr: learning rate, a float or a one-element tensor.
        lr_decay: step t uses ``lr / (1 + (t - 1) * lr_decay)``.
        initial_accumulator_value: what the sums of squares begin with.
        eps: added to the root of the sum.
        maximize: ascend instead of descend.

    Raises:
        ValueError: a value outside its range.

    Source: Duchi, Hazan and Singer 2011; ``torch/optim/adagrad.py``, on sparse gradients.
    """

    name: ClassVar[str] = "Adagrad"
    lr: float | torch.Tensor = 1e-2
    lr_decay: float = 0.0
    initial_accumulator_value: float = 0.0
    eps: float = 1e-10
    maximize: bool = False

    def check(self, values: Mapping[str, Any]) -> None:
        for name in ("lr_decay", "initial_accumulator_value", "eps"):
            check_not_negative(values, name)
        if values["initial_accumulator_value"] != self.initial_accumulator_value:
            raise ValueError(
                f"initial_accumulator_value was {self.initial_accumulator_value} at the table's "
                f"creation, got {values['initial_accumulator_value']}"
            )

    def fields(self, dim: int) -> dict[str, int]:
        return {"sum": dim}

    def initial(self) -> dict[str, float]:
        return {"sum": self.initial_accumulator_value}

    def update(
        self,
        weight: torch.Tensor,
        grad: torch.Tensor,
        state: Mapping[str, torch.Tensor],
        step: int,
        group: Mapping[str, Any],
    ) -> None:
        grad = ascending(grad, group)
        total = state["sum"].add_(grad.square())
        lr = float(group["lr"]) / (1 + (step - 1) * group["lr_decay"])
        weight.sub_(grad / (total.sqrt() + group["eps"]), alpha=lr)


@dataclass(frozen=True)
class RowwiseAdagrad(Rule):
    """Adagrad with one sum a row: of the mean square of its gradients' elements.

    Args:
        lr: learning rate, a float or a one-element tensor.
        eps: added to the root of the sum.
        maximize: ascend instead of descend.

    Raises:
        ValueError: a value outside its range.

    Source: ``EXACT_ROWWISE_ADAGRAD`` of FBGEMM; ``torchrec.optim.RowWiseAdagrad``.
    """

    name: ClassVar[str] = "RowwiseAdagrad"
    lr: float | torch.Tensor = 1e-2
    eps: float = 1e-8
    maximize: bool = False

    def check(self, values: Mapping[str, Any]) -> None:
        check_not_negative(values, "eps")

    def fields(self, dim: int) -> dict[str, int]:
        return {"sum": 1}

    def update(
        self,
        weight: torch.Tensor,
        grad: torch.Tensor,
        state: Mapping[str, torch.Tensor],
        step: int,
        group: Mapping[str, Any],
    ) -> None:
        grad = ascending(grad, group)
        total = state["sum"].add_(grad.square().mean(dim=1, keepdim=True))
        weight.sub_(grad / (total.sqrt() + group["eps"]), alpha=float(group["lr"]))


@dataclass(frozen=True)
class Frozen(Rule):
    """No optimizer: the rule of a store of weights that are only read."""

    name: ClassVar[str] = "Frozen"
    trains: ClassVar[bool] = False

    def fields(self, dim: int) -> dict[str, int]:
        return {}


RULES: dict[str, type[Rule]] = {
    rule.name: rule
    for rule in (SparseAdam, SGD, Adagrad, RowwiseAdagrad, RiemannianAdam, RiemannianSGD, Frozen)
}


def to_json(rule: Rule) -> dict[str, Any]:
    return {"name": rule.name, **{k: plain(v) for k, v in hyperparameters(rule).items()}}


def from_json(value: Mapping[str, Any]) -> Rule:
    """The rule that `to_json` described.

    Raises:
        KeyError: an unknown rule, or a hyper-parameter it does not have.
    """
    arguments = from_plain(value)
    return RULES[arguments.pop("name")](**arguments)
