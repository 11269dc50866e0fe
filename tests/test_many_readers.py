"""Readers that stay open, or come at any instant, each see one commit: every row carries its number.

Row r of commit n is n + r / 1024 in every column, exactly: a row of another commit, or half of one,
cannot pass. Rows that no commit before had touched are read late, too.
"""

from __future__ import annotations

import os
import random
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import crash_child
import pytest
import store_files
import torch
from effort import FULL

from ooc_embed import DiskEmbedding, StoreError, report

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:.*gives up commit"),
]

ROWS, DIM = 4000, 3


@pytest.fixture(scope="module")
def nursery() -> crash_child.Nursery:
    return crash_child.nursery()


def pattern(number: int, rows: torch.Tensor) -> torch.Tensor:
    return (number + rows.double() / 1024).unsqueeze(1).expand(-1, DIM)


def create(path: Path, **options: Any) -> DiskEmbedding:
    cache = 300 * (3 * DIM + 1) * 8
    options = {"keep_commits": 3, "cache_bytes": cache, "chunk_rows": 1024} | options
    return DiskEmbedding(ROWS, DIM, path=path, init="zeros", dtype=torch.float64, **options)


def write(emb: DiskEmbedding, save: Callable[[DiskEmbedding], Any]) -> int:
    """Give every row the number of the commit that this makes."""
    number = max(emb.commits()) + 1
    rows = torch.arange(ROWS)
    emb.weight[rows] = pattern(number, rows)
    save(emb)
    assert max(emb.commits()) == number
    return number


def assert_sees(reader: DiskEmbedding, number: int, rows: torch.Tensor) -> None:
    assert torch.equal(reader.weight[rows], pattern(number, rows))


# In processes of their own


HELD = """
import sys
import torch
from ooc_embed import DiskEmbedding

reader = DiskEmbedding.open(sys.argv[1], mode="r")
(number,) = reader.commits()
print(number, flush=True)
for line in sys.stdin:
    start, stop = map(int, line.split())
    rows = torch.arange(start, stop)
    want = (number + rows.double() / 1024).unsqueeze(1).expand(-1, 3)
    print(torch.equal(reader(rows).detach(), want), flush=True)
"""
