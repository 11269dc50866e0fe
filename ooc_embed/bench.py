"""The measurements that the docs quote; knows tables by their public interface only."""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor

from . import bench_cold, memory_limit
from .embedding import DiskEmbedding
from .figures import Figures
from .references import MemmapTable, RamTable, train_step
from .workloads import DISTRIBUTIONS, batches

Step = Callable[[Tensor, Tensor], None]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the measurements as subcommands."""
    commands = parser.add_subparsers(dest="measurement", required=True)
    hot = commands.add_parser("hot", help="all rows in memory, beside torch.optim.SparseAdam")
    _add_common(hot, rows=1_000_000, steps=20)
    hot.add_argument("--batch", type=int, nargs="+", default=[16384, 2048], help="ids a step")
    hot.add_argument("--rounds", type=int, default=7, help="rounds, of --steps steps each")
    cold = commands.add_parser("cold", help="a table several times larger than memory")
    _add_common(cold, rows=10_000_000, steps=100)
    cold.add_argument("--batch", type=int, default=16384, help="ids a step")
    cold.add_argument(
        "--cache-bytes", type=memory_limit.parse_bytes, help="default: a quarter of it"
    )
    cold.add_argument("--memory-limit", type=memory_limit.parse_bytes, default=4 << 30)
    cold.add_argument("--no-limit", action="store_true", help="trust that a limit is in force")
    cold.add_argument(
        "--seconds", type=float, default=20.0, help="time for each measurement without --steps"
    )


def _add_common(parser: argparse.ArgumentParser, *, rows: int, steps: int) -> None:
    parser.add_argument("--rows", type=int, default=rows, help="default: %(default)s")
    parser.add_argument("--dim", type=int, default=128, help="default: %(default)s")
    parser.add_argument("--steps", type=int, default=steps, help="timed steps, default %(default)s")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures here")
    parser.add_argument(
        "--path", type=Path, default=Path(), help="folder on the disk to measure, default: here"
    )


def main(args: argparse.Namespace) -> int:
    """Runs the measurement that was chosen; its exit code."""
    try:
        with (
            memory_limit.terminated_as_exit(),
            tempfile.TemporaryDirectory(dir=args.path, prefix="ooc-embed-bench-") as folder,
        ):
            if args.measurement == "hot":
                return _hot(args, Path(folder))
            if args.no_limit:
                return _cold(args, Path(folder))
            return _cold_limited(args, folder)
    except OSError as error:
        print(f"bench {args.measurement}: {error}", file=sys.stderr)
        return 1


def _save(figures: Figures, path: Path | None) -> None:
    if path is not None:
        figures.save(path)


def _hot(args: argparse.Namespace, folder: Path) -> int:
    named = ("rows", "dim", "batch", "rounds", "steps", "seed")
    figures = Figures("bench hot", {name: getattr(args, name) for name in named})
    weight = torch.randn(args.rows, args.dim, generator=torch.Generator().manual_seed(args.seed))
    memmap = MemmapTable.create(folder, weight.numpy())
    ram = RamTable(weight)
    cache_bytes = args.rows * 4 * (3 * args.dim + 64)  # every record, padded, and its bookkeeping
    with DiskEmbedding(
        args.rows, args.dim, path=folder / "table.zarr", cache_bytes=cache_bytes, seed=args.seed
    ) as table:
        contestants: dict[str, Step] = {
            "nn.Embedding + SparseAdam, in RAM": ram.step,
            "np.memmap x3, synchronous": memmap.step,
            "DiskEmbedding, every row cached": lambda ids, target: train_step(table, ids, target),
        }
        _touch_every_row(contestants.values(), args.rows, args.dim)
        for batch, distribution in itertools.product(args.batch, DISTRIBUTIONS):
            ids = batches(distribution, args.rows, batch, seed=args.seed)
            target = torch.randn(batch, args.dim)
            rounds = [[next(ids) for _ in range(args.steps)] for _ in range(args.rounds + 1)]
            seconds = _interleaved(contestants, rounds, target)
            figures.section(f"{args.rows:,} x {args.dim}, batch {batch:,}, {distribution} ids")
            _add_hot(figures, seconds, batch)
    _save(figures, args.json)
    return 0


def _touch_every_row(steps: Iterable[Step], rows: int, dim: int) -> None:
    for start in range(0, rows, 16384):
        ids = torch.arange(start, min(start + 16384, rows))
        for step in steps:
            step(ids, torch.ones(len(ids), dim))


def _interleaved(
    contestants: Mapping[str, Step], rounds: Iterable[list[Tensor]], target: Tensor
) -> dict[str, list[float]]:
    """Seconds a step, one figure a round; in each round all contestants take the same batches one
    after the other, so that the machine's noise hits all alike. The first round only warms up."""
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for drawn in rounds:
        for name, step in contestants.items():
            begin = time.perf_counter()
            for ids in drawn:
                step(ids, target)
            seconds[name].append((time.perf_counter() - begin) / len(drawn))
    return {name: own[1:] for name, own in seconds.items()}


def _add_hot(figures: Figures, seconds: Mapping[str, list[float]], batch: int) -> None:
    base = next(iter(seconds.values()))
    for name, own in seconds.items():
        # The ratio is of the same round, then the median: noise that lasts longer cancels out.
        ratios = sorted(a / b for a, b in zip(base, own, strict=True))
        figures.add(
            name,
            "ms/step",
            [1e3 * s for s in own],
            samples_per_s=batch / sorted(own)[len(own) // 2],
            x_sparse_adam=ratios[len(ratios) // 2],
        )


def _cold(args: argparse.Namespace, folder: Path) -> int:
    settings = bench_cold.Settings(
        rows=args.rows,
        dim=args.dim,
        batch=args.batch,
        steps=args.steps,
        seconds=args.seconds,
        cache_bytes=args.cache_bytes or args.memory_limit // 4,
        seed=args.seed,
    )
    figures = Figures("bench cold", {**asdict(settings), "memory_limit": args.memory_limit})
    bench_cold.measure(settings, figures, folder)
    _save(figures, args.json)
    return 0


def _cold_limited(args: argparse.Namespace, folder: str) -> int:
    """Runs itself again under the limit. The folder stays ours: it must go even if the child is
    killed for its memory."""
    options = {
        "rows": args.rows,
        "dim": args.dim,
        "steps": args.steps,
        "seed": args.seed,
        "batch": args.batch,
        "seconds": args.seconds,
        "cache-bytes": args.cache_bytes,
        "memory-limit": args.memory_limit,
        "json": args.json,
    }
    command = [sys.executable, "-m", "ooc_embed.bench", "cold", "--no-limit"]
    for name, value in options.items():
        command += [] if value is None else [f"--{name}", str(value)]
    try:
        code = memory_limit.run_limited([*command, "--path", folder], args.memory_limit)
    except OSError as error:
        by_hand = memory_limit.by_hand([*command, "--path", str(args.path)], args.memory_limit)
        print(
            f"bench cold: a memory limit needs root and a writable cgroup hierarchy ({error}).\n"
            f"Run it under one:\n  {by_hand}\n"
            f"or add --no-limit, if this shell already runs under one.",
            file=sys.stderr,
        )
        return 2
    if code < 0:
        print(f"bench cold: ended by signal {-code}, 9 may be the memory limit", file=sys.stderr)
    return 1 if code < 0 else code


if __name__ == "__main__":
    own_parser = argparse.ArgumentParser(prog="python -m ooc_embed.bench")
    add_arguments(own_parser)
    sys.exit(main(own_parser.parse_args()))
