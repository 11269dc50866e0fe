"""The optimizer step of a record in one pass over it, compiled by numba (the extra `fast`).

Knows a record's columns; knows no cache and no disk. The torch operations of `blocks` bring each
field of a record into a buffer and back; this reads and writes the record once, in place.
"""

from __future__ import annotations

import ctypes
import math
import os
from collections.abc import Callable, Mapping
from typing import Any

import numba
import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from .rule import Rule
from .rules import SparseAdam

# Takes records (S, W), slots (n,), gradients (n, D), the step's number and hyper-parameters; steps
# the records at the slots, counts their versions up, returns how many of these were 0.
FusedStep = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, int, Mapping[str, Any]], int]

# Rows that a thread claims at once: few enough for threads that were held up to share the rest.
_CLAIM = 64
# What the threads of a step share: numbers and addresses.
_JOB = ("records", "slots", "grads", "scalars", "count", "num_slots", "dim", "next", "fresh")
_NEXT, _FRESH = 8 * _JOB.index("next"), 8 * _JOB.index("fresh")


def shares_threads() -> bool:
    """Whether steps run in all of torch's threads; else in the calling one alone."""
    return _torchs_openmp is not None


def fused_step(rule: Rule) -> FusedStep | None:
    """The compiled step of a rule whose records are ``[weight | fields | version]``, if any."""
    if isinstance(rule, SparseAdam) and rule.bias_correction == "table":
        return _sparse_adam
    return None


def _sparse_adam(
    records: torch.Tensor,
    slots: torch.Tensor,
    grads: torch.Tensor,
    step: int,
    group: Mapping[str, Any],
) -> int:
    beta1, beta2 = group["betas"]
    size = float(group["lr"]) * math.sqrt(1 - beta2**step) / (1 - beta1**step)
    sign = -1.0 if group["maximize"] else 1.0
    dim = grads.shape[1]
    if not (records.is_contiguous() and records.shape[1] == 3 * dim + 1):
        raise ValueError(f"records of {dim} weights must be contiguous, got {records.stride()}")
    if slots.dtype is not torch.int64 or grads.dtype is not records.dtype:
        raise TypeError(f"slots are {slots.dtype}, gradients {grads.dtype} for {records.dtype}")
    keep = 1 - float(group["lr"]) * group["row_weight_decay"]
    scalars = torch.tensor(
        [sign, 1 - beta1, 1 - beta2, size, group["eps"], keep],
        dtype=records.dtype,
        device="cpu",
    )
    arrays = [records, slots.contiguous(), grads.contiguous(), scalars]
    addresses = [array.data_ptr() for array in arrays]
    job = np.array([*addresses, len(slots), len(records), dim, 0, 0], dtype=np.int64)
    _in_torchs_threads(_KERNELS[records.dtype], job)
    return int(job[_JOB.index("fresh")])


def _in_torchs_threads(kernel: Any, job: np.ndarray) -> None:
    """Call a kernel in every thread of torch's OpenMP, which may be the calling one alone.

    Threads of numba's own would wait for a core on which torch's still spin for more work.
    """
    threads = torch.get_num_threads()
    # OpenMP's threads do not survive a fork.
    if _torchs_openmp is None or threads == 1 or os.getpid() != _pid:
        kernel.ctypes(job.ctypes.data)
    else:
        _torchs_openmp.GOMP_parallel(
            ctypes.c_void_p(kernel.address), ctypes.c_void_p(job.ctypes.data), threads, 0
        )


def _find_torchs_openmp() -> Any:
    """GNU's OpenMP, if torch has loaded it: the builds for Linux do."""
    try:
        return ctypes.CDLL("libgomp.so.1", mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    except (OSError, AttributeError):
        return None


_torchs_openmp: Any = _find_torchs_openmp() if torch.backends.openmp.is_available() else None
_pid = os.getpid()


@intrinsic
def _pointer(typing_context, address):  # type: ignore[no-untyped-def]
    """An address as the pointer that ``numba.carray`` takes."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        return builder.inttoptr(arguments[0], ir.IntType(8).as_pointer())

    return types.voidptr(types.int64), generate


@intrinsic
def _fetch_add(typing_context, address, amount):  # type: ignore[no-untyped-def]
    """Add to the integer at an address, as one operation among threads; what it was before."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        pointer = builder.inttoptr(arguments[0], ir.IntType(64).as_pointer())
        return builder.atomic_rmw("add", pointer, arguments[1], "monotonic")

    return types.int64(types.int64, types.int64), generate


def _adam_kernel(dtype: type[np.floating[Any]]) -> Any:
    def adam(address):  # type: ignore[no-untyped-def]
        """SparseAdam of ``torch/optim/_functional.py``, its operations in their order.

        The moments come out the same to the bit; torch may round its square root otherwise.
        """
        job = numba.carray(_pointer(address), len(_JOB), np.int64)
        count, dim = job[4], job[6]
        records = numba.carray(_pointer(job[0]), (job[5], 3 * dim + 1), dtype)
        slots = numba.carray(_pointer(job[1]), count, np.int64)
        grads = numba.carray(_pointer(job[2]), (count, dim), dtype)
        sign, rest1, rest2, size, eps, keep = numba.carray(_pointer(job[3]), 6, dtype)
        fresh = 0
        start = _fetch_add(address + _NEXT, _CLAIM)
        while start < count:
            for i in range(start, min(start + _CLAIM, count)):
                record, grad = records[slots[i]], grads[i]
                for j in range(dim):
                    value, first, second = sign * grad[j], record[dim + j], record[2 * dim + j]
                    first = (value - first) * rest1 + first
                    second = (value * value - second) * rest2 + second
                    record[dim + j], record[2 * dim + j] = first, second
                    record[j] = record[j] * keep - size * (first / (np.sqrt(second) + eps))
                fresh += record[3 * dim] == 0
                record[3 * dim] += 1
            start = _fetch_add(address + _NEXT, _CLAIM)
        _fetch_add(address + _FRESH, fresh)

    signature = types.void(types.int64)
    try:
        return numba.cfunc(signature, cache=True, error_model="numpy")(adam)
    except RuntimeError:  # no folder for the machine code: each process compiles it anew
        return numba.cfunc(signature, error_model="numpy")(adam)


_KERNELS = {torch.float32: _adam_kernel(np.float32), torch.float64: _adam_kernel(np.float64)}
