"""Measures training on tables in memory, side by side; does not measure the disk."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from .cache import SLOT_BYTES
from .cgroups import usable_memory
from .disk_rates import data_files
from .embedding import DiskEmbedding
from .figures import Figures
from .references import FbgemmTable, MemmapTable, RamTable, train_step
from .timing import Rounds, Step, interleaved, touch_every_row
from .workloads import DISTRIBUTIONS, RepeatedRows, batches, record_bytes

_RAM = "nn.Embedding + SparseAdam, in RAM"
_MEMMAP = "np.memmap x3, synchronous"
_FBGEMM = "FBGEMM row-wise Adagrad: 1/3 of the data"
_OURS = "DiskEmbedding"
_BY_TORCH = "DiskEmbedding without numba"
# Part of the memory that the contestants may take together; the rest is for batches and programs.
_USED_SHARE = 0.9
# The work of the map from rows to places and of choosing rows to evict, without any disk.
_BOOKKEEPING = ("find", "begin_batch", "victims", "release", "insert")


@dataclass(frozen=True)
class Settings:
    """What to measure: see the options of ``bench hot``."""

    rows: int = 1_000_000
    dim: int = 128
    batch: tuple[int, ...] = (16384, 2048)
    distributions: tuple[str, ...] = DISTRIBUTIONS
    cache_fraction: float = 1.0
    rounds: int = 7
    steps: int = 20
    seed: int = 0

    @property
    def slots(self) -> int:
        """Rows that the cache is to hold."""
        return max(1, int(self.cache_fraction * self.rows))

    @property
    def cache_bytes(self) -> int:
        """Memory for them; room for whatever padding, where it is to hold every row."""
        spare = 64 if self.cache_fraction >= 1 else 0
        return self.slots * (record_bytes(self.dim) + SLOT_BYTES + spare)


Case = tuple[int, str]


def measure(settings: Settings, figures: Figures, folder: Path) -> None:
    """Sends the same batches through all contestants; files go into ``folder``."""
    cases = list(itertools.product(settings.batch, settings.distributions))
    if settings.cache_fraction < 1:
        _measure_in_turn(settings, cases, figures, folder)
    else:
        _measure_side_by_side(settings, cases, figures, folder)


def _measure_side_by_side(
    settings: Settings, cases: Iterable[Case], figures: Figures, folder: Path
) -> None:
    with _make_table(settings, folder, "normal") as table:
        contestants = _references(settings, figures, folder)
        contestants[_OURS] = partial(train_step, table)
        touch_every_row(contestants.values(), settings.rows, settings.dim)
        if table.kernel != "torch":
            contestants[_BY_TORCH] = _stepped_by_torch(table)
        for case in cases:
            ids = _stream(settings, case)
            rounds = _draw_rounds(settings, ids)
            _add_case(settings, figures, case, interleaved(contestants, rounds, settings.dim))
            _add_shares(settings, figures, table, ids)


def _measure_in_turn(
    settings: Settings, cases: Iterable[Case], figures: Figures, folder: Path
) -> None:
    """One contestant after the other, since each takes the memory: ours as the page cache of the
    rows that are not in its own."""
    streams = {case: _stream(settings, case) for case in cases}
    rounds = {case: _draw_rounds(settings, ids) for case, ids in streams.items()}
    contestants = _references(settings, figures, folder)
    touch_every_row(contestants.values(), settings.rows, settings.dim)
    seconds = {case: interleaved(contestants, rounds[case], settings.dim) for case in rounds}
    del contestants
    # Rows that were never written cost no read, so all are imported.
    init = RepeatedRows(settings.rows, settings.dim, seed=settings.seed)
    with _make_table(settings, folder, init) as table:
        for file in data_files(table.path):
            file.read_bytes()
        for case, ids in streams.items():
            _fill_cache(table, settings, ids)
            own = interleaved({_OURS: partial(train_step, table)}, rounds[case], settings.dim)
            _add_case(settings, figures, case, {**seconds[case], **own})
            _add_shares(settings, figures, table, ids)


def _make_table(settings: Settings, folder: Path, init: object) -> DiskEmbedding:
    return DiskEmbedding(
        settings.rows,
        settings.dim,
        path=folder / "table.zarr",
        init=init,
        cache_bytes=settings.cache_bytes,
        seed=settings.seed,
    )


def _stream(settings: Settings, case: Case) -> Iterator[Tensor]:
    """The case's batches without end. All are drawn from one, so the same rows stay frequent."""
    batch, distribution = case
    return batches(distribution, settings.rows, batch, seed=settings.seed)


