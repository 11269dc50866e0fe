"""Merges a sealed log into the table's chunk files, in threads of its own.

Knows files and the log, which nobody changes any more; never touches the table's maps, its cache or
its manifest.
"""

from __future__ import annotations

import os
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Container, Iterator
from contextlib import suppress

import numpy as np

from .errors import CorruptStoreError, StoreError
from .interrupts import uninterrupted
from .log import RecordLog
from .mapped import HeldFile
from .memory import check_thread, page_aligned
from .merge import NewestRecords
from .soundness import check_log
from .store import Store
from .warning import warn

# While one thread waits for the disk to read or to sync, another one applies or writes.
_THREADS = 4
_CHUNKS_BYTES = 256 << 20
# A file that was replaced keeps its space on the disk until the table has mapped the new one.
_UNSETTLED = 16


def threads_for(chunk_bytes: int) -> int:
    """How many threads merge chunks of that size, each of which keeps one in memory."""
    return min(_THREADS, max(_CHUNKS_BYTES // chunk_bytes, 1))


def most_doubled(chunk_bytes: int) -> int:
    """How many chunks may be on the disk both as they were and as they are merged."""
    # Those that threads are at, before and after the others were settled.
    return _UNSETTLED + 2 * threads_for(chunk_bytes)


class Worker(threading.Thread):
    """A thread that works on a store beside the one that has it."""

    def start(self) -> None:
        """Begin.

        Raises:
            RuntimeError: the system has no room for another thread.
        """
        check_thread()
        super().start()


class Merge:
    """A sealed log's way into the chunk files, in a few threads.

    Each takes the next chunk, in row order, and does all of it: reads the file whole, puts the
    newest sealed records in, writes it aside, syncs and renames it. What is finished waits to be
    settled by the thread that has the table, which maps the new file. The old one is held here
    until then, and let go of in these threads: that deletes its pages and blocks, which takes far
    longer than the mapping.

    Args:
        store: the store.
        log: its sealed log.
        known_crc32: checksums of the chunk files; kept right.
        unsure: those that an earlier merge of the log, which was stopped, may have replaced.
        merged: chunks that have the log's records already.

    Attributes:
        log: the sealed log.
        finished: ``(index, crc32)`` of chunks that wait to be settled.
        stopping: it ends early.
        failure: what made it end early, or None.
        seconds: from its begin until the last chunk was settled.
    """

    def __init__(
        self,
        store: Store,
        log: RecordLog,
        known_crc32: dict[int, int],
        unsure: set[int],
        merged: Container[int],
    ) -> None:
        self.finished: deque[tuple[int, int]] = deque()
        self.stopping = False
        self.failure: BaseException | None = None
        self.seconds = 0.0
        self._began = time.perf_counter()
        self._pid = os.getpid()
        self.log = log
        self._store = store
        self._known_crc32 = known_crc32
        self._unsure = unsure
        self._merged = merged
        self._existing = store.manifest.checksums
        self._changed = threading.Condition()
        self._planning = threading.Lock()
        self._newest: NewestRecords | None = None
        self._todo: deque[int] = deque()
        self._replaced: dict[int, HeldFile] = {}
        self._unneeded: deque[HeldFile] = deque()
        self._left: int | None = None
        # Not an executor's: those are waited for before a table is closed at exit.
        self._workers: list[Worker] = []
        self._running = 1  # until all are started
        self._start()

    def _start(self) -> None:
        # There may be no more threads, and while the interpreter ends there are none.
        with suppress(RuntimeError):
            for _ in range(threads_for(self._store.layout.chunk_bytes)):
                worker = Worker(target=self._run, daemon=True)
                with self._changed:
                    self._running += 1
                try:
                    worker.start()
                except RuntimeError:
                    self._ended()
                    raise
                self._workers.append(worker)
        if self._workers:
            self._ended()

    # For the thread that has the table

    @property
    def complete(self) -> bool:
        """Whether every chunk was merged and settled, if `failure` is None."""
        return self._left == 0

    @property
    def left(self) -> int | None:
        """How many chunks are not settled; waits until that is known, None if it never is."""
        self._wait_for(lambda: self._left is not None or not self._running)
        return self._left

    def settled(self) -> None:
        """The first of the finished chunks is in use."""
        with self._changed:
            index, _ = self.finished.popleft()
            self._left = (self._left or 0) - 1
            if not self._left:
                self.seconds = time.perf_counter() - self._began
            if index in self._replaced:
                self._unneeded.append(self._replaced.pop(index))
            self._changed.notify_all()

    def wait(self) -> Iterator[None]:
        """Yield for each chunk, once it can be settled, until there will be no more."""
        while True:
            self._wait_for(lambda: self.finished or self._left == 0 or not self._running)
            if not self.finished:
                return
            yield

    def _wait_for(self, happened: Callable[[], object]) -> None:
        """Wait, and let Ctrl-C through now and then: it must not leave the lock taken."""
        if not self._workers and self._running:
            self._run()  # there is no thread to wait for
        done = False
        while not done:
            with uninterrupted(), self._changed:
                done = bool(self._changed.wait_for(happened, timeout=0.1))

    def fail(self, error: BaseException) -> None:
        """End early; what was finished can be settled all the same."""
        with self._changed:
            self.failure = self.failure or error
            self.stopping = True
            self._changed.notify_all()

    def tell_failure(self, *, as_warning: bool) -> None:
        """Raise what made it end early, or warn of it."""
        if self.failure is not None and as_warning:
            warn(
                f"{self._store.path}: a merge failed ({self.failure}); nothing is lost, and "
                f"opening the store begins it again"
            )
        elif self.failure is not None:
            self.failure.add_note(
                "It was a merge in the background that failed; the next commit begins it again."
            )
            raise self.failure

    def end(self) -> None:
        """Begin no more chunks. In a forked child, which has no threads of it, it does nothing."""
        if os.getpid() != self._pid:  # whose lock somebody may hold for ever
            return
        with self._changed:
            self.stopping = True
            self._changed.notify_all()

    def stop(self) -> None:
        """Wait for the chunks that are in flight, and begin no others."""
        self.end()
        for worker in self._workers:
            worker.join()

    def close(self) -> None:
        """Let go of the files that were replaced, once `stop` has returned."""
        for file in (*self._unneeded, *self._replaced.values()):
            file.close()
        self._unneeded.clear()
        self._replaced.clear()

    # In the threads

    def _run(self) -> None:
        try:
            self._merge_chunks()
        except (OSError, StoreError, MemoryError) as error:
            self.fail(error)
        except BaseException as error:
            self.fail(error)
            raise
        finally:
            self._ended()

    def _ended(self) -> None:
        with self._changed:
            self._running -= 1
            self._changed.notify_all()

    def _merge_chunks(self) -> None:
        layout = self._store.layout
        with self._planning:
            newest = self._plan()
        buffer = page_aligned(layout.chunk_bytes)
        while (index := self._next()) is not None:
            crc = self._merge_chunk(index, newest, buffer)
            with self._changed:
                self.finished.append((index, crc))
                self._changed.notify_all()

    def _plan(self) -> NewestRecords:
        if self._newest is None:
            layout = self._store.layout
            self._check_log()
            newest = NewestRecords(self.log, layout.chunk_rows, layout.num_chunks)
            todo = [index for index in newest.chunks() if index not in self._merged]
            with self._changed:
                self._newest, self._todo, self._left = newest, deque(todo), len(todo)
                self._changed.notify_all()
        return self._newest

    def _check_log(self) -> None:
        """See that the log's records are what was written, which chunks would certify.

        Raises:
            CorruptStoreError: they are not; nothing is merged then.
        """
        generation = self.log.committed.generation
        if problems := check_log(self._store, generation).problems:
            raise CorruptStoreError(
                f"{problems[0]}. Nothing is merged from it: put the file back from a backup and "
                f"call again; without one, `ooc-embed verify {self._store.path} --salvage OUT` "
                f"keeps the other rows"
            )

    def _next(self) -> int | None:
        """Wait for a chunk to merge, and let go of files meanwhile; None when the merge is over."""
        while True:
            with self._changed:
                self._changed.wait_for(self._has_work)
                if not self._unneeded:
                    return None if self.stopping or not self._todo else self._todo.popleft()
                file = self._unneeded.popleft()
            file.close()

    def _has_work(self) -> bool:
        if self.stopping or self._unneeded or not self._left or not self._workers:
            return True
        return bool(self._todo) and len(self.finished) < _UNSETTLED

    def _merge_chunk(self, index: int, newest: NewestRecords, buffer: np.ndarray) -> int:
        layout = self._store.layout
        chunk = buffer.view(layout.dtype).reshape(layout.chunk_rows, layout.width)
        if index in self._existing:
            self._store.read_chunk(index, buffer)
            found = zlib.crc32(buffer.data)
            newest.put(index, chunk)
            if found != self._known_crc32[index]:
                self._check_merged(index, found, zlib.crc32(buffer.data))
            self._replaced[index] = HeldFile(self._store.chunk_path(index))
        else:
            buffer[:] = 0
            newest.put(index, chunk)
        self._known_crc32[index] = self._store.write_chunk(index, chunk)
        self._unsure.discard(index)  # it may be merged once more, if the table cannot map it
        return self._known_crc32[index]

    def _check_merged(self, index: int, found: int, merged: int) -> None:
        """See that a chunk with another checksum than it should have has the log's records already.

        Raises:
            CorruptStoreError: somebody else has changed it; nothing is merged into it then.
        """
        if found != merged or index not in self._unsure:
            raise CorruptStoreError(
                f"{self._store.chunk_path(index)} was changed or damaged "
                f"({self._store.layout.rows_of(index)}): it has the checksum {found:#010x}, "
                f"{self._known_crc32[index]:#010x} was written. Nothing is merged into it: put "
                f"the file back from a backup and call again; without one, `ooc-embed verify "
                f"{self._store.path} --salvage OUT` keeps the other rows"
            )
