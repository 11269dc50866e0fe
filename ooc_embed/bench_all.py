"""Runs measurements, each in a process of its own, and puts their figures together; does not know
what they measure.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import memory_limit
from .figures import describe_machine


@dataclass(frozen=True)
class Run:
    """One process.

    Args:
        name: what to call it, ``bench hot`` for example.
        command: the program and its arguments, without where to measure and to write figures.
        limit_bytes: of its memory, or None.
    """

    name: str
    command: Sequence[str]
    limit_bytes: int | None


def run_all(runs: Sequence[Run], folder: Path, saved: Path | None) -> int:
    """Runs them one after the other, each with an empty part of memory.

    One that cannot run is listed with its reason, and the others go on.

    Args:
        runs: what to run.
        folder: on the disk to measure.
        saved: a file for all figures as JSON, or None; it is written anew after each run.

    Returns:
        0, or 1 if a run is missing.
    """
    done: list[dict[str, Any]] = []
    missing: list[dict[str, str]] = []
    for run in runs:
        figures = folder / "figures.json"
        figures.unlink(missing_ok=True)
        reason = _run(run, [*run.command, "--path", str(folder), "--json", str(figures)])
        if reason is None:
            done.append(json.loads(figures.read_text()))
        else:
            missing.append({"command": run.name, "reason": reason})
        if saved is not None:
            content = {
                "command": "bench all",
                "machine": describe_machine(),
                "runs": done,
                "missing": missing,
            }
            saved.write_text(json.dumps(content, indent=2) + "\n")
        print(flush=True)
    for absent in missing:
        print(f"not measured: {absent['command']}: {absent['reason']}", file=sys.stderr)
    return 1 if missing else 0


def _run(run: Run, command: Sequence[str]) -> str | None:
    """Why it did not succeed, or None."""
    with tempfile.TemporaryFile() as errors:
        try:
            if run.limit_bytes is None:
                code = subprocess.run(command, check=False, stderr=errors).returncode
            else:
                code = memory_limit.run_limited(command, run.limit_bytes, stderr=errors)
        except OSError as error:
            return f"a memory limit needs root and a writable cgroup hierarchy ({error})"
        errors.seek(0)
        said = errors.read().decode(errors="replace").strip()
    if code == 0:
        return None
    print("\n".join(said.splitlines()[-20:]), file=sys.stderr, flush=True)
    if code < 0:
        return f"ended by signal {-code}, 9 may be the memory limit"
    return said.splitlines()[-1] if said else f"exit code {code}"
