"""What measurements stand beside is correct, and every measurement runs; asserts no timing."""

import argparse
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import ooc_embed
from ooc_embed import bench, bench_hot, linkprediction, memory_limit
from ooc_embed.bench_all import Run, run_all
from ooc_embed.direct_queue import READ, WRITE, DirectQueue
from ooc_embed.disk_rates import (
    mixed_rate,
    random_read_rate,
    random_write_rate,
    sequential_read_rate,
    write_sequentially,
)
from ooc_embed.references import FbgemmTable, MappedTable, MemmapTable, RamTable, train_step
from ooc_embed.workloads import Drawn, RepeatedRows, batches, scattered_rows

linux = pytest.mark.skipif(sys.platform != "linux", reason="Linux AIO and O_DIRECT")


def run_bench(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    return bench.main(parser.parse_args(arguments))


def figures_of(path: Path) -> list[dict]:
    """The figures in a JSON file, each of which has a median between its smallest and largest."""
    figures = json.loads(path.read_text())["figures"]
    assert all(figure["min"] <= figure["median"] <= figure["max"] for figure in figures)
    return figures


def test_all_tables_that_are_compared_train_alike(tmp_path: Path) -> None:
    weight = torch.randn(500, 8, generator=torch.Generator().manual_seed(0))
    ram = RamTable(weight.clone(), lr=0.01)
    memmap = MemmapTable.create(tmp_path, weight.numpy(), lr=0.01)
    mapped = MappedTable.create(tmp_path / "records", weight.numpy(), lr=0.01)
    drawn = batches("zipf", 500, 64, seed=1)
    with ooc_embed.DiskEmbedding(
        500, 8, path=tmp_path / "t.zarr", init=weight, optimizer=ooc_embed.SparseAdam(lr=0.01)
    ) as table:
        for _ in range(20):
            ids, target = next(drawn), torch.randn(64, 8)
            ram.step(ids, target)
            memmap.step(ids, target)
            mapped.step(ids, target)
            train_step(table, ids, target)
        state = ram.optimizer.state[ram.embedding.weight]
        expected = [ram.embedding.weight.detach(), state["exp_avg"], state["exp_avg_sq"]]
        in_memmap = [memmap.weight, memmap.exp_avg, memmap.exp_avg_sq]
        in_table = [table.weight, table.state["exp_avg"], table.state["exp_avg_sq"]]
        mapped.flush()
        mapped.close()
        in_file = np.fromfile(tmp_path / "records", np.float32).reshape(500, 25)
        for field, right in enumerate(expected):
            torch.testing.assert_close(torch.from_numpy(np.array(in_memmap[field])), right)
            in_span = torch.from_numpy(in_file[:, 8 * field : 8 * field + 8].copy())
            torch.testing.assert_close(in_span, right)
            torch.testing.assert_close(in_table[field][0:500], right)


def test_fbgemm_steps_by_rowwise_adagrad() -> None:
    weight = torch.randn(50, 8, generator=torch.Generator().manual_seed(0))
    try:
        table = FbgemmTable(weight, lr=0.1)
    except ImportError as error:
        pytest.skip(f"fbgemm_gpu: {error}")
    ids, target = torch.tensor([3, 5, 3]), torch.randn(3, 8)
    table.step(ids, target)
    grad = torch.zeros(50, 8).index_add_(0, ids, target)
    expected = weight - 0.1 * grad / (grad.square().mean(1, keepdim=True).sqrt() + 1e-8)
    torch.testing.assert_close(table.weight, expected)


def test_batches_drawn_before_are_those_drawn_one_by_one() -> None:
    drawn = Drawn.draw("zipf", 100, 16, 5, seed=2)
    one_by_one = batches("zipf", 100, 16, seed=2)
    for ids, rows in zip(drawn, drawn.rows, strict=True):
        expected = next(one_by_one)
        assert torch.equal(ids, expected)
        assert rows == len(set(expected.tolist()))


def test_zipf_ids_follow_the_harmonic_law_and_are_scattered() -> None:
    ids = next(batches("zipf", 1000, 200_000, seed=3))
    counts = torch.bincount(ids, minlength=1000)
    shares = counts.sort(descending=True).values[:4] / len(ids)
    expected = torch.tensor([1, 1 / 2, 1 / 3, 1 / 4]) / sum(1 / k for k in range(1, 1001))
    torch.testing.assert_close(shares, expected, rtol=0.05, atol=0)
    assert counts.topk(4).indices.tolist() != [0, 1, 2, 3]


def test_scattered_rows_never_share_a_page() -> None:
    rows = scattered_rows(10_000, 1540, page_bytes=4096, seed=0)
    first, last = rows * 1540 // 4096, (rows * 1540 + 1539) // 4096
    pages = torch.cat([first, last[last != first]])
    assert len(pages.unique()) == len(pages)
    assert rows.tolist() != sorted(rows.tolist())


def test_repeated_rows_read_by_slices_like_an_array() -> None:
    rows = RepeatedRows(70_000, 4)
    whole = rows[0:70_000]
    assert whole.shape == rows.shape
    np.testing.assert_array_equal(rows[65_000:66_000], whole[65_000:66_000])
    np.testing.assert_array_equal(whole[65_536:], whole[: 70_000 - 65_536])


@linux
def test_a_sequential_write_repeats_its_content_to_the_last_byte(tmp_path: Path) -> None:
    content = np.arange(8192, dtype=np.uint16).view(np.uint8)
    assert write_sequentially(tmp_path / "f", content, 100_001) > 0
    expected = np.tile(content, 7)[:100_001].tobytes()
    assert (tmp_path / "f").read_bytes() == expected
    with pytest.raises(FileExistsError):
        write_sequentially(tmp_path / "f", content, 4096)


@linux
def test_the_queue_reads_what_was_asked_for(tmp_path: Path) -> None:
    pages = np.arange(16, dtype=np.uint8).repeat(4096)
    (tmp_path / "f").write_bytes(pages.tobytes())
    with (tmp_path / "f").open("rb") as file, DirectQueue(2, 4096) as queue:
        order = np.array([7, 3])
        queue.read(np.full(2, file.fileno()), order * 4096, np.full(2, 4096))
        assert queue.buffer.min(1).tolist() == queue.buffer.max(1).tolist() == [7, 3]
        with pytest.raises(OSError, match="moved 0 bytes"):
            queue.read(np.array([file.fileno()]), np.array([16 * 4096]), np.array([4096]))


@linux
def test_the_queue_reads_and_writes_at_once(tmp_path: Path) -> None:
    (tmp_path / "from").write_bytes(np.full(4096, 7, np.uint8).tobytes())
    (tmp_path / "to").write_bytes(bytes(8192))
    with (
        (tmp_path / "from").open("rb") as source,
        (tmp_path / "to").open("r+b") as sink,
        DirectQueue(2, 4096) as queue,
    ):
        queue.buffer[:] = 9
        queue.run(
            np.array([WRITE, READ]),
            np.array([sink.fileno(), source.fileno()]),
            np.array([4096, 0]),
            np.full(2, 4096),
        )
        assert sorted(queue.buffer[:, 0].tolist()) == [7, 9]
    assert (tmp_path / "to").read_bytes() == bytes(4096) + bytes([9] * 4096)


@linux
def test_the_disk_has_rates(tmp_path: Path) -> None:
    files = [tmp_path / name for name in "ab"]
    for file in files:
        file.write_bytes(bytes(1 << 20))
    assert random_read_rate(files, seconds=0.01, depth=8) > 0
    assert sequential_read_rate(files, seconds=0.01, block_bytes=65536) > 0
    with pytest.raises(ValueError, match="no files"):
        random_read_rate([])


@linux
def test_random_writes_leave_numbers_from_0_to_1_in_every_page(tmp_path: Path) -> None:
    files = [tmp_path / name for name in "ab"]
    for file in files:
        file.write_bytes(bytes(4 * 4096))
    assert random_write_rate(files, seconds=0.01, depth=8) > 0
    for file in files:
        pages = np.fromfile(file, np.float32).reshape(4, -1)
        assert pages.max(axis=1).min() > 0
        assert 0 <= pages.min() <= pages.max() < 1


@linux
def test_the_mixed_rate_writes_as_much_as_it_reads(tmp_path: Path) -> None:
    files = [tmp_path / name for name in "ab"]
    for file in files:
        file.write_bytes(bytes(5 * 4096))
    sizes = {"block_bytes": 8192, "depth": 4}
    assert mixed_rate(files, tmp_path / "all", **sizes) > 0
    assert (tmp_path / "all").stat().st_size == 10 * 4096
    assert mixed_rate(files, tmp_path / "part", nbytes=16384, **sizes) > 0
    assert (tmp_path / "part").stat().st_size == 16384


def test_sizes_are_read_in_powers_of_1024() -> None:
    assert [memory_limit.parse_bytes(text) for text in ("17", "512M", "1.5g", "2GiB", "1KB")] == [
        17,
        512 << 20,
        3 << 29,
        2 << 30,
        1024,
    ]
    with pytest.raises(ValueError, match="'4X' is not a size"):
        memory_limit.parse_bytes("4X")


def test_a_command_that_takes_more_than_its_limit_is_killed() -> None:
    command = [sys.executable, "-c", "bytearray(b'x') * (256 << 20)"]
    try:
        assert memory_limit.run_limited(command, 1 << 30) == 0
    except OSError as error:
        pytest.skip(f"no cgroup can be made here: {error}")
    assert memory_limit.run_limited(command, 64 << 20) == -9


TINY = ["--dim", "8", "--batch", "64", "--steps", "2"]


def test_bench_hot_compares_tables_and_leaves_nothing(tmp_path: Path) -> None:
    sizes = ["--rows", "3000", *TINY, "--rounds", "2"]
    saved = tmp_path / "hot.json"
    assert run_bench("hot", *sizes, "--path", str(tmp_path), "--json", str(saved)) == 0
    content = json.loads(saved.read_text())
    assert content["settings"]["rows"] == 3000
    assert {"cores", "torch", "numpy", "zarr", "ooc_embed"} <= set(content["machine"])
    extras = ("FBGEMM", "numba")  # are there where they are installed
    measured = [f for f in figures_of(saved) if not any(extra in f["label"] for extra in extras)]
    assert len(measured) == (3 + 1) * 2
    assert all(figure["median"] > 0 and figure["samples"] == 2 for figure in measured)
    own = [figure for figure in measured if figure["label"] == "DiskEmbedding"]
    assert all({"x_sparse_adam", "x_memmap"} <= set(figure) for figure in own)
    assert [path.name for path in tmp_path.iterdir()] == ["hot.json"]


def test_bench_hot_leaves_out_what_does_not_fit_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_hot, "usable_memory", lambda: 1000)
    sizes = ["--rows", "3000", *TINY, "--rounds", "1", "--cache-fraction", "0.1"]
    only = ["--distributions", "zipf", "--path", str(tmp_path), "--json", str(tmp_path / "f")]
    assert run_bench("hot", *sizes, *only) == 0
    (skipped,) = json.loads((tmp_path / "f").read_text())["skipped"]
    assert "SparseAdam" in skipped["label"]
    assert "GB" in skipped["reason"]
    labels = [figure["label"] for figure in figures_of(tmp_path / "f")]
    assert [label for label in labels if "numba" not in label] == [
        "DiskEmbedding",
        "where-map and eviction",
    ]


