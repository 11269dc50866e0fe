"""Tests that a step is torch's SparseAdam to the last digits that matter, read by plain zarr."""

import subprocess
import sys

import pytest
import torch
import zarr
from ram_reference import (
    RamTable,
    assert_stored_equal,
    fingerprint,
    read_rows,
    train_both,
    weighted_sum,
)

import ooc_embed

pytestmark = pytest.mark.usefixtures("each_kernel")

# Trace G1 and all numbers below that are written out were computed with torch 2.14.1 on a CPU.
G1_INITIAL = [[0, 0], [1, -1], [0.5, 0.25], [2, 2]]
G1_BATCHES = [
    ([1, 1, 2], [[1, 2], [3, -1], [0.5, 0.5]]),
    ([2, 3], [[-1, 0], [1e-6, 1e-6]]),
    ([1], [[0, 0]]),
]
G1_WEIGHT = [
    [0, 0],
    [0.84247802032, -1.157521942314],
    [0.436610405593, 0.082994280231],
    [1.943464433529, 1.943464433529],
]
G1_EXP_AVG = [[0, 0], [0.36, 0.09], [-0.055, 0.045], [1e-7, 1e-7]]
G1_EXP_AVG_SQ = [[0, 0], [0.015984, 0.000999], [0.00124975, 0.00024975], [1e-15, 1e-15]]


def double(values: object) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def near(actual: object, expected: float, digits: float = 1e-10) -> None:
    torch.testing.assert_close(
        torch.as_tensor(actual, dtype=torch.float64), double(expected), rtol=0, atol=digits
    )


def adam_table(make_table, rows=4, dim=1, lr=0.1, dtype=torch.float64, **options):
    """A float64 table of zeros, whose steps can be compared with written-out numbers."""
    rule = ooc_embed.SparseAdam(lr=lr, **options)
    return make_table(rows, dim, init="zeros", dtype=dtype, optimizer=rule)


def backward(emb, ids: list[int], grads: list[float]) -> None:
    grad = torch.tensor(grads, dtype=emb.weight.dtype)[:, None]
    (emb(torch.tensor(ids)) * grad).sum().backward()


# The gold trace


def run_g1(train) -> None:
    for ids, grad in G1_BATCHES:
        train(weighted_sum(torch.tensor(ids), double(grad)))


def test_gold_trace_is_what_torch_computes():
    ram = RamTable(double(G1_INITIAL), lr=0.1)
    run_g1(ram.train)
    near(ram.weight, G1_WEIGHT, 1e-12)
    near(ram.exp_avg, G1_EXP_AVG, 1e-12)
    torch.testing.assert_close(ram.exp_avg_sq, double(G1_EXP_AVG_SQ), rtol=1e-12, atol=0)
    assert ram.step == 3


def test_gold_trace_read_back_by_plain_zarr(make_table):
    emb = make_table(
        4,
        2,
        init=double(G1_INITIAL),
        dtype=torch.float64,
        optimizer=ooc_embed.SparseAdam(lr=0.1),
    )
    run_g1(lambda loss_of: loss_of(emb).backward())
    emb.flush()
    assert emb.step == 3
    table = zarr.open_group(emb.path, mode="r")["table"]
    assert (table.shape, table.dtype) == ((4, 7), "float64")
    stored = torch.from_numpy(table[:])
    near(stored[:, :2], G1_WEIGHT, 1e-12)
    near(stored[:, 2:4], G1_EXP_AVG, 1e-12)
    torch.testing.assert_close(stored[:, 4:6], double(G1_EXP_AVG_SQ), rtol=1e-12, atol=0)
    assert stored[:, 6].tolist() == [1, 3, 3, 2]


def test_gold_trace_survives_reopening_between_its_steps(make_table, open_table):
    emb = make_table(
        4,
        2,
        init=double(G1_INITIAL),
        dtype=torch.float64,
        optimizer=ooc_embed.SparseAdam(lr=0.1),
    )
    for number, (ids, grad) in enumerate(G1_BATCHES):
        weighted_sum(torch.tensor(ids), double(grad))(emb).backward()
        emb.close(flush=number == 1)
        emb = open_table(emb.path)
    assert emb.step == 3
    near(emb.weight[:], G1_WEIGHT, 1e-12)
    near(emb.state["exp_avg"][:], G1_EXP_AVG, 1e-12)
    torch.testing.assert_close(
        emb.state["exp_avg_sq"][:], double(G1_EXP_AVG_SQ), rtol=1e-12, atol=0
    )


# The formula


