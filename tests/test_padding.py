"""Tests that the padding row is never trained, and is what its user stored."""

import pytest
import torch
from ram_reference import (
    RamTable,
    assert_stored_equal,
    read_rows,
    train_both,
    weighted_sum,
)

import ooc_embed


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("padding_idx", [0, 4, 9])
def test_padding_row_never_changes_whatever_the_batch(make_table, padding_idx, dtype):
    initial = torch.randn(10, 3, dtype=dtype)
    emb = make_table(10, 3, padding_idx=padding_idx, init=initial, dtype=dtype)
    ram = RamTable(initial, padding_idx=padding_idx)
    half = torch.where(torch.rand(3000) < 0.5, padding_idx, torch.randint(0, 10, (3000,)))
    padding = torch.full((769,), padding_idx)
    for ids in (padding, half, padding[:1], half.view(30, 100)):
        train_both(emb, ram, weighted_sum(ids, torch.randn(*ids.shape, 3, dtype=dtype)))
    emb.flush()
    assert_stored_equal(emb.path, ram, imported=True)
    stored = read_rows(emb.path)
    assert torch.equal(stored.weight[padding_idx], initial[padding_idx])
    assert not stored.exp_avg[padding_idx].any()
    assert not stored.exp_avg_sq[padding_idx].any()


def test_padding_row_of_a_seeded_table_is_zero_and_never_stored(make_table):
    emb = make_table(10, 4, padding_idx=3)
    emb(torch.tensor([3, 3, 5])).sum().backward()
    emb.flush()
    assert torch.equal(emb(torch.tensor([3])), torch.zeros(1, 4))
    assert read_rows(emb.path).version.tolist() == [0, 0, 0, 0, 0, 1, 0, 0, 0, 0]


def test_batch_of_padding_alone_advances_the_step_and_stores_nothing(make_table):
    emb = make_table(5, 2, padding_idx=0)
    ram = RamTable(emb.weight[:], padding_idx=0)
    train_both(emb, ram, lambda lookup: lookup(torch.zeros(4, dtype=torch.int64)).sum())
    emb.flush()
    assert emb.step == ram.step == 1
    assert_stored_equal(emb.path, ram)


def test_padding_row_keeps_the_value_that_its_user_assigned(make_table, open_table):
    emb = make_table(10, 2, padding_idx=0)
    emb.weight[[0]] = torch.ones(1, 2)
    for _ in range(5):
        emb(torch.tensor([0, 1, 0])).sum().backward()
    assert torch.equal(emb(torch.tensor([0])), torch.ones(1, 2))
    emb.close(flush=True)
    stored = read_rows(emb.path)
    assert stored.weight[0].tolist() == [1, 1]
    assert not stored.exp_avg[0].any()
    assert not stored.exp_avg_sq[0].any()
    again = open_table(emb.path)
    assert again.padding_idx == 0
    assert torch.equal(again(torch.tensor([0])), torch.ones(1, 2))


def test_given_weights_keep_their_padding_row(make_table):
    emb = make_table(3, 2, padding_idx=1, init=torch.ones(3, 2))
    assert torch.equal(emb(torch.tensor([1])), torch.ones(1, 2))


@pytest.mark.parametrize(("given", "row"), [(-1, 4), (-5, 0), (-3, 2), (4, 4)])
def test_negative_padding_idx_counts_from_the_end(make_table, open_table, given, row):
    emb = make_table(5, 2, padding_idx=given)
    assert emb.padding_idx == row
    assert f"padding_idx={row}" in repr(emb)
    emb(torch.arange(5)).sum().backward()
    assert emb.weight[row].tolist() == [0, 0]
    emb.close(flush=True)
    assert read_rows(emb.path).version.tolist() == [int(i != row) for i in range(5)]
    again = open_table(emb.path)
    assert again.padding_idx == row
    again(torch.arange(5)).sum().backward()
    assert again.weight[row].tolist() == [0, 0]


@pytest.mark.parametrize("padding_idx", [5, -6, 2**40])
def test_padding_idx_outside_the_table_is_refused_before_anything_is_made(store_path, padding_idx):
    with pytest.raises(ValueError, match=r"padding_idx"):
        ooc_embed.DiskEmbedding(5, 2, padding_idx=padding_idx, path=store_path)
    assert not store_path.exists()
