"""What a plan tells: sizes beside real stores and torch, hits beside a simulated cache, rows/s."""

import re
import sys
from collections import OrderedDict
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import ooc_embed
from ooc_embed import calibration, cli
from ooc_embed.prediction import Rates, traffic
from ooc_embed.workloads import batches

linux = pytest.mark.skipif(sys.platform != "linux", reason="Linux AIO and O_DIRECT")

GIB = 1 << 30


def files_below(folder: Path) -> list[int]:
    """The sizes of the chunk files of an array."""
    return [path.stat().st_size for path in folder.glob("c.*")]


# Sizes


def test_ten_million_rows_are_what_a_calculator_says() -> None:
    plan = ooc_embed.plan(10_000_000, 128, memory=4 * GIB)
    record = 4 * (128 + 128 + 128 + 1)
    chunk_rows = 22 * 1024  # the first multiple of 1024 that has 32 MiB
    assert plan.record_bytes == record
    assert plan.weight_bytes == 5_120_000_000
    assert plan.state_bytes == 10_240_000_000
    assert plan.layout.num_chunks == 444
    assert plan.table_bytes == 444 * chunk_rows * record
    # Half the rows, and 100 steps: 295 files of records, and 7 of 2^20 row ids.
    assert plan.log_records == 5_000_000 + 100 * 16384
    assert plan.log_bytes == 295 * chunk_rows * record + 7 * (8 << 20)
    # 22,500,000 and 8 * 1024 records, rounded up to whole thousands: 1000 and 22 files.
    assert plan.log_bound_bytes == 1000 * chunk_rows * record + 22 * (8 << 20)
    aside = (16 + 2 * 4) * chunk_rows * record
    assert plan.merging_bytes == plan.table_bytes + 2 * plan.log_bytes + aside
    assert plan.most_bytes == plan.table_bytes + 2 * plan.log_bound_bytes + aside
    assert plan.layout.num_files == 444 + 2 * (1000 + 22)
    assert plan.map_bytes == 40_000_000
    assert plan.slots == GIB // (record + 25)
    assert plan.cache_bytes == plan.slots * (record + 25)
    assert plan.batch_bytes == 16384 * (3 * 512 + 32)
    assert plan.merge_bytes == 4 * chunk_rows * record + 2 * 6_638_400
    assert plan.sparse_adam_bytes == plan.in_ram_bytes == 15_360_000_000 + 16384 * (8 + 512)
    assert plan.dense_adam_bytes == 20_480_000_000


