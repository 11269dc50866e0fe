"""Tests that gradients asked for without training, and second ones, leave the table right."""

import pytest
import torch
from ram_reference import (
    assert_same,
    assert_untrained,
    fingerprint,
    leaf,
    train_both,
)

IDS = torch.tensor([1, 2, 2, 7])


# Gradients asked for without training


def saliency(emb, x):
    out = emb(IDS)
    return torch.autograd.grad((out * x).sum(), out)


def grad_of_other_leaf(emb, x):
    return torch.autograd.grad((emb(IDS) * x).sum(), x)


def backward_into_other_leaf(emb, x):
    (emb(IDS) * x).sum().backward(inputs=[x])
    return (x.grad,)


def backward_into_output(emb, x):
    out = emb(IDS)
    out.retain_grad()
    (out * x).sum().backward(inputs=[out])
    return (out.grad,)


def grad_with_graph(emb, x):
    out = emb(IDS)
    return torch.autograd.grad((out * x).pow(2).sum(), (out, x), create_graph=True)


def grad_of_leaf_behind_a_second_lookup(emb, x):
    out = emb(IDS)
    return torch.autograd.grad(((out + emb(IDS)) * x).sum(), (x, out))


@pytest.mark.parametrize(
    "ask",
    [
        saliency,
        grad_of_other_leaf,
        backward_into_other_leaf,
        backward_into_output,
        grad_with_graph,
        grad_of_leaf_behind_a_second_lookup,
    ],
)
def test_asking_for_other_gradients_does_not_train_the_table(both, ask):
    emb, ram = both
    before = fingerprint(emb.path)
    x = leaf()
    other_x = x.detach().clone().requires_grad_()
    for grad, expected in zip(ask(emb, x), ask(ram, other_x), strict=True):
        assert torch.equal(grad, expected)
    assert_untrained(emb, before)
    ram.optimizer.zero_grad()
    train_both(emb, ram, lambda lookup: lookup(IDS).pow(2).sum())
    assert_same(emb, ram)


def test_asking_for_the_gradient_of_all_parameters_does_not_train(both):
    """The table's parameter is among them; its gradient is not a thing that can be given."""
    emb, _ = both
    before = fingerprint(emb.path)
    x = leaf()
    try:
        torch.autograd.grad((emb(IDS) * x).sum(), [x, *emb.parameters()], allow_unused=True)
    except RuntimeError as error:
        assert "table" in str(error) or "DiskEmbedding" in str(error)
    assert_untrained(emb, before)


def test_backward_into_the_table_alone_trains_it(both):
    emb, ram = both
    x = leaf()
    (emb(IDS) * x).sum().backward(inputs=list(emb.parameters()))
    (ram(IDS) * x).sum().backward(inputs=[ram.embedding.weight])
    ram.step_and_zero()
    assert x.grad is None
    if emb.step:  # a pass that accumulates into the parameter trains; else nothing may have moved
        assert_same(emb, ram)
    else:
        assert not emb.state["exp_avg"][:].any()


# Second order


def penalised_loss(lookup, x):
    out = lookup(IDS)
    loss = (out * x).pow(2).sum()
    (grad,) = torch.autograd.grad(loss, x, create_graph=True)
    return loss + grad.pow(2).sum()


def test_gradient_penalty_on_another_leaf_trains_once_with_the_whole_gradient(both):
    emb, ram = both
    x = leaf()
    train_both(emb, ram, lambda lookup: penalised_loss(lookup, x))
    assert emb.step == 1
    assert_same(emb, ram)


def test_gradient_penalty_has_the_gradient_that_was_worked_out(make_table):
    """The derivative by o of (o x)^2 + (2 o^2 x)^2 is 2 o x^2 + 16 o^3 x^2."""
    initial = torch.tensor([[2.0, 3.0]], dtype=torch.float64)
    emb = make_table(1, 2, init=initial, dtype=torch.float64)
    x = torch.ones(1, 2, dtype=torch.float64, requires_grad=True)
    out = emb(torch.tensor([0]))
    loss = (out * x).pow(2).sum()
    (grad,) = torch.autograd.grad(loss, x, create_graph=True)
    (loss + grad.pow(2).sum()).backward()
    expected = torch.tensor([[132.0, 438.0]], dtype=torch.float64)
    assert emb.step == 1
    torch.testing.assert_close(emb.state["exp_avg"][:], 0.1 * expected, rtol=1e-12, atol=1e-12)


def test_gradient_penalty_on_the_output_trains_once(both):
    emb, ram = both

    def loss_of(lookup):
        out = lookup(IDS)
        loss = out.pow(3).sum()
        (grad,) = torch.autograd.grad(loss, out, create_graph=True)
        return loss + grad.norm()

    train_both(emb, ram, loss_of)
    assert emb.step == 1
    assert_same(emb, ram)


def test_second_derivative_of_the_tables_own_gradient_is_an_error(both):
    emb, ram = both
    before = fingerprint(emb.path)
    with pytest.raises(RuntimeError, match=r"create_graph|second|twice"):
        emb(IDS).pow(2).sum().backward(create_graph=True)
    assert_untrained(emb, before)
    train_both(emb, ram, lambda lookup: lookup(IDS).pow(2).sum())
    assert_same(emb, ram)


def test_gradient_of_the_table_with_a_graph_is_an_error(both):
    emb, _ = both
    before = fingerprint(emb.path)
    with pytest.raises(RuntimeError, match=r"create_graph|second|twice|gradient"):
        torch.autograd.grad(
            emb(IDS).pow(2).sum(), list(emb.parameters()), create_graph=True, allow_unused=False
        )
    assert_untrained(emb, before)
