"""The two logs of a store: one takes appends, the other is sealed or empty. Knows no cache.

They change places when a log is sealed, and each keeps its folder.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .errors import CorruptStoreError
from .log import SKIPPED, LogState, RecordLog
from .store import Store


class Logs:
    """Both logs.

    Args:
        store: where they are, as its newest commit names them.

    Attributes:
        active: takes appends.
        other: sealed and waiting for its merge, or empty.
        sealed: which of the two.

    Raises:
        CorruptStoreError: a file is missing or short, or the row ids fail their checksum.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        states = store.manifest.commit.logs
        self.sealed = store.manifest.commit.sealed is not None
        self.active = self._open(states[-1])
        self.other = self._open(states[0] if self.sealed else _after(states[0]))
        for log in self.named:
            log.check_rows()

    def _open(self, state: LogState) -> RecordLog:
        return RecordLog(self._store.log_folder(state.generation), self._store.layout.log, state)

    @property
    def named(self) -> tuple[RecordLog, ...]:
        """Those that a commit names, the sealed one before the active one."""
        return (self.other, self.active) if self.sealed else (self.active,)

    def find_records(self, where: np.ndarray) -> None:
        """Enter the rows of named logs into a map, ``(N,)``; the last record of a row wins.

        Raises:
            CorruptStoreError: a row is none of the table's.
        """
        for log in self.named:
            for start, rows in log.blocks(log.committed.records):
                kept = np.flatnonzero(rows != SKIPPED)
                rows = rows[kept]
                if len(rows) and not 0 <= rows.min() <= rows.max() < len(where):
                    raise CorruptStoreError(
                        f"{log.folder / 'rows'} names rows {rows.min()} to {rows.max()}, the table "
                        f"has {len(where)}"
                    )
                where[rows] = -(kept + (start + log.base + 1))

    def states(self, *, seal: bool) -> tuple[LogState, ...]:
        """How a commit made now names them.

        Args:
            seal: close the active log, if it has records and the other one is empty.
        """
        state = self.active.state
        if self.sealed:
            return (self.other.committed, state)
        if seal and state.records:
            return (state, _after(state))
        return (state,)

    def follow(self, states: Sequence[LogState]) -> None:
        """Become what a manifest names that was just written."""
        if states[-1].generation != self.active.state.generation:  # the active log was sealed
            self.active, self.other = self.other, self.active
            self.other.state = self.other.committed = states[0]
        self.active.committed = states[-1]
        if self.sealed and len(states) == 1:
            self.other.restart(states[-1].generation + 1)
        self.sealed = len(states) == 2

    def drop_tails(self) -> None:
        """Unlink what lies behind the committed ends."""
        self.active.drop_tail()
        if not self.sealed:
            self.other.drop_tail()

    def close(self) -> None:
        self.active.close()
        self.other.close()


def _after(state: LogState) -> LogState:
    """An empty log that takes over from that one."""
    return LogState(state.generation + 1)
