"""Tables on the Poincaré ball: steps of geoopt, rows that stay inside, and what is refused."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import store_files
import torch

import ooc_embed
from ooc_embed import RiemannianAdam, RiemannianSGD, Uniform, poincare

pytestmark = pytest.mark.usefixtures("one_thread")

ROWS, DIM = 500, 5


def radius_of(curvature: float) -> float:
    return 1 / math.sqrt(curvature)


def start(curvature: float, dtype: torch.dtype) -> torch.Tensor:
    """Points all over the ball, a tenth of them beside its boundary."""
    x = torch.randn(ROWS, DIM, dtype=dtype)
    share = torch.rand(ROWS, 1, dtype=dtype)
    share[::10] = 1
    x *= share * radius_of(curvature) / x.norm(dim=1, keepdim=True)
    return poincare.project(x, curvature)


def random_steps(count: int, dtype: torch.dtype) -> Any:
    """Ids with repetitions, and gradients of all sizes whose sums need no rounding."""
    for _ in range(count):
        ids = torch.randint(0, ROWS, (80,))
        sizes = 10 ** torch.empty(80, 1, dtype=dtype).uniform_(-3, 3)
        yield ids, (torch.randn(80, DIM, dtype=dtype) * sizes * 64).round() / 64


# The numbers


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("curvature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
def test_300_random_steps_of_adam_equal_geoopt(
    make_table: Any, dtype: torch.dtype, limit: float, curvature: float, exact: bool
) -> None:
    geoopt = pytest.importorskip("geoopt", reason="geoopt is the reference of the rule")
    from test_poincare import ball

    initial = start(curvature, dtype)
    emb = make_table(
        ROWS,
        DIM,
        init=initial,
        dtype=dtype,
        optimizer=RiemannianAdam(lr=0.05, curvature=curvature, exact=exact),
        cache_bytes=150 * (2 * DIM + 6) * dtype.itemsize,  # for few of the rows
        chunk_rows=1024,
    )
    manifold = ball(curvature, dtype, exact=exact)
    weight = geoopt.ManifoldParameter(initial.clone(), manifold=manifold)
    reference = geoopt.optim.SparseRiemannianAdam([weight], lr=0.05)
    with torch.sparse.check_sparse_tensor_invariants(enable=False):
        for ids, grads in random_steps(300, dtype):
            (emb(ids) * grads).sum().backward()
            (torch.nn.functional.embedding(ids, weight, sparse=True) * grads).sum().backward()
            reference.step()
            reference.zero_grad()
    assert emb.step == 300
    assert emb.stats().evictions > 0
    state = reference.state[weight]
    torch.testing.assert_close(emb.weight[:], weight.detach(), rtol=0, atol=limit)
    for name, columns in (("exp_avg", DIM), ("exp_avg_sq", 1)):
        want = state[name][:, :columns]
        torch.testing.assert_close(
            emb.state[name][:] / want.abs().max(), want / want.abs().max(), rtol=0, atol=limit
        )


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("curvature", [0.5, 1.0, 2.0])
def test_300_random_steps_of_sgd_equal_geoopt(
    make_table: Any, curvature: float, exact: bool
) -> None:
    geoopt = pytest.importorskip("geoopt", reason="geoopt is the reference of the rule")
    from test_poincare import ball

    initial = start(curvature, torch.float64)
    rule = RiemannianSGD(lr=0.01, curvature=curvature, exact=exact)
    emb = make_table(ROWS, DIM, init=initial, dtype=torch.float64, optimizer=rule)
    manifold = ball(curvature, torch.float64, exact=exact)
    weight = geoopt.ManifoldParameter(initial.clone(), manifold=manifold)
    reference = geoopt.optim.SparseRiemannianSGD([weight], lr=0.01)
    with torch.sparse.check_sparse_tensor_invariants(enable=False):
        for ids, grads in random_steps(300, torch.float64):
            (emb(ids) * grads).sum().backward()
            (torch.nn.functional.embedding(ids, weight, sparse=True) * grads).sum().backward()
            reference.step()
            reference.zero_grad()
    torch.testing.assert_close(emb.weight[:], weight.detach(), rtol=0, atol=1e-10)


def test_the_first_step_from_the_origin_has_a_quarter_of_the_gradient(make_table: Any) -> None:
    """The conformal factor is 2 there, and its square divides the gradient."""
    emb = make_table(3, 2, init="zeros", dtype=torch.float64, optimizer=RiemannianSGD(lr=0.1))
    (emb(torch.tensor([1])) * torch.tensor([4.0, -8.0])).sum().backward()
    assert emb.weight[1].tolist() == pytest.approx([-0.1, 0.2])
    assert not emb.weight[[0, 2]].any()
    assert emb.step == 1


@pytest.mark.parametrize("rule", [RiemannianAdam, RiemannianSGD])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_pushes_outward_leave_every_row_inside_and_every_loss_finite(
    make_table: Any, rule: Any, dtype: torch.dtype
) -> None:
    emb = make_table(20, 3, dtype=dtype, optimizer=rule(lr=1.0, curvature=2.0), seed=1)
    ids = torch.arange(20)
    for _ in range(500):  # of 20 rows: 10,000 pushes
        rows = emb(ids)
        loss = poincare.distance(rows[:10], rows[10:], 2.0).sum() - 1e6 * rows.square().sum()
        assert loss.isfinite()
        loss.backward()
    norms = emb.weight[:].norm(dim=1)
    assert (norms < radius_of(2.0)).all()
    assert (norms > 0.9 * radius_of(2.0)).all()
    assert all(view[:].isfinite().all() for view in emb.state.values())


# The store


def test_a_record_has_two_dims_and_two_numbers(make_table: Any) -> None:
    emb = make_table(10, 8, optimizer=RiemannianAdam())
    emb(torch.tensor([1])).sum().backward()
    emb.flush()
    columns = store_files.manifest(emb.path)["fields"]
    assert columns == [["weight", 8], ["exp_avg", 8], ["exp_avg_sq", 1], ["version", 1]]
    assert store_files.read_by_hand(emb.path, "table").shape == (10, 2 * 8 + 2)


def test_the_curvature_stays_with_the_store(make_table: Any, open_table: Any) -> None:
    emb = make_table(optimizer=RiemannianAdam(lr=0.1, curvature=0.5))
    emb(torch.tensor([1])).sum().backward()
    emb.close()
    assert store_files.manifest(emb.path)["rule"]["curvature"] == 0.5
    again = open_table(emb.path)
    group = again.optimizer.param_groups[0]
    assert (group["curvature"], group["lr"]) == (0.5, 0.1)
    before = again.weight[:]
    group["curvature"] = 1.0
    with pytest.raises(ValueError, match=r"curvature was 0\.5 .* got 1\.0"):
        again(torch.tensor([1])).sum().backward()
    group["curvature"] = 0.5
    assert torch.equal(again.weight[:], before)


def test_rows_begin_near_the_origin(make_table: Any) -> None:
    emb = make_table(1000, 4, optimizer=RiemannianAdam())
    assert 0.9e-3 < float(emb.weight[:].abs().max()) <= 1e-3
    assert torch.equal(emb(torch.arange(1000)), emb.weight[:])


@pytest.mark.parametrize(
    ("init", "text"),
    [("normal", "norm 2,"), (Uniform(0, 1), r"norm 1\.15,"), (Uniform(-1, 1), r"norm 1\.15,")],
)
def test_rows_that_would_begin_outside_are_refused(store_path: Any, init: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        ooc_embed.DiskEmbedding(10, 4, path=store_path, init=init, optimizer=RiemannianAdam())
    assert not store_path.exists()


def test_the_few_random_rows_that_begin_outside_are_moved_in(make_table: Any) -> None:
    emb = make_table(2000, 2, init=ooc_embed.Normal(std=0.35), optimizer=RiemannianAdam())
    norms = emb.weight[:].norm(dim=1)
    assert float(norms.max()) == pytest.approx(0.996)
    assert 1 < int((norms > 0.9959).sum()) < 100


def test_given_rows_are_moved_in_or_refused(make_table: Any, store_path: Any) -> None:
    rows = torch.rand(10, 2) * 0.5
    rows[3] = torch.tensor([1.0001, 0.0])  # as rounding leaves them
    emb = make_table(10, 2, init=rows, optimizer=RiemannianAdam())
    assert emb.weight[3].tolist() == pytest.approx([0.996, 0])
    assert torch.equal(emb.weight[:3], rows[:3])
    emb.weight[[4, 5]] = torch.tensor([[0.0, -1.005], [0.1, 0.1]])
    assert emb.weight[4].tolist() == pytest.approx([0, -0.996])
    for bad in ([[0.0, 1.2], [0.1, 0.1]], [[0.0, math.nan], [0.1, 0.1]]):
        text = "outside|is not finite"
        with store_files.untouched(emb.path), pytest.raises(ValueError, match=text):
            emb.weight[[6, 7]] = torch.tensor(bad)
        assert torch.equal(emb.weight[6:8], rows[6:8])
    with pytest.raises(ValueError, match=r"norm 3\.\d+, outside of the ball"):
        ooc_embed.DiskEmbedding(
            10, 2, path=store_path, init=np.full((10, 2), 2.2), optimizer=RiemannianAdam()
        )
    assert not store_path.exists()
    emb.state["exp_avg"][6] = torch.tensor([5.0, 5.0])  # moments are no points
    assert emb.state["exp_avg"][6].tolist() == [5, 5]


def test_rows_that_are_refused_cost_no_store_that_is_to_be_overwritten(
    make_table: Any, tmp_path: Any
) -> None:
    emb = make_table(10, 2, optimizer=RiemannianAdam())
    emb.close()
    rows = torch.zeros(10, 2)
    rows[9] = 2
    ram = torch.nn.Embedding.from_pretrained(rows)
    options: dict[str, Any] = {"path": emb.path, "optimizer": RiemannianAdam(), "overwrite": True}
    with store_files.untouched(emb.path):
        with pytest.raises(ValueError, match="outside of the ball"):
            ooc_embed.DiskEmbedding(10, 2, init=rows, **options)
        with pytest.raises(ValueError, match="outside of the ball"):
            ooc_embed.DiskEmbedding.from_embedding(ram, **options)
        with pytest.raises(ValueError, match="outside of the ball"):
            ooc_embed.DiskEmbedding.from_pretrained(rows, **options)
    model = torch.nn.ModuleDict({"good": torch.nn.Embedding(10, 2), "bad": ram})
    model["good"].weight.data.zero_()
    with pytest.raises(ValueError, match="outside of the ball"):
        ooc_embed.replace_embeddings(
            model, tmp_path / "tables", min_rows=1, optimizer=RiemannianAdam()
        )
    assert type(model["good"]) is torch.nn.Embedding
    assert not (tmp_path / "tables").exists()


def test_points_nearer_to_the_boundary_than_the_dtype_keeps_are_moved_with_a_warning(
    make_table: Any,
) -> None:
    rows = torch.tensor([[0.9999, 0.0], [0.5, 0.0], [0.0, -0.9985]])
    many = rows.repeat(50_000, 1)
    with pytest.warns(UserWarning, match=r"100,000 given rows .* of up to 3\.\d+") as caught:
        emb = make_table(150_000, 2, init=many, optimizer=RiemannianAdam(), chunk_rows=1024)
    assert len(caught) == 1
    with pytest.warns(UserWarning, match=r"1 given rows .* distance of up to 3\.\d+"):
        emb.weight[3:5] = rows[:2]
    emb = make_table(3, 2, init=rows.double(), optimizer=RiemannianAdam(), dtype=torch.float64)
    assert torch.equal(emb.weight[:], rows.double())  # without a warning
    with pytest.raises(ValueError, match="outside of the ball"):
        emb.weight[0] = torch.tensor([1.005, 0.0])  # no rounding of float64's


@pytest.mark.parametrize("rule", [RiemannianAdam, RiemannianSGD])
@pytest.mark.parametrize(("dtype", "size"), [(torch.float32, 1e25), (torch.float64, 1e200)])
def test_gradients_whose_squares_overflow_push_a_row_outward_all_the_same(
    make_table: Any, rule: Any, dtype: torch.dtype, size: float
) -> None:
    emb = make_table(2, 2, optimizer=rule(lr=1.0), dtype=dtype)
    emb.weight[0] = torch.tensor([0.3, 0.0])
    (emb(torch.tensor([0])) * torch.tensor([[-size, 0.0]], dtype=dtype)).sum().backward()
    assert emb.weight[0][0] > 0.7
    emb(torch.tensor([0])).sum().backward()
    for view in (emb.weight, *emb.state.values()):
        assert view[:].isfinite().all()


@pytest.mark.parametrize("curvature", [1e-7, 1e7])
def test_a_curvature_that_no_float_has_digits_for_is_refused(curvature: float) -> None:
    with pytest.raises(ValueError, match="from 1e-06 to 1e.06, got"):
        RiemannianAdam(curvature=curvature)


@pytest.mark.parametrize("curvature", [1e-6, 1e6])
def test_rows_of_any_ball_begin_near_its_origin_and_train(
    make_table: Any, curvature: float
) -> None:
    emb = make_table(50, 3, optimizer=RiemannianAdam(curvature=curvature))
    assert float(emb.weight[:].norm(dim=1).max()) < 0.002 * radius_of(curvature)
    for _ in range(3):
        out = emb(torch.arange(50))
        poincare.distance(out[:25], out[25:], curvature).sum().backward()
    assert emb.weight[:].isfinite().all()


@pytest.mark.parametrize("curvature", [0.0, -1.0])
@pytest.mark.parametrize("rule", [RiemannianAdam, RiemannianSGD])
def test_a_curvature_that_is_none_points_to_the_flat_rules(rule: Any, curvature: float) -> None:
    with pytest.raises(ValueError, match="greater than 0, got .*SparseAdam"):
        rule(curvature=curvature)


def test_grown_rows_begin_in_the_ball_too(make_table: Any) -> None:
    emb = make_table(10, 2, optimizer=RiemannianAdam())
    emb.resize(20)
    assert 0 < float(emb.weight[10:].abs().max()) <= 1e-3


@pytest.mark.parametrize(
    "other", [RiemannianAdam(curvature=2.0), RiemannianSGD(), ooc_embed.SparseAdam()]
)
def test_opening_with_another_geometry_raises(make_table: Any, open_table: Any, other: Any) -> None:
    make_table(optimizer=RiemannianAdam()).close()
    for mode in ("r", "r+"):
        with pytest.raises(ValueError, match="made with RiemannianAdam.* cannot go on with"):
            open_table(make_table.__self__.paths[0], mode, optimizer=other)
    again = open_table(make_table.__self__.paths[0], optimizer=RiemannianAdam(lr=0.5))
    assert again.optimizer.param_groups[0]["lr"] == 0.5