@linux
def test_bench_cold_measures_disk_references_and_table_and_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = ["--rows", "20000", "--dim", "8", "--batch", "256", "--seconds", "0.05"]
    runs = ["--steps", "150", "--commit-every", "10", "--merges", "2"]
    saved = tmp_path / "cold.json"
    options = ["--no-limit", "--cache-bytes", "100K", "--path", str(tmp_path)]
    assert run_bench("cold", *sizes, *runs, *options, "--json", str(saved)) == 0
    figures = figures_of(saved)
    whole = [figure for figure in figures if figure["label"].endswith("commits, merges, flush")]
    assert len(whole) == 2 * 2
    assert all({"x_memmap", "x_mapped", "x_disk"} <= set(figure) for figure in whole)
    merges = [figure["median"] for figure in figures if figure["label"] == "merges"]
    assert len(merges) == 4
    assert merges[0] >= 2, "uniform ids fill a log of half the rows twice"
    assert any(figure["label"] == "training, from merge to merge" for figure in figures)
    assert [path.name for path in tmp_path.iterdir()] == ["cold.json"]
    assert "lookups of uncached rows" in capsys.readouterr().out


@linux
def test_bench_commit_stands_beside_sequential_writes(tmp_path: Path) -> None:
    sizes = ["--rows", "40000", "--dim", "8", "--dirty", "9000", "--batch", "1000"]
    saved = tmp_path / "f"
    options = ["--rounds", "2", "--path", str(tmp_path), "--json", str(saved)]
    assert run_bench("commit", *sizes, *options) == 0
    figures = {figure["label"]: figure for figure in figures_of(saved)}
    assert figures["commit of dirty rows"]["x_disk"] > 0
    assert figures["log records"]["median"] == 2 * 9000
    assert figures["merges"]["median"] == 0, "the log was not to be full"
    assert [path.name for path in tmp_path.iterdir()] == ["f"]


