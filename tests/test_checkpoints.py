"""Checkpoints of models with tables: which commits they hold fast, and how one comes back."""

from __future__ import annotations

import copy
import errno
import json
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import going_back
import numpy as np
import pytest
import store_files
import system_calls
import torch
import workload
from going_back import create, go_on, open_again
from torch import nn

import ooc_embed
from ooc_embed import DiskEmbedding, StoreError, describe, report
from ooc_embed.storage import Storage

pytestmark = pytest.mark.usefixtures("one_thread")

SEED = 95
ROUNDS = 50
WORD = "_extra_state"


@pytest.fixture(scope="module")
def states(weight: torch.Tensor) -> list[workload.State]:
    return workload.history(SEED, ROUNDS, weight)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "t.zarr"


# What a checkpoint holds fast


def test_the_commit_handed_out_can_be_returned_to_whatever_commits_follow(
    path: Path, states: list[workload.State]
) -> None:
    with create(path) as emb:
        go_on(emb, SEED, 5)
        handed = going_back.word_of(emb)
        assert handed["step"] == 5
        go_on(emb, SEED, 40)
        assert going_back.is_sealed(path)
        assert emb.commits() == {5: 5, 40: 40}
        going_back.assert_commit_is(path, 5, states[5])
    with open_again(path) as emb:
        go_on(emb, SEED, 42)
        emb.rollback(handed["commit"])
        workload.assert_table_is(emb, states[5])
        go_on(emb, SEED, 30)
        workload.assert_table_is(emb, states[30])
    assert report.verify(path) == []


def test_a_merge_waits_until_both_checkpoints_have_the_sealed_log(
    path: Path, states: list[workload.State]
) -> None:
    with create(path) as emb:
        emb.state_dict()
        while not going_back.is_sealed(path):
            go_on(emb, SEED, emb.step + 1)
        emb.state_dict()
        go_on(emb, SEED, emb.step + 2)
        assert not store_files.chunk_files(path)
        assert emb.stats().merges == 0
        emb.state_dict()
        while emb.stats().merges == 0 and emb.step < ROUNDS:
            go_on(emb, SEED, emb.step + 1)
        emb.state_dict()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            emb.flush()
        assert emb.stats().merges >= 1
        workload.assert_zarr_is(path, states[emb.step])


def test_at_the_hard_bound_the_checkpoint_is_given_up_with_a_warning_and_training_goes_on(
    path: Path, weight: torch.Tensor
) -> None:
    """Each step appends a record of every row, far more than the cache holds."""
    shadow = workload.Shadow(weight)
    ids = torch.arange(workload.ROWS)
    grads = torch.ones(len(ids), workload.DIM, dtype=torch.float64)

    def train(emb: DiskEmbedding) -> None:
        for _ in range(9):
            workload.train(emb, ids, grads)
            shadow.train(ids, grads)
            emb.commit()

    with create(path) as emb:
        saved = emb.state_dict()
        with pytest.warns(UserWarning, match=r"gives up commit 0 \(step 0\)"):
            train(emb)
        workload.assert_table_is(emb, shadow.state())
        assert 0 not in emb.commits()
        with pytest.raises(RuntimeError, match="does not keep that commit any more"):
            emb.load_state_dict(saved)
    assert report.verify(path) == []


def test_where_a_checkpoint_never_becomes_a_file_the_former_one_can_be_returned_to(
    path: Path, states: list[workload.State]
) -> None:
    with create(path) as emb:
        go_on(emb, SEED, 5)
        saved = emb.state_dict()
        go_on(emb, SEED, 9)
        emb.state_dict()  # the process ends in torch.save
        going_back.abandon(emb)
    with open_again(path) as emb:
        assert emb.commits() == {5: 5, 9: 9}
        ooc_embed.rollback(emb, saved)
        workload.assert_table_is(emb, states[5])
        emb.load_state_dict(saved)


def test_a_checkpoint_that_a_failed_merge_stops_is_not_held_fast(
    path: Path, states: list[workload.State]
) -> None:
    with create(path) as emb:

        def fail(name: str, arguments: tuple[Any, ...]) -> None:
            if name == "rename" and "/c." in str(arguments[1]):
                raise OSError(errno.EIO, "failing on purpose")

        go_on(emb, SEED, 6)
        saved = emb.state_dict()
        with system_calls.watched(path, fail), pytest.raises(OSError, match="on purpose"):
            emb.flush()
        for step in (7, 8):
            go_on(emb, SEED, step, commits=False)
            merging = emb._table._storage.begin_merge()
            assert merging is not None
            merging.fail(OSError(errno.EIO, "failing on purpose"))
            with pytest.raises(OSError, match="on purpose") as caught:
                emb.state_dict()
            assert caught.value.__notes__ == [
                "It was a merge in the background that failed; the next commit begins it again.",
                "All steps up to here were committed all the same.",
            ]
            assert max(emb.commits().values()) == step
        assert 6 in emb.commits().values()
        ooc_embed.rollback(emb, saved)
        workload.assert_table_is(emb, states[6])


