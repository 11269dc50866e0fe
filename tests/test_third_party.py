"""Models of other libraries with their table on disk: their own losses are those of the RAM run."""

from __future__ import annotations

import copy
import warnings
from itertools import islice
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from model_reference import CLOSE, LR, assert_same_losses, train
from torch import Tensor, nn

from ooc_embed import Adagrad, DiskEmbedding, SparseAdam, replace_embeddings


def import_extra(name: str) -> ModuleType:
    """Import a library of the extra `models`, which may warn, or skip the test."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`torch.jit.script` is deprec", DeprecationWarning)
        return pytest.importorskip(name, reason="needs the extra `models`")


# Node2Vec of torch_geometric


def random_walk(
    rowptr: Tensor, col: Tensor, start: Tensor, length: int, p: float, q: float
) -> Tensor:
    """Uniform walks, `(len(start), length + 1)`, asked for as `torch.ops.pyg.random_walk` is."""
    assert p == q == 1
    walk = [start]
    for _ in range(length):
        first, end = rowptr[walk[-1]], rowptr[walk[-1] + 1]
        walk.append(col[first + (torch.rand(len(start)) * (end - first)).long()])
    return torch.stack(walk, dim=1)


@pytest.fixture
def node2vec(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Node2Vec's module, given `random_walk`: pyg-lib, which has torch's own, is not on PyPI."""
    module = import_extra("torch_geometric.nn.models.node2vec")
    monkeypatch.setattr(module, "WITH_PYG_LIB", True)
    monkeypatch.setattr(torch.ops, "pyg", SimpleNamespace(random_walk=random_walk), raising=False)
    return module


@pytest.fixture
def walkers(node2vec: ModuleType, stores) -> tuple[Any, Any]:
    """Two equal models of a generated graph; the second one's embedding is on disk."""
    from torch_geometric.utils import barabasi_albert_graph

    graph = barabasi_albert_graph(num_nodes=2000, num_edges=3)
    ram = node2vec.Node2Vec(
        graph,
        embedding_dim=8,
        walk_length=10,
        context_size=5,
        walks_per_node=2,
        num_negative_samples=2,
        sparse=True,
    ).double()
    disk = copy.deepcopy(ram)
    disk.embedding = DiskEmbedding.from_embedding(
        disk.embedding, SparseAdam(lr=LR), path=stores.new_path(), cache_bytes=300_000
    )
    stores.tables.append(disk.embedding)
    return ram, disk


def train_node2vec(model: Any) -> Tensor:
    """The loop of the library's example, its loader included: the same seed, the same walks."""
    torch.manual_seed(7)
    batches = islice(model.loader(batch_size=16, shuffle=True), 20)
    optimizer = torch.optim.SparseAdam(list(model.parameters()), lr=LR)
    return train(model, batches, lambda model, walks: model.loss(*walks), [optimizer])


def test_node2vec_on_disk_has_the_losses_of_ram(walkers: tuple[Any, Any]) -> None:
    ram, disk = walkers
    expected = train_node2vec(ram)
    assert_same_losses(train_node2vec(disk), expected)
    assert disk.embedding.step == len(expected) == 20
    assert disk.embedding.stats().evictions > 0


def test_node2vec_gives_vectors_of_nodes_and_of_a_mask_of_nodes(walkers: tuple[Any, Any]) -> None:
    ram, disk = walkers
    for model in walkers:
        train_node2vec(model)
    nodes, mask = torch.tensor([5, 1999, 5]), torch.arange(2000) % 3 == 0
    torch.testing.assert_close(disk(nodes), ram(nodes).detach(), **CLOSE)
    torch.testing.assert_close(disk()[mask], ram()[mask].detach(), **CLOSE)


def test_node2vec_with_a_table_can_be_printed(walkers: tuple[Any, Any]) -> None:
    assert [str(model) for model in walkers] == ["Node2Vec(2000, 8)"] * 2


# PyKEEN, with the graph of nations that the package carries


@pytest.fixture
def pykeen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> SimpleNamespace:
    """Parts of PyKEEN, which makes a folder for downloads when it is imported."""
    monkeypatch.setenv("PYSTOW_HOME", str(tmp_path / "downloads"))
    names = ("datasets", "evaluation", "models", "nn", "training")
    parts = {name: import_extra(f"pykeen.{name}") for name in names}
    return SimpleNamespace(graph=parts["datasets"].Nations(), **parts)


