"""Processes that train a table and die, forked from one that has imported torch; knows no format.

`Nursery` is the test's side; run as a script, this file is the other side. Over its stdin come
lines of JSON, one child each; over its stdout go the child's pid, what the child reports, and how
it ended.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib
import itertools
import json
import os
import random
import select
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ooc_embed import memory_limit

HERE = Path(__file__).resolve().parent


class Nursery:
    """Starts children one at a time, lets them train and kills them at a random moment.

    With `group`, the folder of a cgroup, they all run in it.
    """

    def __init__(self, group: Path | None = None) -> None:
        environment = dict(os.environ)
        paths = (str(HERE.parent), str(HERE), environment.get("PYTHONPATH", ""))
        environment["PYTHONPATH"] = os.pathsep.join(paths)
        environment["OMP_NUM_THREADS"] = "1"
        command = [sys.executable, "-W", "error", __file__]
        self._server = subprocess.Popen(
            command if group is None else memory_limit.inside(group, command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            bufsize=0,
        )
        self._buffer = b""
        self._child = 0

    def close(self) -> None:
        """End it, and a child that is left."""
        assert self._server.stdin is not None and self._server.stdout is not None
        if self._child:
            with contextlib.suppress(ProcessLookupError):  # it said why, and died
                os.kill(self._child, signal.SIGKILL)
        self._server.stdin.close()
        self._server.wait()
        self._server.stdout.close()

    def start(self, task: str, **arguments: Any) -> int:
        """The pid of a new child that runs one of TASKS."""
        if self._child:
            # A test that failed left it; whatever it still says is not for the next one.
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._child, signal.SIGKILL)
            self.rest()
        assert self._server.stdin is not None
        self._server.stdin.write(json.dumps([task, arguments]).encode() + b"\n")
        line = self._read_line(None)
        assert line is not None
        assert line[0] == "born", line
        self._child = int(line[1])
        return self._child

    def next_event(self, timeout: float | None = None) -> list[Any] | None:
        """What the child says next; None when it says nothing for that long."""
        return self._read_line(timeout)

    def rest(self) -> list[list[Any]]:
        """All that the child still says; the last is ["died", status], negative for a signal."""
        events = []
        while not events or events[-1][0] != "died":
            line = self._read_line(None)
            assert line is not None
            events.append(line)
        return events

    def run(self, task: str, **arguments: Any) -> list[list[Any]]:
        self.start(task, **arguments)
        return self.rest()

    def run_and_kill(
        self,
        task: str,
        rng: random.Random,
        events: int,
        delay: float,
        after: str = "",
        **arguments: Any,
    ) -> list[list[Any]]:
        """Kill the child some time below `delay` seconds after one of its first `events` reports.

        With `after`, only reports of that name count: the kill falls into what they announce.
        """
        pid = self.start(task, **arguments)
        heard: list[list[Any]] = []
        left = rng.randrange(events) + 1
        while left:
            event = self._read_line(None)
            assert event is not None
            heard.append(event)
            if event[0] == "died":
                return heard
            left -= not after or event[0] == after
        # Waiting for the child's next words is waiting without sleeping; whatever it says is kept.
        event = self._read_line(rng.random() * delay)
        if event is not None:
            heard.append(event)
            if event[0] == "died":
                return heard
        os.kill(pid, signal.SIGKILL)
        return heard + self.rest()

    def _read_line(self, timeout: float | None) -> list[Any] | None:
        assert self._server.stdout is not None
        while b"\n" not in self._buffer:
            if not select.select([self._server.stdout], [], [], timeout)[0]:
                return None
            data = os.read(self._server.stdout.fileno(), 65536)
            assert data, "the process that forks the children ended"
            self._buffer += data
        line, self._buffer = self._buffer.split(b"\n", 1)
        decoded: list[Any] = json.loads(line)
        if decoded[0] == "died":
            self._child = 0
        return decoded


@functools.cache
def nursery() -> Nursery:
    """The one of this test run: it takes seconds to import torch."""
    children = Nursery()
    atexit.register(children.close)
    return children


def report(*words: Any) -> None:
    # One write below PIPE_BUF: lines of the child and of its parent never mix.
    os.write(1, json.dumps(words).encode() + b"\n")


def create(path: str, cache_bytes: int, **options: Any) -> Any:
    """The table of tests/workload.py, with seeded initial rows."""
    import torch
    import workload

    import ooc_embed

    return ooc_embed.DiskEmbedding(
        workload.ROWS,
        workload.DIM,
        path=path,
        optimizer=ooc_embed.SparseAdam(lr=workload.LR),
        seed=7,
        cache_bytes=cache_bytes,
        dtype=torch.float64,
        chunk_rows=workload.CHUNK_ROWS,
        **options,
    )


def _obtain(path: str, cache_bytes: int) -> Any:
    import ooc_embed

    if not (Path(path) / "zarr.json").exists():
        return create(path, cache_bytes)
    return ooc_embed.DiskEmbedding.open(path, cache_bytes=cache_bytes)


def train_until_killed(
    path: str,
    seed: int,
    rounds: int,
    cache_bytes: int,
    flushes: bool,
    dies_in_merge: int | None = None,
) -> None:
    """Go on from the last commit; tell of each step and each commit before and after it.

    With `dies_in_merge`, it is killed at that call of the merges' threads which changes a file.
    """
    with contextlib.ExitStack() as stack:
        if dies_in_merge is not None:
            stack.enter_context(_dying_in_merge(Path(path), dies_in_merge))
        _train(path, seed, rounds, cache_bytes, flushes)
    os._exit(0)


def _dying_in_merge(path: Path, number: int) -> contextlib.AbstractContextManager[None]:
    import system_calls

    from ooc_embed.merging import Worker

    calls = itertools.count()

    def die(*_: Any) -> None:
        if isinstance(threading.current_thread(), Worker) and next(calls) == number:
            os.kill(os.getpid(), signal.SIGKILL)

    return system_calls.watched(path, die)


def _train(path: str, seed: int, rounds: int, cache_bytes: int, flushes: bool) -> None:
    import workload

    emb = _obtain(path, cache_bytes)
    report("opened", emb.step)
    for index in range(emb.step, rounds):
        played = workload.make_round(seed, index, flushes)
        workload.play(emb, played)
        report("step", emb.step)
        if played.then:
            report(played.then, emb.step)
            getattr(emb, played.then)()
            report("committed", emb.step)


def create_and_say_so(path: str) -> None:
    report("creating")
    emb = create(path, 1 << 20)
    report("created", emb.step)
    os._exit(0)


def train_through_interrupts(path: str, seed: int, rounds: int, cache_bytes: int) -> None:
    """A KeyboardInterrupt leaves a step done or not begun: the table's step says what is next."""
    import workload

    emb = _obtain(path, cache_bytes)
    training = False

    def interrupt(number: int, frame: Any) -> None:
        nonlocal training
        if training:
            training = False
            raise KeyboardInterrupt

    signal.signal(signal.SIGINT, interrupt)
    report("opened", emb.step)
    interrupts = 0
    while emb.step < rounds:
        played = workload.make_round(seed, emb.step, flushes=False)
        before = emb.step
        try:
            training = True
            workload.train(emb, played.ids, played.grads)
            report("step", before + 1)
            if played.then:
                emb.commit()
            training = False
        except KeyboardInterrupt:
            interrupts += 1
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    emb.close()
    report("closed", interrupts)


