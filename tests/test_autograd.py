"""Tests of which backward trains a table, and how often; knows no failure and no second order."""

import threading
from collections.abc import Callable

import pytest
import torch
from ram_reference import (
    RamTable,
    assert_same,
    assert_stored_equal,
    assert_untrained,
    fingerprint,
    leaf,
    train_both,
    weighted_sum,
)
from torch import nn

from ooc_embed import passes

IDS = torch.tensor([1, 2, 2, 7])


# One backward is one step


def test_output_requires_grad_as_torchs_does(both):
    emb, ram = both
    assert emb(IDS).requires_grad
    assert ram(IDS).requires_grad
    with torch.no_grad():
        assert not emb(IDS).requires_grad


def test_lookups_through_different_depths_of_a_model_are_one_step(both):
    emb, ram = both
    layer = nn.Linear(2, 2, dtype=torch.float64)

    def loss_of(lookup):
        deep = layer(layer(lookup(IDS).tanh()).tanh())
        return deep.sum() + lookup(IDS[:2]).pow(2).sum() + lookup(torch.tensor(7)).prod()

    for _ in range(3):
        train_both(emb, ram, loss_of)
    assert emb.step == 3
    assert_same(emb, ram)


def test_one_output_used_many_times_is_one_step(both):
    emb, ram = both

    def loss_of(lookup):
        out = lookup(IDS)
        return (out * out.roll(1, 0)).sum() + out.exp().sum() + out[0, 0]

    train_both(emb, ram, loss_of)
    assert_same(emb, ram)


def test_lookup_that_the_loss_does_not_use_is_not_trained(both):
    emb, ram = both
    unused = emb(torch.tensor([5, 6])), ram(torch.tensor([5, 6]))
    train_both(emb, ram, weighted_sum(IDS, torch.randn(4, 2, dtype=torch.float64)))
    assert len(unused) == 2
    assert emb.version[:].tolist()[5:7] == [1, 1]
    assert_same(emb, ram)


def test_backward_that_does_not_reach_the_table_is_no_step(both):
    emb, ram = both
    for lookup in both:
        (lookup(IDS).detach() * leaf()).sum().backward()
    assert emb.step == ram.step == 0


def test_two_forwards_then_two_backwards_are_two_steps(both):
    emb, ram = both
    one, other = torch.tensor([1, 2, 3]), torch.tensor([3, 3, 4])
    for lookup in both:
        losses = [lookup(one).pow(2).sum(), lookup(other).pow(3).sum()]
        for loss in losses:
            loss.backward()
            if lookup is ram:
                ram.step_and_zero()
    assert emb.step == 2
    assert_same(emb, ram)


def test_backwards_in_another_order_than_the_forwards(both):
    emb, ram = both
    for lookup in both:
        losses = [lookup(IDS).pow(power).sum() for power in (2, 3, 4)]
        for loss in reversed(losses):
            loss.backward()
            if lookup is ram:
                ram.step_and_zero()
    assert emb.step == 3
    assert_same(emb, ram)


def test_two_tables_in_one_backward_step_once_each(make_table):
    pairs = []
    for rows in (10, 20):
        initial = torch.randn(rows, 2, dtype=torch.float64)
        pairs.append((make_table(rows, 2, init=initial, dtype=torch.float64), RamTable(initial)))

    def loss_of(first, second):
        return (first(IDS) * second(IDS + 9)).sum() + first(IDS[:1]).sum()

    for _ in range(3):
        loss_of(*(emb for emb, _ in pairs)).backward()
        loss_of(*(ram for _, ram in pairs)).backward()
        for _, ram in pairs:
            ram.step_and_zero()
    for emb, ram in pairs:
        assert emb.step == 3
        assert_same(emb, ram)


def test_backward_over_several_losses_is_one_step(both):
    emb, ram = both
    for lookup in both:
        losses = [lookup(IDS).sum(), lookup(IDS).pow(2).sum()]
        torch.autograd.backward(losses)
    ram.step_and_zero()
    assert emb.step == 1
    assert_same(emb, ram)


GRADIENTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sum": lambda out: out.sum(),
    "transposed": lambda out: (out.t() @ torch.arange(4.0, dtype=out.dtype)).sum(),
    "one column": lambda out: out[:, 1].pow(2).sum(),
    "one row": lambda out: out[2].sum(),
    "expanded": lambda out: out.unsqueeze(0).expand(3, 4, 2).sum(),
    "viewed": lambda out: out.view(2, 4).cumsum(0).sum(),
    "permuted": lambda out: out.t().contiguous().pow(2).sum(),
    "indexed": lambda out: out[[0, 0, 3]].sum(),
    "changed in place": lambda out: out.mul_(3).sum(),
}


@pytest.mark.parametrize("use", GRADIENTS.values(), ids=GRADIENTS)
def test_gradients_of_any_layout(both, use):
    emb, ram = both
    train_both(emb, ram, lambda lookup: use(lookup(IDS)))
    assert_same(emb, ram)


def test_hooks_on_the_output_see_and_change_its_gradient(both):
    emb, ram = both
    seen = []

    def loss_of(lookup):
        out = lookup(IDS)
        out.retain_grad()
        out.register_hook(lambda grad: grad * 2)
        seen.append(out)
        return out.pow(2).sum()

    train_both(emb, ram, loss_of)
    assert torch.equal(seen[0].grad, seen[1].grad)
    assert_same(emb, ram)


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")  # with torch's own, too
def test_hooks_on_the_module_see_and_change_what_they_do_on_torchs(both):
    emb, ram = both
    seen = {}

    def record(name, *what):
        def hook(module, *args):
            seen.setdefault(type(module), []).append((name, args[what[0]] if what else None))

        return hook

    for module in (emb, ram.embedding):
        module.register_forward_pre_hook(record("before"))
        module.register_forward_hook(lambda module, args, out: out.tanh())
        module.register_full_backward_pre_hook(lambda module, grads: (grads[0] * 3,))
        module.register_full_backward_hook(record("backward", 1))
    everywhere = torch.nn.modules.module
    handle = everywhere.register_module_forward_hook(record("after", 1))
    try:
        train_both(emb, ram, weighted_sum(IDS, torch.randn(4, 2, dtype=torch.float64)))
    finally:
        handle.remove()
    ours, torchs = seen[type(emb)], seen[nn.Embedding]
    assert [name for name, _ in ours] == ["before", "after", "backward"]
    assert [name for name, _ in torchs] == ["before", "after", "backward"]
    assert torch.equal(ours[1][1], torchs[1][1])
    assert torch.equal(ours[2][1][0], torchs[2][1][0])
    assert_same(emb, ram)


def test_backward_in_another_thread_trains(both):
    emb, ram = both
    loss = emb(IDS).pow(2).sum()
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()
    ram.train(lambda lookup: lookup(IDS).pow(2).sum())
    assert_same(emb, ram)