@linux
def test_bench_merge_merges_once(tmp_path: Path) -> None:
    sizes = ["--rows", "20000", "--dim", "8", "--touched", "8000", "--batch", "1000"]
    saved = tmp_path / "f"
    options = ["--no-limit", "--path", str(tmp_path), "--json", str(saved)]
    assert run_bench("merge", *sizes, *options) == 0
    figures = {figure["label"]: figure for figure in figures_of(saved)}
    assert figures["merge"]["x_disk"] > 0
    assert figures["merges"]["median"] == 1
    assert [path.name for path in tmp_path.iterdir()] == ["f"]


def test_bench_lookahead_compares_with_compute_and_reads_alone(tmp_path: Path) -> None:
    saved = tmp_path / "f"
    options = ["--path", str(tmp_path), "--json", str(saved)]
    assert run_bench("lookahead", "--rows", "100000", *TINY, *options) == 0
    ahead = figures_of(saved)[-1]
    assert ahead["label"] == "both, with look-ahead"
    assert ahead["x_longer"] > 0
    assert ahead["samples"] == 2
    assert run_bench("lookahead", "--rows", "1000", *TINY, *options) == 0
    assert "--rows" in json.loads(saved.read_text())["skipped"][0]["reason"]
    assert [path.name for path in tmp_path.iterdir()] == ["f"]


