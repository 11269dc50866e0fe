"""Rules beside SparseAdam, each against torch.optim's numbers or the published formula."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from ram_reference import fingerprint
from torch import Tensor, nn

from ooc_embed import SGD, Adagrad, DiskEmbedding, RowwiseAdagrad, SparseAdam, blocks
from ooc_embed.opened import field_spans
from ooc_embed.optimizer import first_group

ROWS, DIM = 60, 3

# torch.optim.Adagrad makes sparse tensors itself, and torch says once that it does not check them.
pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks")


def sparse(rows: Tensor, grads: Tensor, count: int = 1) -> Tensor:
    """The gradient of ``count`` rows; zeros that are named stay."""
    grads = grads.reshape(len(rows), -1)
    shape = (count, grads.shape[1])
    return torch.sparse_coo_tensor(rows[None].long(), grads, shape, check_invariants=True)


class Together:
    """One sparse parameter, as `nn.Embedding(sparse=True)` gives it to a torch optimizer."""

    def __init__(self, initial: Tensor, make: Callable[..., torch.optim.Optimizer]) -> None:
        self._weight = nn.Parameter(initial.clone())
        self._optimizer = make([self._weight])

    def step(self, rows: Tensor, grads: Tensor) -> None:
        self._weight.grad = sparse(rows, grads, len(self._weight))
        self._optimizer.step()

    @property
    def weight(self) -> Tensor:
        return self._weight.detach()


class EachRow:
    """A parameter for each row: torch leaves those without a gradient alone, state and all."""

    def __init__(
        self, initial: Tensor, make: Callable[..., torch.optim.Optimizer], *, sparse: bool = False
    ) -> None:
        self._rows = [nn.Parameter(row[None].clone()) for row in initial]
        self._optimizer = make(self._rows)
        self._sparse = sparse

    def step(self, rows: Tensor, grads: Tensor) -> None:
        self._optimizer.zero_grad(set_to_none=True)
        for row, grad in zip(rows.tolist(), grads, strict=True):
            self._rows[row].grad = sparse(torch.zeros(1), grad) if self._sparse else grad[None]
        self._optimizer.step()

    @property
    def weight(self) -> Tensor:
        return torch.cat([row.detach() for row in self._rows])


class Shrinking(Together):
    """SparseAdam, whose batch's rows are shrunk before each step."""

    def step(self, rows: Tensor, grads: Tensor) -> None:
        with torch.no_grad():
            self._weight[rows] *= 1 - 0.1 * 0.2
        super().step(rows, grads)


class Rowwise:
    """`EXACT_ROWWISE_ADAGRAD`: the sum of a row's mean squares divides its gradient."""

    def __init__(self, initial: Tensor) -> None:
        self._weight, self._sum = initial.numpy().copy(), np.zeros(len(initial))

    def step(self, rows: Tensor, grads: Tensor) -> None:
        for row, grad in zip(rows.tolist(), grads.numpy(), strict=True):
            self._sum[row] += np.mean(grad * grad)
            self._weight[row] -= 0.1 * grad / (np.sqrt(self._sum[row]) + 1e-8)

    @property
    def weight(self) -> Tensor:
        return torch.from_numpy(self._weight)


def torchs(name: str, **options: object) -> Callable[..., torch.optim.Optimizer]:
    return lambda params: getattr(torch.optim, name)(params, lr=0.1, **options)


RULES = {
    "SGD": (SGD(lr=0.1), lambda w: Together(w, torchs("SGD"))),
    "SGD, maximize": (
        SGD(lr=0.1, maximize=True),
        lambda w: Together(w, torchs("SGD", maximize=True)),
    ),
    "SGD, momentum": (SGD(lr=0.1, momentum=0.9), lambda w: EachRow(w, torchs("SGD", momentum=0.9))),
    "SGD, nesterov": (
        SGD(lr=0.1, momentum=0.9, nesterov=True),
        lambda w: EachRow(w, torchs("SGD", momentum=0.9, nesterov=True)),
    ),
    "Adagrad": (Adagrad(lr=0.1), lambda w: Together(w, torchs("Adagrad"))),
    "Adagrad, all options": (
        Adagrad(lr=0.1, lr_decay=0.01, initial_accumulator_value=0.3, eps=1e-6),
        lambda w: Together(
            w, torchs("Adagrad", lr_decay=0.01, initial_accumulator_value=0.3, eps=1e-6)
        ),
    ),
    "RowwiseAdagrad": (RowwiseAdagrad(lr=0.1), Rowwise),
    "SparseAdam, row_weight_decay": (
        SparseAdam(lr=0.1, row_weight_decay=0.2),
        lambda w: Shrinking(w, torchs("SparseAdam")),
    ),
    "SparseAdam, by row": (
        SparseAdam(lr=0.1, bias_correction="row"),
        lambda w: EachRow(w, torchs("SparseAdam"), sparse=True),
    ),
}


