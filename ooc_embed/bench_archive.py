"""Measures archives of a trained table: bytes, speeds and errors of each way to write one."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch

from . import linkprediction, training
from .archive_embedding import ArchiveEmbedding
from .embedding import DiskEmbedding
from .exporting import export_table, freeze_table
from .figures import Figures
from .linkprediction import ComplEx, Graph
from .timing import seconds

_Readable = DiskEmbedding | ArchiveEmbedding


@dataclass(frozen=True)
class Settings:
    """What to measure: see the options of ``bench archive``."""

    trained: str = ""
    steps: int = 3900
    codecs: tuple[str, ...] = ("zstd", "blosc-lz4", "none")
    bitrounds: tuple[int, ...] = (0, 11, 7, 4)
    dtypes: tuple[str, ...] = ("float32", "float16")
    batch: int = 1024
    rounds: int = 9
    seed: int = 0


def measure(settings: Settings, figures: Figures, folder: Path) -> None:
    """Trains the demonstration's model on WordNet, or takes a run of it, and writes its table in
    each way. A batch is of uniform ids; all files are in the page cache."""
    graph = linkprediction.load_wordnet()
    if settings.trained:
        run = training.Run.resume(Path(settings.trained), graph)
    else:
        new = training.Settings(steps=settings.steps, seed=settings.seed)
        run = training.Run.create(folder / "run", new, graph)
    with run:
        run.train(run.settings.steps)
        run.entities.flush()
        path = run.entities.path
        shape = run.entities.weight.shape
        figures.section(f"WordNet after {run.step:,} steps, {shape[0]:,} x {shape[1]}")
        with DiskEmbedding.open(path, "r") as table:
            _Ways(settings, figures, table, run.model, graph, folder).measure()


class _Ways:
    """Writes a table in each way, and adds a line for it."""

    def __init__(
        self,
        settings: Settings,
        figures: Figures,
        table: DiskEmbedding,
        model: ComplEx,
        graph: Graph,
        folder: Path,
    ) -> None:
        self._settings = settings
        self._figures = figures
        self._table = table
        self._model = model
        self._graph = graph
        self._folder = folder
        self._weight = torch.cat([rows for _, rows in table.blocks()])
        self._megabytes = self._weight.nbytes / 1e6
        generator = torch.Generator().manual_seed(settings.seed)
        self._ids = [
            torch.randint(0, len(self._weight), (settings.batch,), generator=generator)
            for _ in range(settings.rounds)
        ]

    def measure(self) -> None:
        table, frozen = self._table, self._folder / "frozen.zarr"
        self._add("the store", table.path, table, {"MRR": self._mrr(table)})
        taken = seconds(lambda: freeze_table(table, frozen))
        with DiskEmbedding.open(frozen, "r") as served:
            self._add("frozen store", frozen, served, {"export MB/s": self._megabytes / taken})
        ways = itertools.product(
            self._settings.dtypes, self._settings.bitrounds, self._settings.codecs
        )
        for dtype, bits, codec in ways:
            if bits < {"float16": 10, "float32": 23, "float64": 52}[dtype]:
                self._measure_way(dtype, bits, codec)

    def _measure_way(self, dtype: str, bits: int, codec: str) -> None:
        name = f"{dtype}, {bits or 'all'} bits, {codec}"
        out = self._folder / name.replace(", ", "-")
        taken = seconds(
            lambda: export_table(
                self._table,
                out,
                codec=codec,
                bitround=bits or None,
                dtype=getattr(torch, dtype),
            )
        )
        archive = ArchiveEmbedding(out)
        extra = {"export MB/s": self._megabytes / taken}
        if codec == self._settings.codecs[0]:  # others give the same rows
            extra |= {**self._errors(archive), "MRR": self._mrr(archive)}
        self._add(name, out, archive, extra)

    def _add(self, name: str, path: Path, rows: _Readable, extra: dict[str, float]) -> None:
        size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file()) / 1e6
        reading = seconds(lambda: deque(rows.blocks(), maxlen=0))
        self._figures.add(
            name,
            "MB",
            [size],
            **{
                "ratio": self._megabytes / size,
                "read MB/s": self._megabytes / reading,
                "rows/s": self._settings.batch / self._timed(rows, self._ids),
                "one row ms": 1e3 * self._timed(rows, [ids[:1] for ids in self._ids]),
                **extra,
            },
        )

    def _errors(self, archive: ArchiveEmbedding) -> dict[str, float]:
        """The largest errors of a weight, in millionths, absolute and relative."""
        absolute, relative = [], []
        for start, rows in archive.blocks():
            weight = self._weight[start : start + len(rows)]
            error = (rows - weight).abs().double()
            absolute.append(float(error.max()))
            # Numbers that float16 has to its full precision.
            relative.append(float((error / weight.abs()).where(weight.abs() > 2**-14, 0).max()))
        return {"error 1e-6": 1e6 * max(absolute), "relative 1e-6": 1e6 * max(relative)}

    @staticmethod
    def _timed(rows: Callable[[torch.Tensor], torch.Tensor], batches: list[torch.Tensor]) -> float:
        with torch.no_grad():
            return median(seconds(lambda ids=ids: rows(ids)) for ids in batches)  # type: ignore[misc]

    def _mrr(self, rows: _Readable) -> float:
        model = ComplEx(rows, self._graph.num_relations, 0.0, 1.0, 0)
        model.relations.load_state_dict(self._model.relations.state_dict())
        return linkprediction.evaluate(model, self._graph, self._graph.test).mrr