@pytest.mark.parametrize(
    ("rule", "state"),
    [
        (ooc_embed.SparseAdam(), {"exp_avg": 6, "exp_avg_sq": 6}),
        (ooc_embed.SparseAdam(bias_correction="row"), {"exp_avg": 6, "exp_avg_sq": 6, "step": 1}),
        (ooc_embed.SGD(), {}),
        (ooc_embed.SGD(momentum=0.9), {"momentum_buffer": 6}),
        (ooc_embed.Adagrad(), {"sum": 6}),
        (ooc_embed.RowwiseAdagrad(), {"sum": 1}),
        (ooc_embed.RiemannianAdam(), {"exp_avg": 6, "exp_avg_sq": 1}),
        (ooc_embed.RiemannianSGD(), {}),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_each_rule_has_its_own_state(
    rule: ooc_embed.SparseAdam, state: dict[str, int], dtype: torch.dtype
) -> None:
    plan = ooc_embed.plan(1000, 6, rule, dtype=dtype, batch=10)
    assert plan.state_fields == state
    assert plan.weight_bytes == 1000 * 6 * dtype.itemsize
    assert plan.state_bytes == 1000 * sum(state.values()) * dtype.itemsize
    assert plan.record_bytes == (6 + sum(state.values()) + 1) * dtype.itemsize
    gradient = 10 * (8 + 6 * dtype.itemsize)
    assert plan.in_ram_bytes == plan.weight_bytes + plan.state_bytes + gradient


@pytest.mark.parametrize("rule", [ooc_embed.SparseAdam(), ooc_embed.RowwiseAdagrad()])
def test_a_store_takes_what_was_planned(stores, rule: ooc_embed.SparseAdam) -> None:
    plan = ooc_embed.plan(20_000, 5, rule, cache_bytes=100_000, batch=4096, commit_every=1)
    emb = stores.make(20_000, 5, optimizer=rule, cache_bytes=100_000)
    cache = emb._table.cache
    assert cache.where.nbytes == plan.map_bytes
    assert cache.slots == plan.slots
    slots = (cache.records, cache.row, cache.home, cache._used, cache._free, cache.dirty)
    assert sum(tensor.nbytes for tensor in slots) <= plan.cache_bytes

    for ids in torch.arange(10_000).split(4096):
        emb(ids).sum().backward()
    emb.commit()
    log = emb.path / "log" / "0"
    files = files_below(log / "rows") + files_below(log / "records")
    assert sum(files) == plan.log_bytes
    for ids in torch.arange(10_000, 20_000).split(4096):
        emb(ids).sum().backward()
    emb.flush()
    table = files_below(emb.path / "table")
    assert set(table) == {plan.layout.chunk_bytes}
    assert sum(table) == plan.table_bytes


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # torch's own Adagrad
@pytest.mark.parametrize(
    ("rule", "in_torch", "attribute"),
    [
        (ooc_embed.SparseAdam(), torch.optim.SparseAdam, "sparse_adam_bytes"),
        (ooc_embed.SGD(), torch.optim.SGD, "in_ram_bytes"),
        (ooc_embed.Adagrad(), torch.optim.Adagrad, "in_ram_bytes"),
        (ooc_embed.SGD(), torch.optim.Adam, "dense_adam_bytes"),
    ],
)
def test_in_ram_torch_has_the_tensors_that_are_told(
    rule: ooc_embed.SGD, in_torch: type[torch.optim.Optimizer], attribute: str
) -> None:
    sparse = in_torch is not torch.optim.Adam
    emb = torch.nn.Embedding(500, 6, sparse=sparse)
    optimizer = in_torch(emb.parameters(), lr=0.1)
    emb(torch.randint(0, 500, (64,))).sum().backward()
    optimizer.step()
    grad = emb.weight.grad
    kept = [grad._indices(), grad._values()] if sparse else [grad]
    kept += [emb.weight, *optimizer.state[emb.weight].values()]
    kept = [each for each in kept if isinstance(each, torch.Tensor) and each.dim()]  # not the step
    plan = ooc_embed.plan(500, 6, rule, batch=64)
    assert getattr(plan, attribute) == sum(tensor.nbytes for tensor in kept)


def test_a_billion_rows_are_planned_without_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    plan = ooc_embed.plan(1_000_000_000, 128)
    assert plan.layout.num_files < 50_000
    assert plan.layout.num_chunks <= 4096
    assert plan.map_bytes == 8_000_000_000  # positions beyond 32 bits
    assert plan.weight_bytes + plan.state_bytes == 3 * 1_000_000_000 * 128 * 4
    assert list(tmp_path.iterdir()) == []


def test_memory_grows_by_four_bytes_a_row_whatever_the_dimension() -> None:
    for dim in (16, 64):
        small, large = (
            ooc_embed.plan(rows, dim, cache_bytes=1 << 26, memory=GIB)
            for rows in (10_000_000, 20_000_000)
        )
        assert large.map_bytes - small.map_bytes == 40_000_000
        assert large.cache_bytes == small.cache_bytes
        assert large.batch_bytes == small.batch_bytes


def test_the_cache_is_a_quarter_of_the_memory_by_default() -> None:
    plan = ooc_embed.plan(10_000_000, 128, memory=8 * GIB)
    assert plan.slots == ooc_embed.plan(10_000_000, 128, cache_bytes=2 * GIB).slots


def test_the_recommended_cache_is_between_four_batches_and_all_rows() -> None:
    slot = 1540 + 25
    plan = ooc_embed.plan(10_000_000, 128, memory=4 * GIB)
    rest = 4 * GIB - plan.map_bytes - plan.batch_bytes - plan.merge_bytes - GIB // 2
    assert plan.recommended_cache_bytes == rest // 2
    little = ooc_embed.plan(10_000_000, 128, memory=GIB // 4)
    assert little.recommended_cache_bytes == 4 * 16384 * slot
    assert ooc_embed.plan(50_000, 128, memory=4 * GIB).recommended_cache_bytes == 50_000 * slot


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        ((0, 4), {}, ValueError, "num_embeddings must be at least 1, got 0"),
        ((10, 4.0), {}, TypeError, "embedding_dim must be an integer, got 4.0"),
        ((10, 4), {"batch": 0}, ValueError, "batch must be at least 1, got 0"),
        ((10, 4), {"commit_every": 0}, ValueError, "commit_every must be at least 1, got 0"),
        ((10, 4), {"memory": -1}, ValueError, "memory must be at least 1, got -1"),
        ((10, 4), {"cache_bytes": "all"}, TypeError, "must be an integer or 'auto', got 'all'"),
        ((10, 4), {"dtype": torch.float16}, ValueError, "torch.float16 is refused"),
        ((10, 4), {"optimizer": torch.optim.SparseAdam}, TypeError, "optimizer must be a rule"),
        ((10, 4), {"optimizer": torch.optim.SGD([torch.ones(1)])}, TypeError, "sgd.SGD'>$"),
        ((10**14, 128), {}, ValueError, "larger chunk_rows, or fewer rows"),
        ((10, 4), {"disk": 3}, TypeError, "disk must be a folder or the rates of a plan, got 3"),
    ],
)
def test_wrong_arguments_are_refused_with_their_value(
    arguments: tuple[int, ...], options: dict[str, object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        ooc_embed.plan(*arguments, **options)


# Hits


def simulated(ids: str, rows: int, batch: int, slots: int, steps: int) -> tuple[float, float]:
    """Different rows of a batch, and the part of them that a cache has which drops the row that
    was used longest ago; the first half of the steps fills it."""
    cache: OrderedDict[int, None] = OrderedDict()
    hits = total = 0
    drawn = batches(ids, rows, batch, seed=0)
    for step in range(steps):
        unique = np.unique(next(drawn).numpy()).tolist()
        if step >= steps // 2:
            hits += sum(row in cache for row in unique)
            total += len(unique)
        for row in unique:
            cache[row] = None
            cache.move_to_end(row)
        while len(cache) > slots:
            cache.popitem(last=False)
    return total / (steps - steps // 2), hits / total


@pytest.mark.parametrize("ids", ["uniform", "zipf"])
@pytest.mark.parametrize("slots", [800, 3200])
def test_hits_are_those_of_a_simulated_cache(ids: str, slots: int) -> None:
    unique, hit_rate = simulated(ids, 10_000, 256, slots * 15 // 16, steps=400)
    told = traffic(ids, 10_000, 256, slots, commit_every=50)
    assert told.rows == pytest.approx(unique, rel=0.01)
    assert told.hit_rate == pytest.approx(hit_rate, abs=0.01)


@pytest.mark.parametrize("ids", ["uniform", "zipf"])
def test_a_cache_for_all_rows_misses_none(ids: str) -> None:
    assert traffic(ids, 1000, 64, 1000, commit_every=10).hit_rate == 1
    assert traffic(ids, 1, 64, 1, commit_every=10).rows == pytest.approx(1)


def test_each_changed_row_is_appended_once_between_commits() -> None:
    rows, batch, commit_every = 10_000, 256, 50
    drawn = batches("zipf", rows, batch, seed=1)
    changed = [
        len(np.unique(np.concatenate([next(drawn).numpy() for _ in range(commit_every)])))
        for _ in range(20)
    ]
    told = traffic("zipf", rows, batch, rows, commit_every)
    assert told.evicted == 0
    assert told.committed == pytest.approx(np.mean(changed), rel=0.01)
    assert told.appended == pytest.approx(told.committed / commit_every)


# Rows per second


def test_without_a_disk_no_speed_is_told() -> None:
    plan = ooc_embed.plan(1000, 4)
    assert plan.speeds == ()
    assert "rows/s" not in str(plan)


# Of docs/performance.md: both runs of `bench cold`, beside steps of `bench hot`.
STEPS = {"uniform": 0.0118, "zipf": 0.00735}
UNIFORM = Rates(1540, 16384, 2.44e9, 2.10e9, 1.25e9, 60_820, 500_000, STEPS)
ZIPF = Rates(1540, 16384, 3.32e9, 2.71e9, 1.47e9, 68_858, 500_000, STEPS)


@pytest.mark.parametrize(
    ("rates", "ids", "lookahead", "measured"),
    [
        (UNIFORM, "uniform", False, 45_888),
        (UNIFORM, "uniform", True, 54_806),
        (ZIPF, "zipf", False, 111_476),
        (ZIPF, "zipf", True, 132_434),
    ],
)
def test_the_documented_runs_are_predicted_within_30_percent(
    rates: Rates, ids: str, lookahead: bool, measured: int
) -> None:
    plan = ooc_embed.plan(10_000_000, 128, memory=4 * GIB, disk=rates)
    (told,) = [each for each in plan.speeds if (each.ids, each.lookahead) == (ids, lookahead)]
    assert told.rows_per_second == pytest.approx(measured, rel=0.3)


def test_a_step_is_the_sum_of_its_terms() -> None:
    plan = ooc_embed.plan(10_000_000, 128, memory=4 * GIB, disk=UNIFORM)
    for plain, ahead in (plan.speeds[:2], plan.speeds[2:]):
        shared = plain.commit_seconds + plain.merge_seconds
        step = plain.compute_seconds + plain.disk_seconds
        assert plain.samples_per_second == pytest.approx(16384 / (step + shared))
        longer, shorter = sorted([ahead.compute_seconds, ahead.disk_seconds], reverse=True)
        assert ahead.samples_per_second == pytest.approx(16384 / (longer + 0.3 * shorter + shared))
        assert plain.rows_per_second < plain.samples_per_second


def test_rows_that_fit_into_memory_are_not_read_from_the_disk() -> None:
    in_cache = ooc_embed.plan(1_000_000, 128, memory=8 * GIB, cache_bytes=2 * GIB, disk=UNIFORM)
    in_page_cache = ooc_embed.plan(1_000_000, 128, memory=8 * GIB, cache_bytes=GIB, disk=UNIFORM)
    assert {speed.disk_seconds for speed in in_cache.speeds + in_page_cache.speeds} == {0}
    for fast, slow in zip(in_cache.speeds, in_page_cache.speeds, strict=True):
        assert fast.rows_per_second > slow.rows_per_second


@linux
def test_measuring_gives_positive_rates_and_removes_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibration, "SCRATCH_BYTES", 8 << 20)
    plan = ooc_embed.plan(100_000, 16, ooc_embed.RiemannianAdam(), batch=512, disk=tmp_path)
    rates = plan.rates
    assert min(rates.write, rates.read, rates.mixed, rates.reads, rates.cached_reads) > 0
    assert set(rates.steps) == {"uniform", "zipf"}
    assert min(rates.steps.values()) > 0
    assert [speed.ids for speed in plan.speeds] == ["uniform", "uniform", "zipf", "zipf"]
    assert min(speed.rows_per_second for speed in plan.speeds) > 0
    assert list(tmp_path.iterdir()) == []

    again = ooc_embed.plan(100_000, 16, ooc_embed.RiemannianAdam(), batch=512, disk=rates)
    assert again.speeds == plan.speeds
    with pytest.raises(ValueError, match=r"of 136 bytes and batches of 512.* has 136 and 256"):
        ooc_embed.plan(100_000, 16, ooc_embed.RiemannianAdam(), batch=256, disk=rates)


@linux
@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_measuring_that_is_stopped_removes_its_files(
    error: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(*arguments: object) -> None:
        assert [path.name for path in tmp_path.glob("ooc-embed-plan-*/*")] == ["table.zarr"]
        raise error

    monkeypatch.setattr(calibration, "SCRATCH_BYTES", 8 << 20)
    monkeypatch.setattr(calibration, "_measure_lookups", stopped)
    with pytest.raises(error):
        ooc_embed.plan(100_000, 16, batch=512, disk=tmp_path)
    assert list(tmp_path.iterdir()) == []


# What is printed


def test_the_text_has_every_size_exactly_and_the_html_the_same_cells() -> None:
    rates = replace(ZIPF, record_bytes=4 * 257)
    plan = ooc_embed.plan(10_000_000, 128, ooc_embed.Adagrad(), memory=4 * GIB, disk=rates)
    text, page = str(plan), plan._repr_html_()
    sizes = [name for name in dir(plan) if name.endswith("_bytes") and not name.startswith("_")]
    hidden = {"record_bytes", "slot_bytes", "page_cache_bytes"}
    assert len(sizes) > 15
    for name in set(sizes) - hidden:
        assert f"{getattr(plan, name):,} bytes" in text, name
        assert f"<td>{getattr(plan, name):,} bytes</td>" in page, name
    for speed in plan.speeds:
        assert f"{speed.rows_per_second:,.0f} rows/s" in text
    assert "<table><caption>10,000,000 rows x 128, float32, Adagrad" in page
    listed = [line for line in text.splitlines() if line.startswith("  ")]
    assert page.count("<tr><td>") == len(listed)


def planned(*options: str) -> int:
    return cli.main(["plan", *options])


@pytest.mark.parametrize("rows", ["10_000_000", "10,000,000", "10000000"])
def test_the_command_prints_the_plan(rows: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--rows", rows, "--dim", "128", "--rule", "sparse-adam", "--batch", "16384"]
    assert planned(*options, "--memory", "4G") == 0
    out = capsys.readouterr().out
    assert out.startswith(str(ooc_embed.plan(10_000_000, 128, memory=4 * GIB)))
    assert re.search(r"cache +1\.07 GB +1,073,741,805 bytes +686,097 rows, 6\.9% of all", out)
    assert "--measure" in out.splitlines()[-1]


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        (["sgd"], ooc_embed.SGD()),
        (["sgd", "--momentum", "0.9"], ooc_embed.SGD(momentum=0.9)),
        (["adagrad"], ooc_embed.Adagrad()),
        (["rowwise-adagrad"], ooc_embed.RowwiseAdagrad()),
        (["riemannian-adam"], ooc_embed.RiemannianAdam()),
        (["riemannian-sgd"], ooc_embed.RiemannianSGD()),
    ],
)
def test_the_command_knows_every_rule(
    options: list[str], rule: ooc_embed.SGD, capsys: pytest.CaptureFixture[str]
) -> None:
    size = ["--rows", "1000", "--dim", "8", "--dtype", "float64", "--cache-bytes", "1K"]
    assert planned("--rule", *options, *size, "--memory", "1G") == 0
    expected = ooc_embed.plan(1000, 8, rule, dtype=torch.float64, cache_bytes=1024, memory=GIB)
    assert capsys.readouterr().out.startswith(str(expected))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--rows", "10M"], "'10M' is not a whole number from 1 up"),
        (["--rows", "0"], "'0' is not a whole number from 1 up"),
        (["--rule", "adam"], "invalid choice: 'adam'"),
        (["--dtype", "float16"], "invalid choice: 'float16'"),
        (["--memory", "much"], "invalid parse_bytes value: 'much'"),
        (["--momentum", "0.9"], "--momentum: needs --rule sgd, not sparse-adam"),
        (["--rule", "sgd", "--momentum", "-1"], "momentum must be 0 or greater, got -1.0"),
        (["--rows", "100_000_000_000_000"], "larger chunk_rows, or fewer rows"),
    ],
)
def test_the_command_names_a_wrong_option(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        planned("--rows", "1000", "--dim", "128", *options)
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


@linux
def test_the_command_measures_a_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibration, "SCRATCH_BYTES", 8 << 20)
    size = ["--rows", "100000", "--dim", "16", "--batch", "512"]
    assert planned(*size, "--measure", str(tmp_path)) == 0
    captured = capsys.readouterr()
    assert captured.out.count("rows/s") == 6  # two of lookups, four of training
    assert str(tmp_path) in captured.err
    assert list(tmp_path.iterdir()) == []

    assert planned(*size, "--measure", str(tmp_path / "nothing")) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "nothing" in captured.err.splitlines()[-1]


def test_a_disk_without_room_is_refused_before_anything_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibration, "SCRATCH_BYTES", 1 << 50)
    assert planned("--rows", "1000", "--dim", "16", "--measure", str(tmp_path)) == 2
    assert "GB free, this needs" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
