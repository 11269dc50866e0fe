"""Power cuts at any call: a store is its last durable commit, or a later one, and goes on."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

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

CALLS = (*system_calls.WRITES, *system_calls.SYNCS, *system_calls.NAMES, "open")
__all__ = ["long_rows"]
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


def script(path: Path, long_rows: torch.Tensor) -> dict[int, workload.State]:
    """Create, train, commit, merge, go back, grow: what each commit of it holds."""
    states: dict[int, workload.State] = {}
    run = Run(crash_child.create(str(path), workload.SMALL_CACHE))

    def done(how: Callable[[DiskEmbedding], Any] = DiskEmbedding.commit) -> None:
        run.save(how)
        states[max(run.kept)] = run.shadow.state()

    done()
    run.emb.keep_commits = 2
    run.play(0, 1)
    done()
    run.play(2)
    done(DiskEmbedding.state_dict)
    run.play(3)
    done(DiskEmbedding.flush)
    run.play(4, 5)
    done()
    first = max(run.kept)
    run.play(6)
    done(DiskEmbedding.state_dict)
    run.roll_back(first)
    run.play(7)
    done()
    run.play(8)
    grow(run, long_rows)
    done()
    for index in range(9, 13):
        run.play(index)
        done()
    done(DiskEmbedding.flush)
    run.emb.close()
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
        if number is None:
            assert_can_be_made(path)
        else:
            assert_is_whole(path, states)
        shutil.rmtree(path.parent)
    print(f"{cutter.calls} calls, {len(cutter.left)} power cuts, {len(seen)} states seen")
    assert cutter.calls > 250
    assert len(cutter.left) > cutter.calls * SAMPLED
    assert seen >= {None, 0} and len(seen) > 6
