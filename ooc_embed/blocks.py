"""Runs a rule over records, compiled or by blocks. Knows fields; knows no disk and no cache.

A block's fields fit into the processor's cache, and the buffers are reused. Rows are padded to 64
bytes: vector code rounds the elements behind the last full vector differently, and no value may
depend on the block, the cache or the batch that a row came in.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from .rule import Rule

if TYPE_CHECKING:
    from .fused import FusedStep

BLOCK_ROWS = 1024
_PADDING_BYTES = 64


class BlockUpdate:
    """Steps records in place.

    Args:
        rule: the arithmetic.
        spans: field name to its columns in a record; ``weight`` and ``version`` among them.
        dtype: element type.
    """

    def __init__(self, rule: Rule, spans: Mapping[str, slice], dtype: torch.dtype) -> None:
        self._rule = rule
        self._fused = _fused_step(rule)
        self._spans = {name: span for name, span in spans.items() if name != "version"}
        self._version = spans["version"].start
        widths = {name: span.stop - span.start for name, span in self._spans.items()}
        self._widths = {**widths, "grad": widths["weight"]}
        self._dtype = dtype

    @property
    def kernel(self) -> str:
        """What steps the records: ``"numba"``, ``"numba, one thread"`` or ``"torch"``."""
        if self._fused is None:
            return "torch"
        from .fused import shares_threads

        return "numba" if shares_threads() else "numba, one thread"

    @cached_property
    def _whole(self) -> dict[str, torch.Tensor]:
        """A buffer for each field of a block, its rows padded."""
        step = _PADDING_BYTES // self._dtype.itemsize
        return {
            name: torch.zeros(BLOCK_ROWS, -(-width // step) * step, dtype=self._dtype, device="cpu")
            for name, width in self._widths.items()
        }

    @cached_property
    def _parts(self) -> dict[str, torch.Tensor]:
        """The buffers without their padding."""
        return {name: buffer[:, : self._widths[name]] for name, buffer in self._whole.items()}

    def step(
        self,
        records: torch.Tensor,
        slots: torch.Tensor,
        grads: torch.Tensor,
        step: int,
        group: Mapping[str, Any],
    ) -> int:
        """Step the records at ``slots`` and count their versions up.

        Args:
            records: ``(S, W)``.
            slots: ``(n,) int64``, unique.
            grads: ``(n, D)``.
            step: number of this step, from 1.
            group: hyper-parameters.

        Returns:
            How many of the records had never been written.
        """
        if self._fused is not None:
            return self._fused(records, slots, grads, step, group)
        fresh = 0
        for start in range(0, len(slots), BLOCK_ROWS):
            part = slots[start : start + BLOCK_ROWS]
            self._step_block(records, part, grads[start : start + len(part)], step, group)
            fresh += count_versions(records, part, self._version)
        return fresh

    def _step_block(
        self,
        records: torch.Tensor,
        slots: torch.Tensor,
        grads: torch.Tensor,
        step: int,
        group: Mapping[str, Any],
    ) -> None:
        count = len(slots)
        for name, span in self._spans.items():
            torch.index_select(records[:, span], 0, slots, out=self._parts[name][:count])
        buffers = self._whole if self._rule.padded else self._parts
        fields = {name: buffer[:count] for name, buffer in buffers.items()}
        weight, grad = fields.pop("weight"), fields.pop("grad")
        if grad.shape == grads.shape:  # nothing to pad
            grad = grads
        else:
            self._parts["grad"][:count] = grads
        self._rule.update(weight, grad, fields, step, group)
        for name, span in self._spans.items():
            records[:, span].index_copy_(0, slots, self._parts[name][:count])


def _fused_step(rule: Rule) -> FusedStep | None:
    """The compiled step of a rule, where numba is installed and the rule has one."""
    try:
        from .fused import fused_step
    except ImportError:
        return None
    return fused_step(rule)


def count_versions(records: torch.Tensor, slots: torch.Tensor, column: int) -> int:
    """Count the versions of these records up; return how many of them were 0.

    float32 stays at 2**24, where one more is no longer a number of its own.
    """
    versions = records[:, column].index_select(0, slots)
    records[:, column].index_copy_(0, slots, versions + 1)
    return len(slots) - int(versions.count_nonzero())
