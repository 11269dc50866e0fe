"""Death at any moment: what opens afterwards is the last commit, as a run in RAM computes it."""

from __future__ import annotations

import gc
import os
import random
import shutil
import signal
from pathlib import Path
from typing import Any

import crash_child
import numpy as np
import pytest
import scripted
import store_files
import system_calls
import torch
import workload
from effort import FULL

import ooc_embed
from ooc_embed import DiskEmbedding, report

pytestmark = pytest.mark.usefixtures("one_thread")

ROUNDS = 160


@pytest.fixture(scope="module")
def nursery() -> crash_child.Nursery:
    return crash_child.nursery()


@pytest.fixture(scope="module")
def seeded(tmp_path_factory: pytest.TempPathFactory) -> torch.Tensor:
    """The initial weights of the table that the children train."""
    path = tmp_path_factory.mktemp("seeded") / "t.zarr"
    with crash_child.create(str(path), 1 << 20) as emb:
        return emb.weight[:]


def assert_last_commit(
    path: Path, states: list[workload.State], events: list[list[Any]], mode: str
) -> int:
    """The store holds the last commit reported, or the one under way; returns its step."""
    committed = [step for name, step in events if name in ("opened", "committed")]
    begun = [step for name, step in events if name in ("commit", "flush")]
    with DiskEmbedding.open(path, mode=mode, cache_bytes=workload.SMALL_CACHE) as emb:
        step = emb.step
        if committed:
            assert step in (committed[-1], *begun[-1:])
            assert step >= committed[-1]
        workload.assert_table_is(emb, states[step])
    return step


@pytest.mark.parametrize("seed", range(50 if FULL else 5))
def test_a_killed_run_is_its_last_commit_and_trains_on(
    tmp_path: Path, nursery: crash_child.Nursery, seeded: torch.Tensor, seed: int
) -> None:
    rng = random.Random(seed)
    path = tmp_path / "t.zarr"
    states = workload.history(seed, ROUNDS, seeded)
    arguments = {"path": str(path), "seed": seed, "rounds": ROUNDS}
    arguments |= {"cache_bytes": workload.SMALL_CACHE, "flushes": True}
    deaths = 0
    for _ in range(10):
        events = nursery.run_and_kill("train", rng, 20, 0.004, **arguments)
        deaths += events[-1] == ["died", -signal.SIGKILL]
        store_files.assert_every_reader_agrees(path)
        # Now a reader finds it as the kill left it, now a writer recovers it.
        assert_last_commit(path, states, events, rng.choice(["r", "r+"]))
        assert report.verify(path) == []
    assert deaths >= 8
    with DiskEmbedding.open(path, cache_bytes=workload.SMALL_CACHE) as emb:
        for index in range(emb.step, emb.step + 3):
            workload.play(emb, workload.make_round(seed, index))
        emb.flush()
        workload.assert_table_is(emb, states[emb.step])
        workload.assert_zarr_is(path, states[emb.step])


@pytest.mark.parametrize("seed", [11, 12])
def test_a_run_killed_inside_a_flush_is_its_last_commit(
    tmp_path: Path, nursery: crash_child.Nursery, seeded: torch.Tensor, seed: int
) -> None:
    rng = random.Random(seed)
    path = tmp_path / "t.zarr"
    states = workload.history(seed, ROUNDS, seeded)
    arguments = {"path": str(path), "seed": seed, "rounds": ROUNDS}
    arguments |= {"cache_bytes": workload.SMALL_CACHE, "flushes": True}
    inside = 0
    for _ in range(10):
        events = nursery.run_and_kill("train", rng, 2, 0.02, after="flush", **arguments)
        inside += [name for name, _ in events[-2:]] == ["flush", "died"]
        assert_last_commit(path, states, events, rng.choice(["r", "r+"]))
        assert report.verify(path) == []
    assert inside >= 1
    with DiskEmbedding.open(path) as emb:
        emb.flush()
        workload.assert_zarr_is(path, states[emb.step])


