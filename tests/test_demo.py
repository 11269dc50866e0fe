"""The demonstration's run: it learns, it resumes exactly, and its ranking is the right one."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path

import pytest
import torch

import ooc_embed
from ooc_embed import linkprediction
from ooc_embed.cli import main
from ooc_embed.errors import StoreError
from ooc_embed.linkprediction import ComplEx, Graph
from ooc_embed.training import Run, Settings

ENTITIES = 60
SETTINGS = Settings(dim=8, steps=12, batch=32, negatives=20, commit_every=5)


@pytest.fixture
def graph() -> Graph:
    """A ring on which each relation leads a fixed number of entities further, and some noise."""
    heads = torch.arange(ENTITIES)
    triples = torch.cat(
        [
            torch.stack((heads, torch.full_like(heads, kind), (heads + stride) % ENTITIES), dim=1)
            for kind, stride in enumerate((1, 7, 20))
        ]
    )
    noise = torch.randint(0, ENTITIES, (40, 3)) % torch.tensor([ENTITIES, 3, ENTITIES])
    triples = torch.cat((triples, noise)).unique(dim=0)
    triples = triples[torch.randperm(len(triples))]
    names = tuple(f"e{n}" for n in range(ENTITIES))
    return Graph(names, ("r0", "r1", "r2"), triples[:-30], triples[-30:-20], triples[-20:])


def contents(run: Run) -> dict[str, torch.Tensor]:
    table = {name: view[:] for name, view in run.entities.state.items()}
    moments = run.dense.state_dict()["state"][0]
    return {
        **table,
        "weight": run.entities.weight[:],
        "relations": run.model.relations.weight.detach(),
        **{f"dense {name}": value for name, value in moments.items()},
    }


def assert_same(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(got[name], value), name


@pytest.fixture
def uninterrupted(tmp_path: Path, graph: Graph) -> dict[str, torch.Tensor]:
    with Run.create(tmp_path / "uninterrupted", SETTINGS, graph) as run:
        run.train(SETTINGS.steps)
        return contents(run)


def finished(folder: Path, graph: Graph) -> dict[str, torch.Tensor]:
    with Run.resume(folder, graph) as run:
        run.train(SETTINGS.steps)
        return contents(run)


def test_loss_falls_and_the_right_answers_rise(tmp_path: Path, graph: Graph) -> None:
    losses: list[float] = []
    settings = Settings(dim=32, steps=300, batch=64, negatives=40)
    with Run.create(tmp_path / "run", settings, graph) as run:
        before = linkprediction.evaluate(run.model, graph, graph.train)
        run.train(settings.steps, lambda loss, rows: losses.append(loss))
        after = linkprediction.evaluate(run.model, graph, graph.train)
    assert sum(losses[-10:]) < 0.75 * sum(losses[:10])
    assert before.mrr < 0.2
    assert after.mrr > 0.8


def test_same_seed_gives_the_same_bits(
    tmp_path: Path, graph: Graph, uninterrupted: dict[str, torch.Tensor]
) -> None:
    with Run.create(tmp_path / "again", SETTINGS, graph, cache_bytes=10_000) as run:
        run.train(SETTINGS.steps)
        assert_same(contents(run), uninterrupted)


@pytest.mark.parametrize("step", [1, 5, 7])
def test_resumed_run_ends_where_an_uninterrupted_one_does(
    tmp_path: Path, graph: Graph, uninterrupted: dict[str, torch.Tensor], step: int
) -> None:
    with Run.create(tmp_path / "run", SETTINGS, graph) as run:
        run.train(step)
    assert_same(finished(tmp_path / "run", graph), uninterrupted)


def test_run_killed_before_its_first_commit_resumes_at_the_start(
    tmp_path: Path, graph: Graph, uninterrupted: dict[str, torch.Tensor]
) -> None:
    with Run.create(tmp_path / "run", SETTINGS, graph):
        shutil.copytree(tmp_path / "run", tmp_path / "killed")
    assert_same(finished(tmp_path / "killed", graph), uninterrupted)


def test_run_killed_between_its_two_writes_resumes_at_the_commit_before(
    tmp_path: Path,
    graph: Graph,
    uninterrupted: dict[str, torch.Tensor],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with Run.create(tmp_path / "run", SETTINGS, graph) as run:
        run.train(5)
        with monkeypatch.context() as patch:
            kill = KeyboardInterrupt("after the dense state, before the table's commit")
            patch.setattr(run.entities, "commit", lambda: (_ for _ in ()).throw(kill))
            with pytest.raises(KeyboardInterrupt, match="after the dense state"):
                run.train(8)
            shutil.copytree(tmp_path / "run", tmp_path / "killed")
    left = sorted(path.name for path in (tmp_path / "killed").glob("*.pt"))
    assert left == ["model-5.pt", "model-8.pt"]
    with Run.resume(tmp_path / "killed", graph) as run:
        assert run.step == 5
    assert_same(finished(tmp_path / "killed", graph), uninterrupted)


def test_ctrl_c_loses_no_step(
    tmp_path: Path, graph: Graph, uninterrupted: dict[str, torch.Tensor]
) -> None:
    steps = itertools.count(1)

    def interrupt(loss: float, rows: int) -> None:
        if next(steps) == 7:
            raise KeyboardInterrupt

    with (
        pytest.raises(KeyboardInterrupt),
        Run.create(tmp_path / "run", SETTINGS, graph) as run,
    ):
        run.train(SETTINGS.steps, interrupt)
    with Run.resume(tmp_path / "run", graph) as run:
        assert run.step == 7
    assert_same(finished(tmp_path / "run", graph), uninterrupted)


def test_only_the_newest_dense_state_is_kept(tmp_path: Path, graph: Graph) -> None:
    with Run.create(tmp_path / "run", SETTINGS, graph) as run:
        run.train(SETTINGS.steps)
    names = sorted(path.name for path in (tmp_path / "run").iterdir())
    assert names == ["entities.zarr", "model-12.pt", "settings.json"]


def test_missing_dense_state_is_an_error_that_names_it(tmp_path: Path, graph: Graph) -> None:
    with Run.create(tmp_path / "run", SETTINGS, graph) as run:
        run.train(3)
    (tmp_path / "run" / "model-3.pt").unlink()
    with pytest.raises(StoreError, match=r"step 3, and .*model-3\.pt is missing"):
        Run.resume(tmp_path / "run", graph)


def test_existing_run_is_replaced_only_when_asked(tmp_path: Path, graph: Graph) -> None:
    with Run.create(tmp_path / "run", SETTINGS, graph) as run:
        run.train(3)
    with pytest.raises(FileExistsError, match="--resume goes on with it"):
        Run.create(tmp_path / "run", SETTINGS, graph)
    with Run.create(tmp_path / "run", SETTINGS, graph, overwrite=True) as run:
        assert run.step == 0
    assert not list((tmp_path / "run").glob("model-3.pt"))


def test_padded_rows_are_drawn_as_wrong_answers_and_never_ranked(
    tmp_path: Path, graph: Graph
) -> None:
    settings = Settings(rows=5000, dim=8, steps=20, batch=32, negatives=200)
    with Run.create(tmp_path / "run", settings, graph) as run:
        run.train(settings.steps)
        assert run.entities.version[ENTITIES:].count_nonzero() > 1000
        padded = linkprediction.evaluate(run.model, graph, graph.test)
        assert padded == brute_force(run.model, graph, graph.test)


def test_epoch_has_each_triple_once_and_any_step_can_be_the_first(graph: Graph) -> None:
    size = linkprediction.steps_per_epoch(graph, 32)
    steps = list(itertools.islice(linkprediction.batches(graph, 32, 5, 1000, 1, 0), 2 * size))
    first, second = (torch.cat([t for t, _ in steps[a : a + size]]) for a in (0, size))
    for epoch in (first, second):
        assert torch.equal(epoch.unique(dim=0), graph.train.unique(dim=0))
    assert not torch.equal(first, second)
    for start in (1, size, size + 2):
        triples, wrong = next(linkprediction.batches(graph, 32, 5, 1000, 1, start))
        assert torch.equal(triples, steps[start][0])
        assert torch.equal(wrong, steps[start][1])


def brute_force(model: ComplEx, graph: Graph, triples: torch.Tensor) -> linkprediction.Ranking:
    """The ranking with complex numbers, one question and one candidate at a time."""

    def as_complex(rows: torch.Tensor) -> torch.Tensor:
        return torch.complex(*rows.double().chunk(2, dim=1))

    rows = as_complex(model.entities.weight[: graph.num_entities])
    relations = as_complex(model.relations.weight.detach())
    facts = {tuple(t) for split in (graph.train, graph.valid, graph.test) for t in split.tolist()}
    ranks = []
    for head, kind, tail in triples.tolist():
        scores = (rows[head] * relations[kind] * rows.conj()).sum(dim=1).real
        others = [e for e in range(len(rows)) if (head, kind, e) not in facts]
        ranks.append(1 + int((scores[others] >= scores[tail]).sum()))
        back = relations[kind + graph.num_relations]
        scores = (rows[tail] * back * rows.conj()).sum(dim=1).real
        others = [e for e in range(len(rows)) if (e, kind, tail) not in facts]
        ranks.append(1 + int((scores[others] >= scores[head]).sum()))
    mrr = sum(1 / rank for rank in ranks) / len(ranks)
    hits = sum(rank <= 10 for rank in ranks) / len(ranks)
    return linkprediction.Ranking(pytest.approx(mrr), pytest.approx(hits))


def test_ranking_in_blocks_equals_brute_force(
    tmp_path: Path, graph: Graph, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linkprediction, "_BLOCK_ROWS", 7)
    monkeypatch.setattr(linkprediction, "_BLOCK_QUERIES", 11)
    with Run.create(tmp_path / "run", SETTINGS, graph) as run:
        run.train(SETTINGS.steps)
        for triples in (graph.test, graph.train):
            got = linkprediction.evaluate(run.model, graph, triples)
            assert got == brute_force(run.model, graph, triples)


def test_wordnet_comes_with_the_package() -> None:
    graph = linkprediction.load_wordnet()
    assert (graph.num_entities, graph.num_relations) == (109_745, 14)
    assert [len(split) for split in (graph.train, graph.valid, graph.test)] == [133_089, 5000, 5000]
    in_train = torch.zeros(graph.num_entities, dtype=torch.bool)
    in_train[graph.train[:, [0, 2]].reshape(-1)] = True
    assert bool(in_train.all())
    head, relation, tail = graph.train[1].tolist()  # the file's second line
    names = (graph.entities[head], graph.relations[relation], graph.entities[tail])
    assert names == ("'hood.n.01", "hypernym", "vicinity.n.01")


def test_a_store_is_no_folder_for_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "t.zarr"
    ooc_embed.DiskEmbedding(4, 2, path=path).close()
    before = sorted(path.iterdir())
    assert main(["demo", "--path", str(path), "--steps", "1"]) == 2
    assert "is a store itself" in capsys.readouterr().err
    assert sorted(path.iterdir()) == before
