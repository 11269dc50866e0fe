"""Link prediction: the WordNet graph, the ComplEx model, its batches and its filtered ranking.
Knows the table by its public interface only; does not know checkpoints or the command line.
"""

from __future__ import annotations

import gzip
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from .archive_embedding import ArchiveEmbedding
from .embedding import DiskEmbedding

# Rows of the table and queries that are scored at once in evaluation: 32 MiB of scores.
_BLOCK_ROWS = 8192
_BLOCK_QUERIES = 1024


@dataclass(frozen=True)
class Graph:
    """A knowledge graph as ``(n, 3) int64`` triples of head, relation and tail.

    Attributes:
        entities: names of heads and tails, by id.
        relations: names of relations, by id.
    """

    entities: tuple[str, ...]
    relations: tuple[str, ...]
    train: Tensor
    valid: Tensor
    test: Tensor

    @property
    def num_entities(self) -> int:
        return len(self.entities)

    @property
    def num_relations(self) -> int:
        return len(self.relations)


class Ranking(NamedTuple):
    """Filtered ranks in both directions: their mean reciprocal, and the part up to ten."""

    mrr: float
    hits_at_10: float


def load_wordnet() -> Graph:
    """The WordNet 3.0 graph that comes with the package: 109,745 synsets and 14 relations."""
    folder = resources.files("ooc_embed") / "data" / "wordnet"
    splits = []
    for name in ("train", "valid", "test"):
        text = gzip.decompress((folder / f"{name}.tsv.gz").read_bytes()).decode()
        splits.append([line.split("\t") for line in text.splitlines()])
    heads, kinds, tails = zip(*itertools.chain(*splits), strict=True)
    entities, relations = tuple(sorted({*heads, *tails})), tuple(sorted(set(kinds)))
    nodes = {name: node for node, name in enumerate(entities)}
    rows = {name: row for row, name in enumerate(relations)}
    train, valid, test = (
        torch.tensor([(nodes[h], rows[r], nodes[t]) for h, r, t in split]) for split in splits
    )
    return Graph(entities, relations, train, valid, test)