def test_row_seen_twice_in_a_batch_steps_once(make_table):
    emb = adam_table(make_table)
    backward(emb, [1, 1], [1, 3])
    emb.flush()
    stored = read_rows(emb.path)
    near(stored.weight[1], [-0.0999999921])
    near(stored.exp_avg[1], [0.4])
    near(stored.exp_avg_sq[1], [0.016])
    assert stored.version.tolist() == [0, 1, 0, 0]


@pytest.mark.parametrize("repeats", [3, 1000, 20_000])
def test_many_duplicates_sum_before_the_step(make_table, repeats):
    emb, ram = adam_table(make_table, rows=5), RamTable(torch.zeros(5, 1).double(), lr=0.1)
    ids = torch.randint(0, 5, (repeats,))
    train_both(emb, ram, weighted_sum(ids, torch.randn(repeats, 1, dtype=torch.float64)))
    emb.flush()
    assert_stored_equal(emb.path, ram)


def test_bias_correction_counts_the_steps_of_the_table(make_table):
    emb = adam_table(make_table)
    for _ in range(1000):
        backward(emb, [0], [1])
    backward(emb, [2], [1])
    assert emb.step == 1001
    near(emb.weight[2], [-0.2515296942])


@pytest.mark.parametrize(
    ("grad", "weight"), [(1, -0.0999999684), (1e-6, -0.0759746927), (1e-8, -0.0030653430)]
)
def test_eps_is_added_before_bias_correction(make_table, grad, weight):
    emb = adam_table(make_table)
    backward(emb, [1], [grad])
    near(emb.weight[1], [weight])


def test_explicit_zero_gradient_moves_a_row_by_its_momentum(make_table):
    emb, ram = adam_table(make_table), RamTable(torch.zeros(4, 1).double(), lr=0.1)
    for ids, grad in (([1, 2], [[1.0], [0.0]]), ([1, 2], [[0.0], [0.0]]), ([2], [[0.0]])):
        train_both(emb, ram, weighted_sum(torch.tensor(ids), double(grad)))
    emb.flush()
    assert ram.weight[1] < -0.1
    assert_stored_equal(emb.path, ram)


def test_maximize_climbs(make_table):
    emb = adam_table(make_table, maximize=True)
    backward(emb, [1], [1])
    near(emb.weight[1], [0.0999999684])


def test_two_backwards_are_two_steps(make_table):
    emb = adam_table(make_table)
    backward(emb, [1], [1])
    backward(emb, [1], [-0.5])
    near(emb.weight[1], [-0.1266336648])
    assert emb.step == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize(
    "hyper",
    [
        {"lr": 0.5, "betas": (0.5, 0.9), "eps": 1e-3},
        {"lr": 1e-4, "betas": (0.0, 0.99), "eps": 1e-10},
        {"lr": 10.0, "betas": (0.9, 0.5), "eps": 1e-8},
        {"lr": 0.1, "betas": (0.0, 0.0), "eps": 1.0},
    ],
)
def test_any_hyperparameters_step_as_in_torch(make_table, hyper, maximize, dtype):
    initial = torch.randn(7, 5, dtype=dtype)
    rule = ooc_embed.SparseAdam(maximize=maximize, **hyper)
    emb = make_table(7, 5, init=initial, dtype=dtype, optimizer=rule)
    ram = RamTable(initial, maximize=maximize, **hyper)
    for _ in range(20):
        ids = torch.randperm(7)[:4]
        train_both(emb, ram, weighted_sum(ids, torch.randn(4, 5, dtype=dtype)))
    emb.flush()
    assert_stored_equal(emb.path, ram, imported=True)


@pytest.mark.parametrize("scale", [1e-30, 1e-12, 1e-6, 1e6, 1e15])
def test_gradients_of_any_size_step_as_in_torch(make_table, scale):
    initial = torch.randn(7, 5)
    emb, ram = make_table(7, 5, init=initial), RamTable(initial)
    for _ in range(10):
        ids = torch.randint(0, 7, (4,))
        train_both(emb, ram, weighted_sum(ids, torch.randn(4, 5) * scale))
    emb.flush()
    stored = read_rows(emb.path)
    torch.testing.assert_close(stored.weight, ram.weight)
    # Relative to the largest: the sums of duplicates may cancel, and float32 squares underflow.
    for field in ("exp_avg", "exp_avg_sq"):
        expected = getattr(ram, field)
        largest = float(expected.abs().max())
        torch.testing.assert_close(getattr(stored, field), expected, rtol=1e-5, atol=1e-6 * largest)


# Several lookups