def test_threads_that_train_different_rows_lose_no_step(make_table):
    emb = make_table(4000, 2, chunk_rows=1024, cache_bytes=50 * 7 * 4, init="zeros")

    def train(first: int) -> None:
        for step in range(150):
            emb(torch.arange(first + step % 10, 4000, 40)).sum().backward()

    threads = [threading.Thread(target=train, args=(first,)) for first in (0, 10, 20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert emb.step == 450
    assert emb.version[:].tolist() == [15 * (row % 40 < 30) for row in range(4000)]
    # A row that was trained without its moments, or twice, would not have these: 15 ones.
    expected = (1 - 0.9**15) * (torch.arange(4000) % 40 < 30)
    torch.testing.assert_close(emb.state["exp_avg"][:][:, 0], expected.float())


def test_backward_under_no_grad_trains(both):
    emb, ram = both
    loss = emb(IDS).pow(2).sum()
    with torch.no_grad():
        loss.backward()
    ram.train(lambda lookup: lookup(IDS).pow(2).sum())
    assert_same(emb, ram)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_rows_first_seen_without_grad_are_trained_later(make_table, context):
    emb = make_table(dtype=torch.float64)
    with context():
        emb(IDS)
    ram = RamTable(emb.weight[:])
    for _ in range(2):
        train_both(emb, ram, lambda lookup: lookup(IDS).pow(2).sum())
        with context():
            torch.testing.assert_close(emb(IDS), ram(IDS), rtol=1e-12, atol=1e-12)
    emb.flush()
    assert_stored_equal(emb.path, ram)


def test_backward_of_no_ids_is_a_step_without_rows(both):
    emb, ram = both
    empty = torch.zeros(0, dtype=torch.int64)
    train_both(emb, ram, lambda lookup: lookup(empty).sum())
    assert emb.step == ram.step == 1
    train_both(emb, ram, lambda lookup: lookup(IDS).sum())
    assert_same(emb, ram)


TRANSFORMS: dict[str, Callable[..., object]] = {
    "vmap": lambda emb, x: torch.func.vmap(emb)(IDS),
    "grad": lambda emb, x: torch.func.grad(lambda x: (emb(IDS) * x).sum())(x),
    "jacrev": lambda emb, x: torch.func.jacrev(lambda x: emb(IDS) * x)(x),
    "vjp": lambda emb, x: torch.func.vjp(lambda x: emb(IDS) * x, x),
}


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_functional_transforms_are_an_error_that_names_the_layer_and_the_way(both, transform):
    emb, ram = both
    before = fingerprint(emb.path)
    with pytest.raises(RuntimeError, match=r"DiskEmbedding.*torch\.func"):
        transform(emb, leaf().detach())
    assert_untrained(emb, before)
    rows = emb(IDS)
    x = leaf().detach()
    found = torch.func.grad(lambda x: (rows.detach() * x).sum())(x)
    assert torch.equal(found, ram.weight[IDS])


def test_a_functional_call_outside_any_transform_trains(both):
    emb, ram = both
    torch.func.functional_call(emb, dict(emb.named_parameters()), IDS).pow(2).sum().backward()
    ram.train(lambda lookup: lookup(IDS).pow(2).sum())
    assert_same(emb, ram)


# A graph used twice


def test_second_backward_without_retain_graph_is_torchs_own_error(both):
    emb, ram = both
    for lookup in both:
        out = lookup(IDS)
        out.backward(torch.ones_like(out))
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            out.backward(torch.ones_like(out))
    ram.step_and_zero()
    assert emb.step == 1
    assert_same(emb, ram)


def test_retained_graph_gives_two_steps_each_of_its_own_gradient(both):
    emb, ram = both
    for lookup in both:
        out = lookup(IDS)
        for scale in (1.0, 3.0):
            out.backward(torch.full_like(out, scale), retain_graph=True)
            if lookup is ram:
                ram.step_and_zero()
    assert emb.step == 2
    assert_same(emb, ram)


def test_part_of_a_graph_used_by_two_backwards(both):
    emb, ram = both
    for lookup in both:
        out = lookup(IDS)
        out[0].sum().backward(retain_graph=True)
        if lookup is ram:
            ram.step_and_zero()
        out[1:].pow(2).sum().backward()
        if lookup is ram:
            ram.step_and_zero()
    assert_same(emb, ram)


def test_a_pass_that_is_over_leaves_no_python_call_inside_autograd_and_no_memory(make_table):
    emb = make_table()
    for _ in range(5):
        emb(torch.tensor([1, 2])).sum().backward()
    # One entry at most: that of the last pass, which is dead.
    assert len(passes._passes) <= 1
    assert all(entry() is None and entry.__callback__ is None for entry in passes._passes.values())
