"""Tests of `emb.optimizer`: schedulers and hyper-parameters that change in training."""

import warnings

import pytest
import torch
from ram_reference import (
    RamTable,
    assert_stored_equal,
    train_both,
)
from torch import nn
from torch.optim import lr_scheduler

import ooc_embed

IDS = torch.tensor([1, 2, 2, 7])


def train(emb, steps: int = 1, grad: float = 1.0) -> None:
    for _ in range(steps):
        (emb(IDS) * grad).sum().backward()


def test_optimizer_is_a_torch_optimizer_with_the_hyperparameters(make_table):
    emb = make_table(optimizer=ooc_embed.SparseAdam(lr=0.3, betas=(0.8, 0.9), eps=1e-5))
    assert isinstance(emb.optimizer, torch.optim.Optimizer)
    (group,) = emb.optimizer.param_groups
    for values in (group, emb.optimizer.defaults):
        assert (values["lr"], tuple(values["betas"]), values["eps"]) == (0.3, (0.8, 0.9), 1e-5)


def test_step_of_the_optimizer_without_a_backward_does_nothing(make_table):
    emb = make_table()
    train(emb)
    rows = emb.weight[:]
    emb.optimizer.step()
    emb.optimizer.zero_grad()
    emb.optimizer.step()
    assert emb.step == 1
    assert torch.equal(emb.weight[:], rows)


def test_user_who_also_steps_the_optimizer_trains_once_a_backward(make_table):
    initial = torch.randn(10, 2)
    emb, ram = make_table(init=initial), RamTable(initial)
    for _ in range(4):
        emb.optimizer.zero_grad()
        train_both(emb, ram, lambda lookup: lookup(IDS).pow(2).sum())
        emb.optimizer.step()
    emb.flush()
    assert emb.step == 4
    assert_stored_equal(emb.path, ram, imported=True)


SCHEDULERS = {
    "StepLR": lambda optimizer: lr_scheduler.StepLR(optimizer, 2, gamma=0.5),
    "LambdaLR": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda t: 1 / (1 + t)),
    "ExponentialLR": lambda optimizer: lr_scheduler.ExponentialLR(optimizer, 0.7),
    "CosineAnnealingLR": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 8),
    "OneCycleLR": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.5, total_steps=9),
    "CyclicLR": lambda optimizer: lr_scheduler.CyclicLR(optimizer, 0.01, 0.1, 2),
    "SequentialLR": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.LinearLR(optimizer, 0.1), lr_scheduler.ExponentialLR(optimizer, 0.9)],
        [4],
    ),
}


