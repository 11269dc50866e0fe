"""Holds Ctrl-C back while memory is being changed. Knows signals; does not know tables."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Run the body whole: SIGINT and SIGTERM handlers written in Python run after it.

    Python runs handlers between two bytecodes of the main thread, so without this a Ctrl-C could
    leave an optimizer step applied to half of its rows, or memory behind a manifest that was
    renamed already. The body must be short.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    pending: list[tuple[int, FrameType | None]] = []
    handlers = {
        number: handler
        for number in (signal.SIGINT, signal.SIGTERM)
        if callable(handler := signal.getsignal(number))
    }
    interrupt, terminate = handlers.get(signal.SIGINT), handlers.get(signal.SIGTERM)
    try:
        for number in handlers:  # of which one may raise while others are put aside
            signal.signal(number, lambda received, frame: pending.append((received, frame)))
        yield
    finally:
        try:
            # The first one may raise as soon as it is back. Between that and the second there is no
            # call, not even of a helper, behind which it could do so outside of the `try`.
            try:
                if interrupt is not None:
                    signal.signal(signal.SIGINT, interrupt)
            finally:
                if terminate is not None:
                    signal.signal(signal.SIGTERM, terminate)
        finally:
            _deliver(pending, handlers)


def _deliver(
    pending: list[tuple[int, FrameType | None]],
    handlers: dict[signal.Signals, Callable[[int, FrameType | None], object]],
) -> None:
    while pending:
        number, frame = pending.pop(0)
        try:
            handlers[signal.Signals(number)](number, frame)
        except BaseException:
            _deliver(pending, handlers)
            raise
