"""Optimizers on the Poincaré ball: rules whose rows are points of it. Knows no store.

The ball and its curvature are a part of the rule, and so of the store: rows of one geometry mean
nothing in another.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from . import poincare
from .initializers import Initializer, Normal, Uniform
from .rule import Rule, check_adam

# Of given rows, how far outside of the ball rounding may have brought them, relative to its radius.
_ROUNDING = {torch.float64: 1e-5}
_ROUNDING_OF_OTHERS = 0.01
# Given rows inside of the ball that are moved farther than this are told of.
_SHIFT = 0.01
_LEAST_CURVATURE, _LARGEST_CURVATURE = 1e-6, 1e6


@dataclass(frozen=True)
class PoincareRule(Rule):
    """A rule on the Poincaré ball. Use one of its subclasses.

    Attributes:
        curvature: c of the ball of curvature -c, above 0; it stays as the table was made with it.
        exact: follow geodesics (the exponential map), not straight lines in the ball; this may
            change.
    """

    fixed: ClassVar[tuple[str, ...]] = ("curvature",)
    restricts: ClassVar[bool] = True
    curvature: float = 1.0
    exact: bool = False

    def check(self, values: Mapping[str, Any]) -> None:
        if not 0.0 < values["curvature"]:
            raise ValueError(
                f"curvature must be greater than 0, got {values['curvature']}: for flat space use "
                f"SparseAdam or SGD"
            )
        if not _LEAST_CURVATURE <= values["curvature"] <= _LARGEST_CURVATURE:
            raise ValueError(
                f"curvature must be from {_LEAST_CURVATURE:g} to {_LARGEST_CURVATURE:g}, got "
                f"{values['curvature']}: scale the distances of the loss, which are of another "
                f"unit then"
            )

    def default_init(self) -> Initializer:
        bound = 1e-3 * min(1.0, 1 / math.sqrt(self.curvature))
        return Uniform(-bound, bound)

    def check_init(self, init: Initializer, dim: int, dtype: torch.dtype) -> None:
        if isinstance(init, Normal):
            square = init.mean**2 + init.std**2
        elif isinstance(init, Uniform):
            square = (init.a**2 + init.a * init.b + init.b**2) / 3
        else:
            return
        usual, largest = math.sqrt(dim * square), poincare.largest_norm(dtype, self.curvature)
        if usual > largest / 2:
            raise ValueError(
                f"{init} gives rows of norm {usual:.3g}, and those of the ball of curvature "
                f"{self.curvature} end at {largest:.3g}: begin near the origin, as "
                f"init={self.default_init()} does"
            )

    def admit(self, weight: torch.Tensor) -> torch.Tensor:
        """Given rows, brought into the ball where rounding has moved them out.

        Raises:
            ValueError: one is far outside, or not finite.
        """
        radius = 1 / math.sqrt(self.curvature)
        norms = torch.linalg.vector_norm(weight, dim=1)
        if not weight.isfinite().all():
            raise ValueError("a row is not finite: points of the ball are")
        rounding = _ROUNDING.get(weight.dtype, _ROUNDING_OF_OTHERS)
        if not (norms <= radius * (1 + rounding)).all():
            raise ValueError(
                f"a row has the norm {float(norms.max()):.6g}, outside of the ball of curvature "
                f"{self.curvature}, whose radius is {radius:.6g}: scale the rows down, or map them "
                f"with ooc_embed.poincare.expmap"
            )
        # A row that was projected before may be behind the margin by a rounding, and stays.
        largest = poincare.largest_norm(weight.dtype, self.curvature)
        outside = norms > largest * (1 + 8 * torch.finfo(weight.dtype).eps)
        return torch.where(outside.unsqueeze(1), self.confine(weight), weight)

    def shifts(self, given: torch.Tensor, admitted: torch.Tensor) -> torch.Tensor:
        """How far `admit` moved points of the ball, where that was more than a rounding."""
        given, admitted = given.double(), admitted.double()
        inside = torch.linalg.vector_norm(given, dim=1) < 1 / math.sqrt(self.curvature)
        moved = inside & (given != admitted).any(dim=1)
        shifts = poincare.distance(given[moved], admitted[moved], self.curvature)
        return shifts[shifts > _SHIFT]

    def confine(self, weight: torch.Tensor) -> torch.Tensor:
        return poincare.project(weight, self.curvature)

    def _move(
        self, weight: torch.Tensor, velocity: torch.Tensor, group: Mapping[str, Any]
    ) -> torch.Tensor:
        """Where points come to that move with a velocity for a unit of time: ``(n, dim)``."""
        if group["exact"]:
            return poincare.expmap(weight, velocity, self.curvature)
        return poincare.project(weight + velocity, self.curvature)


@dataclass(frozen=True)
class RiemannianAdam(PoincareRule):
    """Adam on the Poincaré ball, with the numbers of geoopt's ``SparseRiemannianAdam``.

    The gradient is made Riemannian, the first moment is carried along to the new point by parallel
    transport, and the second moment is one number a row, of the gradient's Riemannian length. A row
    moves only in steps that looked it up. Every step ends inside the ball, so that there is nothing
    to stabilize now and then, as geoopt's option of that name does.

    Args:
        lr: learning rate, a float or a one-element tensor.
        curvature: c of the ball of curvature -c, whose radius is ``1 / sqrt(c)``.
        exact: move along geodesics by the exponential map, as geoopt's ``PoincareBallExact``; else
            straight on and back into the ball, as its ``PoincareBall``.
        betas: decay of the running averages of the gradient and of its squared length.
        eps: added to the root of the second moment.

    Raises:
        ValueError: a value outside its range.

    Source: Bécigneul and Ganea, "Riemannian Adaptive Optimization Methods" (2019);
    ``geoopt/optim/sparse_radam.py``.
    """

    name: ClassVar[str] = "RiemannianAdam"
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8

    def check(self, values: Mapping[str, Any]) -> None:
        super().check(values)
        check_adam(values)

    def fields(self, dim: int) -> dict[str, int]:
        return {"exp_avg": dim, "exp_avg_sq": 1}

    def update(
        self,
        weight: torch.Tensor,
        grad: torch.Tensor,
        state: Mapping[str, torch.Tensor],
        step: int,
        group: Mapping[str, Any],
    ) -> None:
        beta1, beta2 = group["betas"]
        exp_avg, exp_avg_sq = state["exp_avg"], state["exp_avg_sq"]
        factor = poincare.conformal_factor(weight, self.curvature)
        grad = poincare.bounded(grad / factor.square())
        length = factor.square() * grad.square().sum(dim=1, keepdim=True)
        exp_avg.mul_(beta1).add_(grad, alpha=1 - beta1)
        exp_avg_sq.mul_(beta2).add_(length, alpha=1 - beta2)
        denominator = (exp_avg_sq / (1 - beta2**step)).sqrt_().add_(group["eps"])
        direction = exp_avg / (1 - beta1**step) / denominator
        moved = self._move(weight, direction * -float(group["lr"]), group)
        exp_avg.copy_(poincare.parallel_transport(weight, moved, exp_avg, self.curvature))
        weight.copy_(moved)


@dataclass(frozen=True)
class RiemannianSGD(PoincareRule):
    """Riemannian stochastic gradient descent on the Poincaré ball.

    Args:
        lr: learning rate, a float or a one-element tensor.
        curvature: c of the ball of curvature -c, whose radius is ``1 / sqrt(c)``.
        exact: move along geodesics by the exponential map; else straight on and back into the ball,
            the update of Nickel and Kiela.

    Raises:
        ValueError: a value outside its range.

    Source: Bonnabel, "Stochastic Gradient Descent on Riemannian Manifolds" (2013); Nickel and
    Kiela, "Poincaré Embeddings for Learning Hierarchical Representations" (2017), equation 5.
    """

    name: ClassVar[str] = "RiemannianSGD"

    def fields(self, dim: int) -> dict[str, int]:
        return {}

    def update(
        self,
        weight: torch.Tensor,
        grad: torch.Tensor,
        state: Mapping[str, torch.Tensor],
        step: int,
        group: Mapping[str, Any],
    ) -> None:
        factor = poincare.conformal_factor(weight, self.curvature)
        velocity = poincare.bounded(grad / factor.square() * -float(group["lr"]))
        weight.copy_(self._move(weight, velocity, group))