def train_and_leave(path: str, steps: int, ending: str, lr_check: float | None = None) -> None:
    """`steps` gradients of one on row 1, then an end without close() of the given kind."""
    import torch

    import ooc_embed

    emb: Any = ooc_embed.DiskEmbedding.open(path)
    if lr_check is not None:
        assert emb.optimizer.param_groups[0]["lr"] == lr_check
    for _ in range(steps):
        emb(torch.tensor([1])).sum().backward()
    report("step", emb.step)
    if ending == "close":
        emb.close()
    elif ending == "commit, then _exit":
        emb.commit()
        os._exit(0)
    elif ending == "_exit":
        os._exit(0)
    elif ending == "exception":
        raise RuntimeError("the user's script ends here")
    elif ending == "sys.exit":
        sys.exit(3)
    elif ending == "cycle":
        ring: dict[str, Any] = {"emb": emb}
        ring["ring"] = ring


def hold(path: str, mode: str = "r+", fork: bool = False) -> None:
    """Keep a table open until killed; with `fork`, a grandchild outlives this process."""
    import ooc_embed

    emb: Any = ooc_embed.DiskEmbedding.open(path, mode=mode)
    grandchild = 0
    if fork:
        grandchild = os.fork()
        if grandchild == 0:
            signal.pause()
            os._exit(0)
    report("holding", emb.step, grandchild)
    signal.pause()


