"""Small trained stores for the tests of creation, opening and layout; knows no format."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from ooc_embed import DiskEmbedding


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
