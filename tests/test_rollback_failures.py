"""A rollback that is killed, fails or is interrupted anywhere: before it or behind it, whole."""

from __future__ import annotations

import errno
import itertools
import os
import shutil
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import going_back
import pytest
import store_files
import system_calls
import torch
import workload
from going_back import create, go_on, open_again

from ooc_embed import DiskEmbedding, StoreError, durable, report
from ooc_embed.merging import Worker

pytestmark = pytest.mark.usefixtures("one_thread")

SEED = 91
ROUNDS = 60


@pytest.fixture(scope="module")
def states(weight: torch.Tensor) -> list[workload.State]:
    return workload.history(SEED, ROUNDS, weight)


@pytest.fixture
def path(quick: Path) -> Path:
    return quick / "t.zarr"


def crashes_of(
    path: Path, quick: Path, body: Callable[[set[int]], None]
) -> list[tuple[Path, set[int]]]:
    """Run a body that keeps the set of steps that may be the newest; a copy at each call."""
    allowed: set[int] = set()
    crashes: list[tuple[Path, set[int]]] = []

    def crash_here(*_: Any) -> None:
        copy = quick / "crashes" / f"{len(crashes)}.zarr"
        crashes.append((store_files.copied(path, copy), set(allowed)))

    with system_calls.watched(path, crash_here):
        body(allowed)
    return crashes


def check_crash(copy: Path, steps: set[int], states: list[workload.State]) -> None:
    """The newest commit is one of these, and every other one that is named can be returned to."""
    found = {number: commit["step"] for number, commit in going_back.named(copy).items()}
    for number, step in found.items():
        going_back.assert_commit_is(copy, number, states[step])
    with open_again(copy) as emb:
        assert emb.step in steps
        workload.assert_table_is(emb, states[emb.step])
        assert emb.commits() == found
        oldest = min(found)
        emb.rollback(oldest)
        workload.assert_table_is(emb, states[found[oldest]])
        go_on(emb, SEED, emb.step + 2)
        workload.assert_table_is(emb, states[emb.step])
    assert report.verify(copy) == []
    shutil.rmtree(copy)


def test_a_crash_inside_a_rollback_leaves_the_commit_before_it_or_the_one_gone_back_to(
    quick: Path, path: Path, states: list[workload.State]
) -> None:
    with create(path, keep=30) as emb:
        go_on(emb, SEED, 24)
        go_on(emb, SEED, 28, commits=False)

        def body(allowed: set[int]) -> None:
            for newest, number in ((24, 21), (21, 6)):
                allowed |= {newest, number}
                emb.rollback(number)
                allowed.clear()
                allowed.add(number)
                go_on(emb, SEED, number + 1, commits=False)
                emb.rollback()

        crashes = crashes_of(path, quick, body)
    assert len(crashes) > 8
    for copy, steps in crashes:
        check_crash(copy, steps, states)


def test_a_crash_while_commits_come_and_are_given_up_keeps_all_that_the_manifest_names(
    quick: Path, path: Path, states: list[workload.State]
) -> None:
    """Three are kept, sealed, merged and, by a flush, given up."""
    with create(path, keep=3) as emb:
        go_on(emb, SEED, 16)

        def body(allowed: set[int]) -> None:
            while emb.step < 26:
                workload.play(emb, workload.make_round(SEED, emb.step))
                allowed |= {emb.step - 1, emb.step}
                emb.state_dict() if emb.step == 18 else emb.commit()
                allowed.clear()
                allowed.add(emb.step)
            with pytest.warns(UserWarning, match="gives up"):
                emb.flush()
            allowed.add(emb.step)

        crashes = crashes_of(path, quick, body)
    assert len(crashes) > 60
    assert any(going_back.is_sealed(copy) for copy, _ in crashes)
    for copy, steps in crashes[::2]:
        check_crash(copy, steps, states)


# Errors and interrupts


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """24 commits, the newest of them behind a sealed log."""
    path = tmp_path_factory.mktemp("stored") / "t.zarr"
    with create(path, keep=30) as emb:
        go_on(emb, SEED, 24)
    return path


def run_stopped(
    emb: DiskEmbedding,
    states: list[workload.State],
    target: int,
    before: Callable[..., None],
    after: Callable[..., None] | None = None,
) -> int:
    """Roll back, step and commit, again wherever that is stopped; return how often it was."""
    path, stopped, uncommitted = emb.path, 0, emb.step
    played = workload.make_round(5, target)
    with system_calls.watched(path, before, after):
        while emb.step != target + 1 or emb.commits().get(max(emb.commits())) != target + 1:
            try:
                if emb.step > target + 1:
                    emb.rollback(target)
                if emb.step == target:
                    workload.train(emb, played.ids, played.grads)
                emb.commit()
            except (OSError, KeyboardInterrupt):
                stopped += 1
            except StoreError as error:
                stopped += 1
                assert "open" in str(error)
                with pytest.raises(StoreError):
                    emb.close()
            if emb.closed:
                emb = open_again(path)
                assert emb.step != uncommitted
            if emb.step != target + 1:
                workload.assert_table_is(emb, states[emb.step])
    emb.close()
    return stopped