def test_bench_growth_holds_the_hit_rate_whatever_the_size(tmp_path: Path) -> None:
    saved = tmp_path / "f"
    options = ["--rounds", "2", "--path", str(tmp_path), "--json", str(saved)]
    assert run_bench("growth", "--rows", "100", "60000", "120000", *TINY, *options) == 0
    (skipped,) = json.loads(saved.read_text())["skipped"]
    assert skipped["section"].startswith("100 x 8")
    rates = [f["median"] for f in figures_of(saved) if f["label"] == "hit rate"]
    assert rates == pytest.approx([58 / 64, 58 / 64], abs=0.02)
    ratios = [f["x_first"] for f in figures_of(saved) if f["label"] == "training"]
    assert ratios[0] == 1
    assert [path.name for path in tmp_path.iterdir()] == ["f"]


def test_bench_rules_times_every_rule_beside_what_torch_has_of_it(tmp_path: Path) -> None:
    saved = tmp_path / "f"
    options = ["--rounds", "2", "--path", str(tmp_path), "--json", str(saved)]
    assert run_bench("rules", "--rows", "3000", *TINY, *options) == 0
    found = {f["label"].rpartition(", by ")[0]: f for f in figures_of(saved)}
    rules = {"SparseAdam", "SGD", "Adagrad", "RowwiseAdagrad"}
    assert {name.split("(")[0] for name in found} == rules
    for name, figure in found.items():
        assert figure["x torch.optim.SparseAdam in RAM"] > 0
        assert ("x torch.optim.SGD in RAM" in figure) == (name == "SGD")
        assert ("x torch.optim.Adagrad in RAM" in figure) == (name == "Adagrad")
    assert [path.name for path in tmp_path.iterdir()] == ["f"]


