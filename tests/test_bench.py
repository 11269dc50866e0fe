"""What measurements stand beside is correct, and every measurement runs; asserts no timing."""

import argparse
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import ooc_embed
from ooc_embed import bench, memory_limit
from ooc_embed.disk_rates import (
    DirectQueue,
    random_read_rate,
    sequential_read_rate,
    write_sequentially,
)
from ooc_embed.references import MemmapTable, RamTable, train_step
from ooc_embed.workloads import RepeatedRows, batches, scattered_rows

linux = pytest.mark.skipif(sys.platform != "linux", reason="Linux AIO and O_DIRECT")


def run_bench(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    return bench.main(parser.parse_args(arguments))


def test_the_three_contestants_of_bench_hot_train_the_same_table(tmp_path: Path) -> None:
    weight = torch.randn(500, 8, generator=torch.Generator().manual_seed(0))
    ram = RamTable(weight.clone(), lr=0.01)
    memmap = MemmapTable.create(tmp_path, weight.numpy(), lr=0.01)
    drawn = batches("zipf", 500, 64, seed=1)
    with ooc_embed.DiskEmbedding(
        500, 8, path=tmp_path / "t.zarr", init=weight, optimizer=ooc_embed.SparseAdam(lr=0.01)
    ) as table:
        for _ in range(20):
            ids, target = next(drawn), torch.randn(64, 8)
            ram.step(ids, target)
            memmap.step(ids, target)
            train_step(table, ids, target)
        state = ram.optimizer.state[ram.embedding.weight]
        expected = [ram.embedding.weight.detach(), state["exp_avg"], state["exp_avg_sq"]]
        in_memmap = [memmap.weight, memmap.exp_avg, memmap.exp_avg_sq]
        in_table = [table.weight, table.state["exp_avg"], table.state["exp_avg_sq"]]
        for right, other, own in zip(expected, in_memmap, in_table, strict=True):
            torch.testing.assert_close(torch.from_numpy(np.array(other)), right)
            torch.testing.assert_close(own[0:500], right)


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
def test_the_disk_has_rates(tmp_path: Path) -> None:
    files = [tmp_path / name for name in "ab"]
    for file in files:
        file.write_bytes(bytes(1 << 20))
    assert random_read_rate(files, seconds=0.01, depth=8) > 0
    assert sequential_read_rate(files, seconds=0.01, block_bytes=65536) > 0
    with pytest.raises(ValueError, match="no files"):
        random_read_rate([])


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


def test_bench_hot_compares_three_tables_and_leaves_nothing(tmp_path: Path) -> None:
    sizes = ["--rows", "3000", "--dim", "8", "--batch", "64", "--rounds", "2", "--steps", "2"]
    saved = tmp_path / "hot.json"
    assert run_bench("hot", *sizes, "--path", str(tmp_path), "--json", str(saved)) == 0
    content = json.loads(saved.read_text())
    assert content["settings"]["rows"] == 3000
    assert len(content["figures"]) == 3 * 2
    assert all(figure["median"] > 0 and figure["samples"] == 2 for figure in content["figures"])
    assert [path.name for path in tmp_path.iterdir()] == ["hot.json"]


@linux
def test_bench_cold_measures_disk_memmap_and_table_and_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = ["--rows", "20000", "--dim", "8", "--batch", "256", "--steps", "3", "--seconds", "0.05"]
    saved = tmp_path / "cold.json"
    options = ["--no-limit", "--cache-bytes", "100K", "--path", str(tmp_path)]
    assert run_bench("cold", *sizes, *options, "--json", str(saved)) == 0
    figures = json.loads(saved.read_text())["figures"]
    assert {"x_memmap", "x_disk"} <= {name for figure in figures for name in figure}
    assert [path.name for path in tmp_path.iterdir()] == ["cold.json"]
    assert "lookups of uncached rows" in capsys.readouterr().out


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
