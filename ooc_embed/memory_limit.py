"""Runs a command under a memory limit by a cgroup; does not know what it runs."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

_MOUNT = Path("/sys/fs/cgroup")
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def parse_bytes(text: str) -> int:
    """``512M``, ``4G`` or plain bytes as a number of bytes, in powers of 1024.

    Raises:
        ValueError: for anything else.
    """
    number = text.upper().removesuffix("B").removesuffix("I")
    unit = number[-1:] if number[-1:].isalpha() else ""
    if unit not in _UNITS:
        raise ValueError(f"{text!r} is not a size; write for example 512M or 4G")
    return int(float(number.removesuffix(unit)) * _UNITS[unit])


def run_limited(
    command: Sequence[str], limit_bytes: int, *, stderr: IO[bytes] | None = None
) -> int:
    """Runs ``command`` in a cgroup of its own and gives back its exit code (negative: a signal).

    Args:
        command: the program and its arguments.
        limit_bytes: of memory, page cache included.
        stderr: where its error messages go, by default to ours.

    Raises:
        OSError: where this process may not make a cgroup with a memory limit.
    """
    with limited_group(limit_bytes) as group:
        return subprocess.run(inside(group, command), check=False, stderr=stderr).returncode


def inside(group: Path, command: Sequence[str]) -> list[str]:
    """A command that runs ``command`` in a cgroup, and never outside of it.

    Args:
        group: of `limited_group`.
        command: the program and its arguments.
    """
    # The shell joins the group and becomes the command.
    return ["sh", "-c", 'echo $$ > "$0" && exec "$@"', str(group / "cgroup.procs"), *command]


def by_hand(command: Sequence[str], limit_bytes: int) -> str:
    """The shell line that runs ``command`` under the limit where ``run_limited`` cannot."""
    return (
        f"systemd-run --scope -p MemoryMax={limit_bytes} -p MemorySwapMax=0 {shlex.join(command)}"
    )


@contextmanager
def limited_group(limit_bytes: int) -> Iterator[Path]:
    """The folder of a new cgroup, whose processes must have ended when the block does.

    It is directly under the root of the hierarchy, since version 2 allows a group to have either
    processes or limited children, and our own has a process.

    Args:
        limit_bytes: of memory, page cache included.

    Raises:
        OSError: where this process may not make a cgroup with a memory limit.
    """
    if (_MOUNT / "memory").is_dir():
        root, limits = _MOUNT / "memory", ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes")
        values = (str(limit_bytes), str(limit_bytes))
    else:
        root, limits = _MOUNT, ("memory.max", "memory.swap.max")
        values = (str(limit_bytes), "0")
    group = root / f"ooc-embed-bench-{os.getpid()}"
    group.mkdir()
    try:
        (group / limits[0]).write_text(values[0])
        if (group / limits[1]).exists():  # kernels without swap accounting have no such file
            (group / limits[1]).write_text(values[1])
        yield group
    finally:
        group.rmdir()


@contextmanager
def terminated_as_exit() -> Iterator[None]:
    """SIGTERM raises SystemExit inside, so that temporary files and groups are removed."""

    def leave(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
