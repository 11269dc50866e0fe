"""Runs calls in their order while the next are being prepared. Knows nothing of what is called."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from .interrupts import uninterrupted
from .memory import check_thread


class Behind:
    """Runs calls one after the other, in threads, while the caller prepares the next ones.

    Leaving the block waits for all of them, however it is left; after an error the later ones are
    not begun. Calls must be short: Ctrl-C waits for those that were handed over.

    Args:
        depth: calls that may have been handed over and not be over yet.

    Raises:
        Exception: what a call raised, at a later one or where the block ends.
    """

    def __init__(self, depth: int) -> None:
        self._depth = depth
        self._threads: deque[threading.Thread] = deque()
        self._error: BaseException | None = None

    def __enter__(self) -> Behind:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        with uninterrupted():
            self._wait(0)
        if self._error is not None and kind is None:
            raise self._error

    def run(self, call: Callable[[], None]) -> None:
        """Hand a call over, once fewer than ``depth`` others are on their way."""
        with uninterrupted():
            self._wait(self._depth - 1)
            if self._error is not None:
                raise self._error
            before = self._threads[-1] if self._threads else None
            thread = threading.Thread(target=self._run, args=(call, before))
            try:
                check_thread()
                thread.start()
            except RuntimeError:  # none may begin, as while the interpreter ends
                self._run(call, before)
            else:
                self._threads.append(thread)

    def _run(self, call: Callable[[], None], before: threading.Thread | None) -> None:
        if before is not None:
            before.join()
        if self._error is not None:
            return
        try:
            call()
        except OSError as error:
            self._error = error
        except BaseException as error:
            self._error = error
            raise

    def _wait(self, left: int) -> None:
        while len(self._threads) > left:
            self._threads[0].join()
            self._threads.popleft()
