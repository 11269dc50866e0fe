"""A power cut, or a failure, at any call of a script: the store is one of its commits, and whole.

`OOC_EMBED_FULL_MATRIX=1` takes every call, not a sample.
"""

from __future__ import annotations

import contextlib
import copy
import errno
import json
import os
import shutil
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import crash_child
import going_back
import numpy as np
import pytest
import store_files
import system_calls
import torch
import workload
from effort import FULL
from power_cut import Disk
from shadowed import Run
from test_resize import grow, long_rows

from ooc_embed import DiskEmbedding, FormatError, report
from ooc_embed.merging import Merge, Worker
from ooc_embed.stored import StoredState

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:.*gives up commit"),
]

CODES = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EINTR)
CALLS = (*system_calls.WRITES, *system_calls.SYNCS, *system_calls.NAMES, "open")
__all__ = ["long_rows"]
T = TypeVar("T")
SEED = 5
# Rows of the table that the script overwrites.
IMPORTED = 50
# Of the calls, those ahead of which the power is cut, those at which the process is killed, those
# of the next process ahead of which the power is cut then, and those that fail.
CUT, KILLED, CUT_THEN, FAILING = (1.0, 0.25, 0.04, 1.0) if FULL else (0.08, 0.004, 0.04, 0.012)
# Few manifests name what an unfinished merge has done, and few calls come between a rename and its
# sync: a sample could miss them.
RARE = 4
# None of what is not safe, half of it, all of it: the last is a killed process.
KEPT = (0.0, 0.5, 1.0)


# The number of the newest commit, the checkpoints' and those of all that are kept.
Moment = tuple[int, tuple[int, ...], tuple[int, ...]]
# What each commit of a run holds.
Shadows = dict[int, workload.Shadow]


def named(path: Path) -> Moment | None:
    """What a manifest names, None where there is no manifest."""
    try:
        value = json.loads((path / "zarr.json").read_text())["attributes"]["ooc_embed"]
    except FileNotFoundError:
        return None
    numbers = tuple(commit["commit"] for commit in value["commits"])
    return numbers[-1], tuple(value["checkpoints"]), numbers


def at_once(call: Callable[[], T]) -> T:
    return call()


@contextlib.contextmanager
def stopping_merges(path: Path, chunks: int) -> Iterator[None]:
    """Let the merges in the block end behind so many chunks, and then at once, but not one that is
    waited for."""
    real, left = Merge._next, iter(range(chunks))
    real_finish, waited = StoredState._finish_merge, set[Path]()

    def finish(self: StoredState, **how: bool) -> None:
        waited.add(self.store.path)
        real_finish(self, **how)

    def next_chunk(self: Merge) -> int | None:
        if self._store.path == path and path not in waited and next(left, None) is None:
            self.end()
        return real(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Merge, "_next", next_chunk)
        patch.setattr(StoredState, "_finish_merge", finish)
        yield
        for thread in threading.enumerate():
            if isinstance(thread, Worker):
                thread.join()


