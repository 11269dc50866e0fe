"""`ooc-embed report`: one HTML page about a store, which needs no other file and no network.

Knows what is on the page and how it looks; does not know how facts are found or plots are drawn.
"""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Iterable
from datetime import UTC, datetime
from html import escape
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING

from . import durable, plots, report
from ._version import __version__
from .drawing import require
from .errors import StoreError
from .inspectable import Inspectable
from .reader import describe, open_table

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_STYLE = """
:root { color-scheme: light dark; }
body { margin: 0; color: #23282d; background: #fff; font: 15px/1.5 system-ui, sans-serif; }
main { max-width: 47em; margin: 0 auto; padding: 2em 1.2em; }
h1 { margin: 0 0 .6em; font-size: 1.6em; overflow-wrap: anywhere; }
h2 { margin: 2em 0 .2em; font-size: 1.15em; }
p { margin: 0 0 .6em; }
li { overflow-wrap: anywhere; }
figure { margin: 0; }
figure svg { display: block; width: 100%; height: auto; fill: currentColor; }
main .ooc-embed { max-width: none; overflow-x: auto; }
footer { margin-top: 2.5em; padding-top: .8em; border-top: 1px solid #8b909655; font-size: .87em; }
code { overflow-wrap: anywhere; }
@media (prefers-color-scheme: dark) { body { color: #dfe3e6; background: #16191c; } }
@media print { figure { break-inside: avoid; } }
"""
_NORMS = (
    "Euclidean norms of the rows, for the weight and each of the optimizer's fields. A row that "
    "was never written has its initial weight, and zeros in the others."
)
_UPDATES = "How often rows were written, the most frequent first. A straight line is a power law."
_TOUCHED = "The share of rows that were ever written, from the first row of the table to the last."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of a report."""
    parser.add_argument("path", type=Path, help="folder of the store, which may be open to write")
    parser.add_argument(
        "--html",
        type=Path,
        required=True,
        metavar="OUT",
        help="the page; a file that is there is replaced. Needs matplotlib, the extra plot",
    )
    parser.add_argument(
        "--verify",
        action="store_true",
        help="check all of the store too, and exit with 1 if there is a problem",
    )


def main(args: argparse.Namespace) -> int:
    """Writes the page; the command's exit status."""
    require()
    out = args.html.resolve()
    _check_out(args.path, out)
    words = ["ooc-embed", "report", str(args.path), "--html", str(args.html)]
    problems = None
    if args.verify:
        words.append("--verify")
        problems = report.verify(args.path)
    with open_table(args.path) as table:
        page = _page(table, problems, shlex.join(words))
    # A file's name may have bytes that are no text.
    durable.replace(out, page.encode("utf-8", "replace"), durable.temporary_for(out))
    durable.sync_directory(out.parent)
    if problems:
        print(f"verify: problems, which the report names: {len(problems):,}")
    print(f"report: {args.html}")
    return 1 if problems else 0


def _check_out(path: Path, out: Path) -> None:
    """Refuse a place for the page before anything is read."""
    if out.is_relative_to(path.resolve()):
        raise StoreError(f"{out} is the store or inside of it: choose a path beside {path}")
    if not out.parent.is_dir():
        raise FileNotFoundError(f"there is no folder {out.parent}")
    if out.exists() and not out.is_file():
        raise FileExistsError(f"{out} is no file that a page could replace: choose another path")


def _page(table: Inspectable, problems: list[str] | None, command: str) -> str:
    import matplotlib.style

    name = escape(table.path.name)
    parts = [describe(table)._repr_html_()]
    if problems is not None:
        parts.append(_verified(problems))
    with matplotlib.style.context("default"):  # whatever the user's are, black is the page's ink
        parts += [
            _figure("Norms", _NORMS, plots.norms(table)),
            _figure("Updates", _UPDATES, plots.updates(table)),
            _figure("Touched rows", _TOUCHED, plots.touched(table)),
        ]
    now = datetime.now(UTC)
    return "\n".join(
        [
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            # A browser is told, too, that nothing is to be loaded and nothing to be run.
            '<meta http-equiv="Content-Security-Policy" '
            "content=\"default-src 'none'; style-src 'unsafe-inline'\">",
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{name}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n<main>",
            f"<h1>{name}</h1>",
            *parts,
            f"<footer><p>{name}, {now:%Y-%m-%d %H:%M:%S} UTC, ooc_embed {__version__}</p>",
            f"<p><code>{escape(command)}</code></p></footer>",
            "</main>\n</body>\n</html>\n",
        ]
    )


def _verified(problems: Iterable[str]) -> str:
    lines = "".join(f"<li>{escape(problem)}</li>" for problem in problems)
    found = f"<ul>{lines}</ul>" if lines else "<p>All of the store is sound.</p>"
    return f"<h2>Verify</h2>{found}"


def _figure(title: str, text: str, axes: Axes) -> str:
    return f"<h2>{title}</h2><p>{escape(text)}</p><figure>{_svg(axes)}</figure>"


def _svg(axes: Axes) -> str:
    """A figure as a part of the page, drawn in the page's colour of text."""
    file = StringIO()
    metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    axes.figure.canvas.figure.savefig(file, format="svg", transparent=True, metadata=metadata)
    drawn = file.getvalue()
    drawn = re.sub(r' xmlns(:\w+)?="[^"]*"', "", drawn[drawn.index("<svg") :])
    label = escape(axes.get_title())
    drawn = drawn.replace("<svg", f'<svg role="img" aria-label="{label}"', 1)
    return drawn.replace("#000000", "currentColor")
