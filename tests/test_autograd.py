"""Tests of the table's place in autograd: which backward trains, how often, and what a failed one leaves."""

import gc
import threading
import weakref
from collections.abc import Callable

import pytest
import torch
from ram_reference import (
    RamTable,
    assert_stored_equal,
    fingerprint,
    train_both,
    weighted_sum,
)
from torch import nn
from torch.utils.checkpoint import checkpoint

import ooc_embed

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


@pytest.fixture
def both(make_table):
    """A float64 table and torch's own in RAM with the same initial rows."""
    initial = torch.randn(10, 2, dtype=torch.float64)
    emb = make_table(
        init=initial, dtype=torch.float64, optimizer=ooc_embed.SparseAdam(lr=0.1), chunk_rows=1024
    )
    return emb, RamTable(initial, lr=0.1)


def assert_same(emb, ram) -> None:
    emb.flush()
    assert emb.step == ram.step
    assert_stored_equal(emb.path, ram, imported=True)


def assert_untrained(emb, before: dict) -> None:
    assert emb.step == 0
    assert not emb.state["exp_avg"][:].any()
    assert fingerprint(emb.path) == before


def x_of(shape=(4, 2)) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


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
        (lookup(IDS).detach() * x_of()).sum().backward()
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


@pytest.mark.parametrize("transform", ["vmap", "grad"])
def test_functional_transforms_are_an_error(both, transform):
    emb, _ = both
    before = fingerprint(emb.path)
    with pytest.raises((RuntimeError, NotImplementedError)):
        if transform == "vmap":
            torch.func.vmap(emb)(IDS)
        else:
            torch.func.grad(lambda x: (emb(IDS) * x).sum())(x_of().detach())
    assert_untrained(emb, before)


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
    x = x_of()
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
    x = x_of()
    try:
        torch.autograd.grad((emb(IDS) * x).sum(), [x, *emb.parameters()], allow_unused=True)
    except RuntimeError as error:
        assert "table" in str(error) or "DiskEmbedding" in str(error)
    assert_untrained(emb, before)


def test_backward_into_the_table_alone_trains_it(both):
    emb, ram = both
    x = x_of()
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
    x = x_of()
    train_both(emb, ram, lambda lookup: penalised_loss(lookup, x))
    assert emb.step == 1
    assert_same(emb, ram)


def test_gradient_penalty_has_the_gradient_that_was_worked_out(make_table):
    """Rows of ones and twos, x of ones and twos: d/do of (o x)^2 + (2 o^2 x)^2 = 2 o x^2 + 16 o^3 x^2."""
    initial = torch.tensor([[1.0, 2.0]], dtype=torch.float64)
    emb = make_table(1, 2, init=initial, dtype=torch.float64)
    x = torch.tensor([[1.0, 2.0]], dtype=torch.float64, requires_grad=True)
    out = emb(torch.tensor([0]))
    loss = (out * x).pow(2).sum()
    (grad,) = torch.autograd.grad(loss, x, create_graph=True)
    (loss + grad.pow(2).sum()).backward()
    o, x = initial, x.detach()
    expected = 2 * o * x**2 + 16 * o**3 * x**2
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


# A backward that fails


