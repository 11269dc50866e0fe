"""From autograd's backward pass to one step of every table in it. Knows no disk.

A pass collects what the lookups of one `.backward()` give it, and steps at its end. It lives in the
callback that autograd keeps for the end of that pass: one that fails takes the pass with it, so
there is no flag to reset.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import torch
from torch.autograd import Variable

from .gradients import coalesce, segment_sum, sort_rows
from .interrupts import uninterrupted
from .optimizer import TableOptimizer
from .table import Table

# No WeakValueDictionary: its clean-up is Python code inside autograd, which loses a Ctrl-C there.
_passes: dict[int, weakref.ref[Pass]] = {}
# Tables on several devices stage in a thread of each.
_passes_lock = threading.Lock()


_Function = TypeVar("_Function", bound=Callable[..., Any])


def uncompiled(function: _Function) -> _Function:
    """Keep a function out of torch.compile, which would trace it and never step.

    This loads the compiler, as the first torch optimizer of a process does: the first table of a
    process need not wait for it then.
    """
    return cast(_Function, torch.compiler.disable(function))


def current_pass() -> int:
    """Autograd's number of the backward pass that this thread is in, -1 outside one."""
    return int(torch._C._current_graph_task_id())


def in_compiled_autograd() -> bool:
    """Whether compiled autograd runs the backward pass."""
    # Looked up, not imported: this part of the compiler is loaded only where it is used.
    module = sys.modules.get("torch._dynamo.compiled_autograd")
    return bool(getattr(module, "in_compiled_autograd_region", False))


def refuse_transforms(layer: object) -> None:
    """Raise where a ``torch.func`` transform would run a lookup of ``layer``.

    Raises:
        RuntimeError: one does; torch's own errors for it name neither the layer nor a way.
    """
    if torch._C._are_functorch_transforms_active():
        raise RuntimeError(
            f"{type(layer).__name__} cannot be transformed by torch.func (vmap, grad, jacrev, jvp "
            f"and the like): its rows come from the disk, and step in backward(). Look the rows up "
            f"before, and transform a function of them"
        )


def _at_the_end(callback: Callable[[], None]) -> None:
    """Have autograd call back at the end of the running backward pass, if it succeeds."""
    Variable._execution_engine.queue_callback(callback)


def check_not_gone_back(table: Table, rollbacks: int) -> None:
    """Refuse gradients of rows that a rollback took back.

    Args:
        table: the rows'.
        rollbacks: how often it had gone back when they were looked up.

    Raises:
        RuntimeError: it has gone back since.
    """
    if table.rollbacks != rollbacks:
        raise RuntimeError(
            f"{table.store.path} went back to another commit since this forward, whose gradients "
            f"belong to rows that are gone: look the rows up again"
        )


class Staged:
    """What one table has in a pass.

    Attributes:
        blocks: pairs of ``(n,) int64`` sorted unique rows and their ``(n, D)`` gradients.
        armed: whether the pass is a `.backward()` that reached the table's anchor, and not an
            ``autograd.grad`` or ``backward(inputs=...)`` for other tensors.
    """

    def __init__(self, optimizer: TableOptimizer) -> None:
        self.optimizer = optimizer
        self.rollbacks = optimizer.table.rollbacks
        self.blocks: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.armed = False


class Pass:
    """The tables of one backward pass."""

    def __init__(self) -> None:
        self.staged: dict[int, Staged] = {}

    @uncompiled
    def finish(self) -> None:
        """Step every armed table once: first all that can fail, then all changes in memory."""
        armed = [staged for staged in self.staged.values() if staged.armed and staged.blocks]
        armed.sort(key=lambda staged: id(staged.optimizer.table))
        now = [staged for staged in armed if not staged.optimizer.waits]
        later = [staged for staged in armed if staged.optimizer.waits]
        stepped: list[TableOptimizer] = []

        def step_all() -> None:
            for staged in armed:
                check_not_gone_back(staged.optimizer.table, staged.rollbacks)
            prepared = [
                (staged.optimizer, staged.optimizer.prepare(*coalesce(staged.blocks)))
                for staged in now
            ]
            with uninterrupted():
                for optimizer, step in prepared:
                    if step is not None:
                        optimizer.apply(step)
                        stepped.append(optimizer)
            for staged in later:
                staged.optimizer.stage(*coalesce(staged.blocks))

        with torch.no_grad():
            _alone([staged.optimizer.table for staged in now], step_all)
        for optimizer in stepped:
            optimizer.step()
        scaled = [each.optimizer for each in later if each.optimizer.step_on == "backward"]
        try:
            for optimizer in scaled:
                optimizer.step_scaled()
        finally:
            for optimizer in scaled:
                optimizer.zero_grad()


