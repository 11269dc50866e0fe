"""The command line: what it prints, and the status that it exits with."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest
import torch
import zarr

import ooc_embed
from ooc_embed import bench, cli, linkprediction, report

DEMO = ["--steps", "6", "--batch", "16", "--negatives", "8", "--dim", "4", "--commit-every", "4"]


@pytest.fixture
def store(store_path: Path) -> Path:
    """A closed store whose rows 1 and 3 were trained."""
    with ooc_embed.DiskEmbedding(10, 2, path=store_path) as emb:
        emb(torch.tensor([1, 3])).sum().backward()
    return store_path


@pytest.fixture
def small_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    triples = torch.randint(0, 2, (60, 3)) + torch.arange(60).remainder(28)[:, None] * torch.tensor(
        [1, 0, 1]
    )
    entities, relations = tuple(f"e{n}" for n in range(30)), ("r0", "r1")
    splits = triples[:40], triples[40:50], triples[50:]
    graph = linkprediction.Graph(entities, relations, *splits)
    monkeypatch.setattr(linkprediction, "load_wordnet", lambda: graph)


def test_info_describes_a_store(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["info", str(store)]) == 0
    out = capsys.readouterr().out
    assert str(store) in out
    assert "SparseAdam" in out


def test_info_goes_to_where_bars_cannot_be_written(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(written, encoding="ascii"))
    assert cli.main(["info", str(store)]) == 0
    sys.stdout.flush()
    assert b"rows written   20% (2 rows)" in written.getvalue()


def test_verify_says_ok(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["verify", str(store)]) == 0
    assert capsys.readouterr().out == f"{store}: ok\n"


def test_verify_prints_problems_and_exits_with_1(
    store: Path, stores, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["flush", str(store)]) == 0
    stores.expect_damage(store)
    chunk = store / "table" / "c.0.0"
    chunk.write_bytes(bytes([chunk.read_bytes()[0] ^ 1]) + chunk.read_bytes()[1:])
    assert cli.main(["verify", str(store)]) == 1
    assert "c.0.0" in capsys.readouterr().out


def test_salvage_of_a_sound_store_is_status_0_and_an_equal_copy(
    store: Path, stores, capsys: pytest.CaptureFixture[str]
) -> None:
    out = stores.new_path()
    assert cli.main(["verify", str(store), "--salvage", str(out)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"{store}: ok",
        f"{out} has 10 of 10 rows, as of commit 1 (step 1)",
        f"go on with ooc_embed.DiskEmbedding.open({str(out)!r})",
    ]
    with (
        ooc_embed.DiskEmbedding.open(store, "r") as emb,
        ooc_embed.DiskEmbedding.open(out) as copy,
    ):
        assert torch.equal(copy.weight[:], emb.weight[:])
        assert copy.step == emb.step == 1


def test_salvage_prints_problems_and_what_is_lost_and_exits_with_1(
    store: Path, stores, capsys: pytest.CaptureFixture[str]
) -> None:
    out = stores.new_path()
    assert cli.main(["flush", str(store)]) == 0
    stores.expect_damage(store)
    (store / "table" / "c.0.0").unlink()
    assert cli.main(["verify", str(store), "--salvage", str(out)]) == 1
    problem, *lines = capsys.readouterr().out.splitlines()
    assert "c.0.0 is missing" in problem
    assert "(rows 0 to 9)" in problem
    assert lines == [
        f"{out} has 0 of 10 rows, as of commit 1 (step 1)",
        "lost rows, which begin anew (10): 0 to 9",
        f"go on with ooc_embed.DiskEmbedding.open({str(out)!r})",
    ]


def test_salvage_to_a_place_that_is_no_good_is_status_2_before_anything_is_read(
    store: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for out, message in (
        (store, "choose a path beside"),
        (store / "out.zarr", "choose a path beside"),
        (tmp_path, "choose another path"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(report, "verify", lambda _: pytest.fail("was read"))
            assert cli.main(["verify", str(store), "--salvage", str(out)]) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.startswith("ooc-embed verify: ")
        assert message in captured.err


def test_salvage_of_what_has_no_manifest_is_status_2(
    store: Path, stores, capsys: pytest.CaptureFixture[str]
) -> None:
    out = stores.new_path()
    (store / "zarr.json").write_text("{}")
    stores.expect_damage(store)
    assert cli.main(["verify", str(store), "--salvage", str(out)]) == 2
    captured = capsys.readouterr()
    assert "holds no ooc_embed manifest" in captured.out
    assert "holds no ooc_embed manifest" in captured.err
    assert not out.exists()


def test_flush_brings_rows_into_the_zarr_array(store: Path) -> None:
    with ooc_embed.DiskEmbedding.open(store, "r") as emb:
        weight = emb.weight[[1, 3]].numpy()
    assert cli.main(["flush", str(store)]) == 0
    table = zarr.open_group(store, mode="r")["table"]
    assert (table.oindex[[1, 3], :2] == weight).all()


@pytest.mark.parametrize("command", ["info", "flush"])
def test_missing_store_is_one_line_and_status_2(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([command, str(tmp_path / "nothing.zarr")]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"ooc-embed {command}: ")
    assert captured.err.count("\n") == 1
    assert "nothing.zarr" in captured.err


def test_flush_of_a_store_that_is_open_elsewhere_is_status_2(
    store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with ooc_embed.DiskEmbedding.open(store):
        assert cli.main(["flush", str(store)]) == 2
    assert capsys.readouterr().err.startswith("ooc-embed flush: ")


def test_unknown_command_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["train"])
    assert stop.value.code == 2
    assert "invalid choice: 'train'" in capsys.readouterr().err


def test_version_is_the_package_s(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out == f"ooc-embed {ooc_embed.__version__}\n"


def test_bench_gets_its_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    got = []
    monkeypatch.setattr(bench, "main", lambda args: got.append(args) or 3)
    assert cli.main(["bench", "hot", "--rows", "500"]) == 3
    assert (got[0].measurement, got[0].rows) == ("hot", 500)


@pytest.mark.usefixtures("small_graph")
def test_demo_trains_ranks_and_says_how_to_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "a run"
    assert cli.main(["demo", "--path", str(folder), *DEMO]) == 0
    out = capsys.readouterr().out
    assert "6 steps in" in out
    assert "filtered MRR" in out
    assert f"ooc-embed demo --path '{folder}' --resume" in out

    assert cli.main(["demo", "--path", str(folder), "--resume"]) == 0
    again = capsys.readouterr().out
    assert "at step 6" in again
    ranking = next(line.split(": ")[1] for line in out.splitlines() if "MRR" in line)
    assert ranking in again


@pytest.mark.usefixtures("small_graph")
def test_demo_stopped_by_ctrl_c_goes_on_later(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["demo", "--path", str(tmp_path / "run")]
    with monkeypatch.context() as patch:
        forward = linkprediction.ComplEx.forward

        def interrupted(self, *args):
            if self.entities.step == 3:
                raise KeyboardInterrupt
            return forward(self, *args)

        patch.setattr(linkprediction.ComplEx, "forward", interrupted)
        assert cli.main([*command, *DEMO]) == 130
    assert "stopped at step 3" in capsys.readouterr().out
    assert cli.main([*command, "--resume"]) == 0
    assert "3 steps in" in capsys.readouterr().out


@pytest.mark.usefixtures("small_graph")
def test_demo_never_mixes_two_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["demo", "--path", str(tmp_path / "run")]
    assert cli.main([*command, "--resume"]) == 2
    assert "there is no run in" in capsys.readouterr().err
    assert cli.main([*command, *DEMO]) == 0
    assert cli.main([*command, *DEMO]) == 2
    assert "--resume goes on with it" in capsys.readouterr().err
    assert cli.main([*command, "--resume", "--dim", "6"]) == 2
    assert "has dim 4, it cannot go on with 6" in capsys.readouterr().err
    assert cli.main([*command, "--resume", "--dim", "4"]) == 0


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--dim", "5", "'5' is not a multiple of 2 from 2 up"),
        ("--steps", "0", "'0' is not a whole number from 1 up"),
        ("--rows", "many", "'many' is not a whole number from 0 up"),
    ],
)
def test_demo_names_a_wrong_option(
    option: str, value: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        cli.main(["demo", option, value])
    assert message in capsys.readouterr().err
