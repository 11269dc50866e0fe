"""Pictures of a table: norms, updates, touched rows, rates over time, and chosen rows in a plane.

Each function returns its Axes and shows nothing. Without ``ax`` they are in a figure of their own,
which pyplot does not have: a notebook shows it where the Axes, or ``ax.figure``, are what a cell
gives, and ``ax.figure.savefig(file)`` writes it.

Of a table with more than ``max_rows`` rows, 200,000 by default, a sample is read: one row from each
of so many equal parts of the table, the same rows each time. The title says so.

Reads a table by its views, and `ooc_embed.Stats`; knows no store. matplotlib comes with the extra
``plot``, and is imported only to draw.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from .drawing import COLOURS, Names, require
from .inspectable import Inspectable
from .stats import Stats
from .views import RowView

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MAX_ROWS = 200_000
# Bins of a field's norms, and parts of a table whose rows are counted.
_BINS = 50
_PARTS = 200
# Numbers that are read at once: 32 MiB of float32.
_BLOCK_NUMBERS = 1 << 23
# From this ratio of the largest to the smallest norm on, their axis is logarithmic.
_LOG_RATIO = 100
_RED, _BLUE = COLOURS[:2]
_OF_FIELDS = (_BLUE, _RED, *COLOURS[2:])
_DOT_AREA = 24.0
# Of the height of the histograms.
_LEGEND_LINE = 0.08
# Places of names, points away from their dots: beside these, so that all see whose they are.
_REACHES = (2, 5, 9)


def norms(
    table: Inspectable,
    fields: str | Sequence[str] | None = None,
    ax: Axes | None = None,
    *,
    max_rows: int = MAX_ROWS,
) -> Axes:
    """Histograms of the Euclidean norms of rows, one for each field.

    Each has 50 bins between its own least and largest norm. Where norms differ by more than a
    hundred times the axis is logarithmic, and the legend tells how many are zero, which it has no
    place for: moments of rows that were never written are.

    Args:
        table: open to write or to read.
        fields: ``"weight"``, names of ``table.state``, or ``"version"``, whose norm is the count;
            None is the weight and all of ``table.state``.
        ax: where to draw; None makes a figure.
        max_rows: rows that are read at most.

    Raises:
        ValueError: the table has no such field, or ``max_rows`` is below 1.
        TypeError: ``table`` is no open table, as the path of one.
        ImportError: matplotlib is not installed.
    """
    rows = _chosen(table, max_rows)
    views = _views(table, fields)
    ax = _axes(ax)
    found = {name: _norms(view, rows) for name, view in views.items()}
    finite = {name: values[np.isfinite(values)] for name, values in found.items()}
    positive = np.concatenate([values[values > 0] for values in finite.values()])
    is_log = len(positive) > 0 and positive.max() > _LOG_RATIO * positive.min()
    for (name, values), colour in zip(finite.items(), itertools.cycle(_OF_FIELDS), strict=False):
        drawn = values[values > 0] if is_log else values
        left_out = {"zero": len(values) - len(drawn), "not finite": len(rows) - len(values)}
        notes = [f"{n / len(rows):.1%} {what}" for what, n in left_out.items() if n]
        counts, edges = np.histogram(np.log10(drawn) if is_log else drawn, _BINS)
        edges = 10**edges if is_log else edges
        ax.stairs(counts, edges, color=colour, alpha=0.25, fill=True)
        ax.stairs(counts, edges, color=colour, label=", ".join([name, *notes]))
    ax.set(title=f"Norms of {_of(table, rows)}", xlabel="norm of a row", ylabel="rows in a bin")
    if is_log:
        ax.set_xscale("log")
    elif ax.get_xlim()[0] < 0:  # a margin, or the bins around norms that are all zero
        ax.set_xlim(left=0)
    # Room for the legend above all histograms.
    ax.set_ylim(0, (1 + _LEGEND_LINE * len(views)) * ax.get_ylim()[1])
    ax.yaxis.set_major_formatter("{x:,.0f}")
    ax.legend(frameon=False, loc="upper right")
    return ax


def updates(table: Inspectable, ax: Axes | None = None, *, max_rows: int = MAX_ROWS) -> Axes:
    """How often rows were written, by rank: the row that was written most is the first.

    Both axes are logarithmic, so a power law is a straight line. Of a sample a rank is an estimate,
    and the first ones are missing.

    Args:
        table: open to write or to read.
        ax: where to draw; None makes a figure.
        max_rows: rows that are read at most.

    Raises:
        ValueError: ``max_rows`` is below 1.
        TypeError: ``table`` is no open table, as the path of one.
        ImportError: matplotlib is not installed.
    """
    rows = _chosen(table, max_rows)
    ax = _axes(ax)
    from matplotlib.ticker import LogFormatter

    versions = _versions(table, rows)
    counts, ties = np.unique(versions[versions > 0], return_counts=True)
    counts, ties = counts[::-1], ties[::-1]
    # A count is drawn from the first to the last rank that has it, so few points are the curve.
    last = np.cumsum(ties)
    ranks = np.stack([last - ties + 1, last], axis=1).ravel() * (table.num_embeddings / len(rows))
    ax.plot(ranks, np.repeat(counts, 2), color=_BLUE)
    ax.set(
        title=f"Updates of {_of(table, rows)}",
        xlabel=f"rank of the row, without {(versions == 0).sum():,} that were never written",
        ylabel="updates of the row",
        xscale="log",
        yscale="log",
    )
    ax.set_ylim(0.8, None if len(counts) else 12)
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_formatter("{x:,.0f}")
        axis.set_minor_formatter(LogFormatter())
    return ax


def touched(table: Inspectable, ax: Axes | None = None, *, max_rows: int = MAX_ROWS) -> Axes:
    """The share of rows that were ever written, along the table, in at most 200 equal parts.

    Args:
        table: open to write or to read.
        ax: where to draw; None makes a figure.
        max_rows: rows that are read at most.

    Raises:
        ValueError: ``max_rows`` is below 1.
        TypeError: ``table`` is no open table, as the path of one.
        ImportError: matplotlib is not installed.
    """
    rows = _chosen(table, max_rows)
    ax = _axes(ax)
    written = _versions(table, rows) > 0
    parts = min(_PARTS, len(rows))
    cuts = np.arange(parts + 1) * len(rows) // parts
    shares = np.add.reduceat(written, cuts[:-1], dtype=np.int64) / np.diff(cuts)
    edges = cuts * table.num_embeddings // len(rows)  # between the parts that were sampled
    ax.stairs(100 * shares, edges, color=_BLUE, alpha=0.25, fill=True)
    ax.stairs(100 * shares, edges, color=_BLUE)
    ax.set(
        title=f"Written: {written.mean():.1%} of {_of(table, rows)}",
        xlabel="row",
        ylabel="rows ever written (%)",
        xlim=(0, table.num_embeddings),
        ylim=(0, 105),
    )
    ax.locator_params("x", integer=True)
    ax.xaxis.set_major_formatter("{x:,.0f}")
    return ax


def rates(history: Sequence[Stats], ax: Axes | None = None) -> Axes:
    """Rows looked up a second, and the cache's share, from one `ooc_embed.Stats` to another.

    ::

        history = [emb.stats()]
        for step, batch in enumerate(loader):
            ...
            if step % 100 == 99:
                history.append(emb.stats())
        ooc_embed.plots.rates(history)

    Args:
        history: what ``stats()`` of one open table gave, the oldest first.
        ax: where rows/s are drawn; None makes a figure. The hit rate has an axis of its own at the
            right, the last of ``ax.figure.axes``.

    Raises:
        ValueError: fewer than two, or not of one table and in order.
        ImportError: matplotlib is not installed.
    """
    seconds = np.array([stats.seconds for stats in history])
    hits = np.diff([stats.hits for stats in history])
    rows = hits + np.diff([stats.misses for stats in history])
    if len(history) < 2:
        raise ValueError(f"rates lie between two or more stats(), got {len(history)}")
    for place in np.flatnonzero((np.diff(seconds) <= 0) | (hits < 0) | (rows < hits)):
        raise ValueError(
            f"history[{place + 1}] ({seconds[place + 1]:.3f} s) does not follow on "
            f"history[{place}] ({seconds[place]:.3f} s): give the stats() of one open table, each "
            f"once, the oldest first"
        )
    ax = _axes(ax)
    ax.stairs(rows / np.diff(seconds), seconds, baseline=None, color=_BLUE, linewidth=1.8)
    ax.set(
        title="Rows looked up, and hits of the cache", xlabel="seconds since the table was opened"
    )
    ax.set_ylabel("rows/s", color=_BLUE)
    ax.tick_params("y", colors=_BLUE)
    ax.set_ylim(bottom=0)
    ax.yaxis.set_major_formatter("{x:,.0f}")
    right = ax.twinx()
    # No lookups, no hit rate: a gap.
    shares = np.divide(100.0 * hits, rows, out=np.full(len(rows), np.nan), where=rows > 0)
    right.stairs(shares, seconds, baseline=None, color=_RED, linewidth=1.8)
    right.set_ylabel("hit rate (%)", color=_RED)
    right.tick_params("y", colors=_RED)
    right.spines["top"].set_visible(ax.spines["top"].get_visible())
    right.set_ylim(0, 105)
    return ax


def pca(
    table: Inspectable, rows: Any, names: Sequence[str] | None = None, ax: Axes | None = None
) -> Axes:
    """Chosen rows in the plane of their first two principal components, with names.

    Names stand beside their points, and never on each other: one that has no room is left out, and
    the title says how many were.

    Args:
        table: open to write or to read.
        rows: as of ``table.weight[rows]``; their weights are held in memory.
        names: one for each row; None names none.
        ax: where to draw, at its final size; None makes a figure.

    Raises:
        ValueError: fewer than two rows or columns, rows that are all equal or not finite, or a
            number of names that is not that of the rows.
        IndexError, TypeError: as of ``table.weight[rows]``, or ``table`` is no open table.
        ImportError: matplotlib is not installed.
    """
    _check(table)
    weights = table.weight[rows].to(torch.float64).numpy()
    if weights.ndim != 2 or min(weights.shape) < 2:
        raise ValueError(f"two components need 2 rows and 2 columns, got {weights.shape}")
    if names is not None and len(names) != len(weights):
        raise ValueError(f"{len(weights)} rows have {len(names)} names: give one for each")
    if not np.isfinite(weights).all():
        raise ValueError("some of the rows are not finite, and have no principal components")
    points, shares = _principal(weights)
    ax = _axes(ax)
    ax.scatter(points[:, 0], points[:, 1], s=_DOT_AREA, color=_BLUE, linewidths=0)
    ax.set(
        title=f"{len(weights):,} of {table.num_embeddings:,} rows",
        xlabel=f"component 1, {shares[0]:.1%} of the variance",
        ylabel=f"component 2, {shares[1]:.1%} of the variance",
    )
    ax.margins(0.12)
    if names is not None and (left_out := _write_names(ax, points, names)):
        ax.set_title(f"{ax.get_title()}; names without room: {left_out:,}")
    return ax


def _principal(weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """``(n, 2)`` coordinates on the first two components, and their shares of the variance.

    The largest coordinate of each is positive, which settles its sign.
    """
    centred = weights - weights.mean(axis=0)
    left, scales, _ = np.linalg.svd(centred, full_matrices=False)
    if scales[0] == 0:
        raise ValueError(f"all {len(weights)} rows are equal, and have no principal components")
    points = left[:, :2] * scales[:2]
    largest = np.abs(points).argmax(axis=0)
    points *= np.where(points[largest, [0, 1]] < 0, -1, 1)
    return points, scales[:2] ** 2 / (scales**2).sum()


def _write_names(ax: Axes, points: np.ndarray, names: Sequence[str]) -> int:
    """Writes names around points, each on the side away from the centre; how many had no room."""
    figure = ax.figure.canvas.figure
    figure.draw_without_rendering()  # so that the Axes have their final place
    places = Names(ax, points)
    dot = np.sqrt(_DOT_AREA) / 2
    style = {"fontsize": 8.5, "parse_math": False}  # a name's dollars are no formula
    written = sum(
        places.place(str(name), (x, y), np.arctan2(y, x), dot, style, _REACHES)
        for name, (x, y) in zip(names, points, strict=True)
    )
    return len(points) - written


def _check(table: object) -> None:
    if not isinstance(table, Inspectable):
        raise TypeError(
            f"a plot takes an open table, such as ooc_embed.open_table(path), got {table!r:.200}"
        )


def _axes(ax: Axes | None) -> Axes:
    require()
    if ax is not None:
        from matplotlib.axes import Axes

        if not isinstance(ax, Axes):
            raise TypeError(f"ax must be one Axes, got {type(ax).__name__}: plt.gca(), or axes[0]")
        return ax
    from .axes import new_axes

    return new_axes()


def _views(table: Inspectable, fields: str | Sequence[str] | None) -> dict[str, RowView]:
    views = {"weight": table.weight, **table.state}
    if fields is None:
        return views
    views["version"] = table.version
    names = [fields] if isinstance(fields, str) else list(fields)
    for name in names:
        if name not in views:
            raise ValueError(f"the table has no field {name!r}: its fields are {', '.join(views)}")
    if not names:
        raise ValueError(f"no field is given: the table's fields are {', '.join(views)}")
    return {name: views[name] for name in names}


def _chosen(table: Inspectable, max_rows: int) -> np.ndarray:
    """``(n,) int64`` sorted rows: all of them, or one from each of ``max_rows`` equal parts."""
    _check(table)
    if max_rows < 1:
        raise ValueError(f"max_rows must be at least 1, got {max_rows}")
    total = table.num_embeddings
    if total <= max_rows:
        return np.arange(total)
    bounds = np.arange(max_rows + 1) * total // max_rows
    # Of its own, for the user's random numbers; the same each time, for equal pictures.
    return np.random.default_rng(0).integers(bounds[:-1], bounds[1:])


def _of(table: Inspectable, rows: np.ndarray) -> str:
    """What was looked at, in words."""
    total = table.num_embeddings
    if len(rows) == total:
        return f"{total:,} rows"
    return f"a sample of {len(rows):,} of {total:,} rows"


def _blocks(view: RowView, rows: np.ndarray) -> Iterator[torch.Tensor]:
    """A field of the rows, some at a time."""
    step = max(_BLOCK_NUMBERS // max(view.shape[1:].numel(), 1), 1)
    for start in range(0, len(rows), step):
        yield view[rows[start : start + step]]


def _norms(view: RowView, rows: np.ndarray) -> np.ndarray:
    """``(n,) float64``: squares of small moments are no float32."""
    values = (block.reshape(len(block), -1).to(torch.float64) for block in _blocks(view, rows))
    return np.concatenate([torch.linalg.vector_norm(part, dim=1).numpy() for part in values])


def _versions(table: Inspectable, rows: np.ndarray) -> np.ndarray:
    return np.concatenate([part.numpy() for part in _blocks(table.version, rows)])