def _alone(tables: Sequence[Table], call: Callable[[], None]) -> None:
    """Call while nobody else uses these tables: a ``with`` for each, as an ExitStack may forget
    one that Ctrl-C follows at once."""
    if not tables:
        call()
        return
    with tables[0].writing():
        _alone(tables[1:], call)


# Takes unique rows (m,) and for each id the index of its row (n,); gives the ids' weights (n, D).
FetchWeights = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
# Takes a lookup's gradients, one a row (m, D), its unique rows (m,) and their bounds (m + 1,), as
# `sort_rows` gives them.
StageGradient = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]


class Lookup(torch.autograd.Function):
    """Fetches the batch's rows; backward sums the gradients of each and stages them for the step.

    The anchor, the table's zero-size parameter, is what makes autograd come here: freezing it, DDP
    and optimizers that want a parameter behave as with nn.Embedding.

    Where the ids are on an accelerator, each row and each gradient goes there and back once,
    however often its id is in the batch: rows are expanded, and gradients summed, on the device.
    """

    @staticmethod
    def forward(
        ctx: Any,
        anchor: torch.Tensor,
        ids: torch.Tensor,
        device: torch.device,
        fetch_weights: FetchWeights,
        stage_gradient: StageGradient,
    ) -> torch.Tensor:
        unique, inverse, order, bounds = sort_rows(ids)
        if _on_cpu(device):
            weights = fetch_weights(unique, inverse)
        else:
            rows = fetch_weights(unique, torch.arange(len(unique), device="cpu"))
            weights = _to_device(rows, device).index_select(0, inverse.to(device))
            order, bounds = order.to(device), bounds.to(device)
        ctx.stage_gradient = stage_gradient
        ctx.forward_pass = current_pass()
        # Saved, not kept as attributes: a second backward is then torch's own error.
        ctx.save_for_backward(unique, order, bounds)
        return weights

    @staticmethod
    @uncompiled
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, ...]:
        if in_compiled_autograd():
            raise RuntimeError(
                "compiled autograd never calls back at the end of a backward pass, so the table "
                "would not step: switch torch._dynamo.config.compiled_autograd off"
            )
        if torch.is_grad_enabled():
            raise RuntimeError(
                "create_graph=True asks for a second derivative through the table's own gradient, "
                "which is used up in its step. Penalties on other inputs work: take them with "
                "torch.autograd.grad(loss, inputs, create_graph=True) and call backward() once"
            )
        if ctx.forward_pass != -1:
            raise RuntimeError(
                "a lookup in reentrant activation checkpointing would step more than once in one "
                "backward: use torch.utils.checkpoint.checkpoint(..., use_reentrant=False)"
            )
        unique, order, bounds = ctx.saved_tensors
        sums = _to_cpu(segment_sum(grad.contiguous(), order, bounds))
        ctx.stage_gradient(sums, unique, bounds)
        return (None,) * 5


def _on_cpu(device: torch.device) -> bool:
    return device.type == "cpu"


def _to_device(rows: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Send rows off; a CUDA device fetches them itself out of pinned memory."""
    if device.type == "cuda":
        rows = rows.pin_memory()
    return rows.to(device, non_blocking=True)


def _to_cpu(sums: torch.Tensor) -> torch.Tensor:
    """Wait for gradients, which come by way of pinned memory too."""
    if sums.device.type == "cuda":
        return torch.empty_like(sums, device="cpu", pin_memory=True).copy_(sums)
    return sums.to("cpu")


def _running(number: int) -> Pass | None:
    """The pass of that number, if it has staged something and is not over."""
    entry = _passes.get(number)
    return None if entry is None else entry()


def stage(optimizer: TableOptimizer, rows: torch.Tensor, grads: torch.Tensor) -> None:
    """Add a lookup's rows and gradients to the running pass."""
    number = current_pass()
    with _passes_lock:
        running = _running(number)
        if running is None:
            for over in [key for key, entry in _passes.items() if entry() is None]:
                del _passes[over]
            running = Pass()
            _passes[number] = weakref.ref(running)
            _at_the_end(running.finish)
        staged = running.staged.setdefault(id(optimizer.table), Staged(optimizer))
        staged.blocks.append((rows, grads))


def arm(table: Table) -> None:
    """Say that the running pass is a `.backward()` that reaches this table."""
    with _passes_lock:
        running = _running(current_pass())
    if running is not None and id(table) in running.staged:
        running.staged[id(table)].armed = True
