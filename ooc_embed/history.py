"""The commits that a store can go back to, and how they follow one another. Touches no file.

Every commit is the table's chunks and a prefix of the logs. So the sealed log may be merged into
the chunks only once all of them contain it whole.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any, Self

from . import parsing
from .errors import StoreError
from .log import LogState


@dataclass(frozen=True)
class Commit:
    """One commit of the store: what a crash after it cannot lose.

    Args:
        number: counts commits from 0, the creation; none is given twice.
        step: optimizer steps taken.
        rows_written: rows whose version is above 0.
        param_groups: hyper-parameters in force.
        num_embeddings: rows of the table.
        logs: the logs' prefixes, the sealed one (if there is one) before the active one.
        created: seconds since the epoch.
        library: version of ooc_embed that wrote it.
    """

    number: int
    step: int
    rows_written: int
    param_groups: list[dict[str, Any]]
    num_embeddings: int
    logs: tuple[LogState, ...]
    created: float
    library: str

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
            created=parsing.number(value["created"]),
            library=parsing.text(value["library"]),
        )


@dataclass(frozen=True)
class History:
    """Commits that can be returned to.

    Args:
        commits: the oldest first; the last one is the state of the store.
        keep: how many of the newest are kept.
        checkpoint: the number of the commit that ``state_dict()`` last handed out, which is kept
            beyond the others, as long as there is one.
        undone: first and last numbers of the commits that each rollback took back.
    """

    commits: tuple[Commit, ...]
    keep: int = 1
    checkpoint: int | None = None
    undone: tuple[tuple[int, int], ...] = ()

    @property
    def newest(self) -> Commit:
        return self.commits[-1]

    @property
    def next_number(self) -> int:
        return 1 + max(self.newest.number, *(last for _, last in self.undone), 0)

    @property
    def behind(self) -> tuple[Commit, ...]:
        """Commits that do not contain the sealed log whole, if there is one."""
        sealed = self.newest.sealed
        if sealed is None:
            return ()
        return tuple(commit for commit in self.commits if commit.logs[0] != sealed)

    def find(self, number: int) -> Commit:
        """The commit of this number.

        Raises:
            StoreError: it is not kept.
        """
        for commit in self.commits:
            if commit.number == number:
                return commit
        kept = ", ".join(f"{commit.number} (step {commit.step})" for commit in self.commits)
        raise StoreError(
            f"commit {number} is not kept; those that are: {kept}. keep_commits= of the "
            f"constructor keeps more"
        )

    def __contains__(self, number: int | None) -> bool:
        return any(commit.number == number for commit in self.commits)

    def states_of(self, generation: int) -> list[LogState]:
        """What the commits name of a log, the shortest prefix first."""
        states = {log for commit in self.commits for log in commit.logs}
        return sorted((s for s in states if s.generation == generation), key=lambda s: s.records)

    def until(self, number: int) -> Self:
        """What it was at the commit of this number.

        Raises:
            StoreError: it is not kept.
        """
        return replace(self, commits=self.commits[: self.commits.index(self.find(number)) + 1])

    def was_undone(self, number: int) -> bool:
        """Whether a rollback took this commit back."""
        return any(first <= number <= last for first, last in self.undone)

    # What it becomes

    def added(self, commit: Commit) -> Self:
        """With one more commit; those that need not be kept any longer go."""
        return replace(self, commits=(*self.commits, commit))._pruned()

    def handed_out(self) -> Self:
        """With the newest commit in a checkpoint."""
        return replace(self, checkpoint=self.newest.number)._pruned()

    def keeping(self, count: int) -> Self:
        """With another number of commits to keep."""
        return replace(self, keep=count)._pruned()

    def _pruned(self) -> Self:
        *older, newest = self.commits
        first = max(len(self.commits) - self.keep, 0)
        kept = [
            commit
            for place, commit in enumerate(older)
            if place >= first or commit.number == self.checkpoint
        ]
        return replace(self, commits=(*kept, newest))

    def restated(self, logs: tuple[LogState, ...]) -> Self:
        """With the newest commit in other logs: the same state, no commit of its own."""
        return replace(self, commits=(*self.commits[:-1], replace(self.newest, logs=logs)))

    def merged(self) -> Self:
        """With the sealed log in the chunks. None is `behind` it then."""
        active = LogState(self.newest.logs[1].generation)
        commits = (replace(c, logs=c.logs[1:] or (active,)) for c in self.commits)
        return replace(self, commits=tuple(commits))

    def given_up(self) -> Self:
        """Without the commits that are `behind` the sealed log."""
        behind = self.behind
        return replace(self, commits=tuple(c for c in self.commits if c not in behind))._forgetful()

    def back_to(self, number: int) -> Self:
        """With an earlier commit as the newest, in logs of other generations.

        Raises:
            StoreError: it is not kept.
        """
        first, last = number + 1, self.next_number - 1
        undone = (*(pair for pair in self.undone if pair[0] < first), (first, last))
        *earlier, target = self.until(number).commits
        if len(self.newest.logs) > len(target.logs) and target not in self.behind:
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
        return replace(self, commits=tuple(commits), undone=undone)._forgetful()

    def _forgetful(self) -> Self:
        """Without the word for a checkpoint whose commit is gone."""
        return self if self.checkpoint in self else replace(self, checkpoint=None)

    # JSON

    def to_json(self) -> dict[str, Any]:
        return {
            "keep_commits": self.keep,
            "checkpoint": self.checkpoint,
            "undone": [list(pair) for pair in self.undone],
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
            checkpoint=parsing.optional(parsing.integer, value.get("checkpoint")),
            undone=tuple(
                (parsing.integer(first), parsing.integer(last))
                for first, last in value.get("undone", [])
            ),
        )
        history.check()
        return history

    def check(self) -> None:
        """Raise a ValueError where commits contradict each other."""
        numbers = [commit.number for commit in self.commits]
        if not numbers or numbers != sorted(set(numbers)):
            raise ValueError(f"commits {numbers} are not in order")
        if self.checkpoint is not None and self.checkpoint not in numbers:
            raise ValueError(f"checkpoint {self.checkpoint} is none of the commits {numbers}")
        for first, last in self.undone:
            if first > last or any(first <= number <= last for number in numbers):
                raise ValueError(f"commits {first} to {last} cannot be undone, {numbers} are kept")
        self._check_logs()

    def _check_logs(self) -> None:
        newest = self.newest.logs
        generations = [log.generation for log in newest]
        if generations not in ([generations[0]], [generations[0], generations[0] + 1]):
            raise ValueError(f"log generations {generations} are not one or two in a row")
        for commit in self.commits:
            _check_logs(commit, newest)


def _check_logs(commit: Commit, newest: tuple[LogState, ...]) -> None:
    """Raise a ValueError where a commit is no prefix of the newest one's logs."""
    if not 1 <= len(commit.logs) <= len(newest):
        raise ValueError(f"commit {commit.number} is in {len(commit.logs)} logs")
    for own, whole in zip(commit.logs, newest, strict=False):
        if own.generation != whole.generation or own.records > whole.records:
            raise ValueError(f"commit {commit.number} is in other logs than the newest")
    if commit.sealed not in (None, newest[0]):
        raise ValueError(f"commit {commit.number} lacks a part of the log before its last")
