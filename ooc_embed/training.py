"""A training run of the link prediction model: settings, steps, and the folder that resumes it.
Does not know the model's arithmetic, nor what is printed.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import torch

from . import durable, linkprediction
from .embedding import DiskEmbedding
from .errors import StoreError
from .initializers import Normal
from .interrupts import uninterrupted
from .linkprediction import ComplEx, Graph
from .rules import SparseAdam

_LEARNING_RATE = 0.05
_DENSE_LEARNING_RATE = 0.01
_PENALTY = 0.1
_STD = 0.3
# The cache of the default run holds a tenth of the table: most rows are on disk at any moment.
_CACHE_SHARE = 10
_FLOAT_BYTES = 4
_SETTINGS = "settings.json"
_TABLE = "entities.zarr"


@dataclass(frozen=True)
class Settings:
    """All that decides the result of a run. They are kept with it: resuming needs only its folder.

    Attributes:
        rows: of the table, 0 for one each entity; further rows are drawn as wrong answers only.
        dim: numbers in a row, two for each complex coordinate.
        steps: of the whole run, over which the learning rate falls to 0.
        batch: triples of a step.
        negatives: wrong answers of a step.
        commit_every: steps.
    """

    rows: int = 0
    dim: int = 128
    steps: int = 3900
    batch: int = 1024
    negatives: int = 512
    commit_every: int = 500
    seed: int = 0


class Run:
    """A model in training, and the folder from which it goes on after Ctrl-C or a kill.

    The folder holds ``settings.json``, the table, and ``model-<step>.pt``, the dense state at the
    step of the table's newest commit. That file is durable before the table commits, and older ones
    are removed after it. So at whichever commit the table is found, its dense state is there too.

    Args:
        folder: of the run.
        settings: of the run.
        graph: to train on.
        entities: the run's table.

    Raises:
        StoreError: the dense state at the table's step is gone.
    """

    def __init__(
        self, folder: Path, settings: Settings, graph: Graph, entities: DiskEmbedding
    ) -> None:
        self.folder = folder
        self.settings = settings
        self.graph = graph
        self.entities = entities
        self.model = ComplEx(entities, graph.num_relations, _PENALTY, _STD, settings.seed)
        self.dense = torch.optim.Adam(self.model.relations.parameters(), lr=_DENSE_LEARNING_RATE)
        if self.step:
            self._load_dense()

    @classmethod
    def create(
        cls,
        folder: Path,
        settings: Settings,
        graph: Graph,
        *,
        cache_bytes: int | None = None,
        overwrite: bool = False,
    ) -> Self:
        """Begin a run.

        Args:
            folder: does not exist yet, or holds a run to overwrite.
            settings: of the run.
            graph: to train on.
            cache_bytes: memory for the table's hot rows; None is a tenth of the table.
            overwrite: replace a run that is in the folder.

        Raises:
            FileExistsError: one is there, and not to be overwritten.
        """
        path = folder / _SETTINGS
        if (folder / "zarr.json").exists():
            raise FileExistsError(f"{folder} is a store itself: give the folder of a run as --path")
        if path.exists() and not overwrite:
            raise FileExistsError(
                f"{folder} holds a run: --resume goes on with it, --overwrite replaces it"
            )
        durable.make_directory(folder)
        # From here until the new settings are written there is no run to resume.
        durable.remove(path)
        rows = max(settings.rows, graph.num_entities)
        entities = DiskEmbedding(
            rows,
            settings.dim,
            path=folder / _TABLE,
            optimizer=SparseAdam(lr=_LEARNING_RATE),
            init=Normal(std=_STD),
            seed=settings.seed,
            cache_bytes=_cache_bytes(cache_bytes, rows, settings.dim),
            overwrite=overwrite,
        )
        for old in folder.glob(_dense_name("*")):
            durable.remove(old)
        durable.replace(path, json.dumps(asdict(settings)).encode(), durable.temporary_for(path))
        durable.sync_directory(folder)
        return cls(folder, settings, graph, entities)

    @classmethod
    def resume(cls, folder: Path, graph: Graph, *, cache_bytes: int | None = None) -> Self:
        """Go on with the run in a folder, exactly where its last commit left it.

        Raises:
            FileNotFoundError: there is no run.
            StoreError: the table cannot be opened, or its dense state is gone.
        """
        settings = read_settings(folder)
        rows = max(settings.rows, graph.num_entities)
        cache = _cache_bytes(cache_bytes, rows, settings.dim)
        entities = DiskEmbedding.open(folder / _TABLE, cache_bytes=cache)
        return cls(folder, settings, graph, entities)

    @property
    def step(self) -> int:
        return self.entities.step

    def train(self, until: int, report: Callable[[float, int], None] | None = None) -> None:
        """Take steps up to ``until``, committing on the way and at the end.

        Args:
            until: the step to stop at.
            report: called after each step with its loss and the number of rows it looked up.
        """
        settings = self.settings
        batches = linkprediction.batches(
            self.graph,
            settings.batch,
            settings.negatives,
            self.entities.num_embeddings,
            settings.seed,
            self.step,
        )
        while self.step < until:
            triples, wrong = next(batches)
            loss = self._take_step(triples, wrong)
            if report is not None:
                report(loss, 2 * len(triples) + len(wrong))
            if self.step % settings.commit_every == 0:
                self.commit()
        self.commit()

    def _take_step(self, triples: torch.Tensor, wrong: torch.Tensor) -> float:
        part_left = 1 - self.step / self.settings.steps
        self.entities.optimizer.param_groups[0]["lr"] = _LEARNING_RATE * part_left
        self.dense.param_groups[0]["lr"] = _DENSE_LEARNING_RATE * part_left
        loss = self.model(triples, wrong)
        self.dense.zero_grad()
        # Ctrl-C comes before the table's step or after the dense one, never between the two.
        with uninterrupted():
            loss.backward()
            self.dense.step()
        value: float = loss.item()
        return value

    def commit(self) -> None:
        """Make the run durable as it is now."""
        path = self.folder / _dense_name(self.step)
        buffer = io.BytesIO()
        state = {"relations": self.model.relations.state_dict(), "adam": self.dense.state_dict()}
        torch.save(state, buffer)
        durable.replace(path, buffer.getvalue(), durable.temporary_for(path))
        durable.sync_directory(self.folder)
        self.entities.commit()
        for old in self.folder.glob(_dense_name("*")):
            if old != path:
                durable.remove(old)

    def close(self) -> None:
        """Commit and let go of the table; a second call does nothing."""
        if not self.entities.closed:
            self.commit()
            self.entities.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _load_dense(self) -> None:
        path = self.folder / _dense_name(self.step)
        if not path.exists():
            raise StoreError(f"the table is at step {self.step}, and {path} is missing")
        state = torch.load(path, weights_only=True)
        self.model.relations.load_state_dict(state["relations"])
        self.dense.load_state_dict(state["adam"])


def read_settings(folder: Path) -> Settings:
    """The settings of the run in a folder.

    Raises:
        FileNotFoundError: there is no run.
    """
    path = folder / _SETTINGS
    if not path.exists():
        raise FileNotFoundError(f"there is no run in {folder}: {path} is missing")
    return Settings(**json.loads(path.read_bytes()))


def record_bytes(dim: int) -> int:
    """Bytes of a row with both moments and its version."""
    return (3 * dim + 1) * _FLOAT_BYTES


def _cache_bytes(given: int | None, rows: int, dim: int) -> int:
    return rows * record_bytes(dim) // _CACHE_SHARE if given is None else given


def _dense_name(step: int | str) -> str:
    return f"model-{step}.pt"