def test_a_run_killed_while_commits_seal_logs_is_its_last_commit(
    tmp_path: Path, nursery: crash_child.Nursery, seeded: torch.Tensor
) -> None:
    """Without any flush; a cache so large that only commits fill the log."""
    rng = random.Random(21)
    path = tmp_path / "t.zarr"
    states = workload.history(21, ROUNDS, seeded, flushes=False)
    arguments = {"path": str(path), "seed": 21, "rounds": ROUNDS}
    arguments |= {"cache_bytes": 1 << 20, "flushes": False}
    for _ in range(10):
        events = nursery.run_and_kill("train", rng, 12, 0.01, after="commit", **arguments)
        assert_last_commit(path, states, events, rng.choice(["r", "r+"]))
        assert report.verify(path) == []
    assert store_files.chunk_files(path), "no merge ever happened"


def test_a_creation_that_was_killed_opens_or_may_be_repeated(
    tmp_path: Path, nursery: crash_child.Nursery
) -> None:
    rng = random.Random(31)
    unfinished = 0
    for attempt in range(12):
        path = tmp_path / f"{attempt}.zarr"
        events = nursery.run_and_kill("create", rng, 1, 0.03, path=str(path))
        if (path / "zarr.json").exists():
            with DiskEmbedding.open(path) as emb:
                assert emb.step == 0
                assert int(emb.version[:].sum()) == 0
        else:
            assert events[-2][0] == "creating"
            unfinished += path.exists()
            with crash_child.create(str(path), 1 << 20) as emb:
                emb(torch.tensor([1])).sum().backward()
        assert report.verify(path) == []
        store_files.assert_every_reader_agrees(path)
    assert unfinished >= 1


def test_a_crash_between_any_two_system_calls_leaves_the_last_commit(
    quick: Path, seeded: torch.Tensor
) -> None:
    """A copy of the store at each call that changes a file is what a kill there would leave."""
    path = quick / "t.zarr"
    seed, rounds = 41, 14
    states = workload.history(seed, rounds, seeded)
    allowed = {0}
    crashes: list[tuple[Path, set[int]]] = []

    def crash_here(name: str, arguments: tuple[Any, ...]) -> None:
        copy = quick / "crashes" / f"{len(crashes)}.zarr"
        crashes.append((store_files.copied(path, copy), set(allowed)))

    emb = crash_child.create(str(path), workload.SMALL_CACHE)
    with system_calls.watched(path, crash_here):
        for index in range(rounds):
            played = workload.make_round(seed, index)
            workload.play(emb, played)
            if played.then:
                allowed.add(emb.step)
                getattr(emb, played.then)()
                allowed.clear()
                allowed.add(emb.step)
        allowed.add(emb.step)
        emb.close()
    assert len(crashes) > 50
    for copy, steps in crashes:
        with DiskEmbedding.open(copy, cache_bytes=workload.SMALL_CACHE) as emb:
            assert emb.step in steps
            workload.assert_table_is(emb, states[emb.step])
        assert report.verify(copy) == []


def test_an_interrupt_leaves_a_step_done_or_not_begun(
    tmp_path: Path, nursery: crash_child.Nursery, seeded: torch.Tensor
) -> None:
    rng = random.Random(51)
    path = tmp_path / "t.zarr"
    rounds = 120
    shadow = workload.Shadow(seeded)
    for index in range(rounds):
        played = workload.make_round(51, index, flushes=False)
        shadow.train(played.ids, played.grads)
    pid = nursery.start(
        "interrupts", path=str(path), seed=51, rounds=rounds, cache_bytes=workload.SMALL_CACHE
    )
    event = nursery.next_event()
    while event is not None and event[0] not in ("closed", "died"):
        waited = nursery.next_event(rng.random() * 0.003)
        if waited is None:
            os.kill(pid, signal.SIGINT)
            waited = nursery.next_event()
        event = waited
    assert event is not None and event[0] == "closed", event
    assert event[1] >= 5, "too few interrupts arrived in time"
    assert nursery.rest()[-1] == ["died", 0]
    with DiskEmbedding.open(path) as emb:
        workload.assert_table_is(emb, shadow.state())


