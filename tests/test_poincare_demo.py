"""The demonstration in the Poincaré ball: it learns, stays in the ball, prints and draws."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

import ooc_embed
from ooc_embed import cli, drawing, hierarchy, poincare, poincare_demo
from ooc_embed.hierarchy import Hierarchy
from ooc_embed.poincare_demo import Settings

SETTINGS = Settings(epochs=25, batch=10, negatives=10, lr=3.0, burn_in=5)


@pytest.fixture
def tree() -> Hierarchy:
    """A root and three levels of three, 40 nodes."""
    edges = torch.tensor([(node, (node - 1) // 3) for node in range(1, 40)])
    names = ("dog.n.01", *(f"node_{node}.n.01" for node in range(1, 40)))
    return Hierarchy(names, hierarchy.closure(40, edges))


@pytest.fixture
def small(tree: Hierarchy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hierarchy, "load_mammals", lambda: tree)
    monkeypatch.setattr(poincare_demo, "MAMMALS", SETTINGS)


def test_loss_falls_and_ancestors_come_near(tmp_path: Path, tree: Hierarchy) -> None:
    losses: list[float] = []
    with poincare_demo.create(tree, SETTINGS, tmp_path / "run") as table:
        before = hierarchy.evaluate(tree, table.weight[:])
        poincare_demo.train(table, tree, SETTINGS, lambda epoch, loss, rows: losses.append(loss))
        after = hierarchy.evaluate(tree, table.weight[:])
    assert sum(losses[-10:]) < 0.3 * sum(losses[:10])
    assert before.mean_average_precision < 0.3
    assert after.mean_average_precision > 0.95
    assert after.mean_rank < 1.1


def test_every_stored_row_is_in_the_ball(tmp_path: Path, tree: Hierarchy) -> None:
    fast = Settings(epochs=20, batch=10, negatives=10, lr=100.0, burn_in=0)
    with poincare_demo.create(tree, fast, tmp_path / "run") as table:
        poincare_demo.train(table, tree, fast)
        path = table.path
    with ooc_embed.DiskEmbedding.open(path, mode="r") as table:
        norms = torch.linalg.vector_norm(table.weight[:], dim=1)
        assert bool((table.version[:] > 0).all())
    largest = poincare.largest_norm(torch.float64, 1.0)
    assert norms.max().item() == pytest.approx(largest), "the run did not come to the boundary"
    assert bool((norms <= largest * (1 + 1e-12)).all())


def test_same_seed_gives_the_same_bits(tmp_path: Path, tree: Hierarchy) -> None:
    points = []
    for name, seed in (("one", 3), ("again", 3), ("other", 4)):
        settings = Settings(epochs=3, seed=seed, batch=10, negatives=10)
        with poincare_demo.create(tree, settings, tmp_path / name) as table:
            poincare_demo.train(table, tree, settings)
            points.append(table.weight[:])
    assert torch.equal(points[0], points[1])
    assert not torch.equal(points[0], points[2])


def test_mammals_are_learned_in_a_few_epochs(tmp_path: Path) -> None:
    mammals = hierarchy.load_mammals()
    settings = Settings(epochs=8, burn_in=3, batch=200, lr=80.0)
    with poincare_demo.create(mammals, settings, tmp_path / "run") as table:
        poincare_demo.train(table, mammals, settings)
        result = hierarchy.evaluate(mammals, table.weight[:])
    assert result.mean_average_precision > 0.65
    assert result.mean_rank < 60


@pytest.mark.usefixtures("small")
def test_command_prints_its_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    assert cli.main(["demo", "--poincare", "--path", str(folder), "--epochs", "2"]) == 0
    out = capsys.readouterr().out
    assert "mammals of WordNet: 40 nodes, 102 pairs" in out
    assert str(folder / "nodes.zarr") in out
    assert "22 steps in" in out
    assert "mean rank" in out
    assert "MAP" in out

    assert cli.main(["demo", "--poincare", "--path", str(folder)]) == 2
    assert "--overwrite replaces it" in capsys.readouterr().err
    again = ["--poincare", "--path", str(folder), "--overwrite", "--epochs", "1", "--dim", "3"]
    again += ["--lr", "0.5", "--burn-in", "1"]
    assert cli.main(["demo", *again]) == 0
    assert "3 dimensions" in capsys.readouterr().out
    with ooc_embed.DiskEmbedding.open(folder / "nodes.zarr", mode="r") as table:
        assert table.optimizer.param_groups[0]["lr"] == 0.05


@pytest.mark.usefixtures("small")
def test_run_in_ram_prints_the_same_figures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("geoopt", reason="geoopt is what the run in RAM is stepped by")
    command = ["demo", "--poincare", "--epochs", "6", "--every", "2"]
    figures = []
    for options in (["--path", str(tmp_path / "run")], ["--ram"]):
        assert cli.main([*command, *options]) == 0
        lines = capsys.readouterr().out.splitlines()
        found = [line.split("s: ")[1] for line in lines if "reconstruction" in line]
        assert [line.split(",")[0] for line in lines if "after" in line] == [
            f"after epoch {epoch}" for epoch in (2, 4, 6)
        ]
        figures.append(found)
    assert figures[0] == figures[1]
    assert len(set(figures[0])) == 3


@pytest.mark.usefixtures("small")
def test_run_in_ram_without_geoopt_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "geoopt", None)
    assert cli.main(["demo", "--poincare", "--ram"]) == 2
    assert "pip install geoopt" in capsys.readouterr().err


@pytest.mark.usefixtures("small")
def test_ctrl_c_says_where_the_table_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    loss = hierarchy.loss
    seen: list[int] = []

    def interrupted(rows: torch.Tensor) -> torch.Tensor:
        seen.append(1)
        if len(seen) == 4:
            raise KeyboardInterrupt
        return loss(rows)

    monkeypatch.setattr(hierarchy, "loss", interrupted)
    assert cli.main(["demo", "--poincare", "--path", str(tmp_path)]) == 130
    assert "stopped at step 3" in capsys.readouterr().out
    with ooc_embed.DiskEmbedding.open(tmp_path / "nodes.zarr", mode="r") as table:
        assert table.step == 3


def test_large_tree_is_measured_on_a_sample(
    tmp_path: Path,
    tree: Hierarchy,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(poincare_demo, "_SAMPLE", 3)
    with poincare_demo.create(tree, SETTINGS, tmp_path / "run") as table:
        poincare_demo.conclude(table, tree, 0)
    assert "reconstruction, 3 nodes" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--nouns"], "--nouns: needs --poincare"),
        (["--epochs", "3"], "--epochs: needs --poincare"),
        (["--png", "disk.png"], "--png: needs --poincare"),
        (["--ram"], "--ram: needs --poincare"),
        (["--lr", "3"], "--lr: needs --poincare"),
        (["--burn-in", "3"], "--burn-in: needs --poincare"),
        (["--poincare", "--lr", "-3"], "'-3' is no number above 0"),
        (["--poincare", "--lr", "nan"], "'nan' is no number above 0"),
        (["--every", "3"], "--every: needs --poincare"),
        (["--poincare", "--ram", "--path", "run"], "--path: not allowed with --ram"),
        (["--poincare", "--resume"], "--resume: not allowed with --poincare"),
        (["--poincare", "--commit-every", "3"], "--commit-every: not allowed with --poincare"),
        (["--poincare", "--cache-bytes", "1M"], "--cache-bytes: not allowed with --poincare"),
        (["--poincare", "--png", "disk.png", "--dim", "3"], "--png: draws rows of 2 numbers"),
        (["--poincare", "--epochs", "0"], "'0' is not a whole number from 1 up"),
    ],
)
def test_wrong_options_are_refused(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        cli.main(["demo", *options])
    assert message in capsys.readouterr().err


def test_store_is_no_folder_for_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "t.zarr"
    ooc_embed.DiskEmbedding(4, 2, path=path).close()
    assert cli.main(["demo", "--poincare", "--path", str(path), "--overwrite"]) == 2
    assert "is a store itself" in capsys.readouterr().err


def test_picture_without_matplotlib_is_refused_before_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drawing, "find_spec", lambda name: None)
    folder = tmp_path / "run"
    command = ["demo", "--poincare", "--path", str(folder), "--png", str(tmp_path / "a.png")]
    assert cli.main(command) == 2
    assert "pip install 'ooc_embed[plot]'" in capsys.readouterr().err
    assert not folder.exists()


@pytest.mark.usefixtures("small")
def test_picture_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "disk.png"
    command = ["demo", "--poincare", "--path", str(tmp_path / "run"), "--png"]
    assert cli.main([*command, str(tmp_path / "missing" / "disk.png")]) == 2
    assert "there is no folder" in capsys.readouterr().err
    assert cli.main([*command, str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert f"picture: {picture}" in capsys.readouterr().out