def steps_per_epoch(graph: Graph, size: int) -> int:
    return -(-len(graph.train) // size)


def batches(
    graph: Graph, size: int, num_negatives: int, num_rows: int, seed: int, first_step: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield ``(≤ size, 3)`` triples and the ``(num_negatives,)`` wrong answers that they share.

    Each epoch shuffles the triples anew; wrong answers are uniform in ``num_rows``. Both depend on
    the seed and the step alone, so a run that goes on at ``first_step`` sees what it would have
    seen.
    """
    epoch, position = divmod(first_step, steps_per_epoch(graph, size))
    step = first_step
    while True:
        order = np.random.default_rng((seed, epoch)).permutation(len(graph.train))
        for start in range(position * size, len(order), size):
            wrong = np.random.default_rng((seed, step, 1)).integers(num_rows, size=num_negatives)
            triples = graph.train[torch.from_numpy(order[start : start + size])]
            yield triples, torch.from_numpy(wrong)
            step += 1
        epoch, position = epoch + 1, 0


class ComplEx(nn.Module):
    """Scores a triple by Re⟨h, r, conj(t)⟩ (Trouillon et al. 2016), with the N3 penalty and the
    reciprocal relations of Lacroix et al. 2018, which make "which head?" another "which tail?".

    Args:
        entities: the table, or to evaluate an archive of it; a row holds the real parts, then the
            imaginary parts.
        num_relations: of the graph; each has a second row for its reciprocal.
        penalty: weight of the cubed moduli of the batch's rows.
        std, seed: of the initial relations.
    """

    def __init__(
        self,
        entities: DiskEmbedding | ArchiveEmbedding,
        num_relations: int,
        penalty: float,
        std: float,
        seed: int,
    ) -> None:
        super().__init__()
        self.entities = entities
        self.relations = nn.Embedding(2 * num_relations, entities.embedding_dim)
        generator = torch.Generator().manual_seed(seed)
        nn.init.normal_(self.relations.weight, std=std, generator=generator)
        self.num_relations = num_relations
        self.penalty = penalty

    def forward(self, triples: Tensor, negatives: Tensor) -> Tensor:
        """The loss of ``(n, 3)`` triples against ``(m,)`` wrong answers, in both directions."""
        kinds = triples[:, 1]
        heads, tails = self.entities(triples[:, 0]), self.entities(triples[:, 2])
        wrong = self.entities(negatives)
        forth, back = self.relations(kinds), self.relations(kinds + self.num_relations)
        loss = _cross_entropy(_multiply(heads, forth), tails, wrong)
        loss = (loss + _cross_entropy(_multiply(tails, back), heads, wrong)) / 2
        cubes = _cubed_moduli(heads) + _cubed_moduli(tails)
        cubes = cubes + (_cubed_moduli(forth) + _cubed_moduli(back)) / 2
        return loss + self.penalty * cubes / len(triples)

    def queries(self, questions: Tensor) -> Tensor:
        """``(n, D)`` vectors whose product with an entity's row is its score as the answer.

        Args:
            questions: ``(n, 2)`` known end and row of ``relations``.
        """
        return _multiply(self.entities(questions[:, 0]), self.relations(questions[:, 1]))


def _multiply(rows: Tensor, relations: Tensor) -> Tensor:
    """The complex product, elementwise; ``(n, D)`` with real parts first."""
    a, b = rows.chunk(2, dim=1)
    c, d = relations.chunk(2, dim=1)
    return torch.cat((a * c - b * d, a * d + b * c), dim=1)


def _cross_entropy(queries: Tensor, answers: Tensor, wrong: Tensor) -> Tensor:
    """Mean negative log of an answer's softmax weight among itself and the wrong answers."""
    right = (queries * answers).sum(dim=1)
    return functional.softplus(torch.logsumexp(queries @ wrong.T, dim=1) - right).mean()


def _cubed_moduli(rows: Tensor) -> Tensor:
    real, imaginary = rows.chunk(2, dim=1)
    return (real.square() + imaginary.square()).pow(1.5).sum()


@torch.no_grad()
def evaluate(model: ComplEx, graph: Graph, triples: Tensor) -> Ranking:
    """Rank the right answer to each question among all entities but the other right ones.

    What is right is what any split says. An entity that scores the same as the right answer counts
    as better. The table is read once, in blocks, so memory depends on the number of questions only.
    """
    questions, answers = _questions(triples, graph)
    vectors = model.queries(questions)
    right = (vectors * model.entities(answers)).sum(dim=1)
    askers, known = _right_answers(questions, graph)
    ranks = torch.ones(len(questions), dtype=torch.float64)
    for start, rows in model.entities.blocks(_BLOCK_ROWS):
        if start >= graph.num_entities:
            break
        rows = rows[: graph.num_entities - start]
        low, high = torch.searchsorted(known, torch.tensor([start, start + len(rows)])).tolist()
        for first in range(0, len(questions), _BLOCK_QUERIES):
            chunk = slice(first, first + _BLOCK_QUERIES)
            scores = vectors[chunk] @ rows.T
            asker = askers[low:high] - first
            here = (asker >= 0) & (asker < len(scores))
            scores[asker[here], known[low:high][here] - start] = -torch.inf
            # In place and in floats, which sum faster than booleans.
            ranks[chunk] += scores.ge_(right[chunk, None]).sum(dim=1)
    return Ranking((1 / ranks).mean().item(), (ranks <= 10).double().mean().item())


def _questions(triples: Tensor, graph: Graph) -> tuple[Tensor, Tensor]:
    """Both questions that each triple answers.

    Returns:
        ``(2n, 2)`` known end and relation row, which is the reciprocal's for "which head?"; then
        the ``(2n,)`` answers.
    """
    heads, kinds, tails = triples.unbind(dim=1)
    forth = torch.stack((heads, kinds), dim=1)
    back = torch.stack((tails, kinds + graph.num_relations), dim=1)
    return torch.cat((forth, back)), torch.cat((tails, heads))


def _right_answers(questions: Tensor, graph: Graph) -> tuple[Tensor, Tensor]:
    """All right answers to the questions.

    Returns:
        ``(k,)`` indices of questions and ``(k,)`` entities, sorted by entity.
    """

    def key(questions: Tensor) -> Tensor:
        return questions[:, 0] * (2 * graph.num_relations) + questions[:, 1]

    facts, answers = _questions(torch.cat((graph.train, graph.valid, graph.test)), graph)
    keys, order = key(facts).sort()
    asked = key(questions)
    starts = torch.searchsorted(keys, asked)
    counts = torch.searchsorted(keys, asked, right=True) - starts
    askers = torch.arange(len(questions)).repeat_interleave(counts)
    within = torch.arange(len(askers)) - (counts.cumsum(0) - counts)[askers]
    known = answers[order[starts[askers] + within]]
    known, by_entity = known.sort()
    return askers[by_entity], known