def script(
    path: Path,
    long_rows: torch.Tensor,
    do: Callable[[Callable[[], Any]], Any] = at_once,
    returned: Callable[[], None] = lambda: None,
) -> Shadows:
    """Import, overwrite, train, commit, merge, go back, grow, copy: what each commit of it holds.

    Args:
        path: of the store; its snapshot is beside it.
        long_rows: initial rows of the length that it grows to.
        do: makes each call.
        returned: is called behind each that commits.
    """
    shadows: Shadows = {}
    rows = path.with_name("rows.npy")
    np.save(rows, np.ones((IMPORTED, 3), np.float32))
    emb = do(lambda: DiskEmbedding.from_pretrained(rows, path=path))
    do(emb.close)
    returned()
    options: dict[str, Any] = {"overwrite": True}
    emb = do(lambda: crash_child.create(str(path), workload.SMALL_CACHE, **options))
    run = Run(emb)

    def play(*rounds: int) -> None:
        for index in rounds:
            played = workload.make_round(SEED, index)
            if played.lr is not None:
                emb.optimizer.param_groups[0]["lr"] = played.lr
            if played.assigned is not None:
                rows, values = played.assigned
                do(lambda rows=rows, values=values: emb.weight.__setitem__(rows, values))
            do(lambda played=played: workload.train(emb, played.ids, played.grads))
            run.shadow.play(played)

    def done(how: Callable[[DiskEmbedding], Any] = DiskEmbedding.commit) -> None:
        do(lambda: run.save(how))
        shadows[max(run.kept)] = copy.deepcopy(run.shadow)
        returned()
        run.check()

    done()
    do(lambda: setattr(emb, "keep_commits", 2))
    play(0, 1)
    done()
    play(2)
    done(DiskEmbedding.state_dict)
    play(3)
    done(DiskEmbedding.flush)
    play(4, 5)
    done()
    first = max(run.kept)
    play(6)
    done(DiskEmbedding.state_dict)
    do(lambda: run.roll_back(first))
    play(7)
    done()
    play(8)
    do(lambda: grow(run, long_rows))
    done()
    for index in range(9, 13):
        play(index)
        done()
    do(lambda: emb.snapshot(path.with_name("s.zarr")))
    done(DiskEmbedding.flush)
    # A merge that stops in the middle, a commit, a close and an opening beside it.
    for first in range(0, len(long_rows), 500):
        ids = torch.arange(first, min(first + 500, len(long_rows)))
        grads = torch.ones(len(ids), workload.DIM).double()
        do(lambda ids=ids, grads=grads: workload.train(emb, ids, grads))
        run.shadow.train(ids, grads)
    with stopping_merges(path, chunks=3):
        done()
        for index in (13, 14):
            play(index)
            done()
        do(emb.close)
    returned()
    emb = do(lambda: DiskEmbedding.open(path, cache_bytes=workload.SMALL_CACHE))
    run.emb = emb
    play(15)
    done(DiskEmbedding.flush)
    do(emb.close)
    returned()
    return shadows


def life(path: Path, shadows: Shadows, returned: Callable[[], None] = lambda: None) -> Shadows:
    """What comes after a kill: open, train, commit, merge, close; what each commit of it holds."""
    moment = named(path)
    if moment is not None and is_import(path):
        DiskEmbedding.open(path).close()
        return {}
    if moment is None:
        run = Run(crash_child.create(str(path), workload.SMALL_CACHE))
    else:
        emb = DiskEmbedding.open(path, cache_bytes=workload.SMALL_CACHE)
        run = Run(emb, copy.deepcopy(shadows[moment[0]]))
    returned()
    for index, how in ((16, DiskEmbedding.commit), (17, DiskEmbedding.flush)):
        run.play(index)
        run.save(how)
        returned()
    run.emb.close()
    return run.kept


def aside(call: Callable[[], None], faults: list[str]) -> None:
    """Look at other stores, wherever the script is: in a backward, in a merge, without gradients.

    What goes wrong is kept, where the call that is interrupted would take it for its own.
    """
    with ThreadPoolExecutor(1) as pool:
        error = pool.submit(call).exception()
    if error is not None:
        faults.append("".join(traceback.format_exception(error)))