def _draw_rounds(settings: Settings, ids: Iterator[Tensor]) -> Rounds:
    return [list(itertools.islice(ids, settings.steps)) for _ in range(settings.rounds + 1)]


def _add_case(
    settings: Settings, figures: Figures, case: Case, seconds: Mapping[str, list[float]]
) -> None:
    batch, distribution = case
    figures.section(
        f"{settings.rows:,} x {settings.dim}, {settings.slots:,} cached, "
        f"batch {batch:,}, {distribution} ids"
    )
    _add(figures, seconds, batch)


def _add_shares(
    settings: Settings, figures: Figures, table: DiskEmbedding, ids: Iterator[Tensor]
) -> None:
    rounds = _draw_rounds(settings, ids)
    shares = [_bookkeeping_share(table, drawn, settings.dim) for drawn in rounds[1:]]
    figures.add("where-map and eviction", "% of step", [100 * share for share in shares])


def _stepped_by_torch(table: DiskEmbedding) -> Step:
    """Steps of the same table as they are without the extra ``fast``."""
    update = table._table._update
    compiled = update._fused

    def step(ids: Tensor, target: Tensor) -> None:
        update._fused = None
        try:
            train_step(table, ids, target)
        finally:
            update._fused = compiled

    return step


def _references(settings: Settings, figures: Figures, folder: Path) -> dict[str, Step]:
    """The contestants that fit into memory beside our cache, and whose software is here."""
    table_bytes = 4 * settings.rows * settings.dim
    free = _USED_SHARE * usable_memory() - settings.cache_bytes
    steps: dict[str, Step] = {}

    def weight() -> Tensor:
        generator = torch.Generator().manual_seed(settings.seed)
        return torch.randn(settings.rows, settings.dim, generator=generator)

    candidates: list[tuple[str, int, Callable[[], Any]]] = [
        (_RAM, 3 * table_bytes, lambda: RamTable(weight()))
    ]
    if settings.cache_fraction >= 1:  # else they would take the page cache from our other rows
        candidates += [
            (_MEMMAP, 3 * table_bytes, lambda: MemmapTable.create(folder, weight().numpy())),
            (_FBGEMM, table_bytes, lambda: FbgemmTable(weight())),
        ]
    for name, nbytes, make in candidates:
        if nbytes > free:
            figures.skip(name, f"it needs {nbytes / 1e9:.1f} GB, {max(free, 0) / 1e9:.1f} are left")
            continue
        try:
            steps[name] = make().step
        except ImportError as error:
            figures.skip(name, str(error))
        else:
            free -= nbytes
    return steps


def _fill_cache(table: DiskEmbedding, settings: Settings, ids: Iterator[Tensor]) -> None:
    """Trains until rows are evicted; Zipf ids may never come to that, so not for ever."""
    first = next(ids)
    target = torch.randn(len(first), settings.dim)
    for batch in itertools.chain([first], itertools.islice(ids, 10 * settings.slots // len(first))):
        if table.stats().evictions:
            break
        train_step(table, batch, target)


def _add(figures: Figures, seconds: Mapping[str, list[float]], batch: int) -> None:
    bases = {"x_sparse_adam": seconds.get(_RAM), "x_memmap": seconds.get(_MEMMAP)}
    for name, own in seconds.items():
        # The ratio is of the same round, then the median: noise that lasts longer cancels out.
        ratios = {
            ratio: median(a / b for a, b in zip(base, own, strict=True))
            for ratio, base in bases.items()
            if base is not None
        }
        samples_per_s = batch / median(own)
        figures.add(name, "ms/step", [1e3 * s for s in own], samples_per_s=samples_per_s, **ratios)


def _bookkeeping_share(table: DiskEmbedding, drawn: Sequence[Tensor], dim: int) -> float:
    """The part of the steps on ``drawn`` that goes into the cache's map and evictions."""
    target = torch.randn(len(drawn[0]), dim)
    begin = time.perf_counter()
    with _timed_methods(table._table.cache, _BOOKKEEPING) as spent:
        for ids in drawn:
            train_step(table, ids, target)
    return sum(spent) / (time.perf_counter() - begin)


@contextmanager
def _timed_methods(owner: object, names: Iterable[str]) -> Iterator[list[float]]:
    """Inside, each call of these methods of ``owner`` adds its seconds to the list."""
    spent: list[float] = []

    def timed(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            begin = time.perf_counter()
            try:
                return method(*args)
            finally:
                spent.append(time.perf_counter() - begin)

        return call

    for name in names:
        setattr(owner, name, timed(getattr(owner, name)))
    try:
        yield spent
    finally:
        for name in names:
            delattr(owner, name)
