"""Tests that equal seeds and steps give equal bytes, and initial rows the right distribution."""

import hashlib
import math

import numpy as np
import pytest
import torch
import zarr
from ram_reference import read_rows

import ooc_embed

pytestmark = pytest.mark.usefixtures("each_kernel")

DIMS = [2, 5, 10, 100, 128]
DTYPES = [torch.float32, torch.float64]


def train_some(emb, steps: int = 12, commit_every: int | None = None) -> None:
    """Random steps over all rows, the same at every call for tables of one shape."""
    rows, dim = emb.weight.shape
    generator = torch.Generator().manual_seed(7)
    for step in range(steps):
        ids = torch.randint(0, rows, (97 + 11 * step,), generator=generator)
        grad = torch.randn(len(ids), dim, generator=generator, dtype=torch.float64)
        (emb(ids) * grad.to(emb.weight.dtype)).sum().backward()
        if commit_every and step % commit_every == 0:
            emb.commit()
    emb.flush()


def table_bytes(path) -> dict[str, str]:
    """A hash of each chunk file of the table."""
    files = sorted(file for file in (path / "table").iterdir() if file.name.startswith("c."))
    assert files
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


# Training


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", DIMS)
def test_equal_seeds_and_steps_give_equal_bytes_whatever_cache_and_commits(make_table, dim, dtype):
    record = (3 * dim + 1) * dtype.itemsize
    tables = [
        make_table(2500, dim, seed=3, dtype=dtype, chunk_rows=1024, cache_bytes=slots * record)
        for slots in (5000, 5000, 700, 30)
    ]
    for table, commit_every in zip(tables, (None, None, 5, 1), strict=True):
        train_some(table, commit_every=commit_every)
    expected = table_bytes(tables[0].path)
    for table in tables[1:]:
        assert table_bytes(table.path) == expected


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", DIMS)
def test_chunk_rows_change_no_row(make_table, dim, dtype):
    tables = [make_table(2500, dim, dtype=dtype, chunk_rows=rows) for rows in (1024, 2048, None)]
    stored = []
    for table in tables:
        train_some(table, steps=4)
        stored.append(zarr.open_group(table.path, mode="r")["table"][:])
    assert np.array_equal(stored[0], stored[1])
    assert np.array_equal(stored[0], stored[2])


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_number_of_threads_changes_no_bit(make_table, threads):
    before = torch.get_num_threads()
    expected = make_table(2500, 10)
    train_some(expected)
    emb = make_table(2500, 10)
    torch.set_num_threads(threads)
    try:
        train_some(emb)
    finally:
        torch.set_num_threads(before)
    assert table_bytes(emb.path) == table_bytes(expected.path)


@pytest.mark.parametrize("max_norm", [None, 1.0])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", DIMS)
def test_company_in_the_batch_changes_no_bit_of_a_row(make_table, dim, dtype, max_norm):
    """Vector code treats the last few of a block otherwise: a row must not depend on its place."""
    options = {"max_norm": max_norm, "dtype": dtype}
    alone, crowded = make_table(3000, dim, **options), make_table(3000, dim, **options)
    generator = torch.Generator().manual_seed(1)
    rows = torch.tensor([5, 1029, 2999, 5, 5, 1029])
    for others in (0, 1, 2, 3, 7, 1021, 1500):
        grad = torch.randn(6, dim, generator=generator, dtype=dtype)
        (alone(rows) * grad).sum().backward()
        company = torch.randint(0, 3000, (others,), generator=generator)
        company = company[~torch.isin(company, rows)]
        ids = torch.cat([company, rows])
        grads = torch.cat([torch.randn(len(company), dim, generator=generator, dtype=dtype), grad])
        # Mixed at random; the occurrences of a row keep their order, in which they are summed.
        place = torch.rand(len(ids), generator=generator)
        place[-6:] = place[-6:].sort().values
        order = place.argsort()
        (crowded(ids[order]) * grads[order]).sum().backward()
    for field in ("exp_avg", "exp_avg_sq"):
        assert torch.equal(alone.state[field][rows], crowded.state[field][rows])
    assert torch.equal(alone.weight[rows], crowded.weight[rows])


def test_training_leaves_the_global_generators_alone(make_table):
    torch.manual_seed(5)
    np.random.seed(5)
    states = torch.get_rng_state(), np.random.get_state()[1].copy()
    train_some(make_table(2500, 4, cache_bytes=50 * 13 * 4))
    assert torch.equal(torch.get_rng_state(), states[0])
    assert np.array_equal(np.random.get_state()[1], states[1])


