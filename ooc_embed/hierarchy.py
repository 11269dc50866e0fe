"""Hierarchies: nodes and their ancestors, batches for a loss, reconstruction. Knows no store.

It knows graphs and distances; what a row is kept in, and what steps it, it does not.
"""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from importlib import resources
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from . import poincare

# Coordinates that are compared at once in evaluation: 32 MiB of differences in float64.
_BLOCK_ELEMENTS = 1 << 22
# Of the frequency of a node as an ancestor, when negatives are drawn by it.
_DAMPENING = 0.75


@dataclass(frozen=True)
class Hierarchy:
    """Nodes and the pairs of a node and each of its ancestors.

    Attributes:
        names: of the nodes.
        pairs: ``(n, 2) int64``, node and ancestor, sorted and without repetitions.
    """

    names: tuple[str, ...]
    pairs: Tensor

    @property
    def num_nodes(self) -> int:
        return len(self.names)

    @cached_property
    def starts(self) -> Tensor:
        """``(num_nodes + 1,)``: the pairs of node ``u`` are those from ``starts[u]``."""
        return torch.searchsorted(self.pairs[:, 0].contiguous(), torch.arange(self.num_nodes + 1))

    @cached_property
    def keys(self) -> Tensor:
        """``(n,)``, one number for each pair, sorted."""
        return self.pairs[:, 0] * self.num_nodes + self.pairs[:, 1]

    def are_pairs(self, nodes: Tensor, others: Tensor) -> Tensor:
        """Whether the others are ancestors of the nodes: ``(*) bool`` of two ``(*) int64``."""
        asked = nodes * self.num_nodes + others
        places = torch.searchsorted(self.keys, asked).clamp_max(len(self.keys) - 1)
        return self.keys[places] == asked

    def direct_edges(self) -> Tensor:
        """``(m, 2)`` pairs that no third node is between: what the closure came from."""
        longer = _join(self.pairs, self.pairs)
        keys = longer[:, 0] * self.num_nodes + longer[:, 1]
        return self.pairs[~torch.isin(self.keys, keys)]


class Reconstruction(NamedTuple):
    """How near the ancestors are: mean rank over all pairs, mean average precision over nodes."""

    mean_rank: float
    mean_average_precision: float


def load_mammals() -> Hierarchy:
    """The mammals of WordNet 3.0: 1,182 nodes and the 6,542 pairs of their closure."""
    names, pairs = _read("mammal_closure")
    return Hierarchy(names, closure(len(names), pairs))


def load_nouns() -> Hierarchy:
    """All nouns of WordNet 3.0: 82,115 nodes and the 743,241 pairs of their closure."""
    names, edges = _read("noun_hypernyms")
    return Hierarchy(names, closure(len(names), edges))


def _read(name: str) -> tuple[tuple[str, ...], Tensor]:
    file = resources.files("ooc_embed") / "data" / "wordnet" / f"{name}.tsv.gz"
    lines = gzip.decompress(file.read_bytes()).decode().splitlines()
    edges = [line.split("\t") for line in lines]
    names = tuple(sorted({name for edge in edges for name in edge}))
    ids = {name: node for node, name in enumerate(names)}
    return names, torch.tensor([(ids[child], ids[parent]) for child, parent in edges])