def test_quick_changes_defaults_and_not_what_was_asked_for(tmp_path: Path) -> None:
    options = ["--rows", "3000", *TINY, "--path", str(tmp_path), "--json", str(tmp_path / "f")]
    assert run_bench("hot", "--quick", *options) == 0
    settings = json.loads((tmp_path / "f").read_text())["settings"]
    assert (settings["rounds"], settings["rows"], settings["batch"]) == (3, 3000, [64])


def test_all_puts_figures_together_and_lists_what_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write = "import sys; open(sys.argv[4], 'w').write('{\"figures\": [1]}')"
    fail = "import sys; print('first'); sys.exit('no room')"
    runs = [
        Run("bench absent", [sys.executable, "-c", write], 1 << 30),
        Run("bench failing", [sys.executable, "-c", fail], None),
        Run("bench good", [sys.executable, "-c", write], None),
    ]
    monkeypatch.setattr(memory_limit, "_MOUNT", tmp_path / "absent")
    assert run_all(runs, tmp_path, tmp_path / "all.json") == 1
    content = json.loads((tmp_path / "all.json").read_text())
    assert content["runs"] == [{"figures": [1]}]
    assert [absent["command"] for absent in content["missing"]] == ["bench absent", "bench failing"]
    assert "cgroup" in content["missing"][0]["reason"]
    assert content["missing"][1]["reason"] == "no room"
    assert "bench failing: no room" in capsys.readouterr().err


def test_bench_archive_writes_a_trained_table_in_each_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    triples = torch.arange(90).reshape(30, 3).remainder(torch.tensor([25, 2, 25]))
    names = tuple(f"e{entity}" for entity in range(25))
    graph = linkprediction.Graph(names, ("r0", "r1"), triples[:20], triples[20:25], triples[25:])
    monkeypatch.setattr(linkprediction, "load_wordnet", lambda: graph)
    saved = tmp_path / "figures.json"
    ways = ["--codecs", "zstd", "none", "--bitrounds", "0", "7", "--dtypes", "float32", "float16"]
    options = ["--steps", "2", "--rounds", "1", "--path", str(tmp_path), "--json", str(saved)]
    assert run_bench("archive", *ways, *options) == 0
    rows = json.loads(saved.read_text())["figures"]
    assert len(rows) == 2 + 2 * 2 * 2
    by_name = {row["label"]: row for row in rows}
    assert by_name["float32, all bits, zstd"]["relative 1e-6"] == 0
    assert 0 < by_name["float32, 7 bits, zstd"]["relative 1e-6"] <= 1e6 * 2**-8
    assert by_name["float16, all bits, none"]["median"] < by_name["the store"]["median"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["figures.json"]


def test_bench_all_runs_its_measurements(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = ("--rows", "3000", *TINY, "--rounds", "1", "--distributions", "zipf")
    monkeypatch.setattr(bench, "_ALL", (("hot", *sizes),))
    assert run_bench("all", "--path", str(tmp_path), "--json", str(tmp_path / "f")) == 0
    content = json.loads((tmp_path / "f").read_text())
    assert [run["command"] for run in content["runs"]] == ["bench hot"]
    assert content["missing"] == []
    assert [path.name for path in tmp_path.iterdir()] == ["f"]


def test_bench_cold_says_how_much_disk_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_bench("cold", "--rows", str(10**12), "--no-limit", "--path", str(tmp_path)) == 1
    assert "GB free" in capsys.readouterr().err


def test_bench_cold_without_a_cgroup_tells_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_limit, "_MOUNT", tmp_path / "absent")
    assert run_bench("cold", "--memory-limit", "512M", "--path", str(tmp_path)) == 2
    told = capsys.readouterr().err
    assert f"systemd-run --scope -p MemoryMax={512 << 20}" in told
    assert "--no-limit" in told