@pytest.mark.parametrize("made_by", ["snapshot", "copy of the folder"])
def test_a_checkpoint_of_a_copy_is_refused_by_its_original_and_the_other_way_round(
    path: Path, tmp_path: Path, made_by: str
) -> None:
    """Both have the same table id, the same numbers and the same steps."""
    with create(path, keep=9) as emb:
        go_on(emb, SEED, 3)
        shared = emb.state_dict()
        if made_by == "snapshot":
            emb.snapshot(tmp_path / "s.zarr")
        else:
            emb.close()
            store_files.copied(path, tmp_path / "s.zarr")
    with open_again(path) as emb, open_again(tmp_path / "s.zarr") as other:
        for each, seed in ((emb, 5), (other, 6)):
            each.load_state_dict(shared)
            go_on(each, seed, 5)
        saved = [each.state_dict() for each in (emb, other)]
        assert [going_back.read_word(each)["commit"] for each in saved] == [5, 5]
        assert emb.path != other.path
        for each, own, foreign in ((emb, *saved), (other, *reversed(saved))):
            each.load_state_dict(own)
            assert "a copy of the store made it" in messages(each, foreign)
            before = each.weight[:]
            with pytest.raises(StoreError, match="none of .*: a rollback took it back, or a copy"):
                ooc_embed.rollback(each, foreign)
            assert torch.equal(each.weight[:], before)
            ooc_embed.rollback(each, shared)
            assert each.step == 3


def test_a_checkpoint_stays_good_at_its_step_whatever_hyper_parameters_were_committed_since(
    path: Path,
) -> None:
    """As of a frozen table with a scheduler: the commit may be gone, its rows are the table's."""
    with create(path) as emb:
        go_on(emb, SEED, 3)
        saved = emb.state_dict()
        for rate in (0.5, 0.4, 0.3, 0.2):
            emb.optimizer.param_groups[0]["lr"] = rate
            emb.state_dict()
        assert going_back.read_word(saved)["commit"] not in emb.commits()
        emb.load_state_dict(saved)
    with open_again(path) as emb:
        emb.load_state_dict(saved)


def test_a_checkpoint_from_before_there_were_branches_loads(path: Path) -> None:
    with create(path) as emb:
        go_on(emb, SEED, 3)
        words = going_back.word_of(emb)
    del words["branch"]
    old = {WORD: torch.tensor(list(json.dumps(words).encode()), dtype=torch.uint8)}
    newer = ("checkpoints", "branches", "last_number", "crc32")
    store_files.edit_manifest(path, lambda manifest: [manifest.pop(name) for name in newer])
    with open_again(path) as emb:
        emb.load_state_dict(old)
        go_on(emb, SEED, 4)
        emb.state_dict()
        messages(emb, old)


def test_a_checkpoint_that_fails_behind_its_commit_is_not_held_fast(
    path: Path, states: list[workload.State]
) -> None:
    """A merge fails while the commit is being made; what the call raises names no checkpoint."""
    with create(path) as emb:
        go_on(emb, SEED, 3)
        saved = emb.state_dict()
        for step in (4, 5, 6):
            go_on(emb, SEED, step, commits=False)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(Storage, "_conclude_merge", _fail)
                with pytest.raises(OSError, match="on purpose"):
                    emb.state_dict()
        assert list(emb.commits().values()) == [3, 6]
        ooc_embed.rollback(emb, saved)
        workload.assert_table_is(emb, states[3])


def _fail(*_: Any, **__: Any) -> None:
    raise OSError(errno.EIO, "failing on purpose")


def test_commits_that_are_to_be_kept_are_given_up_with_a_warning_though_a_checkpoint_has_one(
    path: Path,
) -> None:
    with create(path, keep=3) as emb:
        go_on(emb, SEED, 1, commits=False)
        emb.state_dict()
        go_on(emb, SEED, 2, commits=False)
        emb.state_dict()
        go_on(emb, SEED, 3, commits=False)
        with pytest.warns(UserWarning, match=r"gives up commit 1 \(step 1\), 2 \(step 2\), which"):
            emb.flush()


