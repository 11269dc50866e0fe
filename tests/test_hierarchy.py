"""Hierarchies against brute force: the closure, negatives, the loss, and reconstruction."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

from ooc_embed import hierarchy
from ooc_embed.hierarchy import Hierarchy, Negatives

NODES = 40


@pytest.fixture
def edges() -> torch.Tensor:
    """Each node under one or two of those before it; node 1 has nothing above it either."""
    rng = np.random.default_rng(7)
    pairs = [(node, int(rng.integers(node))) for node in range(2, NODES)]
    pairs += [(node, int(rng.integers(node))) for node in range(10, NODES, 4)]
    return torch.tensor(pairs)


@pytest.fixture
def tree(edges: torch.Tensor) -> Hierarchy:
    names = tuple(f"node{node}" for node in range(NODES))
    return Hierarchy(names, hierarchy.closure(NODES, edges))


def ancestors_by_walking(edges: torch.Tensor) -> set[tuple[int, int]]:
    parents: dict[int, set[int]] = {}
    for child, parent in edges.tolist():
        parents.setdefault(child, set()).add(parent)
    found = set()
    for node in parents:
        left = list(parents[node])
        seen: set[int] = set()
        while left:
            if (above := left.pop()) not in seen:
                seen.add(above)
                left.extend(parents.get(above, ()))
        found |= {(node, above) for above in seen if above != node}
    return found


def as_pairs(pairs: torch.Tensor) -> list[tuple[int, ...]]:
    return [tuple(pair) for pair in pairs.tolist()]


def test_closure_has_who_is_reached_by_walking_up(edges: torch.Tensor, tree: Hierarchy) -> None:
    assert as_pairs(tree.pairs) == sorted(ancestors_by_walking(edges))


def test_closure_of_a_closure_is_itself(tree: Hierarchy) -> None:
    shuffled = tree.pairs[torch.randperm(len(tree.pairs))]
    assert torch.equal(hierarchy.closure(NODES, shuffled), tree.pairs)


def test_closure_of_a_circle_ends() -> None:
    circle = torch.tensor([(0, 1), (1, 2), (2, 0), (3, 0), (3, 3)])
    expected = [*sorted(itertools.permutations(range(3), 2)), (3, 0), (3, 1), (3, 2)]
    assert as_pairs(hierarchy.closure(4, circle)) == expected


def test_direct_edges_are_the_fewest_that_have_the_closure(
    edges: torch.Tensor, tree: Hierarchy
) -> None:
    direct = tree.direct_edges()
    assert set(as_pairs(direct)) <= set(as_pairs(edges))
    assert torch.equal(hierarchy.closure(NODES, direct), tree.pairs)
    for left_out in range(len(direct)):
        kept = direct[torch.arange(len(direct)) != left_out]
        assert len(hierarchy.closure(NODES, kept)) < len(tree.pairs)


@pytest.mark.parametrize("by_frequency", [False, True])
def test_negatives_are_never_the_node_or_above_it(tree: Hierarchy, by_frequency: bool) -> None:
    nodes = tree.pairs[:, 0].unique()
    generator = np.random.default_rng(3)
    drawn = Negatives(tree, by_frequency).draw(nodes, 3000, generator)
    related = set(as_pairs(tree.pairs)) | {(node, node) for node in range(NODES)}
    inner = set(tree.pairs[:, 1].tolist())
    for node, others in zip(nodes.tolist(), drawn.tolist(), strict=True):
        allowed = {other for other in range(NODES) if (node, other) not in related}
        assert set(others) == (allowed & inner if by_frequency else allowed)


def test_negatives_by_frequency_are_drawn_as_often_as_they_should_be(tree: Hierarchy) -> None:
    drawn = Negatives(tree, by_frequency=True).draw(
        torch.tensor([1]), 200_000, np.random.default_rng(0)
    )
    weights = torch.bincount(tree.pairs[:, 1], minlength=NODES).double() ** 0.75
    weights[1] = 0
    part = torch.bincount(drawn[0], minlength=NODES) / drawn.numel()
    assert torch.allclose(part.double(), weights / weights.sum(), atol=0.005)


def test_node_without_negatives_is_an_error_that_names_it() -> None:
    chain = hierarchy.closure(3, torch.tensor([(2, 1), (1, 0)]))
    with pytest.raises(ValueError, match="c has no negatives"):
        Negatives(Hierarchy(("a", "b", "c"), chain))


def test_epoch_has_each_pair_once_and_depends_on_seed_and_epoch_alone(tree: Hierarchy) -> None:
    negatives = Negatives(tree)

    def rows(seed: int, epoch: int) -> torch.Tensor:
        return torch.cat(list(hierarchy.batches(tree, negatives, 16, 5, seed, epoch)))

    first = rows(0, 0)
    assert first.shape == (len(tree.pairs), 7)
    assert sorted(as_pairs(first[:, :2])) == as_pairs(tree.pairs)
    assert not tree.are_pairs(first[:, :1].expand(-1, 5), first[:, 2:]).any()
    assert torch.equal(first, rows(0, 0))
    assert not torch.equal(first, rows(0, 1))
    assert not torch.equal(first, rows(1, 0))


def distance(x: np.ndarray, y: np.ndarray) -> float:
    """The formula of Nickel and Kiela (2017), equation 1."""
    apart = ((x - y) ** 2).sum()
    return math.acosh(1 + 2 * apart / ((1 - (x**2).sum()) * (1 - (y**2).sum())))


def points_with_ties() -> torch.Tensor:
    """Points of which many are the same."""
    rng = np.random.default_rng(5)
    places = rng.uniform(-0.7, 0.7, (NODES // 2, 2))
    return torch.from_numpy(places[rng.integers(len(places), size=NODES)])


def test_loss_is_the_softmax_of_the_distances() -> None:
    points = points_with_ties() + torch.linspace(0, 0.05, NODES)[:, None]
    ids = torch.tensor([[4, 0, 7, 9, 30], [12, 3, 5, 6, 7]])
    expected = []
    for node, *others in ids.tolist():
        weights = [math.exp(-distance(points[node].numpy(), points[v].numpy())) for v in others]
        expected.append(-math.log(weights[0] / sum(weights)))
    assert hierarchy.loss(points[ids]).item() == pytest.approx(sum(expected) / 2)


def brute_force(tree: Hierarchy, points: torch.Tensor, nodes: range) -> tuple[float, float]:
    """Mean rank and MAP, one pair and one candidate at a time."""
    rows = points.numpy()
    above = {node: {v for u, v in as_pairs(tree.pairs) if u == node} for node in nodes}
    ranks, precisions = [], []
    for node in nodes:
        far = {v: distance(rows[node], rows[v]) for v in range(NODES) if v != node}
        found = []
        for right in above[node]:
            nearer = [v for v in far if far[v] <= far[right]]
            ranks.append(1 + sum(v not in above[node] for v in nearer))
            found.append(sum(v in above[node] for v in nearer) / len(nearer))
        if found:
            precisions.append(sum(found) / len(found))
    return sum(ranks) / len(ranks), sum(precisions) / len(precisions)


@pytest.mark.parametrize("block", [1 << 22, 300])
def test_reconstruction_equals_brute_force_with_ties(
    tree: Hierarchy, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hierarchy, "_BLOCK_ELEMENTS", block)
    points = points_with_ties()
    assert len(points.unique(dim=0)) < NODES
    got = hierarchy.evaluate(tree, points)
    assert got == pytest.approx(brute_force(tree, points, range(NODES)))
    sample = hierarchy.evaluate(tree, points, nodes=torch.arange(5, 20))
    assert sample == pytest.approx(brute_force(tree, points, range(5, 20)))


def test_points_that_all_coincide_rank_last(tree: Hierarchy) -> None:
    got = hierarchy.evaluate(tree, torch.zeros(NODES, 3))
    counts = torch.bincount(tree.pairs[:, 0], minlength=NODES)
    assert got.mean_rank == pytest.approx((NODES - counts[tree.pairs[:, 0]]).float().mean().item())


def test_points_that_are_none_are_not_ranked_first(tree: Hierarchy) -> None:
    for points in (torch.full((tree.num_nodes, 2), torch.nan), torch.zeros(tree.num_nodes - 1, 2)):
        with pytest.raises(ValueError, match="as many points, all finite"):
            hierarchy.evaluate(tree, points)


def test_nodes_without_ancestors_cannot_be_ranked(tree: Hierarchy) -> None:
    with pytest.raises(ValueError, match="none of these nodes has an ancestor"):
        hierarchy.evaluate(tree, torch.zeros(NODES, 3), nodes=torch.tensor([0]))


def test_mammals_and_nouns_come_with_the_package() -> None:
    mammals, nouns = hierarchy.load_mammals(), hierarchy.load_nouns()
    assert (mammals.num_nodes, len(mammals.pairs)) == (1182, 6542)
    assert (nouns.num_nodes, len(nouns.pairs)) == (82_115, 743_241)
    for tree, root in ((mammals, "mammal.n.01"), (nouns, "entity.n.01")):
        assert (tree.pairs[:, 1] == tree.names.index(root)).sum() == tree.num_nodes - 1
