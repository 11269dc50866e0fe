"""Holds Ctrl-C back while memory is being changed. Knows signals; does not know tables."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Run the body whole: SIGINT and SIGTERM handlers written in Python run after it.

    Python runs handlers between two bytecodes of the main thread, so without this a Ctrl-C could
    leave an optimizer step applied to half of its rows. The body must be memory work, not I/O.
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
    for number in handlers:
        signal.signal(number, lambda received, frame: pending.append((received, frame)))
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for received, frame in pending:
            handlers[signal.Signals(received)](received, frame)
