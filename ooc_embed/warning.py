"""Warns at the line of the user's code that called the package. Knows where the package is."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from types import FrameType

_PACKAGE = str(Path(__file__).parent)


def warn(text: str) -> None:
    """Give a warning that names the first line outside of the package on the way here."""
    level, frame = 1, _caller(sys._getframe())
    while frame is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        level, frame = level + 1, _caller(frame)
    warnings.warn(text, stacklevel=level + 1)


def _caller(frame: FrameType) -> FrameType | None:
    return frame.f_back
