"""SIGINT and SIGTERM at any moment of any call, as in a notebook: the same object goes on.

The exception is kept while the object is used again, as a notebook keeps the last one with all of
its frames: what these hold must not hold anything else up.
"""

from __future__ import annotations

import copy
import gc
import random
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import moments
import numpy as np
import pytest
import shadowed
import store_files
import torch
import workload
from effort import FULL, MOMENTS

import ooc_embed
from ooc_embed import DiskEmbedding, report
from ooc_embed.interrupts import uninterrupted
from ooc_embed.merging import Worker

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:.*gives up commit"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

CACHE = workload.SMALL_CACHE


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """SIGTERM as a user's script may have it: an exit that runs what `finally` asks for."""

    def leave(number: int, _: Any) -> None:
        raise SystemExit(128 + number)

    now = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: leave}
    before = {number: signal.signal(number, handler) for number, handler in now.items()}
    yield
    assert {number: signal.getsignal(number) for number in now} == now
    for number, handler in before.items():
        signal.signal(number, handler)


def numbers(count: int, seed: int) -> list[int]:
    """Which moments are tried: some, or all."""
    if FULL or count <= MOMENTS:
        return list(range(1, count + 1))
    return sorted(random.Random(seed).sample(range(1, count + 1), MOMENTS))


def signalled(number: int, call: Callable[[], Any]) -> tuple[moments.Moments, BaseException | None]:
    """Make a call with a signal at a moment; the exception that it left behind, or None."""
    return moments.signalled(number, signal.SIGTERM if number % 2 else signal.SIGINT, call)


class Case:
    """A table in a folder of its own, and its oracle before and behind a call."""

    def __init__(self, run: shadowed.Run, folder: Path) -> None:
        self.run = run
        self.folder = folder
        self.after = copy.deepcopy(run.shadow)

    @property
    def emb(self) -> DiskEmbedding:
        return self.run.emb


# Calls on a table. Each prepares, and returns the call that a signal cuts off.
Prepare = Callable[[Case], Callable[[], Any]]


def _step(case: Case) -> Callable[[], Any]:
    played = workload.make_round(1, 1)
    loss = (case.emb(played.ids) * played.grads).sum()
    case.after.train(played.ids, played.grads)
    case.run.again = lambda: workload.train(case.emb, played.ids, played.grads)
    return loss.backward


def _forward(case: Case) -> Callable[[], Any]:
    ids = torch.arange(0, 4000, 9)
    return lambda: case.emb(ids)


def _large_step(case: Case) -> Callable[[], Any]:
    ids = torch.arange(0, 3000)
    grads = torch.ones(3000, workload.DIM, dtype=torch.float64)
    case.after.train(ids, grads)
    return lambda: workload.train(case.emb, ids, grads)


def _assign(case: Case) -> Callable[[], Any]:
    ids = torch.arange(100, 105)
    rows = torch.ones(5, workload.DIM, dtype=torch.float64)
    case.after.module.weight.data[ids] = rows
    case.after.version[ids.numpy()] += 1
    return lambda: case.emb.weight.__setitem__(ids, rows)


def _commit(case: Case) -> Callable[[], Any]:
    return case.emb.commit


def _flush(case: Case) -> Callable[[], Any]:
    return case.emb.flush


def _seal(case: Case) -> Callable[[], Any]:
    """A commit that seals the log, and begins a merge beside it."""
    case.emb.keep_commits = 1
    case.run.play(*range(60, 75))
    case.after = copy.deepcopy(case.run.shadow)
    return case.emb.commit


def _step_beside_a_merge(case: Case) -> Callable[[], Any]:
    _seal(case)()
    played = workload.make_round(1, 2)
    case.after.train(played.ids, played.grads)
    return lambda: workload.train(case.emb, played.ids, played.grads)


def _roll_back(case: Case) -> Callable[[], Any]:
    number = min(case.emb.commits())
    case.after = copy.deepcopy(case.run.kept[number])
    return lambda: case.emb.rollback(number)


def _roll_back_to_the_newest(case: Case) -> Callable[[], Any]:
    case.after = copy.deepcopy(case.run.kept[max(case.emb.commits())])
    return case.emb.rollback


def _resize(case: Case) -> Callable[[], Any]:
    """The new rows are those of another copy that grows."""
    rows = workload.ROWS + 1000
    (case.folder / "other").mkdir()
    path = store_files.copied(case.emb.path, case.folder / "other" / "t.zarr")
    with DiskEmbedding.open(path) as other:
        other.resize(rows)
        case.after.grow(other.weight[workload.ROWS :])

    return lambda: case.emb.resize(rows)


def _snapshot(case: Case) -> Callable[[], Any]:
    target = case.folder / "copy.zarr"

    def call() -> None:
        if (target / "zarr.json").exists():
            shutil.rmtree(target)
        case.emb.snapshot(target)

    return call


