"""Going back in the middle of other things: graphs, hooks, gradients that wait, threads, forks."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import store_files
import torch
import workload
from going_back import create, go_on, open_again

import ooc_embed
from ooc_embed import DiskEmbedding, StoreError, report

pytestmark = pytest.mark.usefixtures("one_thread")

SEED = 97


@pytest.fixture(scope="module")
def states(weight: torch.Tensor) -> list[workload.State]:
    return workload.history(SEED, 12, weight)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "t.zarr"


@pytest.mark.parametrize("number", [99, -1])
def test_an_unknown_commit_is_an_error_that_changes_nothing(path: Path, number: int) -> None:
    with create(path, keep=4) as emb:
        go_on(emb, SEED, 3)
        with store_files.untouched(path), pytest.raises(StoreError, match="is not kept"):
            emb.rollback(number)
        assert emb.step == 3


@pytest.mark.parametrize("number", ["3", 3.5, 2.0, True, torch.tensor(2)])
def test_what_is_no_integer_is_no_commit(path: Path, number: Any) -> None:
    with create(path, keep=4) as emb:
        go_on(emb, SEED, 3)
        with store_files.untouched(path):
            for attempt in (
                lambda: emb.rollback(number),
                lambda: DiskEmbedding.open(path, "r", commit=number),
            ):
                with pytest.raises(TypeError, match="commit must be an integer"):
                    attempt()
        assert emb.step == 3


@pytest.mark.parametrize("number", [2, np.int64(2)])
def test_an_integer_of_any_type_leaves_a_store_that_opens(
    path: Path, states: list[workload.State], number: Any
) -> None:
    with create(path, keep=4) as emb:
        go_on(emb, SEED, 3)
        emb.rollback(number)
    with open_again(path) as emb:
        workload.assert_table_is(emb, states[2])


def test_a_reader_and_a_closed_table_do_not_go_back(path: Path) -> None:
    with create(path, keep=4) as emb:
        go_on(emb, SEED, 3)
    with store_files.untouched(path):
        for method in (emb.rollback, emb.commit):
            with pytest.raises(StoreError, match="closed"):
                method()
        with DiskEmbedding.open(path, mode="r") as reader:
            for number in (None, 2):
                with pytest.raises(StoreError, match="open to read"):
                    reader.rollback(number)
            with pytest.raises(StoreError, match="open to read"):
                reader.keep_commits = 2
            assert reader.step == 3


def test_a_forked_child_does_not_go_back(path: Path, states: list[workload.State]) -> None:
    with create(path, keep=4) as emb:
        go_on(emb, SEED, 3)
        pid = os.fork()
        if pid == 0:  # pragma: no cover
            try:
                emb.rollback(2)
            except StoreError as error:
                os._exit(0 if "fork" in str(error) else 2)
            os._exit(1)
        assert os.waitpid(pid, 0)[1] == 0
        workload.assert_table_is(emb, states[3])


def test_a_rollback_in_the_middle_of_a_step_is_refused_and_the_step_is_whole(
    path: Path, states: list[workload.State]
) -> None:
    """As from a signal handler that runs while the table is being changed."""
    with create(path, keep=4) as emb:
        go_on(emb, SEED, 3)
        with emb._table.writing(), pytest.raises(StoreError, match="in the middle"):
            emb.rollback(2)
        workload.assert_table_is(emb, states[3])


def test_a_rollback_between_backward_hooks_stops_that_backward(
    path: Path, states: list[workload.State]
) -> None:
    with create(path, keep=4) as emb:
        go_on(emb, SEED, 3)
        played = workload.make_round(SEED + 1, 0)
        out = emb(played.ids)

        def go_back(grad: torch.Tensor) -> None:
            emb.rollback(2)

        out.register_hook(go_back)
        with pytest.raises(RuntimeError, match="went back to another commit"):
            (out * played.grads).sum().backward()
        workload.assert_table_is(emb, states[2])


@pytest.mark.parametrize("step_on", ["backward", "optimizer"])
@pytest.mark.parametrize("bag", [False, True])
def test_a_graph_from_before_a_rollback_cannot_step_the_rows_after_it(
    path: Path, step_on: str, bag: bool
) -> None:
    options: dict[str, Any] = {"path": path, "step_on": step_on, "keep_commits": 3}
    with (
        ooc_embed.DiskEmbeddingBag(50, 4, mode="sum", **options)
        if bag
        else DiskEmbedding(50, 4, **options) as emb
    ):
        ids = torch.tensor([[1, 2, 2]])
        emb(ids).sum().backward()
        emb.optimizer.step()
        emb.commit()
        before = emb.weight[:]
        losses = [emb(ids).sum() for _ in range(2)]
        losses[0].backward()
        emb.optimizer.step()
        emb.commit()
        emb.rollback(1)
        with pytest.raises(RuntimeError, match="went back to another commit .* look the rows up"):
            losses[1].backward()
        emb.optimizer.step()
        assert emb.step == 1
        assert torch.equal(emb.weight[:], before)
        emb(ids).sum().backward()
        emb.optimizer.step()
        assert emb.step == 2
    assert report.verify(path) == []


@pytest.mark.parametrize("step_on", ["backward", "optimizer"])
def test_a_rollback_behind_a_lookups_own_backward_stops_the_step_too(
    path: Path, step_on: str
) -> None:
    """Its gradients are staged by then."""
    with DiskEmbedding(50, 4, path=path, step_on=step_on) as emb:
        early = torch.ones(4, requires_grad=True)
        scaled = early * 2  # its backward comes after that of the lookup

        def go_back(grad: torch.Tensor) -> None:
            emb.rollback(0)

        scaled.register_hook(go_back)
        before = emb.weight[:]
        out = emb(torch.tensor([1, 2]))
        with pytest.raises(RuntimeError, match="went back to another commit"):
            (out * scaled).sum().backward()
        emb.optimizer.step()
        assert emb.step == 0
        assert torch.equal(emb.weight[:], before)


def test_a_graph_from_before_a_growth_steps_as_ever(path: Path) -> None:
    with (
        DiskEmbedding(50, 4, path=path) as emb,
        DiskEmbedding(50, 4, path=path.with_name("other.zarr")) as other,
    ):
        losses = [each(torch.tensor([1, 49])).square().sum() for each in (emb, other)]
        emb.resize(90)
        for loss in losses:
            loss.backward()
        assert emb.step == 1
        assert torch.equal(emb.weight[:50], other.weight[:])


def test_views_and_the_optimizer_held_across_a_rollback_show_what_is_there_now(
    path: Path, states: list[workload.State]
) -> None:
    with create(path, keep=9) as emb:
        go_on(emb, SEED, 6)
        views = {"weight": emb.weight, **emb.state}
        version, group = emb.version, emb.optimizer.param_groups[0]
        walks = [emb.weight.blocks(1000), emb.blocks(1000)]
        for walk in walks:
            next(walk)
        emb.rollback(2)
        for name, view in views.items():
            np.testing.assert_allclose(view[:].numpy(), states[2].fields[name], atol=1e-11)
        np.testing.assert_array_equal(version[:].numpy(), states[2].version)
        assert group["lr"] == states[2].lr
        for walk in walks:
            with pytest.raises(StoreError, match="went back .* while its rows were being walked"):
                list(walk)
        views["weight"][5] = torch.ones(workload.DIM)
        assert torch.equal(emb.weight[5], torch.ones(workload.DIM, dtype=torch.float64))


def test_a_rollback_while_rows_are_read_ahead_disturbs_neither(
    path: Path, states: list[workload.State]
) -> None:
    with create(path, keep=9) as emb:
        go_on(emb, SEED, 8)
        rounds = [workload.make_round(SEED, index) for index in (4, 5, 6, 4, 5, 6, 7)]
        emb.rollback(4)
        for turn, played in enumerate(
            ooc_embed.lookahead(rounds, emb, rows=lambda played: played.ids, depth=3)
        ):
            if turn == 3:
                emb.rollback(4)
            workload.play(emb, played)
        workload.assert_table_is(emb, states[8])


def test_gradients_that_wait_are_dropped_and_later_ones_are_not(tmp_path: Path) -> None:
    options: dict[str, Any] = {"init": "zeros", "dtype": torch.float64, "keep_commits": 3}
    ids = torch.tensor([1, 2])
    with DiskEmbedding(9, 2, path=tmp_path / "t", step_on="optimizer", **options) as emb:
        for _ in range(2):
            emb(ids).sum().backward()
            emb.optimizer.step()
            emb.commit()
        after_one = DiskEmbedding.open(emb.path, "r", commit=1).weight[:]
        emb(ids).sum().backward()
        emb.rollback(1)
        emb.optimizer.step()
        assert emb.step == 1
        assert torch.equal(emb.weight[:], after_one)
        emb(ids).sum().backward()
        emb.optimizer.step()
        assert emb.step == 2
    with DiskEmbedding.open(tmp_path / "t") as emb:
        assert emb.step_on == "optimizer"


def test_a_scaler_goes_on_behind_a_rollback(tmp_path: Path) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    options: dict[str, Any] = {"init": "zeros", "dtype": torch.float64}
    weights = []
    for goes_back in (False, True):
        with DiskEmbedding(9, 2, path=tmp_path / str(goes_back), keep_commits=3, **options) as emb:
            emb.grad_scaler = scaler

            def step(emb: DiskEmbedding = emb) -> None:
                scaler.scale(emb(torch.tensor([1, 2])).sum()).backward()
                scaler.update()

            step()
            number = emb.commit()
            if goes_back:
                step()
                emb.commit()
                emb.rollback(number)
                assert emb.grad_scaler is scaler
            step()
            assert emb.step == 2
            weights.append(emb.weight[:])
    assert torch.equal(*weights)


def _nothing(emb: DiskEmbedding) -> None:
    pass


def _rollback(emb: DiskEmbedding) -> None:
    emb.rollback()


@pytest.mark.parametrize("between", [_nothing, _rollback])
def test_memory_and_descriptors_do_not_grow_with_rollbacks(
    path: Path, between: Callable[[DiskEmbedding], None]
) -> None:
    with create(path, keep=9) as emb:
        go_on(emb, SEED, 6)

        def turn() -> tuple[int, int]:
            emb.rollback(3)
            go_on(emb, SEED, 6)
            between(emb)
            maps = Path("/proc/self/maps").read_text().count(str(path))
            return maps, len(os.listdir("/proc/self/fd"))

        turn()
        first = turn()
        for _ in range(4):
            assert turn() == first
