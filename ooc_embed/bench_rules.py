"""Measures each rule's steps beside torch's own optimizer in RAM; does not measure the disk."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

import torch

from . import rules
from .cache import SLOT_BYTES
from .embedding import DiskEmbedding
from .figures import Figures
from .references import RamTable, train_step
from .timing import Step, interleaved, touch_every_row
from .workloads import batches, record_bytes

# What torch has for sparse gradients, or None.
_RULES = {
    "SparseAdam": (rules.SparseAdam(), torch.optim.SparseAdam),
    "SparseAdam(row_weight_decay=0.01)": (rules.SparseAdam(row_weight_decay=0.01), None),
    "SparseAdam(bias_correction='row')": (rules.SparseAdam(bias_correction="row"), None),
    "SGD": (rules.SGD(), torch.optim.SGD),
    "SGD(momentum=0.9)": (rules.SGD(momentum=0.9), None),
    "Adagrad": (rules.Adagrad(), torch.optim.Adagrad),
    "RowwiseAdagrad": (rules.RowwiseAdagrad(), None),
}


@dataclass(frozen=True)
class Settings:
    """What to measure: see the options of ``bench rules``."""

    rows: int = 1_000_000
    dim: int = 128
    batch: int = 16384
    rounds: int = 7
    steps: int = 20
    seed: int = 0


def measure(settings: Settings, figures: Figures, folder: Path) -> None:
    """Each rule in turn, beside ``SparseAdam`` in RAM and what torch has of the rule itself."""
    figures.section(
        f"{settings.rows:,} x {settings.dim}, all cached, batch {settings.batch:,}, uniform ids"
    )
    ids = batches("uniform", settings.rows, settings.batch, seed=settings.seed)
    rounds = [list(itertools.islice(ids, settings.steps)) for _ in range(settings.rounds + 1)]
    for number, (name, (rule, in_ram)) in enumerate(_RULES.items()):
        contestants: dict[str, Step] = {}
        for optimizer in dict.fromkeys((torch.optim.SparseAdam, in_ram)):
            if optimizer is not None:
                weight = torch.randn(settings.rows, settings.dim)
                title = f"torch.optim.{optimizer.__name__} in RAM"
                contestants[title] = RamTable(weight, optimizer=optimizer).step
        with DiskEmbedding(
            settings.rows,
            settings.dim,
            path=folder / f"{number}.zarr",
            optimizer=rule,
            cache_bytes=settings.rows * (record_bytes(settings.dim) + SLOT_BYTES + 64),
        ) as table:
            contestants[name] = partial(train_step, table)
            # It says no word of its gradients then.
            with torch.sparse.check_sparse_tensor_invariants(enable=False):
                touch_every_row(contestants.values(), settings.rows, settings.dim)
                taken = interleaved(contestants, rounds, settings.dim)
            _add(figures, name, taken, table.kernel)


def _add(figures: Figures, name: str, taken: dict[str, list[float]], kernel: str) -> None:
    own = taken.pop(name)
    ratios = {
        f"x {base}": median(a / b for a, b in zip(times, own, strict=True))
        for base, times in taken.items()
    }
    figures.add(f"{name}, by {kernel}", "ms/step", [1e3 * s for s in own], **ratios)