def _state_dict(case: Case) -> Callable[[], Any]:
    return case.emb.state_dict


def _load_state_dict(case: Case) -> Callable[[], Any]:
    state = case.emb.state_dict()
    return lambda: case.emb.load_state_dict(state)


def _keep_commits(case: Case) -> Callable[[], Any]:
    return lambda: setattr(case.emb, "keep_commits", 1)


def _blocks(case: Case) -> Callable[[], Any]:
    return lambda: list(case.emb.blocks(1000))


def _topk(case: Case) -> Callable[[], Any]:
    return lambda: case.emb.topk(torch.ones(workload.DIM, dtype=torch.float64), 3)


def _to_ram(case: Case) -> Callable[[], Any]:
    return case.emb.to_embedding


def _prefetch(case: Case) -> Callable[[], Any]:
    return lambda: case.emb.prefetch(torch.arange(0, 6000, 7))


def _look_ahead(case: Case) -> Callable[[], Any]:
    batches = torch.arange(0, 6000, 20).split(50)

    def call() -> None:
        for ids in ooc_embed.lookahead(batches, case.emb):
            case.emb(ids)

    return call


def _close(case: Case) -> Callable[[], Any]:
    return case.emb.close


def _close_and_flush(case: Case) -> Callable[[], Any]:
    return lambda: case.emb.close(flush=True)


def _reader(case: Case) -> Callable[[], Any]:
    def call() -> None:
        with DiskEmbedding.open(case.emb.path, mode="r") as reader:
            reader(torch.arange(100))

    return call


CALLS: list[Prepare] = [
    _step,
    _forward,
    _large_step,
    _assign,
    _commit,
    _flush,
    _seal,
    _step_beside_a_merge,
    _roll_back,
    _roll_back_to_the_newest,
    _resize,
    _snapshot,
    _state_dict,
    _load_state_dict,
    _keep_commits,
    _blocks,
    _topk,
    _to_ram,
    _prefetch,
    _look_ahead,
    _close,
    _close_and_flush,
    _reader,
]


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Iterator[shadowed.Run]:
    """A closed store with rows in chunks and in a log, three commits, and its oracle."""
    with store_files.quick_folder(tmp_path_factory.mktemp("template")) as folder:
        run = shadowed.trained(folder / "t.zarr")
        run.emb.close()
        yield run


def new_case(template: shadowed.Run, folder: Path) -> Case:
    """A copy of the template's store, opened, with steps that no commit has."""
    folder.mkdir()
    path = store_files.copied(template.emb.path, folder / "t.zarr")
    run = template.opened(path)
    run.play(50, 51)
    return Case(run, folder)


def is_at(emb: DiskEmbedding, shadow: workload.Shadow) -> bool:
    try:
        workload.assert_table_is(emb, shadow.state())
    except AssertionError:
        return False
    return True


@pytest.mark.parametrize("prepare", CALLS, ids=lambda prepare: prepare.__name__.strip("_"))
def test_a_call_that_a_signal_cuts_off_is_done_or_not_and_the_table_goes_on(
    quick: Path, template: shadowed.Run, prepare: Prepare
) -> None:
    case = new_case(template, quick / "counted")
    count = signalled(0, prepare(case))[0].seen
    case.emb.close()
    assert count > 3
    for number in numbers(count, seed=len(prepare.__name__)):
        case = new_case(template, quick / str(number))
        call = prepare(case)
        seen, caught = signalled(number, call)
        try:
            go_on(case, call)
        except BaseException as error:
            error.add_note(f"signal {number} of {count} at {seen.where}, {caught!r}")
            raise
        del caught, call
        gc.collect()
        assert str(case.folder) not in Path("/proc/self/maps").read_text()
        shutil.rmtree(case.folder)


def go_on(case: Case, call: Callable[[], Any]) -> None:
    """See that the table is as before the call or behind it, bring it behind, and train on."""
    if case.emb.closed:
        case.run.emb = DiskEmbedding.open(case.emb.path, cache_bytes=CACHE)
        call = case.emb.commit
    if not is_at(case.emb, case.after):
        case.run.check()
        getattr(case.run, "again", call)()
    case.run.shadow = case.after
    if case.emb.closed:
        case.run.emb = DiskEmbedding.open(case.emb.path)
    case.run.check()
    case.run.play(80, 81)
    case.emb.commit()
    case.run.play(82)
    case.emb.flush()
    case.run.check()
    case.emb.close()
    for thread in threading.enumerate():
        assert not isinstance(thread, Worker) or thread.join(60) is None
    for path in case.folder.glob("*.zarr"):
        if (path / "zarr.json").exists():
            assert report.verify(path) == []
    workload.assert_zarr_is(case.emb.path, case.after.state())


