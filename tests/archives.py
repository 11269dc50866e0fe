"""A small trained table and its oracle, for the tests of archives; knows no format."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import zarr

from ooc_embed import DiskEmbedding, SparseAdam, archive

ROWS, DIM = 3000, 4
ALL = ("weight", "exp_avg", "exp_avg_sq", "version")


def ids(seed: int, count: int = 200) -> torch.Tensor:
    """Rows below two thirds: the others stay as they began."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, ROWS * 2 // 3, (count,), generator=generator)


def step(emb: Any, seed: int) -> None:
    emb(ids(seed)).square().sum().backward()


def trained(path: Path, **options: Any) -> DiskEmbedding:
    """Three steps, rows in the chunks and in the log, and a rate that was changed."""
    options = {
        "optimizer": SparseAdam(lr=0.1),
        "dtype": torch.float64,
        "padding_idx": 7,
        "seed": 11,
        "chunk_rows": 1024,
        **options,
    }
    emb = DiskEmbedding(ROWS, DIM, path=path, **options)
    step(emb, 1)
    emb.flush()
    step(emb, 2)
    step(emb, 3)
    emb.optimizer.param_groups[0]["lr"] = 0.05
    emb.commit()
    return emb


def fields_of(emb: DiskEmbedding) -> dict[str, torch.Tensor]:
    state = {name: view[:] for name, view in emb.state.items()}
    return {"weight": emb.weight[:], **state, "version": emb.version[:]}


def use_small_shards(monkeypatch: Any) -> None:
    """Three shards, of 1024 rows of four float64."""
    monkeypatch.setattr(archive, "_CHUNK_BYTES", 128 * DIM * 8)
    monkeypatch.setattr(archive, "_SHARD_BYTES", 1024 * DIM * 8)


def read(path: Path, name: str) -> torch.Tensor:
    """A field as plain zarr reads it."""
    array = zarr.open_group(path, mode="r")[name]
    assert isinstance(array, zarr.Array)
    return torch.from_numpy(array[:])