def branch(weight: torch.Tensor, target: int) -> workload.State:
    shadow = going_back.shadow_of(weight, (SEED, 0, target))
    played = workload.make_round(5, target)
    shadow.train(played.ids, played.grads)
    return shadow.state()


# A log that the disk failed to sync is written anew, and the sealed one must be merged before that.
@pytest.mark.filterwarnings("ignore:.*gives up commit")
@pytest.mark.parametrize("target", [7, 23])
@pytest.mark.parametrize("how", [errno.ENOSPC, errno.EIO, signal.SIGINT])
def test_a_rollback_stopped_at_any_call_happened_or_did_not_and_the_next_one_works(
    quick: Path,
    stored: Path,
    states: list[workload.State],
    weight: torch.Tensor,
    target: int,
    how: int,
) -> None:
    want = branch(weight, target)
    for number in itertools.count():
        calls = itertools.count()

        def stop(*_: Any, calls: Any = calls, number: int = number) -> None:
            if next(calls) == number:
                if how == signal.SIGINT:
                    signal.raise_signal(signal.SIGINT)
                    return
                raise OSError(how, f"{os.strerror(how)}, on purpose")

        path = store_files.copied(stored, quick / f"{number}.zarr")
        emb = open_again(path)
        go_on(emb, SEED, 28, commits=False)
        assert states[28].lr != states[target].lr
        if how == signal.SIGINT:
            stopped = run_stopped(emb, states, target, lambda *_: None, stop)
        else:
            stopped = run_stopped(emb, states, target, stop)
        assert report.verify(path) == []
        with open_again(path) as emb:
            workload.assert_table_is(emb, want)
            first, *_, newest = emb.commits()
            assert list(emb.commits()) == [*range(first, target + 1), newest]
            assert first == 0 or how != signal.SIGINT
        shutil.rmtree(path)
        if next(calls) <= number:
            assert number > 10
            assert not stopped
            return


def test_an_open_at_an_earlier_commit_that_is_interrupted_leaves_no_merge_without_the_lock(
    path: Path, states: list[workload.State]
) -> None:
    with create(path) as emb:
        go_on(emb, SEED, 3, commits=False)
        emb.flush()
        go_on(emb, SEED, 12, commits=False)
        number = emb.commit()
        emb.keep_commits = 2
        emb.optimizer.param_groups[0]["lr"] = 0.5

        def fail_late(name: str, arguments: tuple[Any, ...]) -> None:
            if name == "rename" and "c.2.0" in str(arguments[0]):
                raise OSError(errno.EIO, "failing on purpose")

        with system_calls.watched(path, fail_late), pytest.raises(OSError, match="on purpose"):
            emb.flush()

    def interrupt(name: str, arguments: tuple[Any, ...]) -> None:
        if name == "rename" and arguments[1] == path / "zarr.json":
            signal.raise_signal(signal.SIGINT)

    with system_calls.watched(path, lambda *_: None, interrupt), pytest.raises(KeyboardInterrupt):
        open_again(path, commit=number)
    assert not [thread for thread in threading.enumerate() if isinstance(thread, Worker)]
    with open_again(path) as emb:
        workload.assert_table_is(emb, states[12])
        emb.keep_commits = 1
        emb.flush()
        workload.assert_zarr_is(path, states[12])
    assert report.verify(path) == []


@pytest.mark.parametrize("times", [1, 9])
def test_what_a_manifest_names_that_a_power_cut_may_bring_back_is_not_deleted(
    path: Path, weight: torch.Tensor, times: int
) -> None:
    """The folder's sync fails behind the rename of a rollback, once or for good."""
    emb = create(path, keep=9)
    go_on(emb, SEED, 6)
    newest, before = max(emb.commits()), (path / "zarr.json").read_bytes()
    real, failures = durable.sync_directory, iter(range(times))

    def fail(folder: Path) -> None:
        if folder == path and next(failures, None) is not None:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(folder)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(durable, "sync_directory", fail)
        with pytest.raises(OSError, match="Input/output"):
            emb.rollback(newest - 3)
        if times > 1:
            assert emb.closed
            (path / "zarr.json").write_bytes(before)  # as the power cut leaves it
    emb.close()
    with open_again(path) as again:
        number = newest if times > 1 else newest - 3
        assert max(again.commits()) == number
        again.rollback(number)
    assert report.verify(path) == []


@pytest.mark.parametrize(
    "then", [DiskEmbedding.commit, lambda emb: emb.rollback(max(emb.commits()))]
)
def test_a_commit_that_was_not_made_durable_is_so_by_the_next_call(
    path: Path, weight: torch.Tensor, then: Callable[[DiskEmbedding], None]
) -> None:
    emb = create(path)
    go_on(emb, SEED, 1)
    synced: list[Path] = []
    real = durable.sync_directory

    def fail(folder: Path) -> None:
        if folder == path and not synced:
            synced.append(folder)
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        synced.append(folder)
        real(folder)

    go_on(emb, SEED, 2, commits=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(durable, "sync_directory", fail)
        with pytest.raises(OSError, match="Input/output"):
            emb.commit()
        before = len(synced)
        then(emb)
    assert path in synced[before:]
    emb.close()
