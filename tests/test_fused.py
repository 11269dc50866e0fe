"""The compiled step: equal to numpy's arithmetic to the bit, and to the step without numba."""

from __future__ import annotations

import math
import os
import threading

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ooc_embed import SparseAdam, blocks

fused = pytest.importorskip("ooc_embed.fused", reason="the compiled step needs the extra `fast`")

GROUP = {
    "lr": 0.01,
    "betas": (0.9, 0.999),
    "eps": 1e-8,
    "maximize": False,
    "row_weight_decay": 0.0,
}


def numpy_step(records, slots, grads, step, group):
    """SparseAdam by numpy, where every operation rounds once."""
    number, dim = records.dtype.type, grads.shape[1]
    beta1, beta2 = group["betas"]
    size = group["lr"] * math.sqrt(1 - beta2**step) / (1 - beta1**step)
    rows = records[slots]
    grads = -grads if group["maximize"] else grads
    first = rows[:, dim : 2 * dim]
    first += (grads - first) * number(1 - beta1)
    second = rows[:, 2 * dim : 3 * dim]
    second += (grads * grads - second) * number(1 - beta2)
    rows[:, :dim] -= number(size) * (first / (np.sqrt(second) + number(group["eps"])))
    fresh = int((rows[:, -1] == 0).sum())
    rows[:, -1] += 1
    records[slots] = rows
    return fresh


def random_records(rows: int, dim: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    records = torch.randn(rows, 3 * dim + 1, dtype=dtype, generator=generator)
    records[:, 2 * dim : 3 * dim].square_()
    records[:, -1] = torch.randint(0, 3, (rows,), generator=generator)
    return records


def random_batch(rows: int, count: int, dim: int, dtype: torch.dtype, seed: int):
    """Slots in no order, and gradients of very different sizes, zeros among them."""
    generator = torch.Generator().manual_seed(seed)
    slots = torch.randperm(rows, generator=generator)[:count]
    sizes = 10.0 ** torch.randint(-12, 6, (count, 1), generator=generator)
    grads = torch.randn(count, dim, dtype=dtype, generator=generator) * sizes.to(dtype)
    grads[::7] = 0
    return slots, grads


@given(
    dim=st.integers(1, 200),
    rows=st.integers(1, 500),
    share=st.floats(0, 1),
    step=st.integers(1, 10**6),
    maximize=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    seed=st.integers(0, 2**31),
)
def test_compiled_step_is_numpys_to_the_bit_and_torchs_to_rounding(
    dim, rows, share, step, maximize, dtype, seed
):
    group = {**GROUP, "maximize": maximize}
    records = random_records(rows, dim, dtype, seed)
    slots, grads = random_batch(rows, int(share * rows), dim, dtype, seed)
    expected, by_blocks = records.numpy().copy(), records.clone()
    fresh = numpy_step(expected, slots.numpy(), grads.numpy(), step, group)

    spans = {
        "weight": slice(0, dim),
        "exp_avg": slice(dim, 2 * dim),
        "exp_avg_sq": slice(2 * dim, 3 * dim),
        "version": slice(3 * dim, 3 * dim + 1),
    }
    compiled = blocks.BlockUpdate(SparseAdam(), spans, dtype)
    plain = blocks.BlockUpdate(SparseAdam(), spans, dtype)
    plain._fused = None
    assert (compiled.kernel, plain.kernel) == ("numba", "torch")
    assert compiled.step(records, slots, grads, step, group) == fresh
    assert plain.step(by_blocks, slots, grads, step, group) == fresh
    assert np.array_equal(records.numpy(), expected)
    torch.testing.assert_close(records, by_blocks)


@pytest.mark.parametrize("threads", [1, 2, 4, 7])
def test_threads_share_the_rows_and_change_no_bit(threads):
    records = random_records(3000, 33, torch.float32, 0)
    slots, grads = random_batch(3000, 2001, 33, torch.float32, 1)
    expected = records.numpy().copy()
    fresh = numpy_step(expected, slots.numpy(), grads.numpy(), 5, GROUP)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert fused.fused_step(SparseAdam())(records, slots, grads, 5, GROUP) == fresh
    finally:
        torch.set_num_threads(before)
    assert np.array_equal(records.numpy(), expected)


def test_versions_stop_where_float32_has_no_next_integer():
    records = torch.zeros(2, 4)
    records[:, -1] = torch.tensor([2.0**24 - 1, 2.0**24])
    step = fused.fused_step(SparseAdam())
    assert step(records, torch.arange(2), torch.ones(2, 1), 1, GROUP) == 0
    assert records[:, -1].tolist() == [2**24, 2**24]


def test_steps_in_several_python_threads_at_once_are_each_right():
    results = {}

    def run(seed: int) -> None:
        records = random_records(500, 16, torch.float32, seed)
        expected = records.numpy().copy()
        right = True
        for step in range(1, 40):
            slots, grads = random_batch(500, 300, 16, torch.float32, 100 * seed + step)
            numpy_step(expected, slots.numpy(), grads.numpy(), step, GROUP)
            fused.fused_step(SparseAdam())(records, slots, grads, step, GROUP)
            right = right and np.array_equal(records.numpy(), expected)
        results[seed] = right

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {0: True, 1: True, 2: True, 3: True}


def test_table_says_what_steps_its_rows(make_table, each_kernel):
    assert make_table().kernel == {"compiled": "numba", "torch": "torch"}[each_kernel]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_forked_child_steps_without_the_parents_threads():
    records = random_records(3000, 33, torch.float32, 0)
    slots, grads = random_batch(3000, 2001, 33, torch.float32, 1)
    step = fused.fused_step(SparseAdam())
    step(records.clone(), slots, grads, 1, GROUP)  # the parent's threads are there
    expected = records.numpy().copy()
    numpy_step(expected, slots.numpy(), grads.numpy(), 2, GROUP)
    child = os.fork()
    if child == 0:
        step(records, slots, grads, 2, GROUP)
        os._exit(0 if np.array_equal(records.numpy(), expected) else 1)
    assert os.waitpid(child, 0)[1] == 0
