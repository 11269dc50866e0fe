"""What all pictures have in common: colours, and names beside points. Knows no table and no run.

matplotlib comes with the extra ``plot``, and is imported only to draw.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.text import Text

COLOURS = ("#c2452d", "#2f6db3", "#c98a1b", "#7a4fa3", "#14918b", "#4f8a34", "#b8518c", "#8a5a3c")
GREY = "#8b9096"
# Where a name may stand: points away from its dot, radians off its first direction.
REACHES = (3, 8, 14, 22)
TURNS = (0, 0.5, -0.5, 1.0, -1.0, 1.6, -1.6, 2.3, -2.3, math.pi)
# Around a name, in points of 1/72 inch.
_PADDING = 2.25
# From this sine up, a name stands above its dot and not beside it.
_STEEP = 0.35


def require() -> None:
    """Say at once that no picture can be drawn, rather than behind a run.

    Raises:
        ImportError: matplotlib is not installed.
    """
    if find_spec("matplotlib") is None:
        raise ImportError("a picture needs matplotlib: pip install 'ooc_embed[plot]'")


class Names:
    """Writes names beside points where nothing is written yet.

    Args:
        axes: to write on, whose limits and place in the figure are final.
        points: ``(n, 2)``, in the axes' numbers.
    """

    def __init__(self, axes: Axes, points: np.ndarray) -> None:
        self._axes = axes
        self._frame = axes.get_window_extent()
        self._pixels = axes.transData.transform(points)
        self._padding = _PADDING * axes.figure.dpi / 72
        self._taken: list[Any] = []

    def place(
        self,
        text: str,
        point: tuple[float, float],
        direction: float,
        gap: float,
        style: dict[str, Any],
        reaches: Sequence[float] = REACHES,
        turns: Sequence[float] = TURNS,
    ) -> bool:
        """Writes a name around its point, where it hides the fewest; whether there was room.

        Args:
            text: the name.
            point: in the axes' numbers.
            direction: where it stands best, in radians.
            gap: radius of the point, in points of 1/72 inch.
            style: of the text.
            reaches, turns: places to try, in this order.
        """
        best: tuple[int, Any, Text] | None = None
        distances = [gap + reach for reach in reaches]
        directions = [direction + turn for turn in turns]
        for label in self._around(text, point, distances, directions, style):
            box = label.get_window_extent().padded(self._padding)
            label.remove()
            inside = self._frame.contains(box.x0, box.y0) and self._frame.contains(box.x1, box.y1)
            if not inside or any(box.overlaps(other) for other in self._taken):
                continue
            x, y = self._pixels.T
            hidden = ((box.x0 < x) & (x < box.x1) & (box.y0 < y) & (y < box.y1)).sum()
            if best is None or hidden < best[0]:
                best = (hidden, box, label)
            if not hidden:
                break
        if best is None:
            return False
        self._taken.append(best[1])
        self._axes.add_artist(best[2])
        return True

    def _around(
        self,
        text: str,
        point: tuple[float, float],
        distances: Sequence[float],
        directions: Sequence[float],
        style: dict[str, Any],
    ) -> Iterator[Text]:
        for distance, direction in itertools.product(distances, directions):
            across, up = math.cos(direction), math.sin(direction)
            yield self._axes.annotate(
                text,
                point,
                (distance * across, distance * up),
                textcoords="offset points",
                ha=("right", "center", "left")[_side(across)],
                va=("top", "center", "bottom")[_side(up)],
                **style,
            )


def _side(part: float) -> int:
    """0, 1, 2 for left, middle, right of a point, and so for below, beside, above."""
    return 1 + (part > _STEEP) - (part < -_STEEP)
