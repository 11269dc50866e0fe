"""`lookahead` over loaders: order, errors, threads; knows nothing of pages."""

from __future__ import annotations

import gc
import signal
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import ooc_embed
from ooc_embed import lookahead


class Announced:
    """Stands for a table; remembers what was prefetched."""

    def __init__(self) -> None:
        self.rows: list[list[int]] = []

    def prefetch(self, rows: torch.Tensor) -> None:
        self.rows.append(rows.tolist())


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    assert [t.name for t in threading.enumerate() if t.name.startswith("ooc_embed")] == []


def id_batches(count: int = 6, size: int = 8, rows: int = 50) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(0, rows, (size,), generator=generator) for _ in range(count)]


@pytest.mark.parametrize("depth", [1, 2, 100])
def test_batches_are_the_loaders_own_in_its_order_and_each_is_prefetched(depth):
    table, batches = Announced(), id_batches()
    got = list(lookahead(batches, table, depth=depth))
    assert [id(batch) for batch in got] == [id(batch) for batch in batches]
    assert table.rows == [batch.tolist() for batch in batches]


def test_rows_finds_the_ids_of_a_batch():
    table = Announced()
    loader = [{"ids": torch.tensor([n]), "label": n} for n in range(4)]
    assert list(lookahead(loader, table, rows=lambda batch: batch["ids"])) == loader
    assert table.rows == [[0], [1], [2], [3]]


@pytest.mark.parametrize("loader", [[], iter([]), (n for n in ())], ids=["list", "iter", "gen"])
def test_empty_loader_gives_no_batch(loader):
    assert list(lookahead(loader, Announced())) == []


def test_training_with_lookahead_gives_the_same_table_to_the_bit(make_table):
    loader = DataLoader(
        TensorDataset(torch.arange(500)),
        batch_size=32,
        shuffle=True,
        generator=torch.Generator().manual_seed(1),
    )
    plain, ahead = (make_table(500, 3, cache_bytes=5000) for _ in range(2))
    for emb, wrap in ((plain, lambda _: loader), (ahead, lambda emb: with_ids(loader, emb))):
        loader.generator.manual_seed(1)
        for _ in range(3):
            for (ids,) in wrap(emb):
                emb(ids).square().sum().backward()
    assert ahead.step == plain.step == 3 * 16
    assert torch.equal(ahead.weight[:], plain.weight[:])
    assert torch.equal(ahead.version[:], plain.version[:])
    for field in plain.state:
        assert torch.equal(ahead.state[field][:], plain.state[field][:])


def with_ids(loader, emb):
    return lookahead(loader, emb, rows=lambda batch: batch[0])


def test_each_loop_is_a_new_pass_over_the_loader():
    again = lookahead(id_batches(), Announced())
    first, second = list(again), list(again)
    assert [id(batch) for batch in first] == [id(batch) for batch in second]
    assert len(first) == 6


def test_length_is_the_loaders_or_none():
    assert len(lookahead(id_batches(5), Announced())) == 5
    with pytest.raises(TypeError, match="generator"):
        len(lookahead((batch for batch in id_batches()), Announced()))


@pytest.mark.parametrize("depth", [0, -1])
def test_depth_below_one_is_refused(depth):
    with pytest.raises(ValueError, match=f"depth must be at least 1, got {depth}"):
        lookahead([], Announced(), depth=depth)


def test_thread_is_depth_batches_ahead_and_no_further():
    taken = threading.Semaphore(0)
    pulled = []

    def source() -> Iterator[torch.Tensor]:
        for number in range(10):
            pulled.append(number)
            yield torch.tensor([number])
            taken.release()  # this batch has been prefetched and waits

    for batch in lookahead(source(), Announced(), depth=3):
        number = int(batch)
        if number == 0:
            for _ in range(3):
                assert taken.acquire(timeout=60)
        assert len(pulled) <= number + 1 + 3
    assert pulled == list(range(10))


# Errors


def broken_loader() -> Iterator[torch.Tensor]:
    yield torch.tensor([0])
    yield torch.tensor([1])
    raise RuntimeError("the third batch is broken")


def broken_rows(batch: torch.Tensor) -> torch.Tensor:
    if int(batch) == 2:
        raise KeyError("no ids")
    return batch


@pytest.mark.parametrize(
    ("loader", "rows", "error", "where"),
    [
        (broken_loader, None, RuntimeError, "broken_loader"),
        (lambda: map(torch.tensor, range(5)), broken_rows, KeyError, "broken_rows"),
        (lambda: map(torch.tensor, [0, 1, 99, 3]), None, IndexError, "check_range"),
        (lambda: [torch.tensor(0), torch.tensor(1), "two"], None, TypeError, "flat_ids"),
    ],
    ids=["loader", "rows", "range", "type"],
)
@pytest.mark.parametrize("depth", [1, 5])
def test_error_comes_where_its_batch_would_have_come(
    make_table, loader: Callable, rows, error: type[Exception], where: str, depth: int
):
    got = []
    with pytest.raises(error) as raised:
        got.extend(int(batch) for batch in lookahead(loader(), make_table(50), rows, depth))
    assert got == [0, 1]
    frames = [frame.name for frame in traceback.extract_tb(raised.tb)]
    assert where in frames


