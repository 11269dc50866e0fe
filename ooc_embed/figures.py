"""Prints measured figures as a table and writes JSON; does not know what they mean."""

from __future__ import annotations

import json
import os
import platform
import statistics
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from ._version import __version__

_WIDTHS = (44, 12, 10, 20)


class Figures:
    """The figures of one run.

    Args:
        command: which measurement this is.
        settings: what it was told, kept in the JSON file.
    """

    def __init__(self, command: str, settings: dict[str, Any]) -> None:
        self.command = command
        self.settings = settings
        self.rows: list[dict[str, Any]] = []
        self.skipped: list[dict[str, str]] = []
        self._section = ""
        machine = ", ".join(f"{name} {value}" for name, value in describe_machine().items())
        print(f"{command}: {machine}", flush=True)

    def section(self, title: str) -> None:
        """Begins a part of the table."""
        self._section = title
        self._print(title, "median", "", "min..max", "")

    def add(self, label: str, unit: str, samples: Sequence[float], **extra: float) -> float:
        """Adds a figure, the median of ``samples``, and gives it back.

        Args:
            label: what was measured.
            unit: of the samples.
            samples: one or more measurements of the same thing.
            extra: numbers that follow from it, a ratio for example, printed behind it by name.
        """
        median = statistics.median(samples)
        low, high = min(samples), max(samples)
        self.rows.append(
            {
                "section": self._section,
                "label": label,
                "median": median,
                "unit": unit,
                "min": low,
                "max": high,
                "samples": len(samples),
                **extra,
            }
        )
        spread = f"{number(low)}..{number(high)}" if len(samples) > 1 else ""
        behind = "  ".join(f"{name} {number(value)}" for name, value in extra.items())
        self._print("  " + label, number(median), unit, spread, behind)
        return median

    def skip(self, label: str, reason: str) -> None:
        """Says that a figure is missing, and why."""
        self.skipped.append({"section": self._section, "label": label, "reason": reason})
        print(f"  {label}: not measured, {reason}", flush=True)

    def save(self, path: Path) -> None:
        """Writes everything as one JSON object: command, settings, machine, figures, skipped."""
        content = {
            "command": self.command,
            "settings": self.settings,
            "machine": describe_machine(),
            "figures": self.rows,
            "skipped": self.skipped,
        }
        path.write_text(json.dumps(content, indent=2) + "\n")

    def _print(self, label: str, value: str, unit: str, spread: str, behind: str) -> None:
        a, b, c, d = _WIDTHS
        line = f"{label:<{a}}{value:>{b}} {unit:<{c}}{spread:<{d}}{behind}"
        print(("\n" if not label.startswith(" ") else "") + line.rstrip(), flush=True)


def number(value: float) -> str:
    """A number with about four digits that count."""
    if isinstance(value, int) or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.2f}"


def describe_machine() -> dict[str, Any]:
    """What a figure cannot be compared without."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "memory_gib": round(memory / 2**30, 1),
        "ooc_embed": __version__,
        "torch": torch.__version__,
        "torch_threads": torch.get_num_threads(),
        "numpy": metadata.version("numpy"),
        "zarr": metadata.version("zarr"),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}",
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
