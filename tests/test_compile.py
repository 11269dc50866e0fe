"""Tests that a compiled model trains its table as an uncompiled one does, or says why it cannot."""

import shutil

import pytest
import torch
from ram_reference import RamTable, assert_stored_equal
from torch import nn
from torch.utils.checkpoint import checkpoint

import ooc_embed

COMPILER = any(map(shutil.which, ("c++", "g++", "clang++")))
BACKENDS = [
    "eager",
    "aot_eager",
    pytest.param(
        "inductor",
        marks=pytest.mark.skipif(not COMPILER, reason="inductor needs a C++ compiler"),
    ),
]

pytestmark = [
    # torch's own: modules that the compiler loads, and its look at what a graph break gives.
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch"),
    pytest.mark.filterwarnings("ignore::FutureWarning:torch"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]


class Model(nn.Module):
    def __init__(self, lookup, head: nn.Linear) -> None:
        super().__init__()
        self.lookup = lookup
        self.head = head

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.lookup(ids).tanh()).pow(2).sum()


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.fixture
def setup(make_table):
    """A model over a table, and the same over torch's."""
    initial = torch.randn(10, 4, dtype=torch.float64)
    emb = make_table(
        10, 4, init=initial, dtype=torch.float64, optimizer=ooc_embed.SparseAdam(lr=0.1)
    )
    ram = RamTable(initial, lr=0.1)
    head = nn.Linear(4, 3, dtype=torch.float64)
    return Model(emb, head), Model(ram, head), emb, ram


def batches(count: int = 4) -> list[torch.Tensor]:
    return [torch.randint(0, 10, (6,)) for _ in range(count)]


def check(emb, ram, steps: int) -> None:
    emb.flush()
    assert emb.step == ram.step == steps
    assert_stored_equal(emb.path, ram, imported=True)


@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled_model_reads_fresh_rows_and_steps_as_often_as_uncompiled(setup, backend):
    model, reference, emb, ram = setup
    compiled = torch.compile(model, backend=backend)
    for ids in batches():
        loss, expected = compiled(ids), reference(ids)
        torch.testing.assert_close(loss, expected, rtol=1e-10, atol=1e-10)
        loss.backward()
        expected.backward()
        ram.step_and_zero()
    check(emb, ram, 4)


@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled_training_step_trains(setup, backend):
    model, reference, emb, ram = setup

    @torch.compile(backend=backend)
    def train(ids: torch.Tensor) -> torch.Tensor:
        loss = model(ids)
        loss.backward()
        return loss.detach()

    for ids in batches():
        loss, expected = train(ids), reference(ids)
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-10, atol=1e-10)
        expected.backward()
        ram.step_and_zero()
    check(emb, ram, 4)


def test_compiled_model_with_checkpointing_under_autocast_trains_as_torchs(make_table):
    initial = torch.randn(10, 4)
    emb, ram = make_table(10, 4, init=initial), RamTable(initial)
    heads = nn.Linear(4, 3), nn.Linear(4, 3)
    heads[1].load_state_dict(heads[0].state_dict())
    pairs = []
    for lookup, head in zip((emb, ram), heads, strict=True):
        dense = torch.optim.Adam(head.parameters(), lr=0.1)
        pairs.append((torch.compile(Model(lookup, head), backend="aot_eager"), dense))
    for ids in batches():
        for compiled, dense in pairs:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                checkpoint(compiled, ids, use_reentrant=False).backward()
            dense.step()
            dense.zero_grad()
        ram.step_and_zero()
    check(emb, ram, 4)
    torch.testing.assert_close(heads[0].weight, heads[1].weight)


def test_freezing_behind_a_compiled_model_is_seen(setup):
    model, _, emb, ram = setup
    compiled = torch.compile(model, backend="eager")
    ids = torch.tensor([1, 2])
    for trains in (True, False, True):
        emb.requires_grad_(trains)
        compiled(ids).backward()
        if trains:
            ram.train(lambda lookup: Model(lookup, model.head)(ids))
    check(emb, ram, 2)


def test_compiled_table_alone_trains(setup):
    _, _, emb, ram = setup
    compiled = torch.compile(emb, backend="eager")
    for ids in batches():
        compiled(ids).pow(2).sum().backward()
        ram.train(lambda lookup, ids=ids: lookup(ids).pow(2).sum())
    check(emb, ram, 4)


def test_compiled_lookups_without_grad_see_every_step(setup):
    model, _, emb, _ = setup
    compiled = torch.compile(model, backend="eager")
    ids = torch.tensor([1, 2, 3])
    losses = []
    for _ in range(3):
        with torch.no_grad():
            losses.append(float(compiled(ids)))
        compiled(ids).backward()
    assert len(set(losses)) == 3
    assert emb.step == 3


def test_optimizer_and_scheduler_step_beside_a_compiled_model(setup):
    model, reference, emb, ram = setup
    compiled = torch.compile(model, backend="eager")
    schedulers = [
        torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        for optimizer in (emb.optimizer, ram.optimizer)
    ]
    for ids in batches():
        compiled(ids).backward()
        reference(ids).backward()
        ram.step_and_zero()
        for scheduler in schedulers:
            scheduler.step()
    check(emb, ram, 4)


def test_full_graph_is_a_clear_error_and_trains_nothing(setup):
    model, _, emb, _ = setup
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.TorchDynamoException, match="DiskEmbedding.forward"):
        compiled(torch.tensor([1]))
    assert emb.step == 0
    model(torch.tensor([1])).backward()
    assert emb.step == 1


def test_compiled_autograd_is_refused_rather_than_training_nothing(setup):
    model, reference, emb, ram = setup
    ids = torch.tensor([1, 2])
    loss = model(ids)
    compiled_autograd = torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager"))
    with pytest.raises(RuntimeError, match=r"(?i)compiled.autograd"), compiled_autograd:
        loss.backward()
    assert emb.step == 0
    model(ids).backward()
    reference(ids).backward()
    ram.step_and_zero()
    check(emb, ram, 1)
