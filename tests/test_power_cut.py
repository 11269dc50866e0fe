"""A power cut, or a failure, at any call of a script: the store is one of its commits, and whole.

`OOC_EMBED_FULL_MATRIX=1` takes every call, not a sample.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import crash_child
import going_back
import numpy as np
import pytest
import system_calls
import torch
import workload
from power_cut import Disk
from shadowed import Run
from test_resize import grow, long_rows

from ooc_embed import DiskEmbedding, FormatError, report

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:.*gives up commit"),
]

CODES = (errno.ENOSPC, errno.EDQUOT, errno.EIO)
CALLS = (*system_calls.WRITES, *system_calls.SYNCS, *system_calls.NAMES, "open")
__all__ = ["long_rows"]
T = TypeVar("T")
SEED = 5
# Of the calls; all of them where the environment asks for it.
SAMPLED = 1.0 if os.environ.get("OOC_EMBED_FULL_MATRIX") else 0.15
# None of what is not safe, half of it, all of it: the last is a killed process.
KEPT = (0.0, 0.5, 1.0)


def named(path: Path) -> int | None:
    """The number of the newest commit that a manifest names, None where there is no manifest."""
    try:
        value = json.loads((path / "zarr.json").read_text())
    except FileNotFoundError:
        return None
    return int(value["attributes"]["ooc_embed"]["commits"][-1]["commit"])


def at_once(call: Callable[[], T]) -> T:
    return call()


def script(
    path: Path, long_rows: torch.Tensor, do: Callable[[Callable[[], Any]], Any] = at_once
) -> dict[int, workload.State]:
    """Create, train, commit, merge, go back, grow, copy: what each commit of it holds.

    Args:
        path: of the store; its snapshot is beside it.
        long_rows: initial rows of the length that it grows to.
        do: makes each call.
    """
    states: dict[int, workload.State] = {}
    emb = do(lambda: crash_child.create(str(path), workload.SMALL_CACHE))
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
    do(lambda: emb.resize(len(long_rows)))
    grow(run, long_rows)
    done()
    for index in range(9, 13):
        play(index)
        done()
    do(lambda: emb.snapshot(path.with_name("s.zarr")))
    done(DiskEmbedding.flush)
    do(emb.close)
    return states


class Cutter:
    """Cuts the power at calls below a folder; what is left is looked at when all is over.

    Args:
        folder: an empty one.
        part: of the calls.
        seed: of what is drawn.
    """

    def __init__(self, folder: Path, part: float, seed: int) -> None:
        self.store = folder / "disk" / "t.zarr"
        self.store.parent.mkdir()
        self.left: list[tuple[Path, set[int | None]]] = []
        self.calls = 0
        self._folder = folder
        self._part = part
        self._disk = Disk(self.store.parent)
        self._rng = np.random.default_rng(seed)
        # The newest commits that a manifest may name: the last durable one, and those since.
        self._possible: set[int | None] = {None}

    def before(self, name: str, arguments: tuple[Any, ...]) -> None:
        self.calls += 1
        if self._rng.random() < self._part:
            for kept in KEPT:
                left = self._folder / str(len(self.left))
                self._disk.leave(left, self._rng, kept)
                self.left.append((left / "t.zarr", set(self._possible)))
        self._disk.before(name, arguments)

    def after(self, name: str, arguments: tuple[Any, ...]) -> None:
        self._disk.after(name, arguments)
        if name == "rename" and Path(arguments[1]) == self.store / "zarr.json":
            self._possible.add(named(self.store))
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


def test_a_power_cut_at_any_call_leaves_the_last_durable_commit_or_a_later_one(
    quick: Path, long_rows: torch.Tensor
) -> None:
    states = script(quick / "t.zarr", long_rows)
    cutter = Cutter(quick, SAMPLED, seed=1)
    with system_calls.watched(cutter.store.parent, cutter.before, cutter.after, names=CALLS):
        assert script(cutter.store, long_rows).keys() == states.keys()
    seen = set()
    for path, possible in cutter.left:
        number = named(path)
        seen.add(number)
        assert number in possible
        if named(path.with_name("s.zarr")) is not None:
            assert_is_whole(path.with_name("s.zarr"), states)
        if number is None:
            assert_can_be_made(path)
        else:
            assert_is_whole(path, states)
        shutil.rmtree(path.parent)
    print(f"{cutter.calls} calls, {len(cutter.left)} power cuts, {len(seen)} states seen")
    assert cutter.calls > 250
    assert len(cutter.left) > cutter.calls * SAMPLED
    assert seen >= {None, 0} and len(seen) > 6


@pytest.mark.filterwarnings("ignore:.*a merge failed")
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
        if rng.random() > SAMPLED / 5 and SAMPLED < 1:
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
