"""The demonstration: link prediction on WordNet with its entities on disk. Knows what it prints and
its options; does not know how a step or a commit is made.
"""

from __future__ import annotations

import argparse
import shlex
import time
from collections.abc import Callable
from dataclasses import asdict, fields
from pathlib import Path

from . import linkprediction, memory_limit, poincare_demo
from .errors import StoreError
from .training import Run, Settings, read_settings, record_bytes

_REPORT_SECONDS = 5.0
_FOLDER, _POINCARE_FOLDER = Path("ooc-embed-demo"), Path("ooc-embed-poincare")
# Absent from the arguments unless they are given, and then for one of the demonstrations only.
_ONLY_LINKS = ("rows", "steps", "batch", "negatives", "commit_every")


class _Progress:
    """Prints a line every few seconds, and what the whole training came to."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.rows = self.reported_rows = 0
        self.began = self.reported = time.perf_counter()
        self.first_step = run.step

    def update(self, loss: float, rows: int) -> None:
        self.rows += rows
        now = time.perf_counter()
        if now - self.reported >= _REPORT_SECONDS:
            run, rate = self.run, (self.rows - self.reported_rows) / (now - self.reported)
            epoch = run.step / linkprediction.steps_per_epoch(run.graph, run.settings.batch)
            print(
                f"step {run.step:,} of {run.settings.steps:,}, epoch {epoch:.1f}: "
                f"loss {loss:.3f}, {rate:,.0f} rows/s",
                flush=True,
            )
            self.reported, self.reported_rows = now, self.rows

    def finish(self) -> None:
        seconds = time.perf_counter() - self.began
        steps = self.run.step - self.first_step
        if steps:
            print(
                f"{steps:,} steps in {seconds:.0f} s: {self.rows / seconds:,.0f} rows/s, with "
                f"the model's own arithmetic and all commits"
            )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of a run; those of its settings are absent from the result if not given."""
    default = Settings()
    parser.add_argument(
        "--path", type=Path, help=f"folder, default: {_FOLDER}, or {_POINCARE_FOLDER}"
    )
    begin = parser.add_mutually_exclusive_group()
    begin.add_argument("--resume", action="store_true", help="go on with the run in the folder")
    begin.add_argument("--overwrite", action="store_true", help="replace the run in the folder")
    for name, kind, text in (
        ("rows", _whole(0), "pad the table to this many rows, drawn as wrong answers"),
        ("dim", _whole(2), "numbers in a row, an even number unless with --poincare"),
        ("steps", _whole(1), "of the whole run"),
        ("batch", _whole(1), "triples of a step"),
        ("negatives", _whole(1), "wrong answers of a step"),
        ("commit_every", _whole(1), "steps"),
        ("seed", _whole(0), "of all that is random"),
    ):
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            type=kind,
            default=argparse.SUPPRESS,
            metavar="N",
            help=f"{text}, default: {getattr(default, name):,}",
        )
    parser.add_argument(
        "--cache-bytes",
        type=memory_limit.parse_bytes,
        metavar="SIZE",
        help="memory for hot rows, for example 64M; default: a tenth of the table",
    )
    poincare_demo.add_arguments(parser, _whole(1))
    parser.set_defaults(refuse=parser.error)


def main(args: argparse.Namespace) -> int:
    """Runs the demonstration, or goes on with it; its exit status."""
    _refuse_mixed(args)
    if args.path is None:
        args.path = _POINCARE_FOLDER if args.poincare else _FOLDER
    if args.poincare:
        return poincare_demo.main(args)
    before = _anonymous_bytes()
    graph = linkprediction.load_wordnet()
    with _begin(args, graph) as run:
        again = f"ooc-embed demo --path {shlex.quote(str(run.folder))} --resume"
        _describe(run)
        progress = _Progress(run)
        try:
            run.train(run.settings.steps, progress.update)
        except KeyboardInterrupt:
            run.close()
            print(f"stopped at step {run.step:,}, nothing is lost; to go on:\n  {again}")
            return 130
        progress.finish()
        _conclude(run, before)
    print(f"to go on from here, or only to measure again:\n  {again}")
    return 0


