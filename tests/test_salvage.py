"""What a damaged store's rows become in a new one; the oracle is torch in RAM, never our reader."""

from __future__ import annotations

import contextlib
import copy
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import going_back
import numpy as np
import pytest
import shadowed
import store_files
import system_calls
import torch
import workload
from numpy.typing import NDArray
from test_corruption import flip

import ooc_embed
from conftest import Stores
from ooc_embed import DiskEmbedding, DiskEmbeddingBag, FormatError, StoreError, report
from ooc_embed.salvage import Salvage, salvage

pytestmark = pytest.mark.usefixtures("one_thread")

LARGE_CACHE = 1 << 20
ROWS, CHUNK_ROWS = workload.ROWS, workload.CHUNK_ROWS


class Trained:
    """A closed store, and what torch says it was: as it began, merged, and at each commit since.

    Chunk files have the rows as of the flush, the log those of the commits.
    """

    def __init__(self, path: Path, keep: int) -> None:
        run = shadowed.make(path, 1, LARGE_CACHE)  # no eviction adds to what is trained
        self.path = path
        self.initial = run.shadow.state()
        run.play(*range(5))
        run.save(DiskEmbedding.flush)
        self.merged = run.shadow.state()
        run.emb.keep_commits = keep
        for index in (5, 6, 7):
            run.play(index)
            run.save()
        run.emb.close()
        self.kept = run.kept
        self.newest = max(run.kept)
        self.state = run.shadow.state()
        assert not going_back.is_sealed(path)
        assert len(going_back.named(path)) == keep


@pytest.fixture(scope="module")
def templates(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Trained]:
    """By how many commits are kept."""
    folder = tmp_path_factory.mktemp("trained")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    made = {keep: Trained(folder / f"{keep}.zarr", keep) for keep in (1, 2)}
    torch.set_num_threads(threads)
    return made


def copied(template: Trained, folder: Path) -> Trained:
    trained = copy.copy(template)
    trained.path = store_files.copied(template.path, folder / "t.zarr")
    return trained


@pytest.fixture
def trained(templates: dict[int, Trained], tmp_path: Path) -> Trained:
    """With one commit."""
    return copied(templates[1], tmp_path)


@pytest.fixture
def twice(templates: dict[int, Trained], tmp_path: Path) -> Trained:
    """With two commits."""
    return copied(templates[2], tmp_path)


def changed(one: workload.State, two: workload.State) -> NDArray[np.bool_]:
    """Which rows were trained between two states."""
    return one.version != two.version