def closure(num_nodes: int, edges: Tensor) -> Tensor:
    """Who is above whom, over any number of edges.

    Args:
        num_nodes: ids are below it.
        edges: ``(m, 2) int64``, child and parent.

    Returns:
        ``(n, 2) int64``, sorted, without repetitions; in a circle, no node is its own ancestor.
    """

    def pack(pairs: Tensor) -> Tensor:
        pairs = pairs[pairs[:, 0] != pairs[:, 1]]
        keys: Tensor = (pairs[:, 0] * num_nodes + pairs[:, 1]).unique()
        return keys

    def unpack(keys: Tensor) -> Tensor:
        return torch.stack((keys // num_nodes, keys % num_nodes), dim=1)

    known = new = pack(edges)
    edges = unpack(known)
    while len(new):
        further = pack(_join(unpack(new), edges))
        new = further[~torch.isin(further, known)]
        known = torch.cat((known, new))
    return unpack(known.sort().values)


def _join(first: Tensor, second: Tensor) -> Tensor:
    """All ``(a, c)`` with ``(a, b)`` in the first and ``(b, c)`` in the second, which is sorted."""
    sources = second[:, 0].contiguous()
    middle = first[:, 1].contiguous()
    starts = torch.searchsorted(sources, middle)
    counts = torch.searchsorted(sources, middle, right=True) - starts
    owners, within = _ragged(counts)
    return torch.stack((first[owners, 0], second[starts[owners] + within, 1]), dim=1)


def _ragged(counts: Tensor) -> tuple[Tensor, Tensor]:
    """Of lists of these lengths behind one another: each item's list, and its place in it."""
    owners = torch.arange(len(counts)).repeat_interleave(counts)
    return owners, torch.arange(len(owners)) - (counts.cumsum(0) - counts)[owners]


class Negatives:
    """Draws, for a node, others that are not among its ancestors.

    Descendants of the node are drawn too, as those of Nickel and Kiela are: in the ranking of its
    ancestors they are wrong answers.

    Args:
        hierarchy: to draw from.
        by_frequency: in proportion to the number of descendants to the power of 0.75, inner nodes
            only; else all nodes alike.

    Raises:
        ValueError: a node has no others to draw.
    """

    def __init__(self, hierarchy: Hierarchy, by_frequency: bool = False) -> None:
        self.hierarchy = hierarchy
        counts = torch.bincount(hierarchy.pairs[:, 1], minlength=hierarchy.num_nodes).double()
        weights = counts**_DAMPENING if by_frequency else torch.ones_like(counts)
        self._cumulated = (weights.cumsum(0) / weights.sum()).numpy()
        nodes, ancestors = hierarchy.pairs.unbind(dim=1)
        drawn = weights > 0
        possible = drawn.sum() - drawn.long()
        possible.index_add_(0, nodes, -drawn[ancestors].long())
        if len(stuck := nodes[possible[nodes] < 1]):
            name = hierarchy.names[int(stuck[0])]
            raise ValueError(f"{name} has no negatives: all other nodes are its ancestors")

    def draw(self, nodes: Tensor, count: int, generator: np.random.Generator) -> Tensor:
        """``(n, count)`` negatives of ``(n,)`` nodes, each drawn alone: they may repeat."""
        owners = nodes.repeat_interleave(count)
        drawn = torch.empty_like(owners)
        left = torch.arange(len(owners))
        while len(left):
            uniform = generator.random(len(left))
            found = np.searchsorted(self._cumulated, uniform, side="right")
            drawn[left] = torch.from_numpy(found.clip(max=len(self._cumulated) - 1))
            own = owners[left]
            wrong = self.hierarchy.are_pairs(own, drawn[left]) | (own == drawn[left])
            left = left[wrong]
        return drawn.reshape(len(nodes), count)


def batches(
    hierarchy: Hierarchy, negatives: Negatives, size: int, count: int, seed: int, epoch: int
) -> Iterator[Tensor]:
    """Yield the pairs of an epoch, shuffled: ``(≤ size, 2 + count)`` of node, ancestor, negatives.

    They depend on seed and epoch alone.
    """
    generator = np.random.default_rng((seed, epoch))
    order = torch.from_numpy(generator.permutation(len(hierarchy.pairs)))
    for chosen in order.split(size):
        pairs = hierarchy.pairs[chosen]
        yield torch.cat((pairs, negatives.draw(pairs[:, 0], count, generator)), dim=1)


def loss(rows: Tensor, curvature: float = 1.0) -> Tensor:
    """Mean negative log of an ancestor's weight, exp(-distance), among itself and the negatives.

    Args:
        rows: ``(n, 2 + count, D)``, points of the nodes of a batch.
        curvature: of the ball.

    Source: Nickel and Kiela, "Poincaré Embeddings for Learning Hierarchical Representations"
    (2017), equation 6.
    """
    distances = poincare.distance(rows[:, :1], rows[:, 1:], curvature)
    ancestors = torch.zeros(len(rows), dtype=torch.int64, device=rows.device)
    return functional.cross_entropy(-distances, ancestors)


@torch.no_grad()
def evaluate(
    hierarchy: Hierarchy, points: Tensor, curvature: float = 1.0, nodes: Tensor | None = None
) -> Reconstruction:
    """Rank each ancestor of a node by its distance, among all nodes that are none.

    A node that is as near as the ancestor counts as nearer. The node itself is left out.

    Args:
        hierarchy: whose nodes the points are.
        points: ``(num_nodes, D)``.
        curvature: of the ball.
        nodes: rank the ancestors of these only, of all if None.

    Raises:
        ValueError: none of the nodes has an ancestor, there are not as many points as nodes, or one
            is not finite.

    Source: ``reconstruction.py`` of github.com/facebookresearch/poincare-embeddings; average
    precision is that of scikit-learn.
    """
    if len(points) != hierarchy.num_nodes or not points.isfinite().all():
        raise ValueError(
            f"{hierarchy.num_nodes:,} nodes need as many points, all finite; got {len(points):,}, "
            f"{int(points.isfinite().all(dim=-1).sum()):,} finite"
        )
    if nodes is None:
        nodes = torch.arange(hierarchy.num_nodes)
    nodes = nodes[hierarchy.starts[nodes + 1] > hierarchy.starts[nodes]]
    if not len(nodes):
        raise ValueError("none of these nodes has an ancestor: there is nothing to rank")
    ranks, precisions = 0.0, 0.0
    num_pairs = 0
    for block in nodes.split(max(1, _BLOCK_ELEMENTS // points.numel())):
        distances = poincare.distance(points[block, None], points, curvature)
        distances[torch.arange(len(block)), block] = torch.inf
        counts = hierarchy.starts[block + 1] - hierarchy.starts[block]
        owners, within = _ragged(counts)
        ancestors = hierarchy.pairs[hierarchy.starts[block][owners] + within, 1]
        right = distances[owners, ancestors, None]
        nearer = (distances[owners] <= right).sum(dim=1)
        distances[owners, ancestors] = torch.inf
        wrong = (distances[owners] <= right).sum(dim=1)
        ranks += (wrong + 1).sum().item()
        precision = (nearer - wrong).double() / nearer
        precisions += (precision / counts[owners]).sum().item()
        num_pairs += len(owners)
    return Reconstruction(ranks / num_pairs, precisions / len(nodes))
