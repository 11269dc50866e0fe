"""The demonstration in the Poincaré ball: WordNet's hierarchy on disk. Knows its run and its lines.

It does not know how a step is made, nor the arithmetic of points, ranks and pictures.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from . import disk_plot, drawing, durable, hierarchy
from .embedding import DiskEmbedding
from .hierarchy import Hierarchy, Negatives
from .poincare_reference import RamTable
from .riemannian import RiemannianSGD

_TABLE = "nodes.zarr"
_REPORT_SECONDS = 5.0
# Of the nouns, whose distances to each other would be seven thousand million.
_SAMPLE = 1000


@dataclass(frozen=True)
class Settings:
    """All that decides the result of a run.

    The loss is a mean over the batch, so that a rate of 8 with batches of 100 is what 0.08 is for
    single pairs.

    Attributes:
        dim: of the ball.
        epochs: over all pairs, those of the burn-in among them.
        seed: of all that is random.
        batch: pairs of a step.
        negatives: of each pair.
        lr: learning rate behind the burn-in.
        burn_in: epochs in which the rate is a tenth, and negatives are drawn by frequency.
    """

    dim: int = 5
    epochs: int = 150
    seed: int = 0
    batch: int = 100
    negatives: int = 50
    lr: float = 8.0
    burn_in: int = 25


def add_arguments(parser: argparse.ArgumentParser, whole: Callable[[str], int]) -> None:
    """Adds the options that only this demonstration has; they need ``--poincare``."""
    parser.add_argument(
        "--poincare",
        action="store_true",
        help="instead: the hierarchy of WordNet's mammals in the Poincaré ball, 5 numbers in a row",
    )
    group = parser.add_argument_group(
        "with --poincare, which takes --path, --overwrite, --dim and --seed too"
    )
    group.add_argument("--nouns", action="store_true", help="all 82,115 nouns, 10 numbers in a row")
    group.add_argument(
        "--epochs",
        type=whole,
        metavar="N",
        help=f"over all pairs, default: {MAMMALS.epochs}, with --nouns {NOUNS.epochs}",
    )
    group.add_argument(
        "--lr",
        type=_positive,
        metavar="X",
        help=f"learning rate, default: {MAMMALS.lr:g}, with --nouns {NOUNS.lr:g}",
    )
    group.add_argument(
        "--burn-in",
        type=whole,
        metavar="N",
        help="epochs at a tenth of it, "
        f"default: {MAMMALS.burn_in}, with --nouns {NOUNS.burn_in}, half of all at most",
    )
    group.add_argument(
        "--every", type=whole, metavar="N", help="measure the reconstruction every N epochs, too"
    )
    group.add_argument(
        "--ram",
        action="store_true",
        help="the same run with geoopt over rows in RAM, to compare; it needs geoopt, no --path",
    )
    group.add_argument(
        "--png",
        type=Path,
        metavar="FILE",
        help="draw the disk, of rows of 2 numbers; needs matplotlib, the extra plot",
    )


MAMMALS = Settings()
NOUNS = Settings(dim=10, epochs=40, batch=500, lr=80.0, burn_in=5)


def _positive(text: str) -> float:
    """Parses a number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no number above 0")
    return value