def chunk_of(*indices: int) -> NDArray[np.bool_]:
    return np.isin(np.arange(ROWS) // CHUNK_ROWS, indices)


def mixed(state: workload.State, other: workload.State, rows: NDArray[np.bool_]) -> workload.State:
    """A state whose rows, of a mask, are those of another."""
    fields = {
        name: np.where(rows[:, None], other.fields[name], values)
        for name, values in state.fields.items()
    }
    version = np.where(rows, other.version, state.version)
    return workload.State(fields, version, state.step, state.lr)


def salvaged(path: Path, stores: Stores, want: workload.State) -> Salvage:
    """Salvage, compare all with a state, and train on; the damaged store is only read."""
    out = stores.new_path()
    with store_files.untouched(path):
        result = salvage(path, out)
    assert report.verify(out) == []
    store_files.assert_every_reader_agrees(out)
    assert (result.path, result.num_embeddings) == (out, len(want.version))
    workload.assert_zarr_is(out, want)
    commit = store_files.newest_commit(out)
    assert commit["rows_written"] == (want.version > 0).sum()
    assert [log["records"] for log in commit["logs"]] == [0]
    assert list(going_back.named(out)) == [result.commit]
    with DiskEmbedding.open(out, cache_bytes=workload.SMALL_CACHE) as emb:
        workload.assert_table_is(emb, want)
        shadow = shadow_at(want)
        for index in (20, 21):
            played = workload.make_round(3, index)
            workload.play(emb, played)
            shadow.play(played)
        emb.keep_commits = 1
        emb.flush()
        workload.assert_table_is(emb, shadow.state())
        assert emb.commits() == {result.commit + 1: want.step + 2}
    workload.assert_zarr_is(out, shadow.state())
    return result


def shadow_at(state: workload.State) -> workload.Shadow:
    """torch's own layer and optimizer in a state."""
    shadow = workload.Shadow(torch.from_numpy(state.fields["weight"]), state.lr)
    moments = {name: torch.tensor(state.fields[name]) for name in workload.FIELDS[1:]}
    shadow.optimizer.state[shadow.module.weight] = {"step": state.step, **moments}
    shadow.version[:], shadow.step = state.version, state.step
    return shadow


# Sound stores


@pytest.mark.parametrize("keep", [1, 2])
def test_a_sound_store_becomes_an_equal_copy_of_its_newest_commit(
    templates: dict[int, Trained], tmp_path: Path, stores: Stores, keep: int
) -> None:
    trained = copied(templates[keep], tmp_path)
    result = salvaged(trained.path, stores, trained.state)
    assert (result.commit, result.newest) == (trained.newest, trained.newest)
    assert (result.step, result.older, len(result.lost)) == (trained.state.step, 0, 0)


def test_chunk_files_of_a_flushed_store_are_the_same_and_those_without_a_row_stay_absent(
    stores: Stores,
) -> None:
    path, out = stores.new_path(), stores.new_path()
    with DiskEmbedding(5000, 4, path=path, chunk_rows=1024) as emb:
        emb(torch.tensor([3, 4999])).sum().backward()
        emb.flush()
    salvage(path, out)
    known = store_files.manifest(path)["chunk_crc32"]
    assert sorted(map(int, known)) == [0, 4]
    assert store_files.manifest(out)["chunk_crc32"] == known
    assert [file.name for file in store_files.chunk_files(out)] == ["c.0.0", "c.4.0"]


def test_rule_module_arguments_and_kept_commits_are_the_store_s(stores: Stores) -> None:
    path, out = stores.new_path(), stores.new_path()
    rule = ooc_embed.RowwiseAdagrad(lr=0.25)
    with DiskEmbeddingBag(
        100, 2, mode="max", path=path, optimizer=rule, keep_commits=3, padding_idx=7
    ) as emb:
        emb(torch.tensor([[1, 2], [3, 4]])).sum().backward()
    result = salvage(path, out)
    assert f"ooc_embed.DiskEmbeddingBag.open({str(out)!r})" in str(result)
    known = store_files.manifest(path)
    for name in ("table_id", "rule", "module", "keep_commits", "padding_idx", "init", "seed"):
        assert store_files.manifest(out)[name] == known[name], name
    with DiskEmbeddingBag.open(out) as again:
        assert again.optimizer.param_groups[0]["lr"] == 0.25
        assert again.mode == "max"


# Damaged chunk files


def _flipped(chunk: Path) -> None:
    flip(chunk, 100)


def _short(chunk: Path) -> None:
    os.truncate(chunk, chunk.stat().st_size - 4096)


def _long(chunk: Path) -> None:
    os.truncate(chunk, chunk.stat().st_size + 4096)


def _missing(chunk: Path) -> None:
    chunk.unlink()


def _folder(chunk: Path) -> None:
    chunk.unlink()
    chunk.mkdir()


def _another(chunk: Path) -> None:
    """Of the same table, with checksums of its own: rows, but not these rows."""
    shutil.copy(chunk.with_name("c.0.0"), chunk)


DAMAGES = [_flipped, _short, _long, _missing, _folder, _another]


@pytest.mark.parametrize("damage", DAMAGES)
def test_rows_of_a_damaged_chunk_begin_anew_but_for_those_that_the_log_has(
    trained: Trained, stores: Stores, damage: Callable[[Path], None]
) -> None:
    damage(trained.path / "table" / "c.1.0")
    lost = chunk_of(1) & ~changed(trained.merged, trained.state)
    assert 100 < lost.sum() < CHUNK_ROWS
    result = salvaged(trained.path, stores, mixed(trained.state, trained.initial, lost))
    np.testing.assert_array_equal(result.lost, np.flatnonzero(lost))
    assert (result.commit, result.older) == (trained.newest, 0)


def test_all_chunks_may_be_damaged(trained: Trained, stores: Stores) -> None:
    chunks = store_files.chunk_files(trained.path)
    assert len(chunks) == 6
    for chunk in chunks:
        flip(chunk, 0)
    lost = ~changed(trained.merged, trained.state)
    result = salvaged(trained.path, stores, mixed(trained.state, trained.initial, lost))
    np.testing.assert_array_equal(result.lost, np.flatnonzero(lost))


def test_rows_that_were_given_begin_anew_as_zeros_and_the_last_chunk_ends_with_the_table(
    stores: Stores,
) -> None:
    path, out = stores.new_path(), stores.new_path()
    stores.expect_damage(path)
    given = torch.randn(1500, 3)
    DiskEmbedding(1500, 3, path=path, init=given, chunk_rows=1024).close()
    flip(path / "table" / "c.1.0", 5)
    result = salvage(path, out)
    np.testing.assert_array_equal(result.lost, np.arange(1024, 1500))
    with DiskEmbedding.open(out) as emb:
        assert torch.equal(emb.weight[:1024], given[:1024])
        assert not emb.weight[1024:].any()
        assert not emb.version[1024:].any()


def test_a_chunk_that_the_disk_cannot_read_is_named_and_its_rows_begin_anew(
    trained: Trained, stores: Stores
) -> None:
    chunk = trained.path / "table" / "c.1.0"
    lost = chunk_of(1) & ~changed(trained.merged, trained.state)
    with system_calls.unreadable(chunk):
        (problem,) = report.verify(trained.path)
        result = salvaged(trained.path, stores, mixed(trained.state, trained.initial, lost))
    assert str(chunk) in problem
    assert "Input/output error" in problem
    assert "rows 1,024 to 2,047" in problem
    np.testing.assert_array_equal(result.lost, np.flatnonzero(lost))
    assert report.verify(trained.path) == []


@pytest.mark.parametrize("array", ["rows", "records"])
def test_a_log_that_the_disk_cannot_read_is_named_and_left_out(
    trained: Trained, stores: Stores, array: str
) -> None:
    log = the_log(trained.path, array)
    with system_calls.unreadable(log):
        (problem,) = report.verify(trained.path)
        result = salvaged(trained.path, stores, older(trained))
    assert f"{log} cannot be read: Input/output error" in problem
    assert problem.endswith(f"needed by commit {trained.newest}")
    count = changed(trained.merged, trained.state).sum()
    assert result.older == (count if array == "records" else None)


@contextlib.contextmanager
def ordinary_user(source: Path) -> Iterator[Path]:
    """A copy of a store that is a user's whom a file's mode can refuse: root, none does."""
    with tempfile.TemporaryDirectory() as name:
        path = store_files.copied(source, Path(name, "t.zarr"))
        if os.geteuid():
            yield path
            return
        for place in (path.parent, *path.parent.rglob("*")):
            os.chown(place, 65534, -1)
        os.seteuid(65534)
        try:
            yield path
        finally:
            os.seteuid(0)


@pytest.mark.parametrize("name", ["table/c.1.0", "log/{}/rows/c.0", "log/{}/records/c.0.0"])
def test_opening_and_verify_name_a_file_that_may_not_be_read_and_salvage_gets_the_rest(
    trained: Trained, name: str
) -> None:
    (log,) = store_files.newest_commit(trained.path)["logs"]
    with ordinary_user(trained.path) as path:
        file = path / name.format(log["generation"] % 2)
        file.chmod(0)
        for mode in ("r", "r+"):
            with pytest.raises(PermissionError, match=str(file)):
                DiskEmbedding.open(path, mode=mode)
        (problem,) = report.verify(path)
        assert f"{file} cannot be read: Permission denied" in problem
        out = path.with_name("out.zarr")
        result = salvage(path, out)
        assert report.verify(out) == []
        of_table = name.startswith("table")
        assert (len(result.lost) > 0, result.older == 0) == (of_table, of_table)


def test_a_manifest_or_metadata_that_cannot_be_read_are_an_error_and_a_line(
    trained: Trained, stores: Stores
) -> None:
    out = stores.new_path()
    with ordinary_user(trained.path) as path:
        (path / "zarr.json").chmod(0)
        (problem,) = report.verify(path)
        assert "Permission denied" in problem
        assert "t.zarr/zarr.json" in problem
        with pytest.raises(PermissionError, match=r"t\.zarr/zarr\.json"):
            salvage(path, path.with_name("out.zarr"))
        assert not path.with_name("out.zarr").exists()
    for name in ("log/1/rows/zarr.json", "table/zarr.json", "zarr.json"):
        (trained.path / name).write_text("{")
        with pytest.raises(FormatError, match=name):
            salvage(trained.path, out)
    assert not out.exists()
    with pytest.raises(FileNotFoundError, match=r"nothing\.zarr does not exist"):
        salvage(out.with_name("nothing.zarr"), out)


# Damaged logs


def the_log(path: Path, array: str, log: int = 0) -> Path:
    """Its first file: small tables have one."""
    number = store_files.newest_commit(path)["logs"][log]["generation"] % 2
    return path / "log" / str(number) / array / ("c.0" if array == "rows" else "c.0.0")


def offset(path: Path, array: str, commit: int | None = None) -> int:
    """In a log's file, of the last record of a commit."""
    commits = going_back.named(path)
    (log,) = commits[max(commits) if commit is None else commit]["logs"]
    return int((log["records"] - 1) * (8 if array == "rows" else workload.WIDTH * 8))


def older(trained: Trained) -> workload.State:
    """Rows as of the last merge, at the step and the rate of the newest commit."""
    return mixed(trained.state, trained.merged, np.ones(ROWS, bool))


@pytest.mark.parametrize("array", ["rows", "records"])
def test_damage_to_what_the_newest_commit_added_leaves_the_one_before_it(
    twice: Trained, stores: Stores, array: str
) -> None:
    before = twice.newest - 1
    flip(the_log(twice.path, array), offset(twice.path, array))
    (problem,) = report.verify(twice.path)
    assert problem.startswith(f"{the_log(twice.path, array)}: ")
    assert problem.endswith(f"needed by commit {twice.newest}")
    result = salvaged(twice.path, stores, twice.kept[before].state())
    assert (result.commit, result.newest) == (before, twice.newest)
    assert (result.step, result.older, len(result.lost)) == (twice.state.step - 1, 0, 0)
    assert f"what commit {twice.newest} added is damaged" in str(result)


@pytest.mark.parametrize("array", ["rows", "records"])
def test_damage_that_all_kept_commits_share_leaves_rows_as_of_the_last_merge(
    twice: Trained, stores: Stores, array: str
) -> None:
    flip(the_log(twice.path, array), offset(twice.path, array, twice.newest - 1))
    (problem,) = report.verify(twice.path)
    assert problem.endswith(f"needed by commit {twice.newest - 1}, {twice.newest}")
    result = salvaged(twice.path, stores, older(twice))
    count = int(changed(twice.merged, twice.state).sum())
    assert (result.commit, result.newest) == (twice.newest, twice.newest)
    assert result.older == (count if array == "records" else None)
    assert (
        f"{'an unknown number' if array == 'rows' else f'up to {count:,}'} of them are older"
        in (str(result))
    )


@pytest.mark.parametrize("array", ["rows", "records"])
@pytest.mark.parametrize("damage", [_short, _missing])
def test_a_log_file_that_is_gone_or_short_is_left_out(
    trained: Trained, stores: Stores, damage: Callable[[Path], None], array: str
) -> None:
    damage(the_log(trained.path, array))
    (problem,) = report.verify(trained.path)
    assert str(the_log(trained.path, array)) in problem
    result = salvaged(trained.path, stores, older(trained))
    count = changed(trained.merged, trained.state).sum()
    assert result.older == (count if array == "records" else None)


@pytest.mark.parametrize("damage", [False, True])
def test_positions_that_a_long_run_skips_are_no_rows(stores: Stores, damage: bool) -> None:
    path, out = stores.new_path(), stores.new_path()
    rule = ooc_embed.SGD(lr=1.0)
    with DiskEmbedding(30_000, 1, path=path, optimizer=rule, init="zeros") as emb:
        for rows in (torch.arange(3), torch.arange(10_000)):
            emb(rows).sum().backward()
            emb.commit()
    ids = store_files.read_by_hand(path, "log/0/rows")[: 1024 + 10_000]
    assert (ids == -1).sum() == 1024 - 3
    assert report.verify(path) == []
    if damage:
        stores.expect_damage(path)
        flip(the_log(path, "records"), 0)
    result = salvage(path, out)
    assert (len(result.lost), result.older) == (0, 10_000 if damage else 0)
    with DiskEmbedding.open(out, "r") as again:
        want = np.zeros(30_000) if damage else (np.arange(30_000) < 10_000) + 0.0
        want[:3] *= 2
        np.testing.assert_array_equal(again.version[:], want)
        np.testing.assert_array_equal(again.weight[:].squeeze(1), -want)


def test_rows_of_a_damaged_log_and_a_damaged_chunk_are_lost_and_not_older(
    trained: Trained, stores: Stores
) -> None:
    flip(the_log(trained.path, "records"), 0)
    flip(trained.path / "table" / "c.0.0", 0)
    lost = chunk_of(0)
    result = salvaged(trained.path, stores, mixed(older(trained), trained.initial, lost))
    np.testing.assert_array_equal(result.lost, np.flatnonzero(lost))
    assert result.older == (changed(trained.merged, trained.state) & ~lost).sum()


def test_a_kept_commit_before_the_table_grew_has_its_own_number_of_rows(stores: Stores) -> None:
    path, out = stores.new_path(), stores.new_path()
    stores.expect_damage(path)
    with DiskEmbedding(1000, 2, path=path, chunk_rows=1024, keep_commits=3) as emb:
        emb(torch.arange(1000)).sum().backward()
        number, before = emb.commit(), emb.weight[:]
        emb(torch.arange(500)).sum().backward()
        emb.resize(3000)
        emb(torch.arange(2500, 2600)).sum().backward()
    (log,) = going_back.named(path)[number]["logs"]
    flip(the_log(path, "records"), log["records"] * 7 * 4)
    result = salvage(path, out)
    assert (result.commit, result.num_embeddings, len(result.lost)) == (number, 1000, 0)
    with DiskEmbedding.open(out) as again:
        assert torch.equal(again.weight[:], before)
        again.resize(3000)
        assert again.weight[1000:].std() > 0.9


# Checkpoints of the damaged table


def test_a_checkpoint_loads_where_every_row_is_as_of_its_commit_and_only_there(
    stores: Stores,
) -> None:
    path = stores.new_path()
    stores.expect_damage(path)
    with shadowed.make(path, 1, LARGE_CACHE).emb as emb:
        going_back.go_on(emb, 5, 3, commits=False)
        emb.flush()
        going_back.go_on(emb, 5, 5, commits=False)
        checkpoint = emb.state_dict()
        going_back.go_on(emb, 5, 7, commits=False)
    flip(the_log(path, "records"), offset(path, "records"))
    for damage, number in ((False, 1), (True, 2)):
        out = path.with_name(f"out{number}.zarr")
        if damage:
            flip(path / "table" / "c.0.0", 0)
        result = salvage(path, out)
        assert result.step == 5
        assert (len(result.lost) > 0) == damage
        with DiskEmbedding.open(out) as emb:
            if not damage:
                emb.load_state_dict(checkpoint)
                assert going_back.word_of(emb) == going_back.read_word(checkpoint)
                continue
            with pytest.raises(RuntimeError, match=r"none of its past.*a salvage lost rows"):
                emb.load_state_dict(checkpoint)
            with pytest.raises(StoreError, match="none of"):
                ooc_embed.rollback(emb, checkpoint)
            emb.load_state_dict({}, strict=False)
