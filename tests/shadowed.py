"""A table beside its oracle in RAM, and what two stores share on the disk. Knows no reader of ours.

Knows the format by json alone.
"""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import crash_child
import store_files
import workload

from ooc_embed import DiskEmbedding, report

SEED = 5


class Run:
    """A table and its oracle in RAM, which do the same rounds."""

    def __init__(self, emb: DiskEmbedding, shadow: workload.Shadow | None = None) -> None:
        self.emb = emb
        self.shadow = workload.Shadow(emb.weight[:]) if shadow is None else shadow
        self.kept: dict[int, workload.Shadow] = {}

    def play(self, *rounds: int) -> None:
        for index in rounds:
            played = workload.make_round(SEED, index)
            workload.play(self.emb, played)
            self.shadow.play(played)

    def save(self, how: Callable[[DiskEmbedding], Any] = DiskEmbedding.commit) -> None:
        how(self.emb)
        self.kept[max(self.emb.commits())] = copy.deepcopy(self.shadow)

    def roll_back(self, number: int) -> None:
        self.emb.rollback(number)
        self.shadow = copy.deepcopy(self.kept[number])

    def check(self) -> None:
        workload.assert_table_is(self.emb, self.shadow.state())

    def opened(self, path: Path) -> Run:
        """The same moment in another store."""
        other = Run(DiskEmbedding.open(path, cache_bytes=workload.SMALL_CACHE))
        other.shadow, other.kept = copy.deepcopy(self.shadow), copy.deepcopy(self.kept)
        return other


def make(path: Path, keep: int = 3, cache: int = workload.SMALL_CACHE) -> Run:
    emb = crash_child.create(str(path), cache)
    emb.keep_commits = keep
    return Run(emb)


def trained(path: Path) -> Run:
    """Rows in chunks, and a log of some full files and one that is not, of three commits."""
    run = make(path)
    run.play(*range(4))
    run.save(DiskEmbedding.flush)
    for index in range(4, 10):
        run.play(2 * index, 2 * index + 1)
        run.save()
    assert len(run.emb.commits()) == 3
    return run


def files(path: Path) -> dict[str, Path]:
    found = (file for file in path.rglob("*") if file.is_file())
    return {str(file.relative_to(path)): file for file in found if file.name != "writer.json"}


def linked(one: Path, two: Path) -> set[str]:
    theirs = files(two)
    return {n for n, file in files(one).items() if n in theirs and file.samefile(theirs[n])}


def expected_links(path: Path) -> set[str]:
    """By the manifest alone: chunks, and log files with no position left to write to."""
    links = {f"table/c.{index}.0" for index in store_files.manifest(path)["chunk_crc32"]}
    for log in store_files.newest_commit(path)["logs"]:
        for name, ending in (("rows", ""), ("records", ".0")):
            array = f"log/{log['generation'] % 2}/{name}"
            (size, *_) = store_files.metadata(path, array)["chunk_grid"]["configuration"][
                "chunk_shape"
            ]
            links |= {f"{array}/c.{i}{ending}" for i in range(log["records"] // size)}
    return links


def assert_is_whole(path: Path) -> None:
    assert report.verify(path) == []
    store_files.assert_every_reader_agrees(path)


@contextlib.contextmanager
def shared_bytes_stay(one: Path, two: Path, witness: Path) -> Iterator[set[str]]:
    """Other names for what both stores share hold the same bytes after the block."""
    names = linked(one, two)
    witness.mkdir()
    before = {}
    for number, name in enumerate(sorted(names)):
        os.link(one / name, witness / str(number))
        before[number] = (witness / str(number)).read_bytes()
    yield names
    for number, data in before.items():
        assert (witness / str(number)).read_bytes() == data, sorted(names)[number]
