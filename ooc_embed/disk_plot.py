"""Draws points of the Poincaré disk with their edges and some names. Knows no store and no run.

matplotlib comes with the extra ``plot``, and is imported only to draw.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from . import poincare
from .errors import StoreError
from .hierarchy import Hierarchy

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.text import Text

_INCHES, _DPI = 9.0, 160
# Points on a geodesic between two nodes, evenly spaced in hyperbolic length.
_ARC_POINTS = 96
# Names that people know, in the order in which they get their place.
_KNOWN = (
    *("placental", "dog", "cat", "horse", "mouse", "bat", "lion", "wolf", "bear", "whale"),
    *("elephant", "rabbit", "kangaroo", "monkey", "homo_sapiens", "seal", "deer", "cattle"),
    *("sheep", "giraffe", "camel", "rat", "squirrel", "tiger", "dolphin", "zebra", "gorilla"),
    *("koala", "goat", "fox", "hyena", "otter", "walrus", "beaver", "blue_whale", "platypus"),
    *("hedgehog", "armadillo", "giant_panda", "poodle", "beagle", "manatee", "hare"),
)
_MOST_NAMES = 34
# Where a name may stand: points away from its dot, radians off the direction to the rim.
_REACHES = (3, 8, 14, 22)
_TURNS = (0, 0.5, -0.5, 1.0, -1.0, 1.6, -1.6, 2.3, -2.3, math.pi)
_PADDING = 5.0
# From this radius on, a name stands outside of the disk.
_AT_RIM = 0.93
# From this sine up, a name stands above its dot and not beside it.
_STEEP = 0.35
# A family has at most this part of all nodes; the largest are drawn in these colours.
_FAMILY_PART = 0.35
_COLOURS = ("#c2452d", "#2f6db3", "#c98a1b", "#7a4fa3", "#14918b", "#4f8a34", "#b8518c", "#8a5a3c")
_OTHERS = "#8b9096"
_CAPTION = "Poincaré disk: edges drawn as geodesics, distances from the centre as half their length"
_INK = "#23282d"


def require() -> None:
    """Say at once that no picture can be drawn, rather than behind a run.

    Raises:
        StoreError: matplotlib is not installed.
    """
    if find_spec("matplotlib") is None:
        raise StoreError("a picture needs matplotlib: pip install 'ooc_embed[plot]'")


def draw(tree: Hierarchy, points: Tensor, file: Path, dpi: float = _DPI) -> None:
    """Draw nodes, direct edges as geodesics, and the names of large families and known nodes.

    The disk is moved so that the node with the most descendants is its centre, and points are drawn
    at half their hyperbolic distance from it: trained leaves are so near the rim that no picture
    tells them from it.

    Args:
        tree: of the points.
        points: ``(num_nodes, 2)``, of the ball of curvature -1.
        file: of the picture, a PNG.
        dpi: pixels an inch, of which it has nine in both directions.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.collections import LineCollection
    from matplotlib.figure import Figure
    from matplotlib.patches import Circle

    points = points.double()
    sizes = torch.bincount(tree.pairs[:, 1], minlength=tree.num_nodes)
    points = _nearer(poincare.mobius_add(-points[sizes.argmax()], points))
    families = _families(tree, sizes)
    colours = _colours(tree, families)

    figure = Figure(figsize=(_INCHES, _INCHES), dpi=dpi)
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(-1.18, 1.18), ylim=(-1.18, 1.18), aspect="equal")
    axes.axis("off")
    axes.add_patch(Circle((0, 0), 1, facecolor="#fbfaf7", edgecolor="#b9b4a8", linewidth=0.8))
    edges = tree.direct_edges()
    arcs = _geodesics(points[edges[:, 0]], points[edges[:, 1]]).numpy()
    of_edges = [colours[child] for child in edges[:, 0].tolist()]
    axes.add_collection(
        LineCollection(list(arcs), colors=of_edges, linewidths=0.3, alpha=0.35, zorder=1)
    )
    area = 3 + 4 * (1 + sizes.double()).log()
    x, y = points.T.numpy()
    axes.scatter(x, y, s=area.numpy(), c=colours, linewidths=0.2, edgecolors="white", zorder=2)
    _Names(axes, points, area).write(tree, sizes, families, colours)
    axes.text(0.02, 0.02, _CAPTION, transform=axes.transAxes, fontsize=7, color=_OTHERS)
    figure.savefig(file, format="png")


def _nearer(points: Tensor) -> Tensor:
    """``(n, 2)`` points at half their distance from the centre, in the same direction."""
    origin = torch.zeros_like(points)
    return poincare.expmap(origin, poincare.logmap(origin, points) / 2)


