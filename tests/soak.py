"""Hours of training in little memory, with kills: memory stays flat, nothing is lost or left over.

    python tests/soak.py --minutes 60 --ram 2G

A process trains a table that is several times larger than the memory it may use, commits, merges,
goes back, and is killed at random moments, again and again. After each death the rows that this
process follows in RAM are compared, by torch's own SparseAdam. The first fault ends it with exit
code 1, and the store stays for a look.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import copy
import dataclasses
import os
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import crash_child
import numpy as np
import soak_child
import store_files
import torch
import workload
from numpy.typing import NDArray
from soak_watch import Watch, check_flat, first_and_last, is_merging, ooms, peak

from ooc_embed import DiskEmbedding, memory_limit, report
from ooc_embed.disk_facts import file_system

# Of a table that is on the disk and is being trained in float32, against float64 in RAM: relative
# to the value, and to the largest of its row.
CLOSE = {"weight": (1e-4, 1e-5), "exp_avg": (1e-4, 1e-6), "exp_avg_sq": (1e-4, 1e-9)}
# How a life ends, how often. Signals that can be handled close the table.
SIGNALS = {signal.SIGKILL: 7, signal.SIGTERM: 1, signal.SIGINT: 1}
# When: at any moment, within an operation, within a merge, while the store is opened.
AIMS = {"": 5, "operation": 3, "merge": 3, "opening": 1}


@dataclasses.dataclass(frozen=True)
class Settings:
    """How long, and how hard.

    A life takes `short` seconds at most, each 24th `long`, and then waits for the moment that its
    death is aimed at, at most `patience` seconds.
    """

    minutes: float = 60.0
    ram: int | None = 2 << 30
    lives: int | None = None
    tracked: int = 20_000
    verify_every: int = 10
    short: float = 30.0
    long: float = 300.0
    patience: float = 30.0


class Reference:
    """The rows that are followed, by torch in RAM, after any number of rounds."""

    def __init__(self, work: soak_child.Work, count: int) -> None:
        self.work = work
        rng = np.random.default_rng([work.seed, 1])
        often = soak_child.frequent(work, np.arange(count // 2))
        self.rows = np.unique(np.concatenate((often, rng.integers(work.rows, size=count // 2))))
        self._place = np.full(work.rows, -1)
        self._place[self.rows] = np.arange(len(self.rows))
        given = soak_child.initial(work)
        weight = np.concatenate([given[row : row + 1] for row in self.rows])
        first = workload.Shadow(torch.from_numpy(weight).double(), soak_child.LR)
        first.version += 1  # rows that are given count one
        self._shadows = {0: first}
        self.differences = dict.fromkeys(CLOSE, 0.0)

    def at(self, step: int) -> workload.Shadow:
        """What the rows are after `step` rounds."""
        known = max(number for number in self._shadows if number <= step)
        if known < step:
            shadow = copy.deepcopy(self._shadows[known])
            for index in range(known, step):
                shadow.play(self._part(soak_child.make_round(self.work, index)))
            self._shadows[step] = shadow
        return self._shadows[step]

    def forget_before(self, step: int) -> None:
        """Nobody will ask for what was sooner; that itself and the latest are enough to know."""
        self.at(step)
        self._shadows = {number: self._shadows[number] for number in {step, max(self._shadows)}}

    def _part(self, played: workload.Round) -> workload.Round:
        """A round, as far as it changes these rows."""
        ids, grads = self._among(played.ids, played.grads)
        assigned = self._among(*played.assigned) if played.assigned is not None else None
        return dataclasses.replace(played, ids=ids, grads=grads, assigned=assigned)

    def _among(self, rows: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        places = torch.from_numpy(self._place)[rows]
        kept = places >= 0
        return places[kept], values[kept].double()

    def check(self, path: Path) -> None:
        """A reader of the newest commit sees the rows as they are after its rounds."""
        with DiskEmbedding.open(path, mode="r") as emb:
            lr = emb.optimizer.param_groups[0]["lr"]
            version = emb.version[self.rows].numpy()
            found = {"weight": emb.weight[self.rows].numpy()}
            found |= {name: emb.state[name][self.rows].numpy() for name in workload.FIELDS[1:]}
            step = emb.step
        state = self._state_like(step, version, lr)
        np.testing.assert_array_equal(version, state.version, f"versions at step {step}")
        assert lr == state.lr, f"lr {lr} at step {step}, {state.lr} was set"
        for name, (rtol, atol) in CLOSE.items():
            want = state.fields[name]
            # A column near zero of a row of large gradients has their rounding.
            scale = np.maximum(np.abs(want).max(axis=1, keepdims=True), 1.0)
            apart = np.abs(found[name] - want) / (atol * scale + rtol * np.abs(want))
            self.differences[name] = max(self.differences[name], float(apart.max()))
            row, column = np.unravel_index(int(apart.argmax()), apart.shape)
            assert apart.max() <= 1, (
                f"{name} of row {self.rows[row]} at step {step}, column {column}: "
                f"{found[name][row, column]}, {want[row, column]} was expected"
            )

    def _state_like(self, step: int, version: NDArray[Any], lr: float) -> workload.State:
        """After `step` rounds, and perhaps the begin of one more: an interrupt may cut it off
        behind its rate, or behind the rows that it assigns."""
        shadow = self.at(step)
        begun = self._part(soak_child.make_round(self.work, step))
        state = shadow.state()
        if begun.lr is not None and lr != state.lr:
            state = dataclasses.replace(state, lr=begun.lr)
        if begun.assigned is not None and not np.array_equal(version, state.version):
            rows, values = begun.assigned
            state.fields["weight"][rows] = values
            state.version[rows] += 1
        return state


class Death:
    """When and how a life ends."""

    def __init__(self, rng: random.Random, path: Path, seconds: float, patience: float) -> None:
        self._rng = rng
        self._path = path
        self.aim, self.signal = (rng.choices([*d], [*d.values()])[0] for d in (AIMS, SIGNALS))
        self._seconds = seconds
        self._patience = patience
        self._due = float("inf")
        self.came = False

    def come(self, pid: int, heard: str) -> None:
        """Send the signal, if this is the moment; it has so many seconds to follow."""
        if heard == "opened":
            self._due = min(self._due, time.monotonic() + self._seconds)
        elif heard == "opening" and self.aim == "opening" and (self._path / "zarr.json").exists():
            self._due = time.monotonic() + self._rng.uniform(0, 2)
        late = time.monotonic() - self._due
        if not self.came and late > 0 and (late > self._patience or self._is_moment(heard)):
            os.kill(pid, self.signal)
            self.came = True
        assert late < 140, f"{self.signal.name} has not ended the process in two minutes"

    def _is_moment(self, heard: str) -> bool:
        if self.aim == "operation" and heard == "begin":
            time.sleep(self._rng.random() ** 2)  # into it; most take less than a second
        return {"operation": heard == "begin", "merge": is_merging(self._path)}.get(self.aim, True)


class Soak:
    """All lives of one store, and what is known of it."""

    def __init__(
        self, settings: Settings, work: soak_child.Work, nursery: crash_child.Nursery
    ) -> None:
        self.settings = settings
        self.work = work
        self.path = Path(work.path)
        self.rng = random.Random(work.seed)
        self.nursery = nursery
        self.reference = Reference(work, settings.tracked)
        self.counts: collections.Counter[str] = collections.Counter()
        self.watches: list[Watch] = []
        self.begin = time.monotonic()
        # The newest commit that is known to be durable, its step; and what may be one by now.
        self.newest, self.step = 0, 0
        self.begun: tuple[str, int, int] | None = None
        self.highest = 0
        self._spoken = 0.0

    @property
    def minutes(self) -> float:
        return (time.monotonic() - self.begin) / 60

    def run(self) -> None:
        while self.minutes < self.settings.minutes and self.counts["lives"] != self.settings.lives:
            self.live()
            self.check()
        assert report.verify(self.path) == []
        self.check_flat()

    # A life

    def live(self) -> None:
        self.counts["lives"] += 1
        is_long = self.counts["lives"] % 24 == 12
        seconds = self.settings.long if is_long else self.rng.uniform(0, self.settings.short)
        seconds = min(seconds, 60 * (self.settings.minutes - self.minutes))
        death = Death(self.rng, self.path, seconds, self.settings.patience)
        pid = self.nursery.start("soak", life=self.counts["lives"], **dataclasses.asdict(self.work))
        watch, merges, full, heard = None, 0, False, time.monotonic()
        while True:
            event = self.nursery.next_event(0.02) or [""]
            if event[0]:
                heard = time.monotonic()
            assert time.monotonic() < heard + 600, "nothing has happened for ten minutes"
            if event[0] == "died":
                break
            if event[0] == "opened" and not death.came:
                watch = Watch(self.path, self.work, self.settings.ram, pid)
            elif event[0] == "step":
                self.counts["steps"] += 1
                # Counted since the table was opened, which it may be again.
                full = event[2]
                self.counts["merges"] += max(event[3] - merges, 0)
                merges = event[3]
            elif event[0] == "begin":
                full = False  # some empty the cache
            self.hear(event)
            if watch is not None:
                watch.look(full)
            death.come(pid, event[0])
            self.speak()
        self.end(event[1], death)
        if watch is not None:
            watch.check_flat()
            self.watches.append(watch)

    def hear(self, event: list[Any]) -> None:
        """Follow what the process says of its commits."""
        assert event[0] != "fault", f"the process failed: {event[1]}"
        if event[0] == "begin":
            self.begun = (event[1], event[2], event[3])
        elif event[0] == "opened":
            assert (event[1], event[2]) == (self.newest, self.step), "opened at another commit"
        elif event[0] == "done":
            _, name, self.step, self.newest = event
            self.counts[name] += 1
            self.counts["commits"] += self.newest > self.highest
            self.highest = max(self.highest, self.newest)
            self.begun = None

    def end(self, status: int, death: Death) -> None:
        """It died: by the signal it was sent, after closing its table if it was that kind."""
        assert death.came, f"the process ended by itself, with {status}; memory, if that is -9"
        wanted = {signal.SIGKILL: -9, signal.SIGTERM: 143, signal.SIGINT: 130}[death.signal]
        assert status == wanted, f"it ended with {status}, {wanted} was expected"
        self.counts[death.signal.name] += 1
        if death.signal == signal.SIGKILL:
            logs = store_files.newest_commit(self.path)["logs"]
            self.counts["killed with a sealed log"] += len(logs) == 2
            self.counts["killed within an operation"] += self.begun is not None
            self.counts["killed within a merge"] += is_merging(self.path)

    # What it left

    def check(self) -> None:
        """The newest commit is the last one that was told of, or the one that was being made."""
        commits = store_files.manifest(self.path)["commits"]
        number, step = commits[-1]["commit"], commits[-1]["step"]
        known = f"commit {self.newest} at step {self.step} was, {self.begun} was going on"
        if (number, step) != (self.newest, self.step):
            assert self.begun is not None, f"commit {number}, step {step} is there; {known}"
            name, at, target = self.begun
            ok = number == target if name == "rollback" else number > self.highest
            assert ok and step == at, f"commit {number}, step {step} is there; {known}"
            self.counts["commits"] += number > self.highest
        self.newest, self.step, self.begun = number, step, None
        self.highest = max(self.highest, number)
        self.reference.forget_before(min(commit["step"] for commit in commits))
        self.reference.check(self.path)
        self.counts["checks"] += 1
        if self.counts["lives"] % self.settings.verify_every == 0:
            problems = report.verify(self.path)
            assert problems == [], problems
            self.counts["verified"] += 1

    def check_flat(self) -> None:
        """The lives of the last quarter take no more memory than those of the first."""
        if len(self.quiet) >= 4:
            check_flat(self.quiet)

    @property
    def quiet(self) -> list[float]:
        """What each life took while its cache was full and no log was merged."""
        return [statistics.median(watch.quiet) for watch in self.watches if watch.quiet]

    # What it tells

    def speak(self) -> None:
        if time.monotonic() < self._spoken + 30:
            return
        self._spoken = time.monotonic()
        counts = " ".join(f"{name} {count:,}" for name, count in sorted(self.counts.items()))
        print(f"{self.minutes:.1f} min: step {self.step:,} {counts}", file=sys.stderr, flush=True)

    def summary(self) -> Iterator[tuple[str, str]]:
        yield "minutes", f"{self.minutes:.1f}"
        for name, count in sorted(self.counts.items()):
            yield name, f"{count:,}"
        yield "last step", f"{self.step:,}"
        yield "rows followed", f"{len(self.reference.rows):,} of {self.work.rows:,}"
        apart = (f"{name} {value:.2f}" for name, value in self.reference.differences.items())
        yield "differences, of those allowed", ", ".join(apart)
        yield "anon, cache full, no merge", _describe(self.quiet)
        for name in ("anon", "descriptors", "maps", "log", "logs", "disk"):
            most = [max(s[name] for s in watch.samples) for watch in self.watches if watch.samples]
            yield f"{name} at most", _describe(most)


def _describe(lives: list[float]) -> str:
    if not lives:
        return "no life was long enough"
    first, last = first_and_last(lives)
    return f"first lives {first:,.0f}, last {last:,.0f}, most {max(lives):,.0f}"


@contextlib.contextmanager
def limited(ram: int | None) -> Iterator[Path | None]:
    """A cgroup of so much memory; where there can be none, only the samples tell.

    At its end it says how much was taken, and nothing was killed for memory.
    """
    if ram is None:
        yield None
        return
    with contextlib.ExitStack() as stack:
        try:
            group = stack.enter_context(memory_limit.limited_group(ram))
        except OSError as error:
            print(f"no cgroup can be made ({error}): page cache is not limited")
            yield None
            return
        try:
            yield group
        finally:
            tell("peak of memory and page cache", f"{peak(group):,}")
            tell("killed for memory", f"{ooms(group):,}")
        assert ooms(group) == 0


def tell(name: str, value: str) -> None:
    print(f"{name:<32}  {value}", flush=True)


def soak(settings: Settings, work: soak_child.Work) -> Soak:
    """Run one; AssertionError at the first fault. What was counted until then is printed."""
    with limited(settings.ram) as group, contextlib.closing(crash_child.Nursery(group)) as nursery:
        run = Soak(settings, work, nursery)
        try:
            run.run()
        finally:
            for name, value in run.summary():
                tell(name, value)
    return run


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--ram", type=memory_limit.parse_bytes, default=2 << 30)
    parser.add_argument("--rows", type=int, default=4_000_000)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--batch", type=int, default=8192)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=Path("/var/tmp"), help="on a real disk")
    args = parser.parse_args(argv)
    if file_system(args.folder) == "tmpfs":
        parser.error(f"{args.folder} is memory itself, not a disk: choose another --folder")
    torch.set_num_threads(1)
    os.environ["TQDM_DISABLE"] = "1"
    folder = Path(tempfile.mkdtemp(prefix="soak-", dir=args.folder))
    work = soak_child.Work(
        str(folder / "table.zarr"),
        args.rows,
        args.dim,
        args.batch,
        cache_bytes=args.ram // 4,
        seed=args.seed,
    )
    sound = True
    with memory_limit.terminated_as_exit():
        try:
            soak(Settings(args.minutes, args.ram), work)
        except Exception as error:
            sound = False
            traceback.print_exc()
            print(f"FAULT, the store stays in {folder}: {error}")
        finally:
            if sound:
                shutil.rmtree(folder)
    return 0 if sound else 1


if __name__ == "__main__":
    sys.exit(main())
