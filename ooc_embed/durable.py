"""Every write, sync, rename, link and unlink of a store. Knows files and bytes, not rows or torch.

Nothing else changes a file, and nothing here does but by calls of `os`: a test that watches those
can count them, stop at each, let it fail, or forget what was not synced. A name is durable only
after its folder was synced, and a file only through a descriptor that was open when it was written:
a writeback error is reported to those. Disk-full errors name the bytes that were needed and those
that are free.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np

from .disk_facts import free_bytes

PAGE = 4096
TEMPORARY = ".tmp"
_BLOCK = 1 << 20
# What a second name for a file fails with: another disk, a file system without, one name too many.
_NO_LINKS = {errno.EXDEV, errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}


@contextmanager
def needs(path: Path, nbytes: int) -> Iterator[None]:
    """Turn a full disk into an ``OSError`` that names ``nbytes`` and the bytes that are free."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        text = (
            f"{os.strerror(error.errno)}: writing needs {nbytes:,} bytes, "
            f"{free_bytes(path):,} bytes are free. Nothing that was committed is lost; make room "
            f"and call again"
        )
        raise OSError(error.errno, text, str(path)) from error


def sync_directory(path: Path) -> None:
    """Make the names in a folder durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def sync_tree(path: Path) -> None:
    """Sync every file and folder below ``path``, then the folder that holds it."""
    for folder, _, names in os.walk(path, topdown=False):
        for name in names:
            fd = os.open(Path(folder, name), os.O_RDONLY)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)
        sync_directory(Path(folder))
    sync_directory(path.parent)


def replace(path: Path, data: bytes, temporary: Path) -> None:
    """Put ``data`` in the place of ``path`` in one instant: write aside, sync, rename.

    The caller syncs the folder.
    """
    try:
        with needs(path, len(data)), _emptied(temporary) as fd:
            _write_all(fd, memoryview(data), 0)
            os.fsync(fd)
        os.rename(temporary, path)
    except BaseException:
        remove(temporary)
        raise


def rename(source: Path, target: Path) -> None:
    """Give a file another name in one instant; the caller syncs the folder."""
    os.rename(source, target)


def renew(path: Path) -> None:
    """Put a copy in the place of a file: it may be written to, whoever else has the old one.

    The caller syncs the folder.

    Raises:
        OSError: the disk is full, or failed; the file is as it was.
    """
    temporary = temporary_for(path)
    try:
        copy(path, temporary)
        os.rename(temporary, path)
    except BaseException:
        remove(temporary)
        raise


def copy(source: Path, target: Path) -> None:
    """Write a copy of a file, and sync it; the caller syncs the folder."""
    nbytes = source.stat().st_size
    with needs(target, nbytes), _emptied(target) as fd, source.open("rb") as file:
        offset = 0
        while block := file.read(_BLOCK):
            _write_all(fd, memoryview(block), offset)
            offset += len(block)
        os.fsync(fd)


def link(source: Path, target: Path) -> bool:
    """Give a file a second name; False where that is not possible, and nothing is done then."""
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno in _NO_LINKS:
            return False
        raise
    return True


def write_hint(path: Path, text: str) -> None:
    """Write a small file that nothing depends on: a full disk is no error, and it is not synced."""
    with suppress(OSError), _emptied(path) as fd:
        _write_all(fd, memoryview(text.encode()), 0)


def remove_hint(path: Path) -> None:
    """Unlink what `write_hint` wrote; a folder that is there stays."""
    with suppress(IsADirectoryError):
        remove(path)


def make_directory(path: Path) -> None:
    """Create a folder, and its parents, durably; an existing one is kept."""
    if path.is_dir():
        return
    make_directory(path.parent)
    path.mkdir(exist_ok=True)
    sync_directory(path.parent)


def remove(path: Path) -> None:
    """Unlink a file; one that is gone already is fine."""
    path.unlink(missing_ok=True)


def remove_empty(path: Path) -> None:
    """Remove a folder, if there is one and nothing is in it."""
    with suppress(OSError):
        path.rmdir()


def remove_tree(path: Path) -> None:
    """Remove a folder and all below it; links are not followed, though it is one itself."""
    if path.is_symlink():
        remove(path)
        return
    for folder, folders, files in os.walk(path, topdown=False):
        for name in [*files, *folders]:
            place = Path(folder, name)
            if place.is_dir() and not place.is_symlink():
                place.rmdir()
            else:
                remove(place)
    path.rmdir()


def remove_temporaries(folder: Path) -> None:
    """Unlink the temporary files that a killed writer left in ``folder``."""
    for path in folder.glob(f"*{TEMPORARY}"):
        remove(path)


def temporary_for(path: Path) -> Path:
    """Where a file is written before it is renamed to ``path``: the same folder."""
    return path.with_name(path.name + TEMPORARY)


def write_file(path: Path, buffer: np.ndarray) -> None:
    """Write a whole immutable file aside, sync it and rename it to ``path``.

    ``buffer`` is ``(n,) uint8`` from `memory.page_aligned`. The caller syncs the folder.
    """
    with written_aside(path, buffer.nbytes, temporary_for(path)) as file:
        file.write(0, buffer, direct=True)


@contextmanager
def written_aside(path: Path, nbytes: int, temporary: Path) -> Iterator[AppendFile]:
    """Write a file of ``nbytes`` under another name; at the end it is synced and renamed to
    ``path``, or gone where that fails. The caller syncs the folder.
    """
    remove(temporary)
    try:
        with needs(path, nbytes):
            file = AppendFile(temporary, nbytes, create=True)
            try:
                yield file
                file.sync()
            finally:
                file.close()
        os.rename(temporary, path)
    except BaseException:
        remove(temporary)
        raise


def read_file(path: Path, buffer: np.ndarray, offset: int = 0) -> int:
    """Fill ``buffer``, ``(n,) uint8``, from a file, past the page cache where that goes.

    That asks for whole pages, as those of `memory.page_aligned` are.

    Returns:
        How many bytes were read: fewer than n where the file is shorter.

    Raises:
        OSError: the file is missing, or the disk cannot read it; it is named.
    """
    fd = _open_direct(path, os.O_RDONLY)
    direct = fd >= 0
    if not direct:
        fd = os.open(path, os.O_RDONLY)
    done = 0
    try:
        while done < len(buffer):
            try:
                count = os.preadv(fd, [buffer[done:].data], offset + done)
            except OSError as error:
                if error.errno != errno.EINVAL or not direct:
                    error.filename = str(path)
                    raise
                fcntl.fcntl(fd, fcntl.F_SETFL, os.O_RDONLY)
                direct = False
                continue
            if not count:
                break
            done += count
    finally:
        os.close(fd)
    return done


def allocate(path: Path, nbytes: int) -> None:
    """Create a file whose space is reserved, under a temporary name first.

    A full disk shows here, as an ``OSError``, before anything is written to the file.
    """
    temporary = temporary_for(path)
    try:
        with needs(path, nbytes), _emptied(temporary) as fd:
            _reserve(fd, nbytes)
        os.rename(temporary, path)
    except BaseException:
        remove(temporary)
        raise


class AppendFile:
    """A file of fixed size that is written front to back, buffered or past the page cache.

    Args:
        path: the file; with ``create`` it must not exist, without it must have been `allocate`-d.
        nbytes: its size.

    Where the file system refuses O_DIRECT, all writes are buffered.
    """

    def __init__(self, path: Path, nbytes: int, *, create: bool = False) -> None:
        self.path = path
        self._fd = os.open(path, os.O_RDWR | (os.O_CREAT | os.O_EXCL if create else 0), 0o666)
        self._direct_fd = -1
        try:
            if create:
                _reserve(self._fd, nbytes)
            self._direct_fd = _open_direct(path, os.O_WRONLY)
        except BaseException:
            self.close()
            raise

    def write(self, offset: int, data: np.ndarray, *, direct: bool = False) -> None:
        """Write ``data`` (contiguous) at ``offset``; for ``direct`` both are whole pages."""
        view = data.data.cast("B")
        if direct and self._direct_fd >= 0:
            try:
                _write_all(self._direct_fd, view, offset)
                return
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                os.close(self._direct_fd)
                self._direct_fd = -1
        _write_all(self._fd, view, offset)

    def sync(self) -> None:
        """Make all that was written durable."""
        getattr(os, "fdatasync", os.fsync)(self._fd)

    def close(self) -> None:
        for fd in (self._fd, self._direct_fd):
            if fd >= 0:
                os.close(fd)
        self._fd = self._direct_fd = -1


def writes_directly(path: Path) -> bool:
    """Whether the file system of this file takes reads and writes past the page cache."""
    fd = _open_direct(path, os.O_RDONLY)
    if fd >= 0:
        os.close(fd)
    return fd >= 0


@contextmanager
def _emptied(path: Path) -> Iterator[int]:
    """A descriptor of a file with nothing in it, which is created where there is none."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o666)
    try:
        yield fd
    finally:
        os.close(fd)


def _open_direct(path: Path, flags: int) -> int:
    """A descriptor past the page cache, or -1 where the file system refuses one."""
    if not hasattr(os, "O_DIRECT"):
        return -1
    try:
        return os.open(path, flags | os.O_DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return -1


def _reserve(fd: int, nbytes: int) -> None:
    """Reserve disk space, by writing zeros where the system has no posix_fallocate."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(fd, 0, nbytes)
        return
    zeros = memoryview(bytes(_BLOCK))
    for offset in range(0, nbytes, _BLOCK):
        _write_all(fd, zeros[: min(_BLOCK, nbytes - offset)], offset)


def _write_all(fd: int, data: memoryview, offset: int) -> None:
    while data:
        written = os.pwrite(fd, data, offset)
        data, offset = data[written:], offset + written