def test_default_dtype_of_torch_changes_nothing(make_table):
    expected, emb = make_table(500, 5), make_table(500, 5)
    train_some(expected)
    torch.set_default_dtype(torch.float64)
    try:
        train_some(emb)
    finally:
        torch.set_default_dtype(torch.float32)
    assert emb.weight.dtype == torch.float32
    assert table_bytes(emb.path) == table_bytes(expected.path)


def test_deterministic_algorithms_of_torch_change_nothing(make_table):
    expected, emb = make_table(500, 5), make_table(500, 5)
    train_some(expected)
    torch.use_deterministic_algorithms(True)
    try:
        train_some(emb)
    finally:
        torch.use_deterministic_algorithms(False)
    assert table_bytes(emb.path) == table_bytes(expected.path)


# Initial rows


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("init", ["normal", "uniform"])
def test_initial_rows_do_not_depend_on_the_order_of_touch(make_table, open_table, init, dim, dtype):
    options = {"init": init, "dtype": dtype, "seed": 11}
    emb = make_table(3000, dim, **options)
    expected = emb.weight[:]
    order = torch.randperm(3000)
    touched = make_table(3000, dim, chunk_rows=2048, cache_bytes=1, **options)
    with torch.no_grad():
        rows = torch.cat([touched(part) for part in order.split([1, 2, 3, 500, 2494])])
        one_by_one = torch.stack([touched(row) for row in order[:50]])
    assert torch.equal(rows, expected[order])
    assert torch.equal(one_by_one, expected[order[:50]])
    emb.close()
    assert torch.equal(open_table(emb.path).weight[:], expected)


def test_initial_rows_do_not_depend_on_the_number_of_rows(make_table):
    small, large = make_table(10, 5), make_table(5000, 5)
    assert torch.equal(small.weight[:], large.weight[:10])


def test_trained_rows_start_from_their_initial_value(make_table):
    emb = make_table(50, 4, dtype=torch.float64, optimizer=ooc_embed.SparseAdam(lr=1.0))
    initial = emb.weight[:]
    emb(torch.arange(50)).sum().backward()
    emb.flush()
    # The first step of Adam on a gradient of one is the learning rate.
    stored = read_rows(emb.path).weight
    torch.testing.assert_close(stored, initial - 1, rtol=0, atol=1e-6)


def test_reopening_never_initialises_a_row_again(make_table, open_table):
    emb = make_table(50, 4, init="zeros", optimizer=ooc_embed.SparseAdam(lr=0.5))
    emb(torch.arange(25)).sum().backward()
    emb.close()
    again = open_table(emb.path)
    assert torch.equal(again.weight[25:], torch.zeros(25, 4))
    torch.testing.assert_close(again.weight[:25], torch.full((25, 4), -0.5))


def samples(make_table, **options) -> torch.Tensor:
    return make_table(4000, 64, **options).weight[:].double()


def kolmogorov_distance(values: torch.Tensor, cdf) -> float:
    """The largest distance between the sample's distribution and `cdf`, times sqrt(n)."""
    ordered = values.flatten().sort().values
    n = len(ordered)
    steps = torch.arange(n + 1, dtype=torch.float64) / n
    distance = torch.maximum(cdf(ordered) - steps[:-1], steps[1:] - cdf(ordered)).max()
    return float(distance) * math.sqrt(n)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seed", [0, 1, 2**31, 2**63 - 1])
def test_normal_rows_are_standard_normal(make_table, seed, dtype):
    x = samples(make_table, seed=seed, dtype=dtype)
    n = x.numel()
    # Five standard errors of each statistic under N(0, 1); 1.95 is the KS bound at 0.1 %.
    assert abs(x.mean()) < 5 / math.sqrt(n)
    assert abs(x.var() - 1) < 5 * math.sqrt(2 / n)
    assert abs(x.pow(3).mean()) < 5 * math.sqrt(15 / n)
    assert abs(x.pow(4).mean() - 3) < 5 * math.sqrt(96 / n)
    assert kolmogorov_distance(x, torch.special.ndtr) < 1.95
    assert 4 < x.abs().max() < 6.5


def test_every_row_and_column_of_a_normal_table_has_its_share(make_table):
    x = samples(make_table)
    assert (x.mean(dim=0).abs() < 5 / math.sqrt(4000)).all()
    assert (x.mean(dim=1).abs() < 5 / math.sqrt(64)).all()
    assert ((x.var(dim=0) - 1).abs() < 5 * math.sqrt(2 / 4000)).all()
    assert x.unique().numel() > 0.99 * x.numel() * (1 - x.numel() / 2**25)


