"""The command ``bench``: which measurements there are, their options, and how they are run."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from . import (
    bench_all,
    bench_archive,
    bench_cold,
    bench_commit,
    bench_growth,
    bench_hot,
    bench_lookahead,
    bench_merge,
    bench_rules,
    memory_limit,
)
from .figures import Figures
from .workloads import DISTRIBUTIONS


@dataclass(frozen=True)
class _Part:
    """A measurement.

    Args:
        help: one line about it.
        measure: takes settings, figures and a folder.
        settings: what it measures by default, a dataclass; its fields are the options.
        quick: those that ``--quick`` changes.
        limited: it runs under the settings' ``memory_limit``.
    """

    help: str
    measure: Callable[[Any, Figures, Path], None]
    settings: Any
    quick: dict[str, Any] = field(default_factory=dict)
    limited: bool = False

    def chosen(self, args: argparse.Namespace) -> Any:
        """The settings that the arguments ask for."""
        given = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in vars(args).items()
            if name in _names(self.settings) and value is not None
        }
        quick = self.quick if args.quick else {}
        return replace(self.settings, **{**quick, **given})


_PARTS = {
    "hot": _Part(
        "all rows in memory, beside torch.optim.SparseAdam",
        bench_hot.measure,
        bench_hot.Settings(),
        {"rows": 100_000, "batch": (1024,), "rounds": 3, "steps": 5},
    ),
    "cold": _Part(
        "a table several times larger than memory",
        bench_cold.measure,
        bench_cold.Settings(),
        {
            "rows": 600_000,
            "memory_limit": 1 << 30,
            "seconds": 3.0,
            "steps": 80,
            "commit_every": 10,
        },
        limited=True,
    ),
    "commit": _Part(
        "commits, beside the disk's sequential writes",
        bench_commit.measure,
        bench_commit.Settings(),
        {"rows": 400_000, "dirty": 50_000, "rounds": 3},
    ),
    "merge": _Part(
        "a merge, beside what the disk reads and writes at once",
        bench_merge.measure,
        bench_merge.Settings(),
        {"rows": 600_000, "touched": 240_000, "memory_limit": 1 << 30},
        limited=True,
    ),
    "lookahead": _Part(
        "how far reading ahead hides reads behind compute",
        bench_lookahead.measure,
        bench_lookahead.Settings(),
        {"rows": 300_000, "batch": 2048, "steps": 10},
    ),
    "rules": _Part(
        "the steps of each rule, all rows in memory",
        bench_rules.measure,
        bench_rules.Settings(),
        {"rows": 50_000, "batch": 1024, "rounds": 3, "steps": 5},
    ),
    "archive": _Part(
        "sizes, speeds and errors of archives of a trained table",
        bench_archive.measure,
        bench_archive.Settings(),
        {"steps": 20, "codecs": ("zstd", "none"), "bitrounds": (0, 7), "dtypes": ("float32",)},
    ),
    "growth": _Part(
        "the same steps on tables of several sizes",
        bench_growth.measure,
        bench_growth.Settings(),
        {"rows": (50_000, 200_000), "batch": 1024, "rounds": 3, "steps": 10},
    ),
}
# All that the docs quote, in the order of their pages.
_LARGE = ("--rows", "10000000", "--cache-fraction", "0.1", "--batch", "16384", "--steps", "80")
_ALL = (
    ("hot",),
    ("hot", *_LARGE, "--distributions", "zipf"),
    ("cold",),
    ("commit",),
    ("merge",),
    ("lookahead",),
    ("growth",),
    ("rules",),
    ("archive",),
)
_ALL_QUICK = (("hot",), ("hot", "--cache-fraction", "0.1"), *_ALL[2:])

_HELP = {
    "rows": "of the table",
    "dim": "columns of the weight",
    "batch": "ids a step",
    "distributions": "of the ids",
    "cache_fraction": "part of the rows that the cache holds",
    "rounds": "how often it is measured",
    "steps": "of a round; of cold: at most so many a run",
    "merges": "after which a run ends",
    "commit_every": "steps",
    "seconds": "time for each rate of the disk, of np.memmap and of the mapped file",
    "cache_bytes": "the cache's memory, a quarter of the limit if it is not given",
    "memory_limit": "for everything, page cache included",
    "dirty": "rows of a commit",
    "touched": "rows that the log holds",
    "trained": "folder of an `ooc-embed demo`, whose table is taken; else one is trained",
    "codecs": "of the archives",
    "bitrounds": "bits of the mantissa that are kept, 0 for all",
    "dtypes": "of the archives",
    "hit_rate": "part of a batch that is in the cache",
    "seed": "of everything that is drawn",
}
_SIZES = ("cache_bytes", "memory_limit")


def _names(settings: Any) -> list[str]:
    return [entry.name for entry in fields(settings)]


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the measurements as subcommands."""
    commands = parser.add_subparsers(dest="measurement", required=True)
    for name, part in _PARTS.items():
        command = commands.add_parser(name, help=part.help)
        for option in _names(part.settings):
            _add_option(command, option, getattr(part.settings, option))
        if part.limited:
            command.add_argument(
                "--no-limit", action="store_true", help="trust that a limit is in force"
            )
        _add_common(command)
    _add_common(commands.add_parser("all", help="everything that the docs quote, one by one"))


