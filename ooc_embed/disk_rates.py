"""Measures the disk itself, past the page cache; knows files and bytes, not tables."""

from __future__ import annotations

import itertools
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from .direct_queue import READ, WRITE, DirectQueue

PAGE_BYTES = 4096
BLOCK_BYTES = 4 << 20


def random_read_rate(
    files: Sequence[Path], *, seconds: float = 3.0, depth: int = 256, seed: int = 0
) -> float:
    """Random reads of one 4 KiB page a second, over all pages of ``files``, ``depth`` in flight."""
    return _random_rate(READ, files, seconds, depth, seed)


def random_write_rate(
    files: Sequence[Path], *, seconds: float = 3.0, depth: int = 256, seed: int = 0
) -> float:
    """Random writes of one 4 KiB page a second, likewise, all of them durable at the end.

    The pages' content is lost: afterwards they hold float32 numbers from 0 to 1.
    """
    return _random_rate(WRITE, files, seconds, depth, seed)


def _random_rate(
    opcode: int, files: Sequence[Path], seconds: float, depth: int, seed: int
) -> float:
    rng = np.random.default_rng(seed)
    flags = os.O_RDONLY if opcode == READ else os.O_RDWR
    with _opened(files, flags) as fds, DirectQueue(depth, PAGE_BYTES) as queue:
        queue.buffer[:] = random_floats(seed)[:PAGE_BYTES]
        ends = np.cumsum([os.fstat(fd).st_size // PAGE_BYTES for fd in fds])
        opcodes, lengths = np.full(64 * depth, opcode), np.full(64 * depth, PAGE_BYTES)
        done, begin = 0, time.perf_counter()
        while time.perf_counter() - begin < seconds:
            page = rng.integers(ends[-1], size=len(lengths))
            file = np.searchsorted(ends, page, side="right")
            first = np.concatenate(([0], ends))[file]
            queue.run(opcodes, np.asarray(fds)[file], (page - first) * PAGE_BYTES, lengths)
            done += len(lengths)
        if opcode == WRITE:
            for fd in fds:
                os.fdatasync(fd)
        return done / (time.perf_counter() - begin)


def sequential_read_rate(
    files: Sequence[Path],
    *,
    seconds: float = 3.0,
    block_bytes: int = BLOCK_BYTES,
    depth: int = 4,
) -> float:
    """Bytes a second of whole blocks, file after file, until they end or the time is over."""
    with _opened(files) as fds, DirectQueue(depth, block_bytes) as queue:
        blocks = _blocks(fds, block_bytes)
        done, begin = 0, time.perf_counter()
        while time.perf_counter() - begin < seconds:
            batch = list(itertools.islice(blocks, 16 * depth))
            if not batch:
                break
            where, offsets, lengths = np.asarray(batch, dtype=np.int64).T
            queue.read(where, offsets, lengths)
            done += int(lengths.sum())
        return done / (time.perf_counter() - begin)


def mixed_rate(
    files: Sequence[Path],
    target: Path,
    *,
    nbytes: int = 4 << 30,
    block_bytes: int = BLOCK_BYTES,
    depth: int = 8,
) -> float:
    """Bytes a second of sequential reads, while as many are written at the same time.

    Args:
        files: are read, block by block in order, until they end or ``nbytes`` have been read.
        target: a file that must not exist; every block read is written to it, durably.
        nbytes: how much to read, and how much to write.
        block_bytes: bytes of a request.
        depth: requests in flight, reads and writes in turn.
    """
    with _opened(files) as fds, DirectQueue(depth, block_bytes) as queue:
        blocks = itertools.islice(_blocks(fds, block_bytes), max(1, nbytes // block_bytes))
        where, offsets, lengths = np.asarray(list(blocks), dtype=np.int64).T
        total = int(lengths.sum())
        begin = time.perf_counter()
        with _allocated(target, total) as fd:
            # In turn, so that the disk never has only one kind to do.
            queue.run(
                np.tile([READ, WRITE], len(lengths)),
                np.stack([where, np.full_like(where, fd)], axis=1).ravel(),
                np.stack([offsets, np.cumsum(lengths) - lengths], axis=1).ravel(),
                lengths.repeat(2),
            )
            os.fdatasync(fd)
        return total / (time.perf_counter() - begin)


def write_sequentially(
    path: Path, content: NDArray[np.uint8], nbytes: int, *, depth: int = 4
) -> float:
    """Makes a file of ``nbytes`` from repetitions of ``content``; bytes a second, durable.

    Args:
        path: the file, which must not exist.
        content: one block, a multiple of 4 KiB long.
        nbytes: the size of the file.
        depth: how many blocks are in flight.
    """
    block_bytes = len(content)
    begin = time.perf_counter()
    with _allocated(path, -(-nbytes // PAGE_BYTES) * PAGE_BYTES) as fd:
        with DirectQueue(depth, block_bytes) as queue:
            queue.buffer[:] = content
            blocks = np.asarray(list(_blocks([fd], block_bytes)), dtype=np.int64)
            queue.write(*blocks.T)
        os.ftruncate(fd, nbytes)
        os.fdatasync(fd)
    return nbytes / (time.perf_counter() - begin)


def random_floats(seed: int) -> NDArray[np.uint8]:
    """A block of float32 numbers from 0 to 1, as bytes: zeros might be stored as holes, and second
    moments must not be negative."""
    return np.random.default_rng(seed).random(BLOCK_BYTES // 4, np.float32).view(np.uint8)


def check_space(folder: Path, nbytes: int) -> None:
    """Sees that a measurement's files fit.

    Raises:
        OSError: there is less free space than ``nbytes``.
    """
    free = shutil.disk_usage(folder).free
    if free < nbytes:
        raise OSError(
            f"{folder} has {free / 1e9:.1f} GB free, this needs {nbytes / 1e9:.1f} GB: use fewer "
            f"rows, or another folder"
        )


def data_files(folder: Path) -> list[Path]:
    """All data files below a folder of zarr arrays."""
    return [file for file in folder.rglob("*") if file.is_file() and file.name != "zarr.json"]


def drop_from_page_cache(files: Sequence[Path]) -> None:
    """Makes the next read of closed files one from the disk; needs no root and disturbs nobody."""
    for file in files:
        fd = os.open(file, os.O_RDONLY)
        try:
            os.fsync(fd)  # only clean pages are dropped
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def _blocks(fds: Sequence[int], block_bytes: int) -> Iterator[tuple[int, int, int]]:
    """(fd, offset, nbytes) of all whole pages of the files, in order."""
    for fd in fds:
        end = os.fstat(fd).st_size // PAGE_BYTES * PAGE_BYTES
        for offset in range(0, end, block_bytes):
            yield fd, offset, min(block_bytes, end - offset)


@contextmanager
def _opened(files: Sequence[Path], flags: int = os.O_RDONLY) -> Iterator[list[int]]:
    if not files:
        raise ValueError("no files: the disk's rates are measured on existing files")
    with ExitStack() as stack:
        fds = []
        for file in files:
            fds.append(os.open(file, flags | os.O_DIRECT))
            stack.callback(os.close, fds[-1])
        yield fds


@contextmanager
def _allocated(path: Path, nbytes: int) -> Iterator[int]:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_DIRECT, 0o644)
    try:
        os.posix_fallocate(fd, 0, nbytes)
        yield fd
    finally:
        os.close(fd)
