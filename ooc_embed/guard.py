"""Lets one operation of a table run at a time, in the process that opened it. Knows no rows."""

from __future__ import annotations

import _thread
import os
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from operator import attrgetter
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

    def reading(self, begin: Callable[[], None] = lambda: None) -> AbstractContextManager[None]:
        """For ``with`` (no ExitStack finds the end of it): run the body alone.

        Args:
            begin: what comes before it, alone too.

        Raises:
            StoreError: this process may not use the table, or is in the middle of doing so.
        """
        # Checked before the lock is taken: in a forked child another thread may hold it for ever.
        self.check()
        if _is_mine(self._lock):
            raise StoreError(
                f"{self._path} was called in the middle of another of its operations, from a "
                f"signal handler or a hook: set a flag there, and call after the step"
            )

        def checked() -> None:
            self.check()  # it may have been closed meanwhile
            begin()

        return _Alone(self._lock, checked)

    def writing(self, begin: Callable[[], None] = lambda: None) -> AbstractContextManager[None]:
        """As `reading`, for a body that changes the table.

        Raises:
            StoreError: as `reading`, or the table is open to read.
        """

        def checked() -> None:
            if not self.writer:
                raise StoreError(
                    f"{self._path} is open to read: DiskEmbedding.open(path, mode='r+') changes it"
                )
            begin()

        return self.reading(checked)


class _Alone(AbstractContextManager[None]):
    """Takes a lock for the body of a ``with``, however that ends.

    Python runs signal handlers at the begin of functions written in Python, an ``__exit__`` among
    them, which then does nothing. A notebook keeps the exception with all that its frames hold, so
    the lock would stay taken. `with` looks this one up before it enters: it is the lock's own.
    """

    __exit__ = property(attrgetter("_lock.__exit__"))

    def __init__(self, lock: _thread.RLock, begin: Callable[[], None]) -> None:
        self._lock = lock
        self._begin = begin

    def __enter__(self) -> None:
        try:
            self._lock.acquire()
            self._begin()
        except BaseException:
            if _is_mine(self._lock):
                self._lock.release()
            raise


def _is_mine(lock: _thread.RLock) -> bool:
    """Whether this thread has it: as `threading.Condition` asks its lock."""
    return bool(lock._is_owned())  # type: ignore[attr-defined]
