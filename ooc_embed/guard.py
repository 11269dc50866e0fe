"""Lets one operation of a table run at a time, in the process that opened it. Knows no rows."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .errors import StoreError


class Guard:
    """Who may use a table, and when: not after close, not a forked child, not in the middle.

    Args:
        path: the store, for errors.
        writer: whether it is open to write.
    """

    def __init__(self, path: Path, *, writer: bool) -> None:
        self.writer = writer
        self.closed = False
        self._path = path
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._busy = False

    @property
    def forked(self) -> bool:
        """Whether this is a child of the process that opened the table."""
        return os.getpid() != self._pid

    def check(self) -> None:
        """Raise unless this process may use the table."""
        if self.closed:
            raise StoreError(f"{self._path} is closed: DiskEmbedding.open(path) opens it")
        if self.forked:
            raise StoreError(
                f"{self._path} was opened by process {self._pid}; a forked child cannot use it. "
                f"Open it with mode='r' in the child, or start workers with 'spawn'"
            )

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Run the body alone.

        Raises:
            StoreError: this process may not use the table, or is in the middle of doing so.
        """
        # Checked before the lock is taken: in a forked child another thread may hold it for ever.
        self.check()
        with self._lock:
            self.check()
            if self._busy:
                raise StoreError(
                    f"{self._path} was called in the middle of another of its operations, from a "
                    f"signal handler or a hook: set a flag there, and call after the step"
                )
            self._busy = True
            try:
                yield
            finally:
                self._busy = False

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Run the body, which changes the table, alone.

        Raises:
            StoreError: as `reading`, or the table is open to read.
        """
        with self.reading():
            if not self.writer:
                raise StoreError(
                    f"{self._path} is open to read: open it with mode='r+' to change it"
                )
            yield
