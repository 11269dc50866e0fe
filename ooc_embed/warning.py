"""Warns at the line of the user's code that came here. Knows whose files are none of the user's."""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
import weakref
from pathlib import Path

import torch

_OTHERS = (
    *(f"{Path(file).parent}{os.sep}" for file in (__file__, torch.__file__)),
    contextlib.__file__,
    weakref.__file__,
)


def warn(text: str) -> None:
    """Give a warning that names the first line on the way here that is the user's."""
    level, frame = 1, sys._getframe().f_back
    while frame is not None and frame.f_code.co_filename.startswith(_OTHERS):
        level, frame = level + 1, frame.f_back
    warnings.warn(text, stacklevel=level + 1)