def batches(steps: int) -> Sequence[tuple[Tensor, Tensor]]:
    """Ids that repeat, rows that rest, gradients of very different sizes, some of them zero."""
    generator = torch.Generator().manual_seed(0)
    drawn = []
    for step in range(steps):
        ids = (torch.rand(12, generator=generator) ** 2 * ROWS).to(torch.int64)
        grads = torch.randn(12, DIM, dtype=torch.float64, generator=generator)
        drawn.append((ids, grads * 10.0 ** (step % 5 - 3) * (step % 7 > 0)))
    return drawn


@pytest.mark.usefixtures("each_kernel", "one_thread")
@pytest.mark.parametrize("imported", [True, False])
@pytest.mark.parametrize("name", RULES)
def test_300_steps_with_a_small_cache_are_the_references(store_path, name, imported):
    rule, make_reference = RULES[name]
    initial = torch.randn(ROWS, DIM, dtype=torch.float64) if imported else torch.zeros(ROWS, DIM)
    initial = initial.double()
    reference = make_reference(initial)
    emb = DiskEmbedding(
        ROWS,
        DIM,
        path=store_path,
        init=initial if imported else "zeros",
        dtype=torch.float64,
        optimizer=rule,
        cache_bytes=15 * 110,
    )
    for step, (ids, grads) in enumerate(batches(300)):
        (emb(ids) * grads).sum().backward()
        rows = ids.unique()
        summed = torch.zeros(ROWS, DIM, dtype=torch.float64).index_add_(0, ids, grads)[rows]
        reference.step(rows, summed)
        if step % 100 == 60:
            emb.close()
            emb = DiskEmbedding.open(store_path, cache_bytes=15 * 110)
    assert emb.stats().evictions
    torch.testing.assert_close(emb.weight[:], reference.weight, rtol=1e-12, atol=1e-12)
    emb.close()


@pytest.mark.parametrize("name", RULES)
def test_rows_and_bits_do_not_depend_on_the_cache(stores, name):
    rule, _ = RULES[name]
    tables = [
        DiskEmbedding(
            3000, 10, path=stores.new_path(), optimizer=rule, init="normal", cache_bytes=size
        )
        for size in (100 * 200, 1 << 24)
    ]
    for ids in torch.randint(3000, (20, 2000)):
        for emb in tables:
            emb(ids).pow(2).sum().backward()
    small, large = tables
    assert torch.equal(small.weight[:], large.weight[:])
    for field in large.state:
        assert torch.equal(small.state[field][:], large.state[field][:])
    for emb in tables:
        emb.close()


@pytest.mark.parametrize(
    ("rule", "fields"),
    [
        (SGD(), {}),
        (SGD(momentum=0.5), {"momentum_buffer": 2}),
        (Adagrad(), {"sum": 2}),
        (RowwiseAdagrad(), {"sum": 1}),
        (SparseAdam(), {"exp_avg": 2, "exp_avg_sq": 2}),
        (SparseAdam(bias_correction="row"), {"exp_avg": 2, "exp_avg_sq": 2, "step": 1}),
    ],
)
def test_a_table_keeps_the_fields_of_its_rule_and_opens_with_it(make_table, rule, fields):
    emb = make_table(optimizer=rule)
    assert {name: view.shape[1] for name, view in emb.state.items()} == fields
    emb(torch.tensor([1])).sum().backward()
    text = repr(emb)
    emb.close()
    with DiskEmbedding.open(emb.path) as again:
        assert again.state.keys() == fields.keys()
        assert repr(again) == text


def test_a_rows_steps_are_counted_apart_from_its_versions(make_table):
    emb = make_table(optimizer=SparseAdam(lr=0.1, bias_correction="row"))
    for ids in ([1, 2], [1], [1]):
        emb(torch.tensor(ids)).sum().backward()
    emb.weight[2] = torch.zeros(2)
    assert emb.state["step"][[1, 2, 3]].squeeze(1).tolist() == [3, 1, 0]
    assert emb.version[[1, 2, 3]].tolist() == [3, 2, 0]