def _refuse_mixed(args: argparse.Namespace) -> None:
    """Ends the command where an option is given that its demonstration does not have."""
    if args.poincare:
        given = [name for name in _ONLY_LINKS if hasattr(args, name)]
        given += [name for name in ("resume", "cache_bytes") if getattr(args, name)]
        if given:
            args.refuse(f"argument --{given[0].replace('_', '-')}: not allowed with --poincare")
        if args.ram and args.path is not None:
            args.refuse("argument --path: not allowed with --ram")
        if args.png and getattr(args, "dim", 2) != 2:
            args.refuse(f"argument --png: draws rows of 2 numbers, not of {args.dim}")
        return
    for name in ("nouns", "epochs", "lr", "burn_in", "every", "ram", "png"):
        if getattr(args, name):
            args.refuse(f"argument --{name.replace('_', '-')}: needs --poincare")
    if hasattr(args, "dim"):
        try:
            _whole(2, 2)(str(args.dim))
        except argparse.ArgumentTypeError as error:
            args.refuse(f"argument --dim: {error}")


def _begin(args: argparse.Namespace, graph: linkprediction.Graph) -> Run:
    given = {f.name: getattr(args, f.name) for f in fields(Settings) if hasattr(args, f.name)}
    if args.resume:
        _refuse_changes(args.path, given)
        return Run.resume(args.path, graph, cache_bytes=args.cache_bytes)
    settings = Settings(**given)
    return Run.create(
        args.path, settings, graph, cache_bytes=args.cache_bytes, overwrite=args.overwrite
    )


def _refuse_changes(folder: Path, given: dict[str, int]) -> None:
    kept = asdict(read_settings(folder))
    for name, value in given.items():
        if value != kept[name]:
            raise StoreError(
                f"the run in {folder} has {name} {kept[name]}, it cannot go on with {value}"
            )


def _describe(run: Run) -> None:
    graph, table = run.graph, run.entities
    size = table.num_embeddings * record_bytes(table.embedding_dim)
    print(
        f"WordNet: {len(graph.train):,} triples over {graph.num_entities:,} entities and "
        f"{graph.num_relations} relations\n"
        f"table: {table.num_embeddings:,} rows x {table.embedding_dim} in {table.path}, "
        f"{_megabytes(size)} with the optimizer's moments, at step {run.step:,}",
        flush=True,
    )


def _conclude(run: Run, before: int | None) -> None:
    now = _anonymous_bytes()
    began = time.perf_counter()
    ranking = linkprediction.evaluate(run.model, run.graph, run.graph.test)
    print(
        f"test, {2 * len(run.graph.test):,} questions in {time.perf_counter() - began:.0f} s: "
        f"filtered MRR {ranking.mrr:.3f}, hits@10 {ranking.hits_at_10:.3f}"
    )
    weight = run.entities.weight
    in_memory = _megabytes(3 * weight.shape.numel() * weight.dtype.itemsize)
    print(f"nn.Embedding and SparseAdam would keep {in_memory} of weights and moments in memory")
    if now is not None and before is not None:
        print(
            f"this process took {_megabytes(now - before)} for cache, graph, model and batches "
            f"({_megabytes(now)} with Python and torch)"
        )


def _anonymous_bytes() -> int | None:
    """Memory of this process that is no file's page, or None where the system does not tell."""
    status = Path("/proc/self/status")
    if not status.exists():
        return None
    line = next(line for line in status.read_text().splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


def _megabytes(nbytes: int) -> str:
    return f"{nbytes / 1e6:,.0f} MB"


def _whole(low: int, multiple_of: int = 1) -> Callable[[str], int]:
    """A parser of whole numbers from ``low`` up."""

    def parse(text: str) -> int:
        value = int(text) if text.removeprefix("-").isdecimal() else low - 1
        if value < low or value % multiple_of:
            kind = "a whole number" if multiple_of == 1 else f"a multiple of {multiple_of}"
            raise argparse.ArgumentTypeError(f"{text!r} is not {kind} from {low} up")
        return value

    return parse