@pytest.mark.parametrize(
    "error", [RuntimeError("from afar"), OSError(28, "from afar"), KeyError(1)]
)
@pytest.mark.parametrize("when", ["after the table's node", "before the table's node"])
def test_failed_backward_leaves_nothing_and_the_next_trains(both, when, error):
    emb, ram = both
    before = fingerprint(emb.path)
    # The engine runs nodes made later first.
    if when == "after the table's node":
        side = Raise.apply(x_of(), error)
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
    side = Raise.apply(x_of(), KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        (emb(IDS) * side).sum().backward()
    assert emb.step == 0
    train_both(emb, ram, lambda lookup: lookup(IDS).pow(2).sum())
    assert_same(emb, ram)


def test_failed_backwards_in_a_row_leave_nothing(both):
    emb, ram = both
    for _ in range(5):
        with pytest.raises(RuntimeError, match="again"):
            (emb(IDS) * Raise.apply(x_of(), RuntimeError("again"))).sum().backward()
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


# Freezing


def test_frozen_table_gives_outputs_without_grad_and_does_not_train(both):
    emb, ram = both
    before = fingerprint(emb.path)
    emb.requires_grad_(False)
    assert not emb(IDS).requires_grad
    layer = nn.Linear(2, 1, dtype=torch.float64)
    layer(emb(IDS)).sum().backward()
    assert layer.weight.grad.abs().sum() > 0
    assert_untrained(emb, before)
    emb.requires_grad_(True)
    assert emb(IDS).requires_grad
    train_both(emb, ram, lambda lookup: lookup(IDS).pow(2).sum())
    assert_same(emb, ram)


def test_table_frozen_with_its_model_does_not_train(both):
    emb, _ = both
    model = nn.Sequential(emb, nn.Linear(2, 1, dtype=torch.float64)).requires_grad_(False)
    out = model(IDS)
    assert not out.requires_grad
    with pytest.raises(RuntimeError, match="does not require grad"):
        out.sum().backward()
    assert emb.step == 0


def test_one_frozen_table_beside_one_that_trains(make_table):
    frozen, trained = make_table(init="zeros"), make_table(init="zeros")
    frozen.requires_grad_(False)
    (frozen(IDS) + trained(IDS)).sum().backward()
    assert (frozen.step, trained.step) == (0, 1)
    assert not frozen.weight[:].any()


# The parameter that autograd holds


def test_model_of_a_table_alone_gives_optimizers_and_clipping_a_harmless_parameter(both):
    emb, ram = both
    dense = torch.optim.AdamW(emb.parameters(), lr=1.0, weight_decay=1.0)
    for _ in range(2):
        train_both(emb, ram, lambda lookup: lookup(IDS).pow(2).sum())
        nn.utils.clip_grad_norm_(emb.parameters(), 1.0)
        dense.step()
        dense.zero_grad()
    assert_same(emb, ram)


@pytest.mark.parametrize("find_unused_parameters", [False, True])
def test_data_parallel_over_one_process_trains_as_without(both, tmp_path, find_unused_parameters):
    emb, ram = both
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_gloo_available()):
        pytest.skip("this torch has no gloo")
    distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'group'}", rank=0, world_size=1
    )
    try:
        model = nn.Sequential(emb, nn.Linear(2, 1, dtype=torch.float64))
        reference = nn.Linear(2, 1, dtype=torch.float64)
        reference.load_state_dict(model[1].state_dict())
        parallel = nn.parallel.DistributedDataParallel(
            model, find_unused_parameters=find_unused_parameters
        )
        for _ in range(4):
            parallel(IDS).pow(2).sum().backward()
            ram.train(lambda lookup: reference(lookup(IDS)).pow(2).sum())
    finally:
        distributed.destroy_process_group()
    assert emb.step == 4
    assert_same(emb, ram)


# Checkpointing


def region(lookup, ids):
    return lookup(ids).tanh() * lookup(ids + 1)


@pytest.mark.parametrize("regions", [1, 2])
def test_checkpointing_without_reentry_trains_as_without_checkpoints(both, regions):
    emb, ram = both
    for _ in range(3):
        outs = [checkpoint(region, emb, IDS + n, use_reentrant=False) for n in range(regions)]
        sum(out.sum() for out in outs).backward()
        ram.train(lambda lookup: sum(region(lookup, IDS + n).sum() for n in range(regions)))
    assert emb.step == 3
    assert_same(emb, ram)


def test_reentrant_checkpointing_is_refused_and_the_next_backward_trains(both):
    emb, ram = both
    before = fingerprint(emb.path)
    loss = checkpoint(lambda x: region(emb, IDS) * x, x_of(), use_reentrant=True).sum()
    with pytest.raises(RuntimeError, match="use_reentrant=False"):
        loss.backward()
    assert_untrained(emb, before)
    train_both(emb, ram, lambda lookup: region(lookup, IDS).sum())
    assert_same(emb, ram)


# Outputs that are dropped


def resident_bytes() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * 4096


def test_dropped_outputs_leave_no_memory_behind(make_table):
    emb = make_table(1000, 64)
    ids = torch.randint(0, 1000, (512,))
    for _ in range(50):
        emb(ids)
    before = resident_bytes()
    for _ in range(2000):  # 128 KiB each, 250 MiB if they stayed
        emb(ids)
    assert resident_bytes() - before < 40e6


def test_dropped_outputs_free_themselves_and_their_ids(make_table):
    emb = make_table()
    ids = torch.tensor([1, 2])
    out = emb(ids)
    held = weakref.ref(out), weakref.ref(ids)
    del out, ids
    gc.collect()
    assert [reference() for reference in held] == [None, None]


def test_backward_trains_its_own_batch_alone_after_dropped_forwards(both):
    emb, ram = both
    for _ in range(10):
        emb(torch.arange(10))
    train_both(emb, ram, lambda lookup: lookup(IDS).pow(2).sum())
    assert_same(emb, ram)


def test_dropped_table_is_freed_committed_and_unlocked(make_table, open_table, stores):
    emb = make_table()
    path = emb.path
    emb(IDS).sum().backward()
    out = emb(IDS)
    reference = weakref.ref(emb)
    stores.tables.clear()
    del emb, out
    gc.collect()
    assert reference() is None
    assert open_table(path).step == 1
