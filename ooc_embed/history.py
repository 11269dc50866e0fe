"""The commits that a store can go back to, and how they follow one another. Touches no file.

Every commit is the table's chunks and a prefix of the logs. So the sealed log may be merged into
the chunks only once all of them contain it whole.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self

from . import parsing
from ._version import __version__
from .errors import StoreError
from .log import LogState

# A former one too: the newest may have been handed out for a file that was never finished.
_CHECKPOINTS = 2
_MOST_BRANCHES = 256
_YEAR_10000 = 253402300800.0


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What a commit says beside where its records are.

    Args:
        step: optimizer steps taken.
        rows_written: rows whose version is above 0.
        param_groups: hyper-parameters in force.
        num_embeddings: rows of the table.
    """

    step: int
    rows_written: int
    param_groups: list[dict[str, Any]]
    num_embeddings: int


@dataclass(frozen=True, kw_only=True)
class Commit(Facts):
    """One commit of the store: what a crash after it cannot lose.

    Args:
        number: counts commits from 0, the creation; none is given twice.
        logs: the logs' prefixes, the sealed one (if there is one) before the active one.
        created: seconds since the epoch.
        library: version of ooc_embed that wrote it.
    """

    number: int
    logs: tuple[LogState, ...]
    created: float
    library: str

    @classmethod
    def now(cls, number: int, facts: Facts, logs: tuple[LogState, ...]) -> Self:
        """One that is made now, by this version."""
        return cls(
            **vars(facts), number=number, logs=logs, created=time.time(), library=__version__
        )

    @property
    def sealed(self) -> LogState | None:
        """The log that is closed and waits for its merge, if there is one."""
        return self.logs[0] if len(self.logs) == 2 else None

    def to_json(self) -> dict[str, Any]:
        return {
            "commit": self.number,
            "step": self.step,
            "rows_written": self.rows_written,
            "param_groups": self.param_groups,
            "num_embeddings": self.num_embeddings,
            "logs": [asdict(log) for log in self.logs],
            "created": self.created,
            "library": self.library,
        }

    @classmethod
    def from_json(cls, value: Any) -> Self:
        """What `to_json` wrote.

        Raises:
            KeyError, TypeError, ValueError: something else.
        """
        (group,) = value["param_groups"]
        return cls(
            number=parsing.integer(value["commit"]),
            step=parsing.integer(value["step"]),
            rows_written=parsing.integer(value["rows_written"]),
            param_groups=[dict(group)],
            num_embeddings=parsing.integer(value["num_embeddings"], 1),
            logs=tuple(
                LogState(**{name: parsing.integer(number) for name, number in log.items()})
                for log in value["logs"]
            ),
            created=parsing.number(value["created"], 0.0, _YEAR_10000),
            library=parsing.text(value["library"]),
        )