def _add_option(command: argparse.ArgumentParser, name: str, default: Any) -> None:
    several = isinstance(default, tuple)
    shown = " ".join(map(str, default)) if several else default
    sample = default[0] if several else default
    command.add_argument(
        _flag(name),
        type=memory_limit.parse_bytes if name in _SIZES else type(sample),
        nargs="+" if several else None,
        choices=DISTRIBUTIONS if name == "distributions" else None,
        help=_HELP[name] + ("" if default is None else f", default: {shown}"),
    )


def _add_common(command: argparse.ArgumentParser) -> None:
    command.add_argument("--quick", action="store_true", help="small sizes, to see it run")
    command.add_argument("--json", type=Path, metavar="FILE", help="also write the figures here")
    command.add_argument(
        "--path", type=Path, default=Path(), help="folder on the disk to measure, default: here"
    )


def main(args: argparse.Namespace) -> int:
    """Runs the measurement that was chosen; its exit code."""
    try:
        with (
            memory_limit.terminated_as_exit(),
            tempfile.TemporaryDirectory(dir=args.path, prefix="ooc-embed-bench-") as folder,
        ):
            if args.measurement == "all":
                return _all(args, Path(folder))
            part = _PARTS[args.measurement]
            settings = part.chosen(args)
            if part.limited and not args.no_limit:
                return _limited(args, settings, folder)
            figures = Figures(f"bench {args.measurement}", asdict(settings))
            part.measure(settings, figures, Path(folder))
            if args.json is not None:
                figures.save(args.json)
            return 0
    except OSError as error:
        print(f"bench {args.measurement}: {error}", file=sys.stderr)
        return 1


def _program(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "ooc_embed.bench", *arguments]


def _limited(args: argparse.Namespace, settings: Any, folder: str) -> int:
    """Runs itself again under the limit. The folder stays ours: it must go even if the child is
    killed for its memory."""
    command = _program(args.measurement, "--no-limit")
    for name, value in {**asdict(settings), "json": args.json}.items():
        if value is not None:
            values = value if isinstance(value, tuple) else (value,)
            command += [_flag(name), *map(str, values)]
    try:
        code = memory_limit.run_limited([*command, "--path", folder], settings.memory_limit)
    except OSError as error:
        by_hand = memory_limit.by_hand([*command, "--path", str(args.path)], settings.memory_limit)
        print(
            f"bench {args.measurement}: a memory limit needs root and a writable cgroup hierarchy "
            f"({error}).\nRun it under one:\n  {by_hand}\n"
            f"or add --no-limit, if this shell already runs under one.",
            file=sys.stderr,
        )
        return 2
    if code < 0:
        print(
            f"bench {args.measurement}: ended by signal {-code}, 9 may be the memory limit",
            file=sys.stderr,
        )
    return 1 if code < 0 else code


def _all(args: argparse.Namespace, folder: Path) -> int:
    runs = []
    for name, *options in _ALL_QUICK if args.quick else _ALL:
        part = _PARTS[name]
        limit = part.chosen(args).memory_limit if part.limited else None
        command = _program(name, *options)
        command += ["--quick"] if args.quick else []
        command += ["--no-limit"] if part.limited else []
        runs.append(bench_all.Run(" ".join(("bench", name, *options)), command, limit))
    return bench_all.run_all(runs, folder, args.json)


if __name__ == "__main__":
    own_parser = argparse.ArgumentParser(prog="python -m ooc_embed.bench")
    add_arguments(own_parser)
    sys.exit(main(own_parser.parse_args()))
