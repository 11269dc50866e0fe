"""Watches calls of `os` that change files below a folder, and lets them fail; knows no store."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

# What can change a file or a folder. Reading is left alone.
WRITES = ("write", "writev", "pwrite", "pwritev", "posix_fallocate", "ftruncate", "truncate")
SYNCS = ("fsync", "fdatasync")
NAMES = ("rename", "replace", "link", "unlink", "remove", "rmdir", "mkdir")
OPENS = ("open",)

Hook = Callable[[str, tuple[Any, ...]], None]


def target(arguments: tuple[Any, ...]) -> Path | None:
    """The path that a call is about: its first argument's, by /proc where that is a descriptor."""
    first = arguments[0]
    if not isinstance(first, int):
        return Path(os.fsdecode(os.fspath(first)))
    try:
        return Path(os.readlink(f"/proc/self/fd/{first}").removesuffix(" (deleted)"))
    except OSError:
        return None


def _changes(name: str, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> bool:
    if name != "open":
        return True
    flags = arguments[1] if len(arguments) > 1 else keywords.get("flags", 0)
    return bool(flags & os.O_CREAT)


@contextlib.contextmanager
def watched(
    folder: Path, before: Hook, after: Hook | None = None, names: tuple[str, ...] = ()
) -> Iterator[None]:
    """Call `before(name, arguments)` ahead of each changing call below `folder`; it may raise.

    `after` is called behind each that succeeded. One call at a time, whichever threads they are of.
    """
    lock = threading.RLock()
    inside = threading.local()

    def wrap(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **keywords: Any) -> Any:
            if getattr(inside, "hook", False) or not _changes(name, arguments, keywords):
                return real(*arguments, **keywords)
            if "dir_fd" in keywords and keywords["dir_fd"] is not None:
                path: Path | None = Path(os.readlink(f"/proc/self/fd/{keywords['dir_fd']}"))
            else:
                path = target(arguments)
            if path is None or not (path == folder or folder in path.parents):
                return real(*arguments, **keywords)
            with lock:
                inside.hook = True
                try:
                    before(name, arguments)
                    answer = real(*arguments, **keywords)
                    if after is not None:
                        after(name, arguments)
                    return answer
                finally:
                    inside.hook = False

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in names or (*WRITES, *SYNCS, *NAMES, *OPENS):
            if hasattr(os, name):
                patch.setattr(os, name, wrap(name, getattr(os, name)))
        yield


@contextlib.contextmanager
def unreadable(file: Path) -> Iterator[None]:
    """The disk cannot read a file, which plain calls are told."""
    real = os.preadv

    def preadv(fd: int, *arguments: Any) -> int:
        if target((fd,)) == file:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(fd, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "preadv", preadv)
        yield
