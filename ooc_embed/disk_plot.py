"""Draws points of the Poincaré disk with their edges and some names. Knows no store and no run.

matplotlib comes with the extra ``plot``, and is imported only to draw.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from . import poincare
from .drawing import COLOURS, GREY, REACHES, TURNS, Names
from .hierarchy import Hierarchy

if TYPE_CHECKING:
    from matplotlib.axes import Axes

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
# From this radius on, a name stands outside of the disk.
_AT_RIM = 0.93
# A family has at most this part of all nodes; the largest are drawn in these colours.
_FAMILY_PART = 0.35
_CAPTION = "Poincaré disk: edges drawn as geodesics, distances from the centre as half their length"
_INK = "#23282d"


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
    _write_names(axes, points, area, tree, sizes, families, colours)
    axes.text(0.02, 0.02, _CAPTION, transform=axes.transAxes, fontsize=7, color=GREY)
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
        if len(found) == len(COLOURS) or not sizes[node]:
            break
        above = torch.tensor(found, dtype=torch.int64)
        if not tree.are_pairs(torch.full_like(above, node), above).any():
            found.append(node)
    return found


def _colours(tree: Hierarchy, families: list[int]) -> list[str]:
    colours = [GREY] * tree.num_nodes
    for family, colour in zip(families, COLOURS, strict=False):
        members = tree.pairs[tree.pairs[:, 1] == family, 0].tolist()
        for node in (family, *members):
            colours[node] = colour
    return colours


def _geodesics(first: Tensor, second: Tensor) -> Tensor:
    """``(n, points, 2)`` along the shortest ways between ``(n, 2)`` points."""
    parts = torch.linspace(0, 1, _ARC_POINTS, dtype=first.dtype)[:, None]
    velocity = poincare.logmap(first, second)[:, None]
    return poincare.expmap(first[:, None], velocity * parts)


def _write_names(
    axes: Axes,
    points: Tensor,
    area: Tensor,
    tree: Hierarchy,
    sizes: Tensor,
    families: list[int],
    colours: list[str],
) -> None:
    """The root and the families, then the known nodes, as far as there is room."""
    from matplotlib.patheffects import withStroke

    names = Names(axes, points.numpy())
    nodes = {name.split(".")[0]: node for node, name in reversed(list(enumerate(tree.names)))}
    root = int(sizes.argmax())
    known = [nodes[name] for name in _KNOWN if name in nodes]
    written = 0
    for node in dict.fromkeys([root, *families, *known]):
        heavy = node == root or node in families
        style = {
            "color": _INK if node == root else colours[node],
            "fontsize": 11 if heavy else 8.5,
            "fontweight": "bold" if heavy else "normal",
            "path_effects": [withStroke(linewidth=2.5, foreground="white", alpha=0.85)],
        }
        text = tree.names[node].split(".")[0].replace("_", " ")
        dot = math.sqrt(float(area[node]) / math.pi)
        written += _place(names, text, points[node], dot, style)
        if written == _MOST_NAMES:
            break


def _place(names: Names, text: str, point: Tensor, dot: float, style: dict[str, Any]) -> bool:
    """Writes a name around its dot, of that radius, or outside of the disk."""
    x, y = point.tolist()
    length = math.hypot(x, y)
    if length > _AT_RIM:
        at_rim = (x / length, y / length)
        return names.place(text, at_rim, math.atan2(y, x), 0.0, style, REACHES[:2], TURNS[:5])
    return names.place(text, (x, y), math.atan2(y, x), dot, style)