def fit(pykeen: SimpleNamespace, model: Any, optimizer: torch.optim.Optimizer, **options) -> Tensor:
    """PyKEEN's own loop with its negative sampler; the loss of each batch."""
    losses = []

    class Keep(pykeen.training.TrainingCallback):
        def on_batch(self, epoch: int, batch: Any, batch_loss: float, **kwargs: Any) -> None:
            losses.append(batch_loss)

    torch.manual_seed(3)
    triples = pykeen.graph.training
    loop = pykeen.training.SLCWATrainingLoop(
        model=model,
        triples_factory=triples,
        optimizer=optimizer,
        automatic_memory_optimization=False,  # it tries batches by a backward without a step
    )
    with warnings.catch_warnings():  # of an argument that PyKEEN gives itself
        warnings.filterwarnings("ignore", "Training instances are always", DeprecationWarning)
        loop.train(
            triples,
            num_epochs=3,
            batch_size=256,
            use_tqdm=False,
            pin_memory=False,
            callbacks=Keep(),
            **options,
        )
    return torch.tensor(losses, dtype=torch.float64)


@pytest.mark.parametrize("interaction", ["complex", "distmult", "transe"])
def test_a_pykeen_model_whose_embeddings_are_replaced_has_the_losses_of_ram(
    pykeen: SimpleNamespace, stores, tmp_path: Path, interaction: str
) -> None:
    number = torch.cdouble if interaction == "complex" else torch.float64
    ram = pykeen.models.ERModel(
        triples_factory=pykeen.graph.training,
        interaction=interaction,
        interaction_kwargs={"p": 2} if interaction == "transe" else None,
        entity_representations_kwargs={"shape": 6, "dtype": number},
        relation_representations_kwargs={"shape": 6, "dtype": number},
        random_seed=1,
    )
    disk = copy.deepcopy(ram)
    done = replace_embeddings(disk, tmp_path, min_rows=10, optimizer=Adagrad(lr=LR))
    assert [item.num_embeddings for item in done] == [14, 55]
    for part in (*disk.entity_representations, *disk.relation_representations):
        stores.tables.append(part._embeddings)
        stores.paths.append(part._embeddings.path)
    # PyKEEN's gradients are dense, and of dense rows without gradient Adagrad moves none.
    expected, got = (
        fit(pykeen, model, torch.optim.Adagrad(model.parameters(), lr=LR), continue_training=True)
        for model in (ram, disk)
    )
    assert_same_losses(got, expected)
    triples = pykeen.graph.testing.mapped_triples
    torch.testing.assert_close(disk.score_hrt(triples), ram.score_hrt(triples), **CLOSE)


def test_a_pykeen_representation_over_a_table_trains_and_is_ranked_as_in_ram(
    pykeen: SimpleNamespace, stores
) -> None:
    class DiskRepresentation(pykeen.nn.Representation):
        def __init__(self, max_id: int, shape: int, **options: Any) -> None:
            super().__init__(max_id=max_id, shape=shape)
            self.table = DiskEmbedding(max_id, shape, **options)

        def _plain_forward(self, indices: Tensor | None = None) -> Tensor:
            return self.table(torch.arange(self.max_id) if indices is None else indices)

    def make(kind: Any, entities: dict, relations: dict) -> Any:
        return pykeen.models.ERModel(
            triples_factory=pykeen.graph.training,
            interaction="distmult",
            entity_representations=kind,
            entity_representations_kwargs={"shape": 6, **entities},
            relation_representations=kind,
            relation_representations_kwargs={"shape": 6, **relations},
            random_seed=1,
        )

    def given(rows: Tensor) -> dict[str, Any]:
        initializer = pykeen.nn.init.PretrainedInitializer(rows)
        return {"initializer": initializer, "dtype": torch.float64}

    def on_disk(rows: Tensor) -> dict[str, Any]:
        options = {"optimizer": SparseAdam(lr=LR), "path": stores.new_path()}
        return {"init": rows, "dtype": torch.float64, **options}

    both = [torch.randn(count, 6, dtype=torch.float64) for count in (14, 55)]
    ram = make(pykeen.nn.Embedding, *map(given, both))
    for part in ram.modules():
        if isinstance(part, nn.Embedding):
            part.sparse = True  # what SparseAdam asks for
            part.reset_parameters = lambda: None  # draws numbers, which are then overwritten
    disk = make(DiskRepresentation, *map(on_disk, both))
    stores.tables += [part for part in disk.modules() if isinstance(part, DiskEmbedding)]
    expected = fit(pykeen, ram, torch.optim.SparseAdam(ram.parameters(), lr=LR))
    got = fit(pykeen, disk, torch.optim.Adam(disk.parameters()))
    assert_same_losses(got, expected)

    ranks = [
        pykeen.evaluation.RankBasedEvaluator()
        .evaluate(model, pykeen.graph.testing.mapped_triples, use_tqdm=False, batch_size=64)
        .to_flat_dict()
        for model in (ram, disk)
    ]
    assert ranks[0] == pytest.approx(ranks[1], nan_ok=True)