def test_a_full_log_gives_up_the_former_checkpoint_alone_without_a_word(
    path: Path, weight: torch.Tensor
) -> None:
    """Training does not wait for the merge then, though every epoch has one checkpoint."""
    shadow = workload.Shadow(weight)
    ids, grads = torch.arange(workload.ROWS), torch.ones(workload.ROWS, workload.DIM).double()
    with create(path, cache_bytes=1 << 22) as emb, warnings.catch_warnings():
        warnings.simplefilter("error")
        for epoch in range(6):
            workload.train(emb, ids, grads)
            shadow.train(ids, grads)
            emb.state_dict()
            log = store_files.newest_commit(path)["logs"][-1]["records"]
            assert log < 2 * workload.ROWS, epoch
        assert emb.stats().merges > 1
        workload.assert_table_is(emb, shadow.state())


def test_a_reader_that_is_older_than_a_checkpoint_is_told_to_open_again(path: Path) -> None:
    with create(path) as emb:
        go_on(emb, SEED, 3)
        with DiskEmbedding.open(path, mode="r") as reader:
            go_on(emb, SEED, 5)
            assert "earlier commit: open the table again" in messages(reader, emb.state_dict())


def test_a_checkpoint_of_a_number_that_is_not_there_is_refused_without_a_branch_too(
    path: Path,
) -> None:
    with create(path) as emb:
        words = {**going_back.word_of(emb), "commit": 7}
        del words["branch"]
        old = {WORD: torch.tensor(list(json.dumps(words).encode()), dtype=torch.uint8)}
        messages(emb, old)


def test_info_names_checkpoints_and_a_log_that_waits_for_them(path: Path) -> None:
    with create(path) as emb:
        go_on(emb, SEED, 2)
        emb.state_dict()
        go_on(emb, SEED, 40)
        assert going_back.is_sealed(path)
        text = str(describe(path))
    assert "checkpoints have 2" in text
    assert "waiting for kept commits" in text