def test_an_interrupt_behind_any_system_call_costs_nothing(quick: Path) -> None:
    """As Ctrl-C does: the handler runs at once, unless the table holds it back for a moment."""
    states = scripted.states(quick / "seeded.zarr")

    def run(name: str, interrupted: int) -> tuple[int, int]:
        seen = 0

        def after(*_: Any) -> None:
            nonlocal seen
            seen += 1
            if seen == interrupted:
                signal.raise_signal(signal.SIGINT)

        return scripted.run(quick / name, states, lambda *_: None, after), seen

    shown, calls = run("counted.zarr", 0)
    assert shown == 0
    for number in range(1, calls + 1):
        path = f"{number}.zarr"
        shown += run(path, number)[0]
        shutil.rmtree(quick / path)
    # An interrupt that comes while a step is applied is shown behind it, and never swallowed.
    assert shown == calls


# Without a kill


def ones(path: Path, lr: float = 0.1, **options: Any) -> DiskEmbedding:
    """A table of zeros that each test trains with gradients of one on row 1."""
    adam = ooc_embed.SparseAdam(lr=lr)
    return DiskEmbedding(
        4, 2, path=path, init="zeros", optimizer=adam, dtype=torch.float64, **options
    )


def shadow_of_ones(steps: int) -> workload.State:
    shadow = workload.Shadow(torch.zeros(4, 2, dtype=torch.float64))
    for _ in range(steps):
        shadow.train(torch.tensor([1]), torch.ones(1, 2, dtype=torch.float64))
    return shadow.state()


def assert_ones(path: Path, steps: int) -> None:
    with DiskEmbedding.open(path, mode="r") as emb:
        workload.assert_table_is(emb, shadow_of_ones(steps))


def test_five_steps_then_one_in_a_new_process_equal_six(
    tmp_path: Path, nursery: crash_child.Nursery
) -> None:
    path = tmp_path / "t.zarr"
    with ones(path) as emb:
        for _ in range(5):
            emb(torch.tensor([1])).sum().backward()
    events = nursery.run("leave", path=str(path), steps=1, ending="close", lr_check=0.1)
    assert events == [["step", 6], ["died", 0]]
    with DiskEmbedding.open(path, mode="r") as emb:
        # -0.6974810617 would be moments kept and the step begun again at 0.
        np.testing.assert_allclose(emb.weight[1].numpy(), -0.5999998849, atol=1e-9)
    assert_ones(path, 6)


@pytest.mark.parametrize(
    ("ending", "code", "kept"),
    [
        ("normal", 0, True),
        ("close", 0, True),
        ("cycle", 0, True),
        ("sys.exit", 3, True),
        ("exception", 1, True),
        ("_exit", 0, False),
        ("commit, then _exit", 0, True),
    ],
)
def test_an_interpreter_that_ends_commits_and_one_that_is_cut_off_does_not(
    tmp_path: Path, nursery: crash_child.Nursery, ending: str, code: int, kept: bool
) -> None:
    path = tmp_path / "t.zarr"
    with ones(path) as emb:
        emb(torch.tensor([1])).sum().backward()
    events = nursery.run("leave", path=str(path), steps=3, ending=ending)
    assert events[-1] == ["died", code]
    assert_ones(path, 4 if kept else 1)
    assert report.verify(path) == []


@pytest.mark.parametrize("in_a_cycle", [False, True])
def test_a_table_that_is_dropped_is_committed_and_unlocked(
    tmp_path: Path, in_a_cycle: bool
) -> None:
    path = tmp_path / "t.zarr"
    emb = ones(path)
    model = torch.nn.Sequential(emb)
    model(torch.tensor([1])).sum().backward()
    optimizer = emb.optimizer
    if in_a_cycle:
        model.itself = [model]  # type: ignore[assignment]
    assert optimizer.param_groups[0]["lr"] == 0.1
    del emb, model, optimizer
    gc.collect()
    assert str(path) not in Path("/proc/self/maps").read_text()
    with DiskEmbedding.open(path) as emb:
        workload.assert_table_is(emb, shadow_of_ones(1))
        emb(torch.tensor([1])).sum().backward()
    assert_ones(path, 2)