def test_a_rare_rows_first_step_is_the_rate_by_row_and_larger_by_table(make_table):
    moved = {}
    for bias_correction in ("table", "row"):
        rule = SparseAdam(lr=0.1, bias_correction=bias_correction)
        emb = make_table(init="zeros", optimizer=rule)
        for _ in range(1000):
            emb(torch.tensor([0])).sum().backward()
        emb(torch.tensor([2])).sum().backward()
        moved[bias_correction] = float(emb.weight[2][0])
    assert moved["table"] == pytest.approx(-0.2515296942, abs=1e-6)
    assert moved["row"] == pytest.approx(-0.1, abs=1e-6)


def test_initial_sums_of_squares_show_before_the_first_step(make_table):
    emb = make_table(optimizer=Adagrad(initial_accumulator_value=0.5))
    assert emb.state["sum"][[3, 4]].tolist() == [[0.5, 0.5], [0.5, 0.5]]


@pytest.mark.parametrize(
    ("rule", "options"),
    [
        (SGD, {"lr": 0.0}),
        (SGD, {"momentum": -0.1}),
        (SGD, {"nesterov": True}),
        (Adagrad, {"lr_decay": -1.0}),
        (Adagrad, {"initial_accumulator_value": -1.0}),
        (Adagrad, {"eps": -1.0}),
        (RowwiseAdagrad, {"eps": -1.0}),
        (RowwiseAdagrad, {"lr": torch.ones(2)}),
        (SparseAdam, {"row_weight_decay": -0.1}),
        (SparseAdam, {"bias_correction": "column"}),
    ],
)
def test_values_outside_their_range_are_refused(rule, options):
    with pytest.raises(ValueError, match=next(iter(options)).split("_")[0]):
        rule(**options)


@pytest.mark.parametrize("rule", [SGD, Adagrad, RowwiseAdagrad, SparseAdam])
def test_weight_decay_of_all_rows_is_no_argument(rule):
    with pytest.raises(TypeError):
        rule(weight_decay=0.1)


@pytest.mark.parametrize(
    ("rule", "change"),
    [
        (SGD(), {"momentum": 0.9}),
        (Adagrad(), {"initial_accumulator_value": 0.5}),
        (SparseAdam(), {"bias_correction": "row"}),
        (SparseAdam(), {"row_weight_decay": -1.0}),
        (Adagrad(), {"eps": float("nan")}),
    ],
)
def test_a_change_that_the_table_has_no_field_or_sense_for_is_refused(make_table, rule, change):
    emb = make_table(optimizer=rule)
    before = fingerprint(emb.path)
    kept = dict(emb.optimizer.param_groups[0])
    emb.optimizer.param_groups[0].update(change)
    with pytest.raises(ValueError, match=next(iter(change))):
        emb(torch.tensor([1])).sum().backward()
    assert fingerprint(emb.path) == before
    emb.optimizer.param_groups[0].update(kept)


def test_row_weight_decay_that_is_switched_on_later_counts(make_table, each_kernel):
    emb = make_table(4, 2, init=torch.ones(4, 2), optimizer=SparseAdam(lr=0.1))
    emb.optimizer.param_groups[0]["row_weight_decay"] = 0.5
    (emb(torch.tensor([1])) * 0).sum().backward()
    torch.testing.assert_close(emb.weight[1], torch.full((2,), 0.95))
    assert torch.equal(emb.weight[2], torch.ones(2))


@pytest.mark.usefixtures("each_kernel", "one_thread")
@pytest.mark.parametrize("dim", [1, 10, 16, 20, 64])
@pytest.mark.parametrize("name", RULES)
def test_no_bit_of_a_row_depends_on_the_rows_beside_it(name, dim):
    rule, _ = RULES[name]
    fields = {"weight": dim, **rule.fields(dim), "version": 1}
    update = blocks.BlockUpdate(rule, field_spans(fields), torch.float32)
    together = torch.rand(1500, sum(fields.values()))
    alone = together.clone()
    grads, group = torch.randn(1500, dim), first_group(rule, {})
    update.step(together, torch.arange(1500), grads, 7, group)
    for row in range(0, 1500, 97):
        update.step(alone, torch.tensor([row]), grads[row : row + 1], 7, group)
        assert torch.equal(alone[row], together[row])