class Cutter:
    """Cuts the power ahead of calls below a folder.

    Args:
        disk: the folder's.
        cut: the part of the calls ahead of which it does.
        look: is called with what is left, and what its manifest may name.
        faults: what goes wrong there is kept in it.
        possible: what a manifest may name now: the last state that is durable, and those since.
    """

    def __init__(
        self,
        disk: Disk,
        cut: float,
        look: Callable[[Path, set[Moment | None]], None],
        faults: list[str],
        possible: Iterable[Moment | None] = (None,),
    ) -> None:
        self.store = disk.folder / "t.zarr"
        self.calls, self.cuts = 0, 0
        self.possible = set(possible)
        self.named = set[Path]()
        self.disk = disk
        self.faults = faults
        self._cut = cut
        self._look = look
        self._rng = np.random.default_rng(SEED)
        self._merging = False

    def cut(self) -> None:
        for kept in KEPT:
            with tempfile.TemporaryDirectory(dir=self.disk.folder.parent) as folder:
                self.disk.leave(Path(folder, "left"), self._rng, kept)
                self.cuts += 1
                left = Path(folder, "left", "t.zarr")
                aside(lambda left=left: self._look(left, self.possible), self.faults)

    def returned(self) -> None:
        """A call that commits has returned: what it did is durable."""
        self.possible = {named(self.store)}

    def before(self, name: str, arguments: tuple[Any, ...]) -> None:
        self.calls += 1
        self.named |= {Path(where) for where in arguments[:2] if isinstance(where, (str, Path))}
        if self._rng.random() < self._cut * (RARE if self._merging else 1):
            self.cut()
        self.disk.before(name, arguments)

    def after(self, name: str, arguments: tuple[Any, ...]) -> None:
        self.disk.after(name, arguments)
        manifest = self.store / "zarr.json"
        renamed = name == "rename" and Path(arguments[1]) == manifest
        if renamed or (name in ("unlink", "remove") and Path(arguments[0]) == manifest):
            self.possible.add(named(self.store))
            self._merging = bool(renamed and store_files.manifest(self.store)["merged_crc32"])
        elif name == "fsync" and system_calls.target(arguments) == self.store:
            self.possible = {named(self.store)}


def is_import(path: Path) -> bool:
    """Whether it is the table that the script overwrites."""
    return bool(store_files.manifest(path)["num_embeddings"] == IMPORTED)


def assert_is_whole(path: Path, shadows: Shadows) -> None:
    """A store is exactly its commits, each of them, and trains on."""
    commits = going_back.named(path)
    for number in commits:
        going_back.assert_commit_is(path, number, shadows[number].state())
    with DiskEmbedding.open(path, cache_bytes=workload.SMALL_CACHE) as emb:
        assert list(emb.commits()) == list(commits)
        workload.assert_table_is(emb, shadows[max(commits)].state())
        emb(torch.arange(0, emb.num_embeddings, 9)).sum().backward()
    assert report.verify(path) == []


def assert_can_be_made(path: Path) -> None:
    """What is no store yet says so, and a store can be made there."""
    if path.exists():
        with pytest.raises(FormatError, match=r"zarr\.json is missing"):
            DiskEmbedding.open(path)
    crash_child.create(str(path), workload.SMALL_CACHE).close()
    assert report.verify(path) == []


def assert_is_one_of(path: Path, possible: set[Moment | None], shadows: Shadows) -> None:
    """What a power cut left is a store that it may be, and whole; so is its copy, if it is one."""
    moment = named(path)
    assert moment in possible
    copied = path.with_name("s.zarr")
    if named(copied) is not None:
        assert_is_whole(copied, shadows)
    if moment is None:
        assert_can_be_made(path)
    elif is_import(path):
        with DiskEmbedding.open(path) as emb:
            assert emb.weight[:].tolist() == [[1.0] * 3] * IMPORTED
        assert report.verify(path) == []
    else:
        assert_is_whole(path, shadows)


@pytest.mark.timeout(1800 if FULL else 300)
def test_a_power_cut_at_any_call_leaves_the_last_durable_commit_or_a_later_one(
    quick: Path, long_rows: torch.Tensor
) -> None:
    shadows = script(quick / "t.zarr", long_rows)
    seen, merging, faults = set(), 0, list[str]()

    def look(path: Path, possible: set[Moment | None]) -> None:
        nonlocal merging
        seen.add(named(path))
        if named(path) is not None:
            merging += bool(store_files.manifest(path)["merged_crc32"])
        assert_is_one_of(path, possible, shadows)

    (quick / "disk").mkdir()
    cutter = Cutter(Disk(quick / "disk"), CUT, look, faults)
    with system_calls.watched(cutter.disk.folder, cutter.before, cutter.after, names=CALLS):
        assert script(cutter.store, long_rows, returned=cutter.returned).keys() == shadows.keys()
        cutter.cut()
    print(f"{cutter.calls} calls, {cutter.cuts} power cuts, {len(seen)} states seen")
    assert not faults, faults[0]
    assert set(cutter.store.rglob("*")) <= cutter.named  # no file is made by other calls
    assert cutter.calls > 400
    assert merging > 2
    assert len(seen) > 8


