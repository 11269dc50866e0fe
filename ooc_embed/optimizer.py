"""A table's face as a torch.optim.Optimizer. Knows param groups and steps; knows no store."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from . import gradients
from .gradients import GRADIENT_OPTIONS
from .interrupts import uninterrupted
from .rule import Rule, check_group, from_plain, hyperparameters, plain
from .table import Prepared, Table


def first_group(rule: Rule, options: Mapping[str, Any]) -> dict[str, Any]:
    """The param group that a table begins with, as a store keeps it.

    Args:
        rule: gives the hyper-parameters.
        options: some of `GRADIENT_OPTIONS`, and what else differs.

    Raises:
        TypeError, ValueError: an option's value.
    """
    group = {**hyperparameters(rule), **GRADIENT_OPTIONS, **options}
    gradients.check_options(group)
    return {name: plain(value) for name, value in group.items()}


class TableOptimizer(torch.optim.Optimizer):
    """The optimizer of a `DiskEmbedding`: live ``param_groups`` for schedulers and for you.

    With ``step_on="backward"`` the table steps in ``loss.backward()``. That step runs through
    `step`, so schedulers see it, and it reads ``param_groups`` at that moment. Calling `step`
    yourself changes nothing.

    With ``step_on="optimizer"`` the gradients of every backward are summed, one row for each row
    that was looked up, until `step` uses them up or `zero_grad` drops them. Meanwhile they are the
    ``grad`` of this optimizer's one parameter, ``(n, dim)``, to be unscaled and clipped as any.

    Args:
        table: what to step.
        param_groups: what its store kept.
        step_on: ``"backward"`` or ``"optimizer"``.

    Attributes:
        grad_scaler: a ``torch.amp.GradScaler`` through which steps in backward go, or None.
    """

    def __init__(self, table: Table, param_groups: list[dict[str, Any]], step_on: str) -> None:
        self._table = table
        self._rows: torch.Tensor | None = None
        handle = torch.empty(0, table.dim, dtype=table.dtype, device="cpu")
        self._handle = torch.nn.Parameter(handle)
        self._step_on = step_on
        self.grad_scaler: torch.amp.GradScaler | None = None
        defaults = {**hyperparameters(table.rule), **GRADIENT_OPTIONS}
        super().__init__([self._handle], defaults)
        for group, kept in zip(self.param_groups, param_groups, strict=False):
            group.update(from_plain(kept))
        self._drop()

    @property
    def table(self) -> Table:
        """What is stepped."""
        return self._table

    @property
    def step_on(self) -> str:
        """What steps the table: ``"backward"`` or ``"optimizer"``."""
        return self._step_on

    @property
    def waiting(self) -> torch.Tensor | None:
        """The parameter whose ``grad`` waits for `step`, if something does."""
        return None if self._rows is None else self._handle

    @property
    def waits(self) -> bool:
        """Whether gradients are staged here after a backward, not stepped in it."""
        return self.step_on == "optimizer" or self.grad_scaler is not None

    def prepare(self, rows: torch.Tensor, grads: torch.Tensor) -> Prepared | None:
        """Do all of a step that can fail, inside ``table.writing()``; None if it is to be skipped.

        Args:
            rows: ``(n,) int64``, sorted and unique.
            grads: ``(n, dim)``.
        """
        group = self.param_groups[0]
        self._check(group)
        if not gradients.are_finite(rows, grads, group["nonfinite"]):
            return None
        return self._table.prepare(rows, gradients.clip(grads, group), group)

    def apply(self, prepared: Prepared) -> None:
        """Take a prepared step, inside `uninterrupted`."""
        self._table.apply(prepared, self.param_groups[0])

    def stage(self, rows: torch.Tensor, grads: torch.Tensor) -> None:
        """Add the gradients of a backward, as in `prepare`, to those that wait."""
        if self._rows is not None and self._handle.grad is not None:
            rows, grads = gradients.coalesce([(self._rows, self._handle.grad), (rows, grads)])
        self._rows = rows
        self._set_grad(grads)

    def step_scaled(self) -> None:
        """Step on what was just staged, by the scaler: unscaled, and skipped where it overflows."""
        if self.grad_scaler is None:
            return
        try:
            self.grad_scaler.step(self)
        except RuntimeError as error:
            if "since the last update" not in str(error):
                raise
            raise RuntimeError(
                "with emb.grad_scaler each backward is a step, and scaler.update() must follow it; "
                "several backwards to a step need step_on='optimizer'"
            ) from error

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step on the gradients that wait. Hooks and schedulers learn of it in any case.

        Args:
            closure: computes the loss anew, and is called first.

        Returns:
            What the closure returned.

        Raises:
            OSError: the disk is full, or failed; the gradients still wait.
            FloatingPointError: a gradient is not finite.
            RuntimeError: a scaler calls this for a table that has stepped in backward already.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if hasattr(self, "found_inf"):
            # The scaler forgets them only after a step that succeeds.
            for name in ("found_inf", "grad_scale"):
                delattr(self, name)
            raise RuntimeError(
                "the table has stepped in backward, on scaled gradients, which its second moments "
                "keep: go back to its last commit, then give it the scaler by emb.grad_scaler = "
                "scaler and leave this call out, or use step_on='optimizer'"
            )
        rows, grads = self._rows, self._handle.grad
        if rows is not None and grads is not None:
            with torch.no_grad(), self._table.writing():
                prepared = self.prepare(rows, grads)
                with uninterrupted():
                    if prepared is not None:
                        self.apply(prepared)
                    self._drop()
        return loss

    @property
    def _step_supports_amp_scaling(self) -> bool:
        # Then a scaler says that it is one, which it must not be.
        return not self.waits

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse: a table has one group.

        Raises:
            ValueError: it has one already.
        """
        if self.param_groups:
            raise ValueError("a table is one parameter: others need an optimizer of their own")
        super().add_param_group(param_group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the hyper-parameters of another optimizer. The moments stay the table's.

        Args:
            state_dict: of a table's optimizer, or of one of torch's with a single group; what that
                does not have stays as it is.

        Raises:
            ValueError: another number of groups, or values that no step of this rule could use.
        """
        (own,) = self.param_groups
        if len(state_dict["param_groups"]) != 1:
            raise ValueError(f"one group is expected, got {len(state_dict['param_groups'])}")
        (given,) = state_dict["param_groups"]
        group = {**own, **given, "params": own["params"]}
        self._check(group)
        own.update(group)

    def restore(self, param_groups: list[dict[str, Any]]) -> None:
        """Take the hyper-parameters of a commit, and drop the gradients that wait."""
        self._drop()
        self.param_groups[0].update(from_plain(param_groups[0]))

    def __reduce__(self) -> Any:
        raise TypeError("the optimizer of a table belongs to it: save its state_dict()")

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients that wait."""
        self._drop()

    def _drop(self) -> None:
        self._rows = None
        self._set_grad(self._handle.new_zeros(0, self._table.dim))

    def _set_grad(self, grad: torch.Tensor) -> None:
        # A gradient must have its parameter's shape. This one has no memory of its own.
        self._handle.grad = None
        self._handle.data = grad.new_zeros(()).expand(grad.shape)
        self._handle.grad = grad

    def kept_param_groups(self) -> list[dict[str, Any]]:
        """The hyper-parameters as a store keeps them.

        Raises:
            ValueError: a value that no step could use, or a store cannot keep.
        """
        (group,) = self.param_groups
        try:
            self._check(group)
            return [{key: plain(value) for key, value in group.items() if key != "params"}]
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise ValueError(
                f"a hyper-parameter in emb.optimizer.param_groups[0] cannot be kept: {error}"
            ) from error

    def _check(self, group: Mapping[str, Any]) -> None:
        check_group(self._table.rule, group)
        gradients.check_options(group)