def test_lookups_of_one_backward_are_one_step(make_table):
    emb = adam_table(make_table)
    head, tail = emb(torch.tensor([1, 2])), emb(torch.tensor([2, 3]))
    (head.sum() + tail.sum()).backward()
    assert emb.step == 1
    assert emb.version[:].tolist() == [0, 1, 1, 1]
    near(emb.state["exp_avg"][:], [[0], [0.1], [0.2], [0.1]])


@pytest.mark.parametrize("lookups", [2, 3, 7])
def test_gradients_of_all_lookups_of_a_backward_are_summed(make_table, lookups):
    initial = torch.randn(6, 3, dtype=torch.float64)
    emb = make_table(6, 3, init=initial, dtype=torch.float64)
    ram = RamTable(initial)
    for _ in range(10):
        ids = torch.randint(0, 6, (lookups, 4))
        grad = torch.randn(lookups, 4, 3, dtype=torch.float64)
        train_both(
            emb,
            ram,
            lambda lookup, ids=ids, grad=grad: sum(
                (lookup(i) * g).sum() for i, g in zip(ids, grad, strict=True)
            ),
        )
    emb.flush()
    assert emb.step == 10
    assert_stored_equal(emb.path, ram, imported=True)


# Precision


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bit_tables_are_refused_with_the_reason(store_path, dtype):
    with pytest.raises((TypeError, ValueError), match=rf"{dtype}[\s\S]*float32"):
        ooc_embed.DiskEmbedding(10, 2, path=store_path, dtype=dtype)
    assert not store_path.exists()


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64, "float32", float])
def test_other_dtypes_are_refused(store_path, dtype):
    with pytest.raises((TypeError, ValueError), match="dtype"):
        ooc_embed.DiskEmbedding(10, 2, path=store_path, dtype=dtype)
    assert not store_path.exists()


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
def test_16_bit_gradients_are_summed_in_float32(make_table, half):
    emb = adam_table(make_table, dtype=torch.float32)
    emb.to(half)
    out = emb(torch.ones(3000, dtype=torch.int64))
    assert out.dtype == half
    out.backward(torch.ones(3000, 1, dtype=half))
    # The sum of 3,000 ones is no number that a running 16-bit sum would reach.
    near(emb.state["exp_avg"][1], [300.0], 1e-3)


# Gradients that are no numbers


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_gradient_that_is_not_finite_raises_before_anything_is_written(make_table, bad):
    initial = torch.randn(10, 2)
    emb, ram = make_table(init=initial), RamTable(initial)
    first = weighted_sum(torch.tensor([1, 2]), torch.ones(2, 2))
    train_both(emb, ram, first)
    emb.flush()
    before = fingerprint(emb.path)
    grad = torch.ones(3, 2)
    grad[1, 1] = bad
    with pytest.raises((RuntimeError, ArithmeticError), match=r"(?i)finite|nan"):
        weighted_sum(torch.tensor([3, 1, 2]), grad)(emb).backward()
    assert fingerprint(emb.path) == before
    assert emb.step == 1
    assert torch.equal(emb.weight[:], read_rows(emb.path).weight)
    train_both(emb, ram, first)
    emb.flush()
    assert emb.step == 2
    assert_stored_equal(emb.path, ram, imported=True)


def test_duplicates_that_cancel_to_nan_raise(make_table):
    emb = make_table(init="zeros")
    grad = torch.tensor([[float("inf")] * 2, [-float("inf")] * 2])
    with pytest.raises((RuntimeError, ArithmeticError), match=r"(?i)finite|nan"):
        weighted_sum(torch.tensor([1, 1]), grad)(emb).backward()
    assert not emb.version[:].any()


def test_nan_of_a_padding_occurrence_is_dropped_with_it(make_table):
    initial = torch.randn(10, 2)
    emb, ram = make_table(padding_idx=0, init=initial), RamTable(initial, padding_idx=0)
    grad = torch.tensor([[float("nan")] * 2, [1.0, 2.0]])
    train_both(emb, ram, weighted_sum(torch.tensor([0, 3]), grad))
    emb.flush()
    assert_stored_equal(emb.path, ram, imported=True)


# Resuming

RESUME = """
import sys, torch, ooc_embed
with ooc_embed.DiskEmbedding.open(sys.argv[1]) as emb:
    emb(torch.tensor([1])).sum().backward()
"""


def test_training_resumes_in_a_new_process_as_if_never_stopped(make_table, open_table):
    emb = adam_table(make_table)
    for _ in range(5):
        backward(emb, [1], [1])
    emb.close()
    subprocess.run([sys.executable, "-W", "error", "-c", RESUME, str(emb.path)], check=True)
    again = open_table(emb.path)
    assert again.step == 6
    near(again.weight[1], [-0.5999998849])
    again.flush()
    near(read_rows(again.path).weight[1], [-0.5999998849])
