"""Small trained stores for the tests of creation, opening and layout; knows no format."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest
import store_files
import system_calls
import torch

from ooc_embed import DiskEmbedding
from ooc_embed.storage import Storage

HOLDER = "table/writer.json"


def make(path: Path, rows: int = 5000, dim: int = 4, **options: Any) -> DiskEmbedding:
    options.setdefault("chunk_rows", 1024)
    return DiskEmbedding(rows, dim, path=path, **options)


def step(emb: DiskEmbedding, ids: list[int]) -> None:
    emb(torch.tensor(ids)).sum().backward()


def some_steps(emb: DiskEmbedding, seed: int, steps: int = 3) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        ids = torch.randint(0, emb.num_embeddings, (200,), generator=generator)
        emb(ids).square().sum().backward()


def train(path: Path) -> Path:
    """Make a store with rows in its chunks and newer ones in its log, and close it."""
    with make(path) as emb:
        some_steps(emb, 1)
        emb.flush()
        some_steps(emb, 2)
    return path


def in_a_merge(path: Path, seed: int) -> Path:
    """Make a store with three kept commits, chunks that a merge has replaced and one that it has
    not, a sealed log of several files, and an active one; and leave it as a killed writer does."""
    with make(path, seed=seed) as emb, pytest.MonkeyPatch.context() as patch:
        some_steps(emb, seed, 9)
        emb.flush()
        emb.keep_commits = 3
        patch.setattr(Storage, "begin_merge", lambda _: None)
        while len(store_files.newest_commit(path)["logs"]) == 1:
            some_steps(emb, seed + emb.step, 1)
            emb.commit()
        for more in range(4):
            some_steps(emb, seed + more, 2)
            emb.commit()

    def fail_late(name: str, arguments: tuple[Any, ...]) -> None:
        if name == "rename" and "c.3.0" in str(arguments[1]):
            raise OSError(errno.EIO, "failing on purpose")

    with system_calls.watched(path, fail_late):
        emb = DiskEmbedding.open(path)
        merge = emb._table._storage._chunks.merge
        assert merge is not None
        for worker in merge._workers:
            worker.join()
        with pytest.warns(UserWarning, match="a merge failed"):
            emb.close()
    (path / HOLDER).write_text('{"pid": 1, "host": "elsewhere"}')
    return path
