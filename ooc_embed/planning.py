"""The command ``plan``: its options, and what it prints. Knows no size."""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

import torch

from . import memory_limit, rules
from .plan import plan

_RULES = {
    re.sub("(?<=[a-z])(?=[A-Z])", "-", name).lower(): kind
    for name, kind in rules.RULES.items()
    if kind.trains
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of a plan."""
    parser.add_argument("--rows", type=_count, required=True, metavar="N", help="of the table")
    parser.add_argument("--dim", type=_count, required=True, metavar="N", help="of a row's weights")
    parser.add_argument(
        "--rule", choices=_RULES, default="sparse-adam", help="default: %(default)s"
    )
    parser.add_argument("--momentum", type=float, metavar="M", help="of sgd, default: none")
    parser.add_argument(
        "--dtype", choices=("float32", "float64"), default="float32", help="default: %(default)s"
    )
    for name, default, text in (
        ("--batch", 16384, "ids of a step"),
        ("--commit-every", 100, "steps"),
    ):
        parser.add_argument(
            name, type=_count, default=default, metavar="N", help=f"{text}, default: {default:,}"
        )
    for name, text in (
        ("--cache-bytes", "memory for hot rows, for example 1G; default: a quarter of the memory"),
        ("--memory", "that may be used, files' pages included; default: what this process may use"),
    ):
        parser.add_argument(name, type=memory_limit.parse_bytes, metavar="SIZE", help=text)
    parser.add_argument(
        "--measure",
        type=Path,
        metavar="PATH",
        help="measure the disk of this folder, and a step, and tell how fast training would be; "
        "about 20 s, 2.2 GB of files, which are removed",
    )
    parser.set_defaults(refuse=parser.error)


def main(args: argparse.Namespace) -> int:
    """Prints a plan; its exit status.

    Raises:
        OSError: the disk cannot be measured.
    """
    if args.momentum is not None and args.rule != "sgd":
        args.refuse(f"argument --momentum: needs --rule sgd, not {args.rule}")
    given = {} if args.momentum is None else {"momentum": args.momentum}
    if args.measure is not None:
        print(f"measuring {args.measure}, about 20 s", file=sys.stderr, flush=True)
    try:
        with memory_limit.terminated_as_exit():
            table = plan(
                args.rows,
                args.dim,
                _RULES[args.rule](**given),
                dtype=getattr(torch, args.dtype),
                batch=args.batch,
                commit_every=args.commit_every,
                cache_bytes="auto" if args.cache_bytes is None else args.cache_bytes,
                memory=args.memory,
                disk=args.measure,
            )
    except ValueError as error:
        args.refuse(str(error))
    print(table)
    if args.measure is None:
        print("\nto see how fast it would train: --measure FOLDER, on the disk it is to be on")
    return 0


def _count(text: str) -> int:
    """A whole number; thousands may be set apart: ``10_000_000`` or ``10,000,000``."""
    digits = text.replace("_", "").replace(",", "")
    if not digits.isdecimal() or not int(digits):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 up")
    return int(digits)