def test_a_graph_that_outlives_its_table_does_not_keep_the_store_open(tmp_path: Path) -> None:
    path = tmp_path / "t.zarr"
    emb = ones(path)
    emb(torch.tensor([1])).sum().backward()
    kept = emb(torch.tensor([1, 2])).sum()
    emb.close()
    assert kept.item() < 0
    with DiskEmbedding.open(path) as again:
        with pytest.raises((RuntimeError, ooc_embed.StoreError)):
            kept.backward()
        workload.assert_table_is(again, shadow_of_ones(1))


def test_leaving_a_with_block_by_an_exception_commits_the_steps_that_were_done(
    tmp_path: Path,
) -> None:
    path = tmp_path / "t.zarr"
    with pytest.raises(ZeroDivisionError), ones(path) as emb:
        emb(torch.tensor([1])).sum().backward()
        raise ZeroDivisionError
    assert_ones(path, 1)


def test_close_twice_and_commit_twice_do_no_more(tmp_path: Path) -> None:
    path = tmp_path / "t.zarr"
    emb = ones(path)
    emb(torch.tensor([1])).sum().backward()
    number = emb.commit()
    manifest = (path / "zarr.json").read_bytes()
    with store_files.untouched(path):
        assert emb.commit() == number
    emb.close()
    with store_files.untouched(path):
        emb.close()
    assert (path / "zarr.json").read_bytes() == manifest
    assert emb.closed


def test_a_change_of_hyper_parameters_alone_is_a_commit(tmp_path: Path) -> None:
    path = tmp_path / "t.zarr"
    with ones(path) as emb:
        first = emb.commit()
        emb.optimizer.param_groups[0]["lr"] = 0.025
        assert emb.commit() > first
    with DiskEmbedding.open(path) as emb:
        assert emb.optimizer.param_groups[0]["lr"] == 0.025
        emb.optimizer.param_groups[0]["betas"] = (0.5, 0.6)
    with DiskEmbedding.open(path) as emb:
        assert tuple(emb.optimizer.param_groups[0]["betas"]) == (0.5, 0.6)


def test_a_step_whose_rows_were_only_padding_is_still_committed(tmp_path: Path) -> None:
    path = tmp_path / "t.zarr"
    with ones(path, padding_idx=2) as emb:
        emb(torch.tensor([2])).sum().backward()
        steps = emb.step
    with DiskEmbedding.open(path) as emb:
        assert emb.step == steps
        assert int(emb.version[:].sum()) == 0


@pytest.mark.parametrize("flush", [False, True])
def test_close_merges_only_when_asked(tmp_path: Path, flush: bool) -> None:
    path = tmp_path / "t.zarr"
    emb = ones(path)
    emb(torch.tensor([1])).sum().backward()
    emb.close(flush=flush)
    assert len(store_files.chunk_files(path)) == int(flush)
    if flush:
        workload.assert_zarr_is(path, shadow_of_ones(1))
    assert_ones(path, 1)


def test_versions_count_writes_through_commits_merges_and_reopening(
    tmp_path: Path, seeded: torch.Tensor
) -> None:
    """The whole script in one process, as the oracle of the killed ones is used."""
    path = tmp_path / "t.zarr"
    states = workload.history(61, 60, seeded)
    emb = crash_child.create(str(path), workload.SMALL_CACHE)
    for index in range(60):
        played = workload.make_round(61, index)
        workload.play(emb, played)
        if played.then:
            getattr(emb, played.then)()
        if index % 10 == 9:
            emb.close()
            emb = DiskEmbedding.open(path, cache_bytes=workload.SMALL_CACHE)
            workload.assert_table_is(emb, states[index + 1])
    emb.close(flush=True)
    workload.assert_zarr_is(path, states[60])
