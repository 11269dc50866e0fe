"""A power cut, or a failure, at any call of a script: the store is one of its commits, and whole.

`OOC_EMBED_FULL_MATRIX=1` takes every call, not a sample.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator
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

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:.*gives up commit"),
]

CODES = (errno.ENOSPC, errno.EDQUOT, errno.EIO)
CALLS = (*system_calls.WRITES, *system_calls.SYNCS, *system_calls.NAMES, "open")
__all__ = ["long_rows"]
T = TypeVar("T")
SEED = 5
# Of the calls, those ahead of which the power is cut, and those that fail.
CUT, FAILING = (1.0, 1.0) if FULL else (0.12, 0.012)
# None of what is not safe, half of it, all of it: the last is a killed process.
KEPT = (0.0, 0.5, 1.0)


# The number of the newest commit, the checkpoints' and those of all that are kept.
Moment = tuple[int, tuple[int, ...], tuple[int, ...]]


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
def stopping_merges(chunks: int) -> Iterator[None]:
    """Let a merge that begins in the block end behind so many chunks, which nobody has settled."""
    real, left = Merge._next, iter(range(chunks))

    def next_chunk(self: Merge) -> int | None:
        if next(left, None) is None:
            self.end()
        return real(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Merge, "_next", next_chunk)
        yield
        for thread in threading.enumerate():
            if isinstance(thread, Worker):
                thread.join()


def script(
    path: Path,
    long_rows: torch.Tensor,
    do: Callable[[Callable[[], Any]], Any] = at_once,
    returned: Callable[[], None] = lambda: None,
) -> dict[int, workload.State]:
    """Create, train, commit, merge, go back, grow, copy: what each commit of it holds.

    Args:
        path: of the store; its snapshot is beside it.
        long_rows: initial rows of the length that it grows to.
        do: makes each call.
        returned: is called behind each that commits.
    """
    states: dict[int, workload.State] = {}
    do(lambda: DiskEmbedding(50, 3, path=path, init=torch.ones(50, 3))).close()
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
        states[max(run.kept)] = run.shadow.state()
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
    with stopping_merges(chunks=3):
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
    return states


class Cutter:
    """Cuts the power ahead of calls below a folder; what is left is looked at when all is over.

    Args:
        folder: an empty one.
        seed: of what is drawn.
    """

    def __init__(self, folder: Path, seed: int) -> None:
        self.store = folder / "disk" / "t.zarr"
        self.store.parent.mkdir()
        self.left: list[tuple[Path, set[Moment | None]]] = []
        self.calls = 0
        self._folder = folder
        self._disk = Disk(self.store.parent)
        self._rng = np.random.default_rng(seed)
        # What a manifest may name: the last state that is durable, and those since.
        self._possible: set[Moment | None] = {None}
        # Few manifests name what an unfinished merge has done: a sample could miss them.
        self._merging = False

    def cut(self) -> None:
        for kept in KEPT:
            left = self._folder / str(len(self.left))
            self._disk.leave(left, self._rng, kept)
            self.left.append((left / "t.zarr", set(self._possible)))

    def returned(self) -> None:
        """A call that commits has returned: what it did is durable."""
        self._possible = {named(self.store)}

    def before(self, name: str, arguments: tuple[Any, ...]) -> None:
        self.calls += 1
        if self._rng.random() < CUT or self._merging:
            self.cut()
        self._disk.before(name, arguments)

    def after(self, name: str, arguments: tuple[Any, ...]) -> None:
        self._disk.after(name, arguments)
        manifest = self.store / "zarr.json"
        renamed = name == "rename" and Path(arguments[1]) == manifest
        if renamed or (name in ("unlink", "remove") and Path(arguments[0]) == manifest):
            self._possible.add(named(self.store))
            self._merging = bool(renamed and store_files.manifest(self.store)["merged_crc32"])
        elif name == "fsync" and system_calls.target(arguments) == self.store:
            self._possible = {named(self.store)}


def assert_is_whole(path: Path, states: dict[int, workload.State]) -> None:
    """A store is exactly its commits, each of them, and trains on."""
    commits = going_back.named(path)
    for number in commits:
        going_back.assert_commit_is(path, number, states[number])
    with DiskEmbedding.open(path, cache_bytes=workload.SMALL_CACHE) as emb:
        assert list(emb.commits()) == list(commits)
        workload.assert_table_is(emb, states[max(commits)])
        emb(torch.arange(0, emb.num_embeddings, 9)).sum().backward()
    assert report.verify(path) == []


def assert_can_be_made(path: Path) -> None:
    """What is no store yet says so, and a store can be made there."""
    if path.exists():
        with pytest.raises(FormatError, match=r"zarr\.json is missing"):
            DiskEmbedding.open(path)
    crash_child.create(str(path), workload.SMALL_CACHE).close()
    assert report.verify(path) == []


@pytest.mark.timeout(1800 if FULL else 300)
def test_a_power_cut_at_any_call_leaves_the_last_durable_commit_or_a_later_one(
    quick: Path, long_rows: torch.Tensor
) -> None:
    states = script(quick / "t.zarr", long_rows)
    cutter = Cutter(quick, seed=1)
    with system_calls.watched(cutter.store.parent, cutter.before, cutter.after, names=CALLS):
        again = script(cutter.store, long_rows, returned=cutter.returned)
        cutter.cut()
    assert again.keys() == states.keys()
    seen, merging = set(), 0
    for path, possible in cutter.left:
        moment = named(path)
        seen.add(moment)
        assert moment in possible
        if named(path.with_name("s.zarr")) is not None:
            assert_is_whole(path.with_name("s.zarr"), states)
        if moment is None:
            assert_can_be_made(path)
        elif store_files.manifest(path)["num_embeddings"] == 50:  # before it was overwritten
            assert report.verify(path) == []
        else:
            merging += bool(store_files.manifest(path)["merged_crc32"])
            assert_is_whole(path, states)
        shutil.rmtree(path.parent)
    print(f"{cutter.calls} calls, {len(cutter.left)} power cuts, {len(seen)} states seen")
    assert cutter.calls > 400
    assert merging > 2
    assert len(seen) > 8


@pytest.mark.timeout(7200 if FULL else 300)
@pytest.mark.filterwarnings("ignore:.*a merge failed", "ignore:.*merge will begin anew")
@pytest.mark.parametrize("code", CODES)
def test_after_a_call_that_fails_nothing_is_lost_and_the_next_one_works(
    quick: Path, long_rows: torch.Tensor, code: int
) -> None:
    states = script(quick / "t.zarr", long_rows)
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
            assert script(folder / "t.zarr", long_rows, insist).keys() == states.keys()
        tried += 1
        assert_is_whole(folder / "t.zarr", states)
        assert_is_whole(folder / "s.zarr", states)
        shutil.rmtree(folder)
    print(f"{number} calls, {tried} failed, of which {failed} were raised")
    assert tried > 2
    assert 2 * failed > tried
