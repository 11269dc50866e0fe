"""Tests of the table as what autograd holds of it: frozen, wrapped, checkpointed, dropped."""

import gc
import inspect
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from ram_reference import (
    assert_same,
    assert_untrained,
    fingerprint,
    leaf,
    train_both,
)
from torch import nn
from torch.utils.checkpoint import checkpoint

IDS = torch.tensor([1, 2, 2, 7])

# Those that step from one gradient of any shape: Muon takes matrices only, LBFGS a closure.
OPTIMIZERS = [
    "ASGD",
    "Adadelta",
    "Adafactor",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "NAdam",
    "RAdam",
    "RMSprop",
    "Rprop",
    "SGD",
]


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


def test_table_frozen_between_forward_and_backward_is_not_trained_as_in_torch(both):
    emb, ram = both
    for lookup, module in ((emb, emb), (ram, ram.embedding)):
        x = leaf()
        loss = (lookup(IDS) * x).sum()
        module.requires_grad_(False)
        loss.backward()
        assert torch.equal(x.grad, ram.initial[IDS])
        module.requires_grad_(True)
    assert ram.embedding.weight.grad is None
    assert emb.step == 0
    train_both(emb, ram, lambda lookup: lookup(IDS).pow(2).sum())
    assert_same(emb, ram)


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


@pytest.mark.parametrize("empty_grad", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_of_the_whole_model_leaves_the_table_to_its_own(both, name, empty_grad):
    """Empty gradients are what DistributedDataParallel leaves."""
    if empty_grad and name == "Adafactor":
        pytest.skip("it divides by the size of each gradient")
    emb, ram = both
    layer = nn.Linear(2, 3, bias=False, dtype=torch.float64)
    reference = nn.Linear(2, 3, bias=False, dtype=torch.float64)
    reference.load_state_dict(layer.state_dict())
    make = getattr(torch.optim, name)
    decay = {"weight_decay": 1.0} if "weight_decay" in inspect.signature(make).parameters else {}
    pairs = [(emb, layer), (ram, reference)]
    optimizers = [
        make([*emb.parameters(), *layer.parameters()], **decay),
        make(reference.parameters(), **decay),
    ]
    for _ in range(2):
        for (lookup, head), optimizer in zip(pairs, optimizers, strict=True):
            head(lookup(IDS)).pow(2).sum().backward()
            if empty_grad and lookup is emb:
                emb.anchor.grad = torch.zeros_like(emb.anchor)
            optimizer.step()
            optimizer.zero_grad()
        ram.step_and_zero()
    assert torch.equal(layer.weight, reference.weight)
    assert_same(emb, ram)


ALONE = {
    "Adam": torch.optim.Adam,
    "Adam, fused": partial(torch.optim.Adam, fused=True),
    "Adam, foreach": partial(torch.optim.Adam, foreach=True),
    "SGD": partial(torch.optim.SGD, momentum=0.9, weight_decay=0.5),
    "SparseAdam": torch.optim.SparseAdam,
    "Adagrad": torch.optim.Adagrad,
    "RMSprop": torch.optim.RMSprop,
}


@pytest.mark.parametrize("optimizer", ALONE.values(), ids=ALONE)
def test_loop_around_a_model_of_a_table_alone_runs_with_any_optimizer(both, optimizer):
    emb, ram = both
    model = nn.Sequential(emb)
    dense = optimizer(model.parameters(), lr=1.0)
    for _ in range(2):
        dense.zero_grad()
        train_both(model, ram, lambda lookup: lookup(IDS).pow(2).sum())
        assert nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True) == 0
        dense.step()
        dense.load_state_dict(dense.state_dict())
    (group,) = dense.state_dict()["param_groups"]
    assert group["params"] == [0]
    assert emb.step == 2
    assert_same(emb, ram)


def test_penalty_on_all_parameters_and_weights_set_by_hand_leave_the_table_alone(both):
    emb, ram = both
    model = nn.Sequential(emb, nn.Linear(2, 1, dtype=torch.float64))
    vector = nn.utils.parameters_to_vector(model.parameters())
    nn.utils.vector_to_parameters(torch.ones_like(vector), model.parameters())
    assert vector.shape == (3,)
    penalty = sum(parameter.pow(2).sum() for parameter in model.parameters())
    (model(IDS).sum() + penalty).backward()
    # d/dw (sum of the rows . w + w . w) at w = 1
    torch.testing.assert_close(model[1].weight.grad[0], ram.initial[IDS].sum(0) + 2)
    ram.train(lambda lookup: lookup(IDS).sum())  # times the weights, which are 1
    assert_same(emb, ram)