def _families(tree: Hierarchy, sizes: Tensor) -> list[int]:
    """The nodes above the largest groups, none of which is in another or is most of the tree."""
    found: list[int] = []
    for node in sizes.argsort(descending=True, stable=True).tolist():
        if sizes[node] > _FAMILY_PART * tree.num_nodes:
            continue
        if len(found) == len(_COLOURS) or not sizes[node]:
            break
        above = torch.tensor(found, dtype=torch.int64)
        if not tree.are_pairs(torch.full_like(above, node), above).any():
            found.append(node)
    return found


def _colours(tree: Hierarchy, families: list[int]) -> list[str]:
    colours = [_OTHERS] * tree.num_nodes
    for family, colour in zip(families, _COLOURS, strict=False):
        members = tree.pairs[tree.pairs[:, 1] == family, 0].tolist()
        for node in (family, *members):
            colours[node] = colour
    return colours


def _geodesics(first: Tensor, second: Tensor) -> Tensor:
    """``(n, points, 2)`` along the shortest ways between ``(n, 2)`` points."""
    parts = torch.linspace(0, 1, _ARC_POINTS, dtype=first.dtype)[:, None]
    velocity = poincare.logmap(first, second)[:, None]
    return poincare.expmap(first[:, None], velocity * parts)


class _Names:
    """Writes names beside their points where nothing is written yet.

    Args:
        axes: to write on.
        points: ``(num_nodes, 2)``.
        area: ``(num_nodes,)`` of their dots, in square points.
    """

    def __init__(self, axes: Axes, points: Tensor, area: Tensor) -> None:
        self.axes = axes
        self.points = points
        self.area = area
        self.frame = axes.get_window_extent()
        self.pixels = axes.transData.transform(points.numpy())
        self.taken: list[Any] = []

    def write(
        self, tree: Hierarchy, sizes: Tensor, families: list[int], colours: list[str]
    ) -> None:
        """The root and the families, then the known nodes, as far as there is room."""
        from matplotlib.patheffects import withStroke

        nodes = {name.split(".")[0]: node for node, name in reversed(list(enumerate(tree.names)))}
        root = int(sizes.argmax())
        known = [nodes[name] for name in _KNOWN if name in nodes]
        wanted = dict.fromkeys([root, *families, *known])
        written = 0
        for node in wanted:
            heavy = node == root or node in families
            style = {
                "color": _INK if node == root else colours[node],
                "fontsize": 11 if heavy else 8.5,
                "fontweight": "bold" if heavy else "normal",
                "path_effects": [withStroke(linewidth=2.5, foreground="white", alpha=0.85)],
            }
            text = tree.names[node].split(".")[0].replace("_", " ")
            written += self._place(node, text, style)
            if written == _MOST_NAMES:
                break

    def _place(self, node: int, text: str, style: dict[str, Any]) -> bool:
        """Writes a name around its point, where it hides the fewest; whether there was room."""
        best: tuple[int, Any, Text] | None = None
        for label in self._candidates(node, text, style):
            box = label.get_window_extent().padded(_PADDING)
            label.remove()
            inside = self.frame.containsx(box.x0) and self.frame.containsx(box.x1)
            if inside and not any(box.overlaps(other) for other in self.taken):
                x, y = self.pixels.T
                hidden = (box.x0 < x) & (x < box.x1) & (box.y0 < y) & (y < box.y1)
                if best is None or hidden.sum() < best[0]:
                    best = (hidden.sum(), box, label)
        if best is None:
            return False
        self.taken.append(best[1])
        self.axes.add_artist(best[2])
        return True

    def _candidates(self, node: int, text: str, style: dict[str, Any]) -> Iterator[Text]:
        x, y = self.points[node].tolist()
        outwards, length = math.atan2(y, x), math.hypot(x, y)
        reaches: Sequence[float] = _REACHES
        turns: Sequence[float] = _TURNS
        dot = math.sqrt(float(self.area[node]) / math.pi)
        if length > _AT_RIM:  # outside of the disk
            x, y, dot = x / length, y / length, 0.0
            reaches, turns = reaches[:2], turns[:5]
        for reach in reaches:
            for turn in turns:
                across, up = math.cos(outwards + turn), math.sin(outwards + turn)
                yield self.axes.annotate(
                    text,
                    (x, y),
                    ((dot + reach) * across, (dot + reach) * up),
                    textcoords="offset points",
                    ha=("right", "center", "left")[_side(across)],
                    va=("top", "center", "bottom")[_side(up)],
                    **style,
                )


def _side(part: float) -> int:
    """0, 1, 2 for left, middle, right of a point, and so for below, beside, above."""
    return 1 + (part > _STEEP) - (part < -_STEEP)
