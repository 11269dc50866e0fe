"""Tests of max_norm and scale_grad_by_freq, which change rows and gradients by the lookup."""

import pytest
import torch
from ram_reference import (
    RamTable,
    assert_stored_equal,
    fingerprint,
    read_rows,
    train_both,
    weighted_sum,
)
from torch import nn

import ooc_embed

# max_norm


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, float("inf")])
def test_max_norm_rescales_looked_up_rows_in_the_table_also_in_eval(make_table, norm_type):
    initial = torch.full((3, 4), 5.0, dtype=torch.float64)
    emb = make_table(3, 4, max_norm=1.0, norm_type=norm_type, init=initial, dtype=torch.float64)
    ram = RamTable(initial, max_norm=1.0, norm_type=norm_type)
    emb.eval()
    with torch.no_grad():
        out, ram_out = emb(torch.tensor([1, 1])), ram(torch.tensor([1, 1]))
    torch.testing.assert_close(out, ram_out, rtol=1e-12, atol=1e-12)
    emb.flush()
    stored = read_rows(emb.path)
    torch.testing.assert_close(stored.weight, ram.weight, rtol=1e-12, atol=1e-12)
    assert torch.equal(stored.weight[[0, 2]], initial[[0, 2]])
    assert not stored.exp_avg.any()
    assert not stored.exp_avg_sq.any()


def test_max_norm_gives_the_value_of_torch(make_table):
    emb = make_table(
        3, 4, max_norm=1.0, init=torch.full((3, 4), 5.0, dtype=torch.float64), dtype=torch.float64
    )
    with torch.no_grad():
        out = emb(torch.tensor([1, 1]))
    expected = torch.full((2, 4), 0.4999999950, dtype=torch.float64)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-10)


def test_max_norm_of_true_is_one_as_in_torch(make_table, open_table):
    initial = torch.full((3, 4), 5.0)
    emb = make_table(3, 4, max_norm=True, init=initial)
    ram = nn.Embedding.from_pretrained(initial.clone(), max_norm=True)
    assert emb.max_norm == ram.max_norm
    torch.testing.assert_close(emb(torch.tensor([1])).detach(), ram(torch.tensor([1])))
    emb.close()
    assert open_table(emb.path).max_norm == ram.max_norm


@pytest.mark.parametrize("padding_idx", [None, 1])
def test_max_norm_trains_as_in_torch(make_table, padding_idx):
    initial = torch.randn(20, 4, dtype=torch.float64) * 3
    options = {"padding_idx": padding_idx, "max_norm": 1.5}
    emb = make_table(
        20, 4, init=initial, dtype=torch.float64, optimizer=ooc_embed.SparseAdam(lr=0.3), **options
    )
    ram = RamTable(initial, lr=0.3, **options)
    for _ in range(20):
        ids = torch.randint(0, 20, (8,))
        grad = torch.randn(8, 4, dtype=torch.float64)
        train_both(emb, ram, weighted_sum(ids, grad))
    emb.flush()
    stored = read_rows(emb.path)
    for field in ("weight", "exp_avg", "exp_avg_sq"):
        torch.testing.assert_close(
            getattr(stored, field), getattr(ram, field), rtol=1e-12, atol=1e-12
        )


def test_max_norm_rescales_padding_rows_and_frozen_tables_as_torch_does(make_table):
    initial = torch.full((3, 4), 5.0)
    emb = make_table(3, 4, padding_idx=1, max_norm=1.0, init=initial)
    emb.requires_grad_(False)
    ram = nn.Embedding.from_pretrained(initial.clone(), padding_idx=1, max_norm=1.0)
    ids = torch.tensor([1, 2])
    torch.testing.assert_close(emb(ids), ram(ids))
    emb.flush()
    torch.testing.assert_close(read_rows(emb.path).weight, ram.weight.detach())


def test_rows_within_max_norm_are_not_written(make_table):
    emb = make_table(3, 2, max_norm=10.0)
    emb(torch.tensor([0, 2]))
    emb.flush()
    assert read_rows(emb.path).version.tolist() == [0, 0, 0]


def test_max_norm_is_refused_where_the_table_cannot_be_written(make_table, open_table):
    emb = make_table(3, 4, max_norm=1.0, init=torch.full((3, 4), 5.0))
    emb.close(flush=True)
    before = fingerprint(emb.path)

    def look_up() -> None:
        reader = open_table(emb.path, mode="r")
        reader.max_norm = 1.0
        reader(torch.tensor([1]))

    with pytest.raises((ooc_embed.StoreError, ValueError), match="max_norm"):
        look_up()
    assert fingerprint(emb.path) == before


# scale_grad_by_freq


def dense_grad(weight: torch.Tensor, calls: list, padding_idx: int | None) -> torch.Tensor:
    """The gradient by torch's dense table, which alone supports scale_grad_by_freq."""
    dense = nn.Embedding.from_pretrained(
        weight, freeze=False, padding_idx=padding_idx, scale_grad_by_freq=True
    )
    sum((dense(ids) * grad).sum() for ids, grad in calls).backward()
    return dense.weight.grad


@pytest.mark.parametrize("padding_idx", [None, 1])
def test_scale_grad_by_freq_divides_by_the_count_in_each_call(make_table, padding_idx):
    initial = torch.randn(6, 2, dtype=torch.float64)
    emb = make_table(
        6,
        2,
        padding_idx=padding_idx,
        scale_grad_by_freq=True,
        init=initial,
        dtype=torch.float64,
        optimizer=ooc_embed.SparseAdam(lr=0.1),
    )
    ram = RamTable(initial, lr=0.1)
    for _ in range(5):
        calls = [
            (torch.randint(0, 6, (n,)), torch.randn(n, 2, dtype=torch.float64)) for n in (9, 4)
        ]
        sum((emb(ids) * grad).sum() for ids, grad in calls).backward()
        grad = dense_grad(ram.weight.clone(), calls, padding_idx)
        rows = torch.cat([ids for ids, _ in calls]).unique()
        rows = rows[rows != padding_idx] if padding_idx is not None else rows
        ram.embedding.weight.grad = torch.sparse_coo_tensor(
            rows[None], grad[rows], (6, 2), check_invariants=True
        )
        ram.step_and_zero()
    emb.flush()
    assert_stored_equal(emb.path, ram, imported=True)


def test_scale_grad_by_freq_gives_the_row_gradients_of_the_reference(make_table):
    emb = make_table(4, 1, scale_grad_by_freq=True)
    emb(torch.tensor([1, 1, 2])).sum().backward()
    torch.testing.assert_close(emb.state["exp_avg"][[1, 2]], torch.full((2, 1), 0.1))