def test_optimizer_step_in_each_parameters_own_hook_goes_beside_the_tables(both):
    """As in torch's tutorial on fusing the optimizer's step into backward."""
    emb, ram = both
    model = nn.Sequential(emb, nn.Linear(2, 1, dtype=torch.float64))
    before = model[1].weight.detach().clone()
    seen = []
    for parameter in model.parameters():
        dense = torch.optim.SGD([parameter], lr=0.5)

        def step_now(parameter: nn.Parameter, dense: torch.optim.Optimizer = dense) -> None:
            seen.append(parameter.numel())
            dense.step()
            dense.zero_grad()

        parameter.register_post_accumulate_grad_hook(step_now)
    model(IDS).sum().backward()
    assert sorted(seen) == [0, 1, 2]
    torch.testing.assert_close(model[1].weight[0], before[0] - 0.5 * ram.initial[IDS].sum(0))
    ram.train(lambda lookup: (lookup(IDS) * before).sum())
    assert_same(emb, ram)


def test_two_models_over_one_table_train_it_together_and_apart(both):
    emb, ram = both
    heads = [nn.Linear(2, width, dtype=torch.float64) for width in (1, 3)]
    models = [nn.Sequential(emb, head) for head in heads]
    sum(model(IDS).pow(2).sum() for model in models).backward()
    assert emb.step == 1
    for model in models:
        model(IDS).sum().backward()
    ram.train(lambda lookup: sum(head(lookup(IDS)).pow(2).sum() for head in heads))
    for head in heads:
        ram.train(lambda lookup, head=head: head(lookup(IDS)).sum())
    assert emb.step == 3
    assert_same(emb, ram)


# Parameters given to a call


def given(model: nn.Module, make: Callable[[torch.Tensor], torch.Tensor], ids: torch.Tensor):
    """Call with other parameters, as ensembles and meta-learning do."""
    parameters = {name: make(parameter) for name, parameter in model.named_parameters()}
    return torch.func.functional_call(model, parameters, (ids,))


@pytest.mark.parametrize(
    "make",
    [lambda p: p, lambda p: p.detach().clone().requires_grad_(), lambda p: p * 1],
    ids=["own", "copied", "computed"],
)
def test_functional_call_trains_the_table_once_a_backward(both, make):
    emb, ram = both
    model = nn.Sequential(emb, nn.Linear(2, 1, dtype=torch.float64))
    for _ in range(3):
        given(model, make, IDS).pow(2).sum().backward()
        model(IDS).pow(2).sum().backward()
        for _ in range(2):
            ram.train(lambda lookup: model[1](lookup(IDS)).pow(2).sum())
    assert emb.step == 6
    assert_same(emb, ram)


def test_functional_call_with_parameters_without_grad_does_not_train(both):
    emb, ram = both
    out = given(nn.Sequential(emb), torch.Tensor.detach, IDS)
    assert not out.requires_grad
    assert torch.equal(out, ram.initial[IDS])


def test_functional_calls_between_others_leave_no_hook_behind(make_table):
    emb = make_table()
    for _ in range(5):
        given(emb, lambda p: p.detach().clone().requires_grad_(), IDS).sum().backward()
        emb(IDS).sum().backward()
    assert emb.step == 10
    assert len(emb.anchor._post_accumulate_grad_hooks) == 1


# Several processes


@pytest.fixture
def process_group(tmp_path):
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_gloo_available()):
        pytest.skip("this torch has no gloo")
    distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'group'}", rank=0, world_size=1
    )
    yield
    distributed.destroy_process_group()


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("find_unused_parameters", [False, True])
def test_data_parallel_over_one_process_trains_as_without(both, find_unused_parameters):
    emb, ram = both
    model = nn.Sequential(emb, nn.Linear(2, 1, dtype=torch.float64))
    reference = nn.Linear(2, 1, dtype=torch.float64)
    reference.load_state_dict(model[1].state_dict())
    parallel = nn.parallel.DistributedDataParallel(
        model, find_unused_parameters=find_unused_parameters
    )
    for _ in range(4):
        parallel(IDS).pow(2).sum().backward()
        ram.train(lambda lookup: reference(lookup(IDS)).pow(2).sum())
    assert emb.step == 4
    assert_same(emb, ram)


@pytest.mark.usefixtures("process_group")
def test_data_parallel_over_a_table_alone_trains_it_also_without_synchronizing(both):
    emb, ram = both
    parallel = nn.parallel.DistributedDataParallel(emb)
    parallel(IDS).pow(2).sum().backward()
    with parallel.no_sync():
        (parallel(IDS) * parallel(IDS + 1)).sum().backward()
    ram.train(lambda lookup: lookup(IDS).pow(2).sum())
    ram.train(lambda lookup: (lookup(IDS) * lookup(IDS + 1)).sum())
    assert emb.step == 2
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
    loss = checkpoint(lambda x: region(emb, IDS) * x, leaf(), use_reentrant=True).sum()
    with pytest.raises(RuntimeError, match="use_reentrant=False"):
        loss.backward()
    assert_untrained(emb, before)
    train_both(emb, ram, lambda lookup: region(lookup, IDS).sum())
    assert_same(emb, ram)


# Outputs that are dropped


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


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
