"""A short script that runs while calls fail or are interrupted; knows no store's format."""

from __future__ import annotations

import dataclasses
import errno
from pathlib import Path

import crash_child
import pytest
import system_calls
import workload
from system_calls import Hook

import ooc_embed
from ooc_embed import DiskEmbedding, report

ROUNDS = 6
SEED = 3
CACHE = workload.SMALL_CACHE


def states(path: Path) -> list[workload.State]:
    """What the table is after each round; makes a table at `path` for its initial rows."""
    with crash_child.create(str(path), 1 << 20) as emb:
        return workload.history(SEED, ROUNDS, emb.weight[:])


class Script:
    """The script on one table, which may be stopped anywhere and goes on from there."""

    def __init__(self, path: Path, wanted: list[workload.State]) -> None:
        self.path = path
        self.wanted = wanted
        self.emb = crash_child.create(str(path), CACHE)
        self.saved = self.begun = 0

    @property
    def finished(self) -> bool:
        return self.saved == ROUNDS

    def advance(self) -> None:
        """Save, where the last round ends with that; else play the next one."""
        step = self.emb.step
        then = workload.make_round(SEED, step - 1).then if step else ""
        if step == ROUNDS:
            then = "flush"
        if then and self.saved < step:
            self.begun = step
            getattr(self.emb, then)()
            self.saved = step
            return
        played = workload.make_round(SEED, step)
        if played.assigned is not None:
            rows, values = played.assigned
            if bool((self.emb.weight[rows] == values).all()):
                # Done before the step was stopped: it must not count twice.
                played = dataclasses.replace(played, assigned=None)
        workload.play(self.emb, played)

    def check_disk(self) -> None:
        """The disk holds the last commit, or the one that was stopped."""
        with DiskEmbedding.open(self.path, mode="r") as reader:
            assert reader.step in (self.saved, self.begun)
            workload.assert_table_is(reader, self.wanted[reader.step])

    def reopen(self) -> None:
        with pytest.raises(ooc_embed.StoreError, match="open"):
            self.emb.close()
        assert self.emb.closed
        self.emb = open_at_last(self.path)
        assert self.emb.step in (self.saved, self.begun)
        self.saved = self.begun = self.emb.step

    def finish(self) -> None:
        self.emb.close()
        assert report.verify(self.path) == []
        with DiskEmbedding.open(self.path) as emb:
            emb.flush()
            workload.assert_zarr_is(self.path, self.wanted[ROUNDS])


def run(path: Path, wanted: list[workload.State], before: Hook, after: Hook | None = None) -> int:
    """Run the script, repeating whatever was stopped; return how many errors the table showed."""
    shown = 0
    script = Script(path, wanted)
    with system_calls.watched(path, before, after):
        while not script.finished:
            try:
                script.advance()
            except (OSError, KeyboardInterrupt):
                shown += 1
                script.check_disk()
            except ooc_embed.StoreError as error:
                # After a disk has failed to sync twice the writer refuses until it is opened again.
                assert "open" in str(error)
                script.reopen()
    script.finish()
    return shown


def open_at_last(path: Path) -> DiskEmbedding:
    """Opening finishes a merge that was cut off, and so may meet the failing disk itself."""
    while True:
        try:
            return DiskEmbedding.open(path, cache_bytes=CACHE)
        except OSError as error:
            assert error.errno == errno.EIO
