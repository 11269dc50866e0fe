"""Delivers a signal where Python handles one: behind calls, in loops, as functions begin."""

from __future__ import annotations

import dis
import functools
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import ooc_embed

PACKAGE = str(Path(ooc_embed.__file__).parent)
# What the package enters on its way, and where a signal may come just as well.
LIBRARY = ("contextlib.py",)
_CALLS = ("CALL", "CALL_FUNCTION_EX", "CALL_KW", "RESUME")


class Moments:
    """Counts the moments of a block, and delivers a signal at one of them.

    Args:
        number: at which, from 1; 0 is at none.
        which: the signal.

    Attributes:
        seen: how many there were.
        where: function and line of that one.
    """

    def __init__(self, number: int, which: signal.Signals) -> None:
        self.seen = 0
        self.where = ""
        self._number = number
        self._which = which

    def trace(self, frame: FrameType, event: str, _: Any) -> Any:
        name = frame.f_code.co_filename
        if not (name.startswith(PACKAGE) or name.endswith(LIBRARY)):
            return None
        frame.f_trace_opcodes = True
        frame.f_trace_lines = False
        if event == "opcode" and frame.f_lasti in _moments(frame.f_code):
            self.seen += 1
            if self.seen == self._number:
                self.where = f"{Path(name).name}:{frame.f_lineno} {frame.f_code.co_name}"
                signal.raise_signal(self._which)
        return self.trace


@functools.cache
def _moments(code: CodeType) -> frozenset[int]:
    """The offsets of instructions ahead of which the interpreter looks for signals.

    It does so as a part of the call before. Where the next instruction has another handler of
    exceptions, as behind the last call of a `with` that returns, a trace cannot raise in its place.
    """
    handlers = dis.Bytecode(code).exception_entries

    def handler(offset: int) -> int | None:
        found = [entry.target for entry in handlers if entry.start <= offset < entry.end]
        return found[0] if found else None

    found, before = set(), None
    for instruction in dis.get_instructions(code):
        called = before is not None and before.opname in _CALLS
        same = before is not None and handler(before.offset) == handler(instruction.offset)
        if (called and same) or instruction.opname.startswith("JUMP_BACKWARD"):
            found.add(instruction.offset)
        before = instruction
    return frozenset(found)


def signalled(
    number: int, which: signal.Signals, call: Callable[[], Any]
) -> tuple[Moments, BaseException | None]:
    """Make a call in which a signal comes at a moment; and the exception that this left behind."""
    moments = Moments(number, which)
    caught = None
    before = sys.gettrace()
    sys.settrace(moments.trace)
    try:
        call()
    except (KeyboardInterrupt, SystemExit) as error:
        caught = error
    finally:
        sys.settrace(before)
    return moments, caught