def test_loader_is_asked_for_nothing_behind_its_error():
    asked = []

    class Loader:
        def __iter__(self):
            return self

        def __next__(self):
            asked.append(1)
            if len(asked) == 3:
                raise OSError("gone")
            return torch.tensor([1])

    with pytest.raises(OSError, match="gone"):
        list(lookahead(Loader(), Announced(), depth=4))
    assert len(asked) == 3


def test_table_closed_in_the_middle_is_an_error_of_the_lookup_alone(make_table, capfd):
    emb = make_table(50)
    got = 0
    for ids in lookahead(id_batches(), emb):
        if got == 2:
            emb.close()
        if got >= 2:
            with pytest.raises(ooc_embed.StoreError, match="is closed"):
                emb(ids)
        else:
            emb(ids).sum().backward()
        got += 1
    assert got == 6
    assert capfd.readouterr() == ("", "")


# Threads


def endless(closed: list[str]) -> Iterator[torch.Tensor]:
    try:
        while True:
            yield torch.tensor([1])
    finally:
        closed.append("closed")


def leave_by_break(batches):
    for _ in batches:
        break


def leave_by_error(batches):
    with pytest.raises(ZeroDivisionError):
        for _ in batches:
            _ = 1 / 0


def leave_by_dropping(batches):
    iterator = iter(batches)
    next(iterator)
    del iterator


def leave_before_the_first(batches):
    iterator = iter(batches)
    del iterator


@pytest.mark.parametrize("leave", [leave_by_break, leave_by_error, leave_by_dropping])
@pytest.mark.parametrize("nested", [False, True])
def test_leaving_early_ends_the_thread_and_closes_the_generator(leave, nested):
    before, closed = threading.enumerate(), []
    batches = lookahead(endless(closed), Announced())
    if nested:
        batches = lookahead(batches, Announced())
    leave(batches)
    assert threading.enumerate() == before
    assert closed == ["closed"]


def test_iterator_that_was_never_used_starts_no_thread():
    before, closed = threading.enumerate(), []
    iterator = iter(lookahead(endless(closed), Announced()))
    assert threading.enumerate() == before
    del iterator


def test_a_pass_leaves_no_cycle_that_keeps_batches_alive(make_table):
    emb = make_table(50)
    alive = []

    def source() -> Iterator[torch.Tensor]:
        for _ in range(5):
            batch = torch.tensor([1])
            alive.append(weakref.ref(batch))
            yield batch
            del batch

    gc.disable()
    try:
        for _ in lookahead(source(), emb):
            pass
        del _
        assert [reference() for reference in alive] == [None] * 5
    finally:
        gc.enable()


def test_interrupt_reaches_a_loop_that_waits_for_a_batch():
    interrupted = threading.Event()

    def handler(*_: object) -> None:
        interrupted.set()
        raise KeyboardInterrupt

    def source() -> Iterator[torch.Tensor]:
        yield torch.tensor([0])
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        # Nothing comes before the waiting loop has seen the signal.
        assert interrupted.wait(60)
        yield torch.tensor([1])

    before = signal.signal(signal.SIGINT, handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            for _ in lookahead(source(), Announced()):
                pass
    finally:
        signal.signal(signal.SIGINT, before)
    assert interrupted.is_set()


@pytest.mark.parametrize("nested", [False, True])
def test_loaders_iterator_is_made_in_the_thread_of_the_loop(nested):
    made_in = []

    class Loader:
        def __iter__(self):
            made_in.append(threading.current_thread())
            return iter(id_batches())

    batches = lookahead(Loader(), Announced())
    if nested:
        batches = lookahead(batches, Announced())
    assert len(list(batches)) == 6
    assert made_in == [threading.current_thread()]


def test_two_tables_are_read_ahead_by_nesting():
    users, items = Announced(), Announced()
    loader = [(torch.tensor([n]), torch.tensor([10 * n])) for n in range(4)]
    batches = lookahead(lookahead(loader, users, rows=lambda b: b[0]), items, rows=lambda b: b[1])
    assert list(batches) == loader
    assert len(batches) == 4
    assert users.rows == [[0], [1], [2], [3]]
    assert items.rows == [[0], [10], [20], [30]]


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # any fork beside threads
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_dataloader_with_workers_trains_as_without_and_leaves_none(make_table):
    def train(workers: int, *, ahead: bool) -> torch.Tensor:
        loader = DataLoader(TensorDataset(torch.arange(60)), batch_size=8, num_workers=workers)
        emb = make_table(60)
        for _ in range(2):
            for (ids,) in with_ids(loader, emb) if ahead else loader:
                emb(ids).square().sum().backward()
        for (ids,) in with_ids(loader, emb):
            emb(ids)
            break
        return emb.weight[:]

    assert torch.equal(train(2, ahead=True), train(0, ahead=False))
    assert torch.multiprocessing.active_children() == []


@pytest.mark.parametrize("depth", [1.5, None, "2", True])
def test_depth_that_is_no_int_is_refused_at_the_call(depth):
    with pytest.raises(TypeError, match="depth must be an int"):
        lookahead([], Announced(), depth=depth)


def test_what_is_no_table_and_no_function_is_refused_at_the_call():
    with pytest.raises(TypeError, match="must be a table, got Sequential.*once for each"):
        lookahead([], torch.nn.Sequential())
    with pytest.raises(TypeError, match="rows must be a function .* got 'ids'"):
        lookahead([], Announced(), rows="ids")
