"""Axes in a figure of their own, which a notebook shows where they are what a cell gives.

Imports matplotlib, so it is imported only to draw. Knows no table, and never pyplot: a figure that
pyplot has is shown by itself, and stays in memory until it is closed.
"""

from __future__ import annotations

from io import BytesIO

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

_INCHES = (6.4, 4.0)


class Picture(Figure):
    """A figure that IPython shows also where nothing has set pyplot up."""

    def _repr_png_(self) -> bytes:
        return _png(self)


class PictureAxes(Axes):
    """Axes that IPython shows as the figure that they are in."""

    def _repr_png_(self) -> bytes:
        return _png(self.figure.canvas.figure)


def new_axes() -> Axes:
    """The only axes of a new figure."""
    figure = Picture(figsize=_INCHES, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot(axes_class=PictureAxes)
    axes.spines[["top", "right"]].set_visible(False)
    return axes


def _png(figure: Figure) -> bytes:
    file = BytesIO()
    figure.savefig(file, format="png")
    return file.getvalue()
