"""The command line `ooc-embed`. Knows which module does what; does none of it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from . import archive_commands, bench, demo, page, planning, report
from ._version import __version__
from .embedding import DiskEmbedding
from .errors import StoreError
from .reader import describe
from .salvage import check_target, salvage


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command.

    Returns:
        Its exit status: 0, or 1 where `verify` found problems, 2 after an error that stderr names.
    """
    args = _parser().parse_args(argv)
    try:
        return int(args.run(args))
    except (StoreError, OSError, ImportError) as error:  # the last where an extra is missing
        print(f"ooc-embed {args.command}: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ooc-embed", description="Embedding tables larger than memory, in a store on disk."
    )
    parser.add_argument("--version", action="version", version=f"ooc-embed {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)

    def add(name: str, text: str) -> argparse.ArgumentParser:
        return commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")

    demonstration = add("demo", "train on WordNet with the entities on disk")
    demo.add_arguments(demonstration)
    demonstration.set_defaults(run=demo.main)

    plans = add("plan", "tell what a table will take, and how fast it trains")
    planning.add_arguments(plans)
    plans.set_defaults(run=planning.main)

    _add_store_commands(add)

    page_maker = add("report", "write a page about a store")
    page.add_arguments(page_maker)
    page_maker.set_defaults(run=page.main)
    archive_commands.add_export_arguments(
        add("export", "write a store's rows for other readers, compressed")
    )
    archive_commands.add_import_arguments(
        add("import", "make a store of an archive or a file of weights")
    )

    measure = add("bench", "measure this machine")
    bench.add_arguments(measure)
    measure.set_defaults(run=bench.main)
    return parser


def _add_store_commands(add: Callable[[str, str], argparse.ArgumentParser]) -> None:
    """Those that take a store, and little else."""
    for name, run, text in (
        ("info", _info, "describe a store, which may be open to write"),
        ("verify", _verify, "check all of a store, and exit with 1 if there is a problem"),
        (
            "flush",
            _flush,
            "bring every row of a store, which nothing else writes, into its zarr array",
        ),
    ):
        command = add(name, text)
        command.add_argument("path", type=Path, help="folder of the store")
        command.set_defaults(run=run)
        if name == "verify":
            command.add_argument(
                "--salvage",
                type=Path,
                metavar="OUT",
                help="make a new store there of all rows that are sound; PATH is only read",
            )


def _info(args: argparse.Namespace) -> int:
    encoding = sys.stdout.encoding or "utf-8"
    # Not every terminal, or file that it goes to, has the characters that bars are made of.
    print(str(describe(args.path)).encode(encoding, "replace").decode(encoding))
    return 0


def _verify(args: argparse.Namespace) -> int:
    if args.salvage is not None:
        try:
            check_target(args.path, args.salvage)
        except ValueError as error:
            raise StoreError(str(error)) from error
    problems = report.verify(args.path)
    for problem in problems:
        print(problem)
    if not problems:
        print(f"{args.path}: ok")
    if args.salvage is not None:
        print(salvage(args.path, args.salvage))
    return 1 if problems else 0


def _flush(args: argparse.Namespace) -> int:
    with DiskEmbedding.open(args.path) as embedding:
        embedding.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