@pytest.mark.timeout(7200 if FULL else 300)
def test_a_power_cut_after_a_kill_at_any_call_leaves_what_a_power_cut_may(
    quick: Path, long_rows: torch.Tensor
) -> None:
    shadows = script(quick / "t.zarr", long_rows)
    cuts, kills, faults = 0, 0, list[str]()
    rng = np.random.default_rng(SEED)
    (quick / "disk").mkdir()
    first = Cutter(Disk(quick / "disk"), 0.0, pytest.fail, faults)

    def live_on(folder: Path, disk: Disk) -> None:
        nonlocal cuts
        shutil.copytree(disk.folder, folder / "plain")
        later = shadows | life(folder / "plain" / "t.zarr", shadows)

        def look(path: Path, possible: set[Moment | None]) -> None:
            assert_is_one_of(path, possible, later)

        cutter = Cutter(disk, CUT_THEN, look, faults, first.possible)
        with system_calls.watched(disk.folder, cutter.before, cutter.after, names=CALLS):
            life(cutter.store, shadows, cutter.returned)
            cutter.cut()
        cuts += cutter.cuts

    def kill(name: str, arguments: tuple[Any, ...]) -> None:
        nonlocal kills
        if rng.random() < KILLED * (RARE if len(first.possible) > 1 else 1):
            kills += 1
            with tempfile.TemporaryDirectory(dir=quick) as folder:
                disk = first.disk.copied(Path(folder, "killed"))
                aside(lambda: live_on(Path(folder), disk), faults)
        first.before(name, arguments)

    with system_calls.watched(first.disk.folder, kill, first.after, names=CALLS):
        script(first.store, long_rows, returned=first.returned)
    print(f"{first.calls} calls, {kills} kills, {cuts} power cuts after them")
    assert not faults, faults[0]
    assert kills > 4
    assert cuts > 50


@pytest.mark.timeout(7200 if FULL else 300)
@pytest.mark.filterwarnings("ignore:.*a merge failed", "ignore:.*merge will begin anew")
@pytest.mark.parametrize("code", CODES)
def test_after_a_call_that_fails_nothing_is_lost_and_the_next_one_works(
    quick: Path, long_rows: torch.Tensor, code: int
) -> None:
    shadows = script(quick / "t.zarr", long_rows)
    rng = np.random.default_rng(code)
    number, tried, failed = 0, 0, 0
    calls = 1 << 30
    while number < calls:
        number += 1
        if rng.random() > FAILING:
            continue
        folder = quick / str(number)
        folder.mkdir()
        calls = 0

        def fail(*_: Any, number: int = number) -> None:
            nonlocal calls
            calls += 1
            if calls == number:
                raise OSError(code, os.strerror(code))

        def insist(call: Callable[[], Any]) -> Any:
            nonlocal failed
            try:
                return call()
            except OSError as error:
                assert error.errno == code
                failed += 1
                return call()

        with system_calls.watched(folder, fail, names=CALLS):
            assert script(folder / "t.zarr", long_rows, insist).keys() == shadows.keys()
        tried += 1
        assert_is_whole(folder / "t.zarr", shadows)
        assert_is_whole(folder / "s.zarr", shadows)
        shutil.rmtree(folder)
    print(f"{number} calls, {tried} failed, of which {failed} were raised")
    assert tried > 2
    assert 2 * failed > tried