@pytest.mark.parametrize("which", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_that_is_held_back_is_neither_lost_nor_are_its_handlers(
    which: signal.Signals,
) -> None:
    done: list[int] = []

    def call() -> None:
        with uninterrupted():
            done.extend((1, 2))

    handlers = {number: signal.getsignal(number) for number in signal.Signals}
    count = moments.signalled(0, which, call)[0].seen
    assert count > 10
    for number in range(1, count + 1):
        done.clear()
        seen, caught = moments.signalled(number, which, call)
        assert caught is not None, seen.where
        assert {number: signal.getsignal(number) for number in handlers} == handlers, seen.where
        assert done in ([], [1, 2])


# Where a table begins


def _rows() -> torch.Tensor:
    return torch.arange(2500 * 4, dtype=torch.float64).reshape(2500, 4)


def _seeded(path: Path) -> DiskEmbedding:
    return DiskEmbedding(2500, 4, path=path, chunk_rows=1024, init="uniform")


def _given(path: Path) -> DiskEmbedding:
    return DiskEmbedding(2500, 4, path=path, chunk_rows=1024, init=_rows(), dtype=torch.float64)


def _from_a_file(path: Path) -> DiskEmbedding:
    file = path.with_suffix(".npy")
    if not file.exists():
        np.save(file, _rows().numpy())
    return DiskEmbedding.from_pretrained(file, freeze=False, path=path, chunk_rows=1024)


def _from_embedding(path: Path) -> DiskEmbedding:
    layer = torch.nn.Embedding.from_pretrained(_rows(), freeze=False, sparse=True)
    return DiskEmbedding.from_embedding(layer, path=path, chunk_rows=1024)


def _replaced(path: Path) -> DiskEmbedding:
    layer = torch.nn.Embedding.from_pretrained(_rows(), freeze=False, sparse=True)
    model = torch.nn.ModuleDict({path.stem: layer})
    ooc_embed.replace_embeddings(model, path.parent, min_rows=1, chunk_rows=1024)
    return model[path.stem]


BEGINNINGS = [_seeded, _given, _from_a_file, _from_embedding, _replaced]


@pytest.mark.parametrize("begin", BEGINNINGS, ids=lambda begin: begin.__name__.strip("_"))
def test_a_creation_that_a_signal_cuts_off_is_made_by_the_next_call_or_opens(
    quick: Path, begin: Callable[[Path], DiskEmbedding]
) -> None:
    made: list[DiskEmbedding] = []
    counted, _ = signalled(0, lambda: made.append(begin(quick / "counted.zarr")))
    want = made[0].weight[:]
    made.pop().close()
    for number in numbers(counted.seen, seed=len(begin.__name__)):
        path = quick / f"{number}.zarr"
        seen, caught = signalled(number, lambda path=path: made.append(begin(path)))
        try:
            emb = made.pop() if made else begin_again(begin, path)
            assert torch.equal(emb.weight[:], want)
            workload.train(emb, torch.tensor([1, 2]), torch.ones(2, 4))
            emb.close(flush=True)
            assert report.verify(path) == []
            store_files.assert_every_reader_agrees(path)
        except BaseException as error:
            error.add_note(f"signal {number} of {counted.seen} at {seen.where}, {caught!r}")
            raise
        shutil.rmtree(path)


def begin_again(begin: Callable[[Path], DiskEmbedding], path: Path) -> DiskEmbedding:
    """As the errors say: what was made is whole and opens."""
    if (path / "zarr.json").exists():
        with pytest.raises(FileExistsError):
            begin(path)
        return DiskEmbedding.open(path)
    return begin(path)


def test_an_opening_that_a_signal_cuts_off_is_made_by_the_next_call(
    quick: Path, template: shadowed.Run
) -> None:
    """Of a store whose last writer was killed in a merge, so that one begins."""
    case = new_case(template, quick / "killed")
    _seal(case)()
    killed = store_files.copied(case.emb.path, quick / "killed.zarr")
    case.emb.close()
    made: list[DiskEmbedding] = []
    open_it = lambda path: made.append(DiskEmbedding.open(path, cache_bytes=CACHE))  # noqa: E731
    counted, _ = signalled(0, lambda: open_it(store_files.copied(killed, quick / "counted.zarr")))
    made.pop().close()
    for number in numbers(counted.seen, seed=3):
        path = store_files.copied(killed, quick / f"{number}.zarr")
        seen, caught = signalled(number, lambda path=path: open_it(path))
        try:
            if not made:
                open_it(path)
            case.run.emb = made.pop()
            case.run.shadow = copy.deepcopy(case.after)
            case.run.check()
            case.run.play(90, 91)
            case.emb.close(flush=True)
            workload.assert_zarr_is(path, case.run.shadow.state())
            assert report.verify(path) == []
        except BaseException as error:
            error.add_note(f"signal {number} of {counted.seen} at {seen.where}, {caught!r}")
            raise
        shutil.rmtree(path)