@pytest.mark.parametrize("offset", [1, 2, 3, 7, 32, 63])
def test_neighbouring_rows_and_columns_do_not_correlate(make_table, offset):
    x = samples(make_table)
    bound = 5 / math.sqrt(x[:, offset:].numel())
    assert abs((x[offset:] * x[:-offset]).mean()) < 5 / math.sqrt(x[offset:].numel())
    assert abs((x[:, offset:] * x[:, :-offset]).mean()) < bound
    square = x.pow(2) - 1
    assert abs((square[:, offset:] * square[:, :-offset]).mean()) < 2 * bound
    assert abs((square[offset:] * square[:-offset]).mean()) < 2 * bound


def test_columns_are_not_linearly_dependent(make_table):
    """The spectrum of the correlation matrix lies where Marchenko and Pastur say it does."""
    eigenvalues = torch.linalg.eigvalsh(samples(make_table).T.corrcoef())
    edge = math.sqrt(64 / 4000)
    assert (1 - edge) ** 2 * 0.9 < eigenvalues.min()
    assert eigenvalues.max() < (1 + edge) ** 2 * 1.1


@pytest.mark.parametrize(("one", "other"), [(0, 1), (0, 2**32), (1, 2**32 + 1), (3, 2**63 - 1)])
def test_different_seeds_give_independent_rows(make_table, one, other):
    x, y = samples(make_table, seed=one), samples(make_table, seed=other)
    assert (x == y).float().mean() < 1e-4
    assert abs((x * y).mean()) < 5 / math.sqrt(x.numel())


def test_rows_of_one_seed_are_no_shifted_rows_of_another(make_table):
    x, y = samples(make_table, seed=0), samples(make_table, seed=1)
    assert not torch.isin(x[:200], y).float().mean() > 0.1
    for shift in range(1, 4):
        assert abs((x[shift:] * y[:-shift]).mean()) < 5 / math.sqrt(x[shift:].numel())


def test_dimension_and_dtype_do_not_change_the_distribution(make_table):
    for dim in (1, 3):
        x = make_table(60_000, dim, dtype=torch.float64).weight[:]
        assert kolmogorov_distance(x, torch.special.ndtr) < 1.95


def test_normal_takes_mean_and_std(make_table):
    x = samples(make_table, init=ooc_embed.Normal(mean=2.0, std=0.01))
    assert kolmogorov_distance((x - 2) / 0.01, torch.special.ndtr) < 1.95


@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (-3.0, -2.5)])
def test_uniform_rows_are_uniform(make_table, low, high):
    x = samples(make_table, init=ooc_embed.Uniform(low, high), dtype=torch.float64)
    assert low <= x.min()
    assert x.max() <= high
    assert kolmogorov_distance((x - low) / (high - low), lambda u: u) < 1.95


def test_named_uniform_is_from_zero_to_one(make_table):
    x = samples(make_table, init="uniform")
    assert kolmogorov_distance(x, lambda u: u) < 1.95


@pytest.mark.parametrize("init", ["zeros", ooc_embed.Zeros()], ids=["name", "object"])
def test_zeros_are_zeros(make_table, init):
    assert not make_table(100, 3, init=init).weight[:].any()


@pytest.mark.parametrize("kind", ["tensor", "numpy", "parameter", "float64", "strided"])
def test_given_initial_weights_are_what_any_reader_sees(make_table, kind):
    given = torch.randn(1500, 6)
    init = {
        "tensor": given,
        "numpy": given.numpy(),
        "parameter": torch.nn.Parameter(given),
        "float64": given.double(),
        "strided": given.t().contiguous().t(),
    }[kind]
    emb = make_table(1500, 6, init=init, chunk_rows=1024)
    assert torch.equal(emb.weight[:], given)
    emb.flush()
    stored = read_rows(emb.path)
    assert torch.equal(stored.weight, given)
    assert not stored.exp_avg.any()
    assert not stored.exp_avg_sq.any()
    assert emb.step == 0


@pytest.mark.parametrize(
    "init",
    [
        torch.ones(9, 2),
        torch.ones(10, 3),
        torch.ones(10),
        torch.ones(2, 10),
        np.ones((10, 1)),
        "normale",
        0.5,
        torch.nn.init.normal_,
    ],
    ids=lambda init: str(tuple(init.shape)) if hasattr(init, "shape") else str(init)[:12],
)
def test_init_that_is_no_initializer_or_has_another_shape_is_refused(store_path, init):
    with pytest.raises((TypeError, ValueError), match="init|shape"):
        ooc_embed.DiskEmbedding(10, 2, path=store_path, init=init)
    assert not store_path.exists()