def main(args: argparse.Namespace) -> int:
    """Runs the demonstration; its exit status."""
    default = NOUNS if args.nouns else MAMMALS
    epochs = args.epochs or default.epochs
    settings = replace(
        default,
        dim=getattr(args, "dim", 2 if args.png else default.dim),
        epochs=epochs,
        seed=getattr(args, "seed", default.seed),
        lr=args.lr or default.lr,
        burn_in=args.burn_in or min(default.burn_in, epochs // 2),
    )
    if args.png:  # what would stop the picture stops the run before it begins
        drawing.require()
        if not args.png.absolute().parent.is_dir():
            raise FileNotFoundError(f"there is no folder {args.png.absolute().parent}")
        if args.png.is_dir():
            raise IsADirectoryError(f"{args.png} is a folder: give the name of a file")
    tree = hierarchy.load_nouns() if args.nouns else hierarchy.load_mammals()
    table: DiskEmbedding | RamTable
    if args.ram:
        table = RamTable(tree.num_nodes, settings.dim, settings.lr, settings.seed)
    else:
        table = create(tree, settings, args.path, overwrite=args.overwrite)
    with table:
        print(
            f"{'nouns' if args.nouns else 'mammals'} of WordNet: {tree.num_nodes:,} nodes, "
            f"{len(tree.pairs):,} pairs of a node and one of its ancestors\n"
            f"table: {tree.num_nodes:,} points of the ball of {settings.dim} dimensions, float64, "
            f"in {table.path}",
            flush=True,
        )
        progress = _Progress(table, tree, settings, args.every)
        began = time.perf_counter()
        try:
            train(table, tree, settings, progress.step, progress.epoch)
        except KeyboardInterrupt:
            print(f"stopped at step {progress.steps:,}; the table is in {table.path}")
            return 130
        print(f"{progress.steps:,} steps in {time.perf_counter() - began:.0f} s")
        conclude(table, tree, settings.seed)
        if args.png:
            disk_plot.draw(tree, table.weight[:], args.png)
            print(f"picture: {args.png}")
    return 0


def create(
    tree: Hierarchy, settings: Settings, folder: Path, *, overwrite: bool = False
) -> DiskEmbedding:
    """The table of a run, in a folder that does not have one or is to be overwritten.

    Raises:
        FileExistsError: it has one.
    """
    if (folder / "zarr.json").exists():
        raise FileExistsError(f"{folder} is a store itself: give the folder of a run as --path")
    if (folder / _TABLE).exists() and not overwrite:
        raise FileExistsError(f"{folder} holds a run: --overwrite replaces it")
    durable.make_directory(folder)
    return DiskEmbedding(
        tree.num_nodes,
        settings.dim,
        path=folder / _TABLE,
        optimizer=RiemannianSGD(lr=settings.lr),
        seed=settings.seed,
        dtype=torch.float64,  # of float32's ball, the margin at the boundary is too wide for leaves
        overwrite=overwrite,
    )


def train(
    table: DiskEmbedding | RamTable,
    tree: Hierarchy,
    settings: Settings,
    after_step: Callable[[int, float, int], None] = lambda epoch, loss, rows: None,
    after_epoch: Callable[[int], None] = lambda epoch: None,
) -> None:
    """Take all steps of a run, committing each epoch.

    Args:
        table: of the tree's nodes.
        tree: to learn.
        settings: of the run.
        after_step: takes the epoch, the loss and how many rows were looked up.
        after_epoch: takes the epoch.
    """
    group = table.optimizer.param_groups[0]
    early, late = Negatives(tree, by_frequency=True), Negatives(tree)
    for epoch in range(settings.epochs):
        burning_in = epoch < settings.burn_in
        group["lr"] = settings.lr / 10 if burning_in else settings.lr
        negatives = early if burning_in else late
        for ids in hierarchy.batches(
            tree, negatives, settings.batch, settings.negatives, settings.seed, epoch
        ):
            loss = hierarchy.loss(table(ids))
            table.optimizer.zero_grad()
            loss.backward()  # a table on disk steps here, one in RAM in the next line
            table.optimizer.step()
            after_step(epoch, loss.item(), ids.numel())
        table.commit()
        after_epoch(epoch)


class _Progress:
    """Prints a line every few seconds, and the reconstruction every few epochs."""

    def __init__(
        self,
        table: DiskEmbedding | RamTable,
        tree: Hierarchy,
        settings: Settings,
        every: int | None,
    ) -> None:
        self.table = table
        self.tree = tree
        self.settings = settings
        self.every = every
        self.steps = 0
        self.rows = 0
        self.losses: list[float] = []
        self.reported = time.perf_counter()

    def epoch(self, epoch: int) -> None:
        if self.every and (epoch + 1) % self.every == 0:
            print(f"after epoch {epoch + 1}, ", end="")
            conclude(self.table, self.tree, self.settings.seed)

    def step(self, epoch: int, loss: float, rows: int) -> None:
        self.steps += 1
        self.rows += rows
        self.losses.append(loss)
        now = time.perf_counter()
        if (seconds := now - self.reported) >= _REPORT_SECONDS:
            print(
                f"epoch {epoch + 1} of {self.settings.epochs}: loss {np.mean(self.losses):.3f}, "
                f"{self.rows / seconds:,.0f} rows/s",
                flush=True,
            )
            self.rows, self.losses, self.reported = 0, [], now


def conclude(
    table: DiskEmbedding | RamTable, tree: Hierarchy, seed: int
) -> hierarchy.Reconstruction:
    """Measures the reconstruction, of a sample where the tree is large, and prints it."""
    began = time.perf_counter()
    nodes = torch.arange(tree.num_nodes)
    if tree.num_nodes > 10 * _SAMPLE:
        nodes = torch.from_numpy(
            np.random.default_rng(seed).choice(tree.num_nodes, _SAMPLE, replace=False)
        )
    result = hierarchy.evaluate(tree, table.weight[:], nodes=nodes)
    print(
        f"reconstruction, {len(nodes):,} nodes in {time.perf_counter() - began:.1f} s: "
        f"mean rank {result.mean_rank:.3f}, MAP {result.mean_average_precision:.4f}",
        flush=True,
    )
    return result