@pytest.mark.parametrize("step_on", ["backward", "optimizer"])
@pytest.mark.parametrize("make", SCHEDULERS.values(), ids=SCHEDULERS)
def test_schedulers_drive_the_table_as_they_drive_torchs_without_a_warning(
    make_table, make, step_on
):
    initial = torch.randn(10, 2, dtype=torch.float64)
    rule = ooc_embed.SparseAdam(lr=0.1)
    emb = make_table(init=initial, dtype=torch.float64, optimizer=rule, step_on=step_on)
    ram = RamTable(initial, lr=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ours, theirs = make(emb.optimizer), make(ram.optimizer)
        for _ in range(8):
            train_both(emb, ram, lambda lookup: lookup(IDS).pow(2).sum())
            if step_on == "optimizer":
                emb.optimizer.step()
            ours.step()
            theirs.step()
            assert ours.get_last_lr() == theirs.get_last_lr()
    emb.flush()
    assert_stored_equal(emb.path, ram, imported=True)


def test_reduce_on_plateau_drives_the_table(make_table):
    emb = make_table(init="zeros", optimizer=ooc_embed.SparseAdam(lr=0.1))
    scheduler = lr_scheduler.ReduceLROnPlateau(emb.optimizer, patience=0)
    for _ in range(3):
        train(emb)
        scheduler.step(1.0)
    assert emb.optimizer.param_groups[0]["lr"] == pytest.approx(0.001)


def test_lr_of_one_a_half_and_nothing(make_table):
    """The last step has lr 0: the weight stays, its moments, version and the step go on."""
    rule = ooc_embed.SparseAdam(lr=0.1)
    emb = make_table(10, 1, init="zeros", dtype=torch.float64, optimizer=rule)
    ram = RamTable(torch.zeros(10, 1, dtype=torch.float64), lr=0.1)
    schedulers = [
        lr_scheduler.LambdaLR(optimizer, lambda t: (1.0, 0.5, 0.0, 0.0)[t])
        for optimizer in (emb.optimizer, ram.optimizer)
    ]
    weights = []
    for _ in range(3):
        train_both(emb, ram, lambda lookup: lookup(torch.tensor([1])).sum())
        weights.append(float(emb.weight[1]))
        for scheduler in schedulers:
            scheduler.step()
    assert weights == pytest.approx([-0.1, -0.15, -0.15], abs=1e-7)
    assert weights[1] == weights[2]
    emb.flush()
    assert emb.step == 3
    assert_stored_equal(emb.path, ram)


@pytest.mark.parametrize("shape", [(), (1,)], ids=str)
def test_lr_may_be_a_tensor_of_one_element(make_table, open_table, shape):
    initial = torch.randn(10, 2, dtype=torch.float64)
    lr = torch.full(shape, 0.1, dtype=torch.float64)
    emb = make_table(
        init=initial, dtype=torch.float64, optimizer=ooc_embed.SparseAdam(lr=lr.clone())
    )
    ram = RamTable(initial, lr=0.1)
    train_both(emb, ram, lambda lookup: lookup(IDS).pow(2).sum())
    emb.optimizer.param_groups[0]["lr"] = lr * 2
    ram.optimizer.param_groups[0]["lr"] = 0.2
    train_both(emb, ram, lambda lookup: lookup(IDS).pow(2).sum())
    emb.close(flush=True)
    assert_stored_equal(emb.path, ram, imported=True)
    assert float(open_table(emb.path).optimizer.param_groups[0]["lr"]) == pytest.approx(0.2)


def test_lr_changed_between_forward_and_backward_is_used(make_table):
    emb = make_table(init="zeros", optimizer=ooc_embed.SparseAdam(lr=0.1))
    loss = emb(IDS).sum()
    emb.optimizer.param_groups[0]["lr"] = 0.01
    loss.backward()
    torch.testing.assert_close(emb.weight[1], torch.full((2,), -0.01))


def test_hyperparameters_changed_in_training_step_as_in_torch(make_table):
    initial = torch.randn(10, 2, dtype=torch.float64)
    emb, ram = make_table(init=initial, dtype=torch.float64), RamTable(initial)
    for change in ({}, {"betas": (0.5, 0.9)}, {"eps": 1e-3}, {"lr": 0.5}, {"maximize": True}):
        for optimizer in (emb.optimizer, ram.optimizer):
            optimizer.param_groups[0].update(change)
        train_both(emb, ram, lambda lookup: lookup(IDS).pow(2).sum())
    emb.flush()
    assert_stored_equal(emb.path, ram, imported=True)


def test_scheduled_lr_is_there_after_reopening(make_table, open_table):
    emb = make_table(optimizer=ooc_embed.SparseAdam(lr=0.1))
    scheduler = lr_scheduler.ExponentialLR(emb.optimizer, 0.5)
    for _ in range(2):
        train(emb)
        scheduler.step()
    emb.close()
    again = open_table(emb.path)
    assert again.optimizer.param_groups[0]["lr"] == 0.025
    # Without initial_lr a scheduler that resumes would refuse.
    resumed = lr_scheduler.ExponentialLR(again.optimizer, 0.5, last_epoch=1)
    assert resumed.base_lrs == [0.1]


def test_a_schedule_that_sets_a_rate_as_it_is_made_resumes_behind_the_optimizers_state(
    make_table, open_table
):
    def schedule(optimizer):
        warmup = lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3)
        decay = lr_scheduler.CosineAnnealingLR(optimizer, 20)
        return lr_scheduler.SequentialLR(optimizer, [warmup, decay], [3])

    ram = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    expected, in_ram = [], schedule(ram)
    for _ in range(12):
        expected.append(ram.param_groups[0]["lr"])
        ram.step()
        in_ram.step()

    emb = make_table(optimizer=ooc_embed.SparseAdam(lr=0.1))
    rates, scheduler = [], schedule(emb.optimizer)
    for step in range(12):
        if step == 6:
            saved = emb.optimizer.state_dict(), scheduler.state_dict()
            emb.close()
            emb = open_table(emb.path)
            scheduler = schedule(emb.optimizer)
            emb.optimizer.load_state_dict(saved[0])
            scheduler.load_state_dict(saved[1])
        rates.append(emb.optimizer.param_groups[0]["lr"])
        train(emb)
        scheduler.step()
    assert rates == expected


def test_lr_that_alone_was_changed_is_committed(make_table, open_table):
    emb = make_table(optimizer=ooc_embed.SparseAdam(lr=0.1))
    train(emb)
    emb.commit()
    emb.optimizer.param_groups[0]["lr"] = 0.7
    emb.close()
    assert open_table(emb.path).optimizer.param_groups[0]["lr"] == 0.7


def test_commits_are_numbered_and_an_unneeded_one_is_skipped(make_table):
    emb = make_table()
    first = emb.commit()
    train(emb)
    second = emb.commit()
    assert second > first
    assert emb.commit() == second


def test_table_joins_other_modules_in_a_module_list(make_table):
    tables = nn.ModuleList([make_table(), make_table()])
    loss = sum(table(IDS).sum() for table in tables)
    loss.backward()
    assert [table.step for table in tables] == [1, 1]
    assert len(tables.state_dict()) == 2