def test_a_checkpoint_names_the_commit_that_it_holds_fast(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread may commit before the word is written."""
    with create(path) as emb:
        go_on(emb, SEED, 3)
        commit = type(emb._table).commit

        def another_follows(*args: Any, **options: Any) -> int:
            number = commit(*args, **options)
            if options:
                go_on(emb, SEED, 4)
            return number

        with monkeypatch.context() as patch:
            patch.setattr(type(emb._table), "commit", another_follows)
            words = going_back.word_of(emb)
        assert words["step"] == 3
        assert emb.commits() == {3: 3, 4: 4}


def test_lowering_keep_commits_lets_a_merge_begin_that_waited(path: Path) -> None:
    with create(path, keep=50) as emb:
        go_on(emb, SEED, 40)
        assert going_back.is_sealed(path)
        assert emb._table._storage._chunks.merge is None
        emb.keep_commits = 1
        assert emb._table._storage._chunks.merge is not None


def test_a_flush_gives_up_what_is_kept_with_a_warning(
    path: Path, states: list[workload.State]
) -> None:
    with create(path, keep=3) as emb:
        go_on(emb, SEED, 4)
        emb.state_dict()
        go_on(emb, SEED, 9)
        with pytest.warns(UserWarning, match=r"gives up commit 4 \(step 4\), 7 \(step 7\), 8"):
            emb.flush()
        assert emb.commits() == {9: 9}
        workload.assert_zarr_is(path, states[9])
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            emb.flush()
        go_on(emb, SEED, 11)
        assert list(emb.commits()) == [9, 10, 11]
        emb.rollback(9)
        workload.assert_table_is(emb, states[9])


def test_keep_commits_may_be_lowered_and_raised_and_is_remembered(path: Path) -> None:
    with create(path, keep=4) as emb:
        go_on(emb, SEED, 6)
        assert list(emb.commits()) == [3, 4, 5, 6]
        emb.keep_commits = np.int64(2)
        assert list(emb.commits()) == [5, 6]
        emb.keep_commits = 3
    with open_again(path) as emb:
        assert emb.keep_commits == 3
        go_on(emb, SEED, 8)
        assert list(emb.commits()) == [6, 7, 8]
        for wrong in (0, -1, True, 1.5, None):
            with store_files.untouched(path), pytest.raises((ValueError, TypeError)):
                emb.keep_commits = wrong
    with pytest.raises(ValueError, match="keep_commits"):
        DiskEmbedding(3, 2, path=path.parent / "new.zarr", keep_commits=0)
    assert not (path.parent / "new.zarr").exists()
    with DiskEmbedding(np.int64(3), 2, path=path.parent / "n", keep_commits=np.int64(2)) as emb:
        assert emb.keep_commits == 2


def test_a_reader_a_closed_table_and_a_forked_child_hand_out_their_commit_and_make_none(
    path: Path,
) -> None:
    with create(path) as emb:
        go_on(emb, SEED, 3)
        reader = DiskEmbedding.open(path, mode="r")
        go_on(emb, SEED, 4)
        go_on(emb, SEED, 5, commits=False)
        with store_files.untouched(path):
            assert going_back.word_of(reader)["commit"] == 3
            pid = os.fork()
            if pid == 0:  # pragma: no cover
                os._exit(0 if going_back.word_of(emb)["commit"] == 4 else 1)
            assert os.waitpid(pid, 0)[1] == 0
        assert emb.step == 5
    with store_files.untouched(path):
        word = going_back.word_of(emb)
        assert (word["commit"], word["step"]) == (5, 5)
    reader.close()


# Loading one


def messages(emb: nn.Module, saved: dict[str, Any]) -> str:
    """What load_state_dict says, strict or not; and that the way out, which it names, is one."""
    texts = []
    for strict in (True, False):
        with pytest.raises(RuntimeError, match=WORD) as error:
            emb.load_state_dict(saved, strict=strict)
        texts.append(str(error.value))
    assert texts[0] == texts[1]
    assert emb.load_state_dict({}, strict=False).missing_keys == [WORD]
    return texts[0]


def test_a_checkpoint_of_an_earlier_commit_is_refused_and_the_error_says_how_to_go_back(
    path: Path, states: list[workload.State]
) -> None:
    with create(path) as emb:
        go_on(emb, SEED, 4)
        saved = emb.state_dict()
        assert emb.load_state_dict(saved).missing_keys == []
        go_on(emb, SEED, 6)
        text = messages(emb, saved)
        assert "commit 4, step 4" in text
        assert "commit 6, step 6" in text
        assert "emb.rollback(4)" in text
        workload.assert_table_is(emb, states[6])
        emb.rollback(4)
        emb.load_state_dict(saved)
        emb.state_dict()
        for step in (7, 8):
            go_on(emb, SEED, step)
            later = emb.state_dict()
        go_on(emb, SEED, 9)
        assert "does not keep" in messages(emb, saved)
        with DiskEmbedding.open(path, mode="r") as reader:
            number = going_back.read_word(later)["commit"]
            assert f"commit={number}) reads it" in messages(reader, later)
            with DiskEmbedding.open(path, "r", commit=number) as earlier:
                earlier.load_state_dict(later)


def test_a_checkpoint_of_a_commit_that_a_rollback_took_back_is_refused_at_the_same_step_too(
    path: Path,
) -> None:
    with create(path, keep=9) as emb:
        go_on(emb, SEED, 6)
        undone = emb.state_dict()
        emb.rollback(3)
        go_on(emb, SEED + 1, 6)
        assert emb.step == going_back.read_word(undone)["step"] == 6
        assert "a rollback took it back" in messages(emb, undone)
        with pytest.raises(StoreError, match=r"names a commit 6 that is none of .*t.zarr"):
            ooc_embed.rollback(emb, undone)
        kept = emb.state_dict()
        emb.load_state_dict(kept)
    with open_again(path) as emb:
        emb.load_state_dict(kept)
        assert "a rollback took it back" in messages(emb, undone)


@pytest.mark.parametrize("word", [None, {}, [1], {"table_id": "x", "commit": 0, "step": 0}])
def test_what_is_no_checkpoint_of_this_table_is_refused(path: Path, word: Any) -> None:
    with create(path) as emb:
        messages(emb, {WORD: word})
        with pytest.raises(StoreError):
            ooc_embed.rollback(emb, {WORD: word})
        with pytest.raises(KeyError, match="no '_extra_state'.* has a table"):
            ooc_embed.rollback(emb, {})


# Models


class Two(nn.Module):
    """Two tables and a dense layer."""

    def __init__(self, folder: Path, keep: int = 1) -> None:
        super().__init__()
        adam = ooc_embed.SparseAdam(lr=0.05)
        options: dict[str, Any] = {"optimizer": adam, "dtype": torch.float64, "chunk_rows": 1024}
        options |= {"cache_bytes": 40 * 13 * 8, "keep_commits": keep}
        self.users = DiskEmbedding(300, 4, path=folder / "users.zarr", seed=1, **options)
        self.items = DiskEmbedding(200, 4, path=folder / "items.zarr", seed=2, **options)
        self.head = nn.Linear(8, 1, dtype=torch.float64)

    def forward(self, users: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(torch.cat([self.users(users), self.items(items)], 1))
        return out

    def close(self) -> None:
        self.users.close()
        self.items.close()

    def all(self) -> list[torch.Tensor]:
        """All that training changes."""
        tables = (self.users, self.items)
        parts = [view[:] for emb in tables for view in (emb.weight, *emb.state.values())]
        parts += [emb.version[:] for emb in tables]
        return parts + [parameter.detach().clone() for parameter in self.head.parameters()]


def epoch(model: Two, dense: torch.optim.Optimizer, number: int, **schedulers: Any) -> None:
    generator = torch.Generator().manual_seed(number)
    for _ in range(3):
        users = torch.randint(0, 300, (90,), generator=generator)
        items = torch.randint(0, 200, (90,), generator=generator)
        dense.zero_grad()
        (model(users, items) - 1).square().mean().backward()
        dense.step()
    for scheduler in schedulers.values():
        scheduler.step()


def made(folder: Path, **options: Any) -> tuple[Two, torch.optim.Optimizer, dict[str, Any]]:
    torch.manual_seed(4)
    model = Two(folder, **options)
    dense = torch.optim.Adam(model.head.parameters(), lr=0.01)
    schedulers = {
        name: torch.optim.lr_scheduler.StepLR(getattr(model, name).optimizer, 2, gamma=0.5)
        for name in ("users", "items")
    }
    return model, dense, schedulers


def test_early_stopping_returns_to_the_best_epoch_and_goes_on_as_if_it_had_stopped_there(
    tmp_path: Path,
) -> None:
    model, dense, schedulers = made(tmp_path / "a")
    best: dict[str, Any] = {}
    for number in range(7):
        epoch(model, dense, number, **schedulers)
        model.users.commit()  # automatic ones must not displace it
        if number == 2:
            parts = {"model": model, "dense": dense, **schedulers}
            best = copy.deepcopy({name: part.state_dict() for name, part in parts.items()})
            torch.save(best, tmp_path / "best.pt")
    assert (tmp_path / "best.pt").stat().st_size < 10_000
    best = torch.load(tmp_path / "best.pt", weights_only=True)
    ooc_embed.rollback(model, best["model"])
    for name, part in {"model": model, "dense": dense, **schedulers}.items():
        part.load_state_dict(best[name])
    other, other_dense, other_schedulers = made(tmp_path / "b")
    for number in range(3):
        epoch(other, other_dense, number, **other_schedulers)
    for number in range(10, 15):
        for one, two in zip(model.all(), other.all(), strict=True):
            assert torch.equal(one, two)
        for name in ("users", "items"):
            group = getattr(model, name).optimizer.param_groups[0]
            assert group["lr"] == getattr(other, name).optimizer.param_groups[0]["lr"]
            assert group["initial_lr"] == 0.05
        epoch(model, dense, number, **schedulers)
        epoch(other, other_dense, number, **other_schedulers)
    model.close()
    other.close()
    assert report.verify(tmp_path / "a" / "users.zarr") == []


def _closed(model: Two) -> None:
    model.items.close()


def _read_only(model: Two) -> None:
    model.items.close()
    model.items = DiskEmbedding.open(model.items.path, mode="r")


def _forgotten(model: Two) -> None:
    for _ in range(3):
        model(torch.tensor([1]), torch.tensor([1])).sum().backward()
        model.items.state_dict()


def _undone(model: Two) -> None:
    model.items.rollback(0)


@pytest.mark.parametrize("spoil", [_closed, _read_only, _forgotten, _undone])
def test_where_one_table_of_a_model_cannot_go_back_none_does(
    tmp_path: Path, spoil: Callable[[Two], None]
) -> None:
    model, dense, _ = made(tmp_path, keep=2)
    epoch(model, dense, 0)
    model.items.keep_commits = 1 if spoil is not _undone else 2
    saved = model.state_dict()
    epoch(model, dense, 1)
    spoil(model)
    step = model.users.step
    rows = model.users.weight[:]
    with pytest.raises(StoreError):
        ooc_embed.rollback(model, saved)
    assert model.users.step == step
    assert torch.equal(model.users.weight[:], rows)
    model.close()
