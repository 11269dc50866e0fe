"""The lock of a store's writer, and who has it. Knows processes; not what is locked."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import weakref
from pathlib import Path

from . import durable
from .errors import LockedError
from .parsing import integer, json_object, text


class DirectoryLock:
    """The exclusive lock of a store's writer: an flock on the directory's own descriptor.

    The kernel drops it when the process dies, so it is never stale. ``holder`` (a small JSON file
    inside an array's folder) only serves the error message. A forked child closes its copy of the
    descriptor, or a DataLoader worker would keep the lock of a killed trainer.

    Raises:
        LockedError: another writer has it.
    """

    _fd = -1
    _named = False

    def __init__(self, path: Path, holder: Path) -> None:
        self._holder = holder
        self._fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _locks.add(self)
        except BlockingIOError:
            self.close()
            who, remedy = _holder(holder)
            raise LockedError(f"{path} is open for writing by {who}{remedy}") from None
        except BaseException:  # Ctrl-C; who keeps its traceback would keep the lock
            self.close()
            raise

    def name_holder(self) -> None:
        """Write who holds the lock."""
        self._named = True
        facts = {"pid": os.getpid(), "host": socket.gethostname()}
        durable.write_hint(self._holder, json.dumps(facts))

    def release(self) -> None:
        if self._fd >= 0:
            try:
                if self._named:  # a store that could not be opened stays as it is
                    durable.remove_hint(self._holder)
            finally:
                self.close()

    def close(self) -> None:
        """Close the descriptor only: what a forked child does."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        # Ctrl-C may come where nobody closes it any more: in an opening, in another finalizer.
        self.close()


def lock_holder(path: Path, holder: Path) -> str | None:
    """Who has the store at ``path`` open for writing, in words; None when nobody has."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        # A shared attempt, dropped at once: it fails only while a writer is there.
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _holder(holder)[0]
    finally:
        os.close(fd)
    return None


def _holder(holder: Path) -> tuple[str, str]:
    """Who has a lock, and what to do about it."""
    try:
        if not holder.is_file():  # a pipe would be waited for
            return "another process", ""
        facts = json_object(holder.read_bytes())
        pid, host = integer(facts["pid"]), text(facts["host"])
    except (OSError, ValueError, KeyError, TypeError):
        return "another process", ""
    if pid == os.getpid() and host == socket.gethostname():
        return (
            f"this same process (pid {pid})",
            ": a notebook cell run twice? Use the object that is there, or close() it first",
        )
    return f"process {pid} on {host}", ". Wait for it, stop it, or open a reader with mode='r'"


_locks: weakref.WeakSet[DirectoryLock] = weakref.WeakSet()


def _close_locks_in_child() -> None:
    for lock in list(_locks):
        lock.close()


os.register_at_fork(after_in_child=_close_locks_in_child)