def use_in_a_fork(path: str, mode: str) -> None:
    """A fork tries everything with its table and exits as a script does; its parent goes on."""
    import torch

    import ooc_embed

    emb: Any = ooc_embed.DiskEmbedding.open(path, mode=mode)
    kept = emb(torch.tensor([1])).sum()
    uses: dict[str, Callable[[], Any]] = {
        "lookup": lambda: emb(torch.tensor([1])),
        "view": lambda: emb.weight[0],
        "assignment": lambda: emb.weight.__setitem__([0], torch.ones(1, emb.embedding_dim)),
        "backward": kept.backward,
        "commit": emb.commit,
        "flush": emb.flush,
    }
    forked = os.fork()
    if forked == 0:
        for name, use in uses.items():
            try:
                use()
            except Exception as error:
                report("forked", name, type(error).__name__, str(error))
            else:
                report("forked", name, "", "")
        sys.exit(0)
    _, status = os.waitpid(forked, 0)
    report("fork ended", os.waitstatus_to_exitcode(status))
    if mode == "r+":
        kept.backward()
    report("step", emb.step)
    emb.close()


def soak(**arguments: Any) -> None:
    import soak_child

    soak_child.live(**arguments)


def pattern(emb: Any, rows: Any) -> Any:
    """What rows are at a commit of `write_pattern`, by its learning rate: exact in float64."""
    number = int(emb.optimizer.param_groups[0]["lr"])
    return (number + (number > 0) * rows.double() / 1024).unsqueeze(1).expand(-1, emb.embedding_dim)


def write_pattern(emb: Any, number: int, how: str = "commit") -> None:
    """Commit rows that say which commit they are of, as its learning rate does."""
    import torch

    emb.optimizer.param_groups[0]["lr"] = float(number)
    rows = torch.arange(emb.num_embeddings)
    emb.weight[rows] = pattern(emb, rows)
    getattr(emb, how)()


def write_patterns(path: str, seed: int, rounds: int) -> None:
    """Commit, merge, go back and take checkpoints, in a random order."""
    import ooc_embed

    rng = random.Random(seed)
    emb: Any = ooc_embed.DiskEmbedding.open(path, cache_bytes=1 << 15)
    report("opened")
    warnings.filterwarnings("ignore", ".*gives up commit")
    for number in range(2, rounds):
        if rng.random() < 0.2:
            emb.rollback(rng.choice(list(emb.commits())))
        else:
            write_pattern(emb, number, rng.choice(["commit", "commit", "flush", "state_dict"]))
    emb.close()


def read_when_told(path: str, fifo: str) -> None:
    """Stay open; read the rows that are asked for, and say whether they are those of the commit."""
    import torch

    import ooc_embed

    emb: Any = ooc_embed.DiskEmbedding.open(path, mode="r")
    report("reads", emb.optimizer.param_groups[0]["lr"])
    with Path(fifo).open() as lines:
        for line in lines:
            rows = torch.arange(*map(int, line.split()))
            report("read", torch.equal(emb(rows).detach(), pattern(emb, rows)))
    os._exit(0)


TASKS = {
    "write patterns": write_patterns,
    "read when told": read_when_told,
    "train": train_until_killed,
    "create": create_and_say_so,
    "interrupts": train_through_interrupts,
    "leave": train_and_leave,
    "hold": hold,
    "use in a fork": use_in_a_fork,
    "soak": soak,
}


def _serve() -> None:
    """Read a task, fork its child, wait; a child returns from here, to exit as a script does."""
    import system_calls
    import torch
    import workload

    import ooc_embed

    assert ooc_embed and workload and system_calls
    # An optimizer loads it at its first use: once here, not in every child.
    importlib.import_module("torch._dynamo")
    torch.set_num_threads(1)
    for line in sys.stdin:
        task, arguments = json.loads(line)
        pid = os.fork()
        if pid == 0:
            report("born", os.getpid())
            TASKS[task](**arguments)
            return
        _, status = os.waitpid(pid, 0)
        report("died", os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    _serve()
