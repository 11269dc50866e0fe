"""Tables with many commits, and what a commit holds as plain json and numpy read it; never ours."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import crash_child
import numpy as np
import store_files
import torch
import workload
from numpy.typing import NDArray

from ooc_embed import DiskEmbedding

CACHE = workload.SMALL_CACHE


def create(path: Path, keep: int = 1, cache_bytes: int = CACHE) -> DiskEmbedding:
    emb: DiskEmbedding = crash_child.create(str(path), cache_bytes)
    emb.keep_commits = keep
    return emb


def open_again(path: Path, **options: Any) -> DiskEmbedding:
    return DiskEmbedding.open(path, cache_bytes=CACHE, **options)


def go_on(emb: DiskEmbedding, seed: int, until: int, *, commits: bool = True) -> None:
    """Play the rounds of a script up to step `until`, a commit behind each."""
    while emb.step < until:
        workload.play(emb, workload.make_round(seed, emb.step))
        if commits:
            emb.commit()


def abandon(emb: DiskEmbedding) -> None:
    """Leave a table as a killed process does: nothing is committed, the lock is free."""
    emb._table._storage.stop_merge()
    emb._table._guard.closed = True
    emb._table.store.close()


def named(path: Path) -> dict[int, dict[str, Any]]:
    """The commits that a manifest names, by number."""
    return {commit["commit"]: commit for commit in store_files.manifest(path)["commits"]}


def is_sealed(path: Path) -> bool:
    return len(store_files.newest_commit(path)["logs"]) == 2


def records_by_hand(path: Path, number: int) -> NDArray[np.float64]:
    """The records of a commit: the chunks that are named, and over them its prefix of the logs."""
    chunks = {int(index) for index in store_files.manifest(path)["chunk_crc32"]}
    whole = store_files.read_by_hand(path, "table")
    for index in range(-(-len(whole) // workload.CHUNK_ROWS)):
        if index not in chunks:
            whole[index * workload.CHUNK_ROWS : (index + 1) * workload.CHUNK_ROWS] = 0
    for log in named(path)[number]["logs"]:
        folder = f"log/{log['generation'] % 2}"
        end = log["records"]
        rows = store_files.read_by_hand(path, f"{folder}/rows", end)[:end]
        records = store_files.read_by_hand(path, f"{folder}/records", end)[:end]
        for row, record in zip(rows, records, strict=True):
            if row >= 0:
                whole[row] = record
    # A table that was about to grow, or went back to fewer rows, has a longer array.
    return whole[: named(path)[number]["num_embeddings"]]


def assert_commit_is(path: Path, number: int, want: workload.State) -> None:
    """A commit that is kept holds this, whoever reads it by the format's rules."""
    commit = named(path)[number]
    assert commit["step"] == want.step
    assert commit["param_groups"][0]["lr"] == want.lr
    np.testing.assert_allclose(records_by_hand(path, number), want.records(), rtol=1e-9, atol=1e-11)


def shadow_of(weight: torch.Tensor, *parts: tuple[int, int, int]) -> workload.Shadow:
    """What torch makes of rounds ``(seed, first, stop)`` behind one another."""
    shadow = workload.Shadow(weight)
    for seed, first, stop in parts:
        for index in range(first, stop):
            shadow.play(workload.make_round(seed, index))
    return shadow


def word_of(module: torch.nn.Module, name: str = "") -> dict[str, Any]:
    """What a checkpoint says of a table, which it holds as the bytes of JSON."""
    return read_word(module.state_dict(), name)


def read_word(state: Mapping[str, torch.Tensor], name: str = "") -> dict[str, Any]:
    found: dict[str, Any] = json.loads(bytes(state[f"{name}_extra_state"].tolist()))
    return found
