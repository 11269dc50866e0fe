"""Tests that a backward that fails leaves nothing behind, and that the next one trains."""

import signal

import pytest
import torch
from ram_reference import (
    RamTable,
    assert_same,
    assert_untrained,
    fingerprint,
    leaf,
    train_both,
)

IDS = torch.tensor([1, 2, 2, 7])


class Raise(torch.autograd.Function):
    """The identity, whose backward raises what it was given."""

    @staticmethod
    def forward(ctx, x, error):
        ctx.error = error
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise ctx.error


@pytest.mark.parametrize(
    "error", [RuntimeError("from afar"), OSError(28, "from afar"), KeyError(1)]
)
@pytest.mark.parametrize("when", ["after the table's node", "before the table's node"])
def test_failed_backward_leaves_nothing_and_the_next_trains(both, when, error):
    emb, ram = both
    before = fingerprint(emb.path)
    # The engine runs nodes made later first.
    if when == "after the table's node":
        side = Raise.apply(leaf(), error)
        loss = (emb(IDS) * side).sum()
    else:
        loss = Raise.apply(emb(IDS), error).sum()
    with pytest.raises(type(error)):
        loss.backward()
    assert_untrained(emb, before)
    del loss
    train_both(emb, ram, lambda lookup: lookup(torch.tensor([4, 2])).pow(2).sum())
    assert emb.step == 1
    assert_same(emb, ram)


def test_interrupt_in_backward_leaves_nothing_and_the_next_trains(both):
    emb, ram = both
    side = Raise.apply(leaf(), KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        (emb(IDS) * side).sum().backward()
    assert emb.step == 0
    train_both(emb, ram, lambda lookup: lookup(IDS).pow(2).sum())
    assert_same(emb, ram)


def test_ctrl_c_between_the_steps_of_two_tables_leaves_no_half_of_the_pass(make_table):
    pairs = []
    for _ in range(2):
        initial = torch.randn(10, 2, dtype=torch.float64)
        pairs.append((make_table(init=initial, dtype=torch.float64), RamTable(initial)))
    for emb, _ in pairs:
        emb.optimizer.register_step_post_hook(lambda *_: signal.raise_signal(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        (pairs[0][0](IDS) * pairs[1][0](IDS)).sum().backward()
    steps = [emb.step for emb, _ in pairs]
    assert steps in ([0, 0], [1, 1])
    if steps == [1, 1]:
        (pairs[0][1](IDS) * pairs[1][1](IDS)).sum().backward()
        for emb, ram in pairs:
            ram.step_and_zero()
            assert_same(emb, ram)


def test_failed_backwards_in_a_row_leave_nothing(both):
    emb, ram = both
    for _ in range(5):
        with pytest.raises(RuntimeError, match="again"):
            (emb(IDS) * Raise.apply(leaf(), RuntimeError("again"))).sum().backward()
        train_both(emb, ram, lambda lookup: lookup(IDS).pow(2).sum())
    assert emb.step == 5
    assert_same(emb, ram)


def test_gradient_that_is_not_finite_in_one_table_steps_neither(make_table):
    pairs = []
    for _ in range(2):
        initial = torch.randn(10, 2, dtype=torch.float64)
        pairs.append((make_table(init=initial, dtype=torch.float64), RamTable(initial)))
    for bad in (0, 1):
        outs = [emb(IDS) for emb, _ in pairs]
        with pytest.raises((RuntimeError, ArithmeticError), match=r"(?i)finite|nan"):
            (outs[bad] * float("nan") + outs[1 - bad]).sum().backward()
        assert [emb.step for emb, _ in pairs] == [0, 0]
        assert not any(emb.state["exp_avg"][:].any() for emb, _ in pairs)
    for emb, ram in pairs:
        train_both(emb, ram, lambda lookup: lookup(IDS).pow(2).sum())
        assert_same(emb, ram)
