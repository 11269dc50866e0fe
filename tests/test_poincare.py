"""The ball's arithmetic, held to geoopt's, to closed forms and to finite differences."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from ooc_embed import poincare

geoopt = pytest.importorskip("geoopt", reason="geoopt is the reference of the ball's arithmetic")

CURVATURES = (0.5, 1.0, 2.0)
DTYPES = (torch.float32, torch.float64)
CLOSE: dict[torch.dtype, dict[str, float]] = {
    torch.float64: {"rtol": 1e-9, "atol": 1e-10},
    torch.float32: {"rtol": 2e-4, "atol": 2e-5},
}


def ball(curvature: float, dtype: torch.dtype, *, exact: bool = False) -> Any:
    """geoopt's ball of exactly this curvature: it keeps another number, in float32, from which it
    computes one that is off by a rounding, which 1 - c |x|^2 makes a large one at the boundary."""
    kind = geoopt.PoincareBallExact if exact else geoopt.PoincareBall
    manifold = kind(c=curvature)
    k = property(lambda self: torch.tensor(-curvature, dtype=dtype))
    manifold.__class__ = type("Ball", (kind,), {"k": k})
    return manifold


def points(count: int, curvature: float, dtype: torch.dtype, furthest: float = 0.95):
    x = torch.randn(count, 4, dtype=dtype)
    radius = torch.rand(count, 1, dtype=dtype) * furthest / math.sqrt(curvature)
    return x / x.norm(dim=1, keepdim=True) * radius


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("curvature", CURVATURES)
def test_the_maps_are_those_of_geoopt(curvature: float, dtype: torch.dtype) -> None:
    manifold = ball(curvature, dtype)
    x, y = points(200, curvature, dtype), points(200, curvature, dtype)
    u = torch.randn(200, 4, dtype=dtype)
    pairs = {
        "distance": (poincare.distance(x, y, curvature), manifold.dist(x, y)),
        "mobius_add": (poincare.mobius_add(x, y, curvature), manifold.mobius_add(x, y)),
        "expmap": (poincare.expmap(x, u, curvature), manifold.expmap(x, u)),
        "logmap": (poincare.logmap(x, y, curvature), manifold.logmap(x, y)),
        "parallel_transport": (
            poincare.parallel_transport(x, y, u, curvature),
            manifold.transp(x, y, u),
        ),
        "project": (poincare.project(2 * x, curvature), manifold.projx(2 * x)),
        "conformal_factor": (
            poincare.conformal_factor(x, curvature),
            manifold.lambda_x(x, keepdim=True),
        ),
    }
    for name, (got, want) in pairs.items():
        torch.testing.assert_close(
            got, want, **CLOSE[dtype], msg=lambda m, name=name: f"{name}: {m}"
        )


@pytest.mark.parametrize("curvature", CURVATURES)
def test_distance_from_the_origin_is_the_closed_form(curvature: float) -> None:
    """d(0, x) = 2 / sqrt(c) artanh(sqrt(c) |x|)."""
    x = points(100, curvature, torch.float64)
    root = math.sqrt(curvature)
    want = 2 / root * torch.atanh(root * x.norm(dim=1))
    torch.testing.assert_close(poincare.distance(torch.zeros_like(x), x, curvature), want)


def test_a_small_curvature_is_flat_space_scaled_by_two() -> None:
    x, y = torch.randn(50, 4, dtype=torch.float64), torch.randn(50, 4, dtype=torch.float64)
    got = poincare.distance(x, y, 1e-12)
    torch.testing.assert_close(got, 2 * (x - y).norm(dim=1), rtol=1e-8, atol=0)


@pytest.mark.parametrize("curvature", CURVATURES)
def test_the_logarithm_undoes_the_exponential_and_has_the_length_of_the_distance(
    curvature: float,
) -> None:
    x, y = points(100, curvature, torch.float64), points(100, curvature, torch.float64)
    u = poincare.logmap(x, y, curvature)
    torch.testing.assert_close(poincare.expmap(x, u, curvature), y)
    length = poincare.conformal_factor(x, curvature).squeeze(1) * u.norm(dim=1)
    torch.testing.assert_close(length, poincare.distance(x, y, curvature))


@pytest.mark.parametrize("curvature", CURVATURES)
def test_transport_keeps_riemannian_lengths_and_comes_back(curvature: float) -> None:
    x, y = points(100, curvature, torch.float64), points(100, curvature, torch.float64)
    u = torch.randn(100, 4, dtype=torch.float64)
    moved = poincare.parallel_transport(x, y, u, curvature)
    before = poincare.conformal_factor(x, curvature) * u.norm(dim=1, keepdim=True)
    after = poincare.conformal_factor(y, curvature) * moved.norm(dim=1, keepdim=True)
    torch.testing.assert_close(after, before)
    torch.testing.assert_close(poincare.parallel_transport(y, x, moved, curvature), u)


def test_distances_of_near_points_keep_their_digits() -> None:
    """By the arcosh of 1 + something of 1e-14, as the paper writes it, none would be left."""
    x = torch.full((1, 3), 0.3, dtype=torch.float64)
    y = x + 1e-9
    want = 2 / (1 - x.square().sum()) * (y - x).norm()
    torch.testing.assert_close(poincare.distance(x, y)[0], want, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("curvature", CURVATURES)
def test_projected_points_are_inside_and_others_are_left_alone(
    curvature: float, dtype: torch.dtype
) -> None:
    inside = points(50, curvature, dtype)
    assert torch.equal(poincare.project(inside, curvature), inside)
    outside = torch.randn(50, 4, dtype=dtype) * torch.logspace(0, 30, 50, dtype=dtype)[:, None]
    moved = poincare.project(outside + 2, curvature)
    assert (moved.norm(dim=1) < 1 / math.sqrt(curvature)).all()
    zero = torch.zeros(1, 4, dtype=dtype)
    assert torch.equal(poincare.project(zero, curvature), zero)


POINTS = torch.tensor([[0.1, 0.2], [0.3, -0.4]])
FUNCTIONS: list[Callable[..., torch.Tensor]] = [
    lambda c, x=POINTS: poincare.project(x, c),
    lambda c, x=POINTS: poincare.distance(x, -x, c),
    lambda c, x=POINTS: poincare.mobius_add(x, -x, c),
    lambda c, x=POINTS: poincare.expmap(x, -x, c),
    lambda c, x=POINTS: poincare.logmap(x, -x, c),
    lambda c, x=POINTS: poincare.parallel_transport(x, -x, x, c),
    lambda c, x=POINTS: poincare.conformal_factor(x, c),
]


@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_curvature_that_is_none_is_refused(function: Callable[..., torch.Tensor]) -> None:
    for curvature in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match="above 0 and finite"):
            function(curvature)
    with pytest.raises(TypeError, match="gets no gradient"):
        function(torch.tensor(1.0, requires_grad=True))
    with pytest.raises(TypeError, match=r"floating-point numbers, got torch\.int64"):
        function(1.0, torch.tensor([[1, 0]]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_half_precision_gives_numbers_where_points_coincide_and_at_the_origin(
    function: Callable[..., torch.Tensor], dtype: torch.dtype
) -> None:
    for x in (torch.zeros(3, 2, dtype=dtype), torch.full((3, 2), 0.3, dtype=dtype)):
        assert function(1.0, x).isfinite().all()
        assert poincare.logmap(x, x).abs().max() == 0
        assert torch.equal(poincare.expmap(x, torch.zeros_like(x)), x)


overflowing = pytest.mark.parametrize(
    ("dtype", "sizes"), [(torch.float32, (1e18, 1e19, 3e38)), (torch.float64, (1e160, 1e308))]
)


@overflowing
def test_vectors_whose_squares_overflow_keep_their_direction(
    dtype: torch.dtype, sizes: tuple[float, ...]
) -> None:
    for size in sizes:
        far = torch.tensor([[size, size * 1e-3], [-size, size / 3]], dtype=dtype)
        want = poincare.project(far / size * 5)
        torch.testing.assert_close(poincare.project(far), want)
        origin = torch.zeros_like(far)
        torch.testing.assert_close(poincare.expmap(origin, far), want)
    infinite = torch.tensor([[math.inf, 1.0], [0.0, 0.0]], dtype=dtype)
    assert poincare.project(infinite).isfinite().all()


@overflowing
def test_points_whose_squares_overflow_come_to_the_boundary_too(
    dtype: torch.dtype, sizes: tuple[float, ...]
) -> None:
    for size in sizes:
        far = torch.tensor([[size, 0.0], [0.0, -size]], dtype=dtype)
        want = poincare.project(far.sign() * 5)
        torch.testing.assert_close(poincare.project(far), want)
        origin = torch.zeros_like(far)
        torch.testing.assert_close(poincare.expmap(origin, far), want)


@pytest.mark.parametrize("curvature", CURVATURES)
def test_gradients_are_right(curvature: float) -> None:
    x, y = points(5, curvature, torch.float64), points(5, curvature, torch.float64)
    u = torch.randn(5, 4, dtype=torch.float64) * 0.1
    for tensor in (x, y, u):
        tensor.requires_grad_()
    two = (poincare.distance, poincare.mobius_add, poincare.logmap)
    for function in two:
        assert torch.autograd.gradcheck(lambda a, b, f=function: f(a, b, curvature), (x, y))
    assert torch.autograd.gradcheck(lambda a, b: poincare.expmap(a, b, curvature), (x, u))
    assert torch.autograd.gradcheck(
        lambda a, b, c: poincare.parallel_transport(a, b, c, curvature), (x, y, u)
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("curvature", CURVATURES)
@pytest.mark.parametrize("place", ["the origin", "inside", "the boundary", "opposite sides"])
def test_gradients_are_finite_where_points_coincide_and_at_the_boundary(
    curvature: float, dtype: torch.dtype, place: str
) -> None:
    at = {"the origin": 0.0, "inside": 0.2, "the boundary": 1e6, "opposite sides": 1e6}[place]
    x = poincare.project(torch.full((3, 4), at, dtype=dtype), curvature).requires_grad_()
    y = (-x if place == "opposite sides" else x).detach().clone().requires_grad_()
    for function in (poincare.distance, poincare.mobius_add, poincare.logmap, poincare.expmap):
        value = function(x, y, curvature)
        gradients = torch.autograd.grad(value.sum(), (x, y))
        assert value.isfinite().all()
        assert all(gradient.isfinite().all() for gradient in gradients), function.__name__
    if place in ("the origin", "inside"):
        assert not torch.autograd.grad(poincare.distance(x, y, curvature).sum(), x)[0].any()