@dataclass(frozen=True)
class History:
    """Commits that can be returned to, and which others came before the newest.

    Args:
        commits: the oldest first; the last one is the state of the store.
        keep: how many of the newest are kept.
        checkpoints: the numbers of the commits that ``state_dict()`` last handed out, which are
            kept beyond the others, as long as they are there.
        branches: from which number on the commits have which random word, the last ones at the
            end: each opening to write, rollback and growth begins another. Copies of a store, which
            have the same numbers, and commits that a rollback took back are told apart by it.
        last_number: the largest number that was given before the last rollback.
    """

    commits: tuple[Commit, ...]
    keep: int = 1
    checkpoints: tuple[int, ...] = ()
    branches: tuple[tuple[int, str], ...] = ()
    last_number: int = 0

    @property
    def newest(self) -> Commit:
        return self.commits[-1]

    @property
    def next_number(self) -> int:
        return 1 + max(self.newest.number, self.last_number)

    @property
    def unmerged(self) -> tuple[Commit, ...]:
        """Commits that do not contain the sealed log whole, if there is one, which they keep from
        being merged."""
        sealed = self.newest.sealed
        if sealed is None:
            return ()
        return tuple(commit for commit in self.commits if commit.logs[0] != sealed)

    def is_former(self, commit: Commit) -> bool:
        """Whether it is kept for the checkpoint before the newest one alone."""
        return commit.number in self.checkpoints[:-1] and commit not in self.commits[-self.keep :]

    @property
    def only_former_unmerged(self) -> bool:
        """Whether the former checkpoint's commit alone keeps the sealed log from being merged."""
        return bool(self.unmerged) and all(map(self.is_former, self.unmerged))

    def find(self, number: int, path: Path) -> Commit:
        """The commit of this number.

        Args:
            number: which.
            path: of the store, for the error.

        Raises:
            StoreError: it is not kept.
        """
        for commit in self.commits:
            if commit.number == number:
                return commit
        kept = ", ".join(f"{commit.number} (step {commit.step})" for commit in self.commits)
        raise StoreError(
            f"commit {number} of {path} is not kept; those that are: {kept}. emb.keep_commits = k "
            f"keeps the newest k from then on, emb.snapshot(path) keeps one for good"
        )

    def __contains__(self, number: int | None) -> bool:
        return any(commit.number == number for commit in self.commits)

    def branch_of(self, number: int) -> str | None:
        """The word of whoever made this commit; None if it is not known, or there is none yet."""
        if number > self.newest.number:
            return None
        words = [word for first, word in self.branches if first <= number]
        return words[-1] if words else None

    def states_of(self, generation: int) -> list[LogState]:
        """What the commits name of a log, the shortest prefix first."""
        states = {log for commit in self.commits for log in commit.logs}
        return sorted((s for s in states if s.generation == generation), key=lambda s: s.records)

    # What it becomes

    def until(self, commit: Commit) -> Self:
        """What it was at one of its commits."""
        return replace(self, commits=self.commits[: self.commits.index(commit) + 1])._pruned()

    def added(self, facts: Facts, logs: tuple[LogState, ...], branch: str) -> Self:
        """With one more commit; those that need not be kept any longer go.

        Args:
            facts: what it says.
            logs: where its records are.
            branch: the word of whoever makes it.
        """
        commit = Commit.now(self.next_number, facts, logs)
        branches = self.branches
        if not branches or branches[-1][1] != branch:
            branches = (*branches, (self.newest.number + 1, branch))
        return replace(self, commits=(*self.commits, commit), branches=branches)._pruned()

    def handed_out(self) -> Self:
        """With the newest commit in a checkpoint."""
        others = [number for number in self.checkpoints if number != self.newest.number]
        return replace(self, checkpoints=(*others, self.newest.number))._pruned()

    def keeping(self, count: int) -> Self:
        """With another number of commits to keep."""
        return replace(self, keep=count)._pruned()

    def _pruned(self) -> Self:
        """Without the commits that need not be kept, and without words for those that are gone."""
        checkpoints = [number for number in self.checkpoints if number in self][-_CHECKPOINTS:]
        first = max(len(self.commits) - self.keep, 0)
        commits = [
            commit
            for place, commit in enumerate(self.commits)
            if place >= first or commit.number in checkpoints
        ]
        kept = replace(self, commits=tuple(commits), checkpoints=tuple(checkpoints))
        return replace(kept, branches=kept._pruned_branches())

    def _pruned_branches(self) -> tuple[tuple[int, str], ...]:
        """Those of commits that are kept, and the last of others; "" in the place of the rest."""
        branches = [branch for branch in self.branches if branch[0] <= self.newest.number]
        needed = {self.branch_of(commit.number) for commit in self.commits}
        older = [
            (first, word if word in needed else "") for first, word in branches[:-_MOST_BRANCHES]
        ]
        apart = [
            branch
            for place, branch in enumerate(older)
            if branch[1] or not place or older[place - 1][1]
        ]
        return (*apart, *branches[-_MOST_BRANCHES:])

    def restated(self, logs: tuple[LogState, ...]) -> Self:
        """With the newest commit in other logs: the same state, no commit of its own."""
        return replace(self, commits=(*self.commits[:-1], replace(self.newest, logs=logs)))

    def merged(self) -> Self:
        """With the sealed log in the chunks. None is `unmerged` then."""
        active = LogState(self.newest.logs[1].generation)
        commits = (replace(c, logs=c.logs[1:] or (active,)) for c in self.commits)
        return replace(self, commits=tuple(commits))

    def given_up(self) -> Self:
        """Without the commits that are `unmerged`."""
        gone = self.unmerged
        return replace(self, commits=tuple(c for c in self.commits if c not in gone))._pruned()

    def rolled_back(self, target: Commit) -> Self:
        """With one of its earlier commits as the newest, in logs of other generations."""
        earlier = self.until(target).commits[:-1]
        if len(self.newest.logs) > len(target.logs) and target not in self.unmerged:
            # A merge of the sealed log may have begun, and somebody must end it.
            logs = (*target.logs, LogState(self.newest.logs[1].generation))
            target = replace(target, logs=logs)
        ends = {log.generation: log.records for log in target.logs}
        commits = (
            replace(
                commit,
                logs=tuple(
                    replace(log, generation=log.generation + 2, inherited=ends[log.generation])
                    for log in commit.logs
                ),
            )
            for commit in (*earlier, target)
        )
        last_number = self.next_number - 1
        return replace(self, commits=tuple(commits), last_number=last_number)._pruned()

    # JSON

    def to_json(self) -> dict[str, Any]:
        return {
            "keep_commits": self.keep,
            "checkpoints": list(self.checkpoints),
            "branches": [list(branch) for branch in self.branches],
            "last_number": self.last_number,
            "commits": [commit.to_json() for commit in self.commits],
        }

    @classmethod
    def from_json(cls, value: Any) -> Self:
        """What `to_json` wrote; older stores have only commits.

        Raises:
            KeyError, TypeError, ValueError: something else, or commits that contradict each other.
        """
        history = cls(
            commits=tuple(Commit.from_json(commit) for commit in value["commits"]),
            keep=parsing.integer(value.get("keep_commits", 1), 1),
            checkpoints=tuple(map(parsing.integer, value.get("checkpoints", []))),
            branches=tuple(
                (parsing.integer(first), parsing.text(word))
                for first, word in value.get("branches", [])
            ),
            last_number=parsing.integer(value.get("last_number", 0)),
        )
        history.check()
        return history

    def check(self) -> None:
        """Raise a ValueError where commits contradict each other."""
        numbers = [commit.number for commit in self.commits]
        if not numbers or numbers != sorted(set(numbers)):
            raise ValueError(f"commits {numbers} are not in order")
        rows = [commit.num_embeddings for commit in self.commits]
        if rows != sorted(rows):
            raise ValueError(f"commits of {rows} rows: a table never shrinks")
        if not set(self.checkpoints) <= set(numbers):
            raise ValueError(f"checkpoints {self.checkpoints} are not all of {numbers}")
        firsts = [first for first, _ in self.branches]
        if firsts != sorted(set(firsts)) or any(first > numbers[-1] for first in firsts):
            raise ValueError(f"branches at {firsts} are not in order, or after {numbers[-1]}")
        self._check_logs()

    def _check_logs(self) -> None:
        newest = self.newest.logs
        generations = [log.generation for log in newest]
        if generations not in ([generations[0]], [generations[0], generations[0] + 1]):
            raise ValueError(f"log generations {generations} are not one or two in a row")
        for commit, later in zip(self.commits, (*self.commits[1:], self.newest), strict=True):
            _check_logs(commit, later.logs)


def _check_logs(commit: Commit, later: tuple[LogState, ...]) -> None:
    """Raise a ValueError where a commit is no prefix of a later one's logs."""
    if not 1 <= len(commit.logs) <= len(later):
        raise ValueError(f"commit {commit.number} is in {len(commit.logs)} logs")
    for own, whole in zip(commit.logs, later, strict=False):
        if own.generation != whole.generation or own.records > whole.records:
            raise ValueError(f"commit {commit.number} is in other logs than a later one")
    if commit.sealed not in (None, later[0]):
        raise ValueError(f"commit {commit.number} lacks a part of the log before its last")
