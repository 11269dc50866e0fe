"""Tests that lookups are nn.Embedding's: ids, ranks, shapes, and rows that are no tensor."""

import numpy as np
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

BAD_IDS = [5, -1, -5, 2**31, 2**62, torch.iinfo(torch.int64).min, torch.iinfo(torch.int64).max]


# Ids: dtypes, range, rank


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_int32_and_int64_ids_give_the_same_rows(make_table, dtype):
    initial = torch.randn(10, 2)
    emb = make_table(init=initial)
    ids = torch.tensor([[3, 9], [0, 3]])
    assert torch.equal(emb(ids.to(dtype)), initial[ids])


def test_int32_ids_train_as_int64_ids_do(make_table):
    one, other = make_table(), make_table()
    ids = torch.tensor([3, 9, 0, 3])
    one(ids).pow(2).sum().backward()
    other(ids.int()).pow(2).sum().backward()
    assert torch.equal(one.weight[:], other.weight[:])
    assert one.version[:].tolist() == other.version[:].tolist() == [1, 0, 0, 1, 0, 0, 0, 0, 0, 1]


@pytest.mark.parametrize(
    "dtype",
    [
        torch.int8,
        torch.int16,
        torch.uint8,
        torch.uint16,
        torch.uint32,
        torch.uint64,
        torch.bool,
        torch.float16,
        torch.float32,
        torch.float64,
        torch.complex64,
    ],
)
def test_other_id_dtypes_are_refused_with_their_name_and_the_fix(make_table, dtype):
    emb = make_table()
    before = fingerprint(emb.path)
    with pytest.raises(TypeError, match=rf"{dtype}.*(int64|long)|(int64|long).*{dtype}"):
        emb(torch.zeros(2, dtype=dtype))
    assert fingerprint(emb.path) == before
    assert emb(torch.tensor([1])).shape == (1, 2)


@pytest.mark.parametrize("ids", [[1, 2], (1, 2), 1, np.array([1, 2]), None])
def test_ids_that_are_no_tensor_are_refused(make_table, ids):
    emb = make_table()
    with pytest.raises(TypeError, match="tensor"):
        emb(ids)
    assert not emb.version[:].any()


@pytest.mark.parametrize("bad", BAD_IDS)
def test_id_outside_the_table_is_an_index_error_that_names_it(make_table, bad):
    emb = make_table(5, 2)
    ram = RamTable(emb.weight[:])
    before = fingerprint(emb.path)
    for ids in ([bad], [1, bad, 2], [[0, 0], [bad, 4]]):
        with pytest.raises(IndexError, match=rf"(?s){bad}\b.*\b5\b|\b5\b.*{bad}\b"):
            emb(torch.tensor(ids))
    assert fingerprint(emb.path) == before
    assert emb.step == 0
    train_both(emb, ram, lambda lookup: lookup(torch.tensor([0, 4])).sum())
    emb.flush()
    assert_stored_equal(emb.path, ram)


@pytest.mark.parametrize("bad", [5, -1, torch.iinfo(torch.int32).min, torch.iinfo(torch.int32).max])
def test_int32_id_outside_the_table_is_an_index_error(make_table, bad):
    emb = make_table(5, 2, padding_idx=0)
    with pytest.raises(IndexError, match=str(bad)):
        emb(torch.tensor([0, bad], dtype=torch.int32))


@pytest.mark.parametrize("bad", [5, -1, torch.iinfo(torch.int64).min])
def test_bad_id_is_found_before_max_norm_changes_a_row(make_table, bad):
    emb = make_table(5, 2, max_norm=0.5, init=torch.ones(5, 2))
    with pytest.raises(IndexError, match=str(bad)):
        emb(torch.tensor([1, bad]))
    assert torch.equal(emb.weight[:], torch.ones(5, 2))


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 4), (2, 0, 3)])
def test_empty_ids_give_an_empty_output_and_train_no_row(make_table, shape):
    emb = make_table(5, 2)
    ram = RamTable(emb.weight[:])
    empty = torch.zeros(shape, dtype=torch.int64)
    assert emb(empty).shape == (*shape, 2)
    train_both(emb, ram, lambda lookup: lookup(empty).sum())
    assert emb.step == ram.step == 1
    train_both(emb, ram, lambda lookup: lookup(torch.tensor([3])).sum() + lookup(empty).sum())
    emb.flush()
    assert emb.step == ram.step == 2
    assert_stored_equal(emb.path, ram)


@pytest.mark.parametrize("shape", [(), (1,), (24,), (4, 6), (2, 3, 4), (1, 1, 24, 1)])
def test_ids_of_any_rank_give_their_shape_and_one_more(make_table, shape):
    initial = torch.randn(10, 2)
    emb, flat = make_table(init=initial), make_table(init=initial)
    ids = torch.randint(0, 10, shape)
    grad = torch.randn(*shape, 2)
    out = emb(ids)
    assert out.shape == (*shape, 2)
    assert torch.equal(out, initial[ids])
    (out * grad).sum().backward()
    (flat(ids.reshape(-1)) * grad.reshape(-1, 2)).sum().backward()
    for table in (emb, flat):
        table.flush()
    assert torch.equal(read_rows(emb.path).weight, read_rows(flat.path).weight)
    assert torch.equal(read_rows(emb.path).exp_avg, read_rows(flat.path).exp_avg)


@pytest.mark.parametrize(
    "strided",
    [
        lambda ids: ids.t(),
        lambda ids: ids[::2, 1:],
        lambda ids: ids[0].expand(3, 6),
        lambda ids: ids.flip(0),
    ],
    ids=["transposed", "sliced", "expanded", "flipped"],
)
def test_ids_may_have_any_strides(make_table, strided):
    initial = torch.randn(10, 2)
    emb, ram = make_table(init=initial), RamTable(initial)
    ids = strided(torch.randint(0, 10, (4, 6)))
    train_both(emb, ram, weighted_sum(ids, torch.randn(*ids.shape, 2)))
    emb.flush()
    assert_stored_equal(emb.path, ram, imported=True)


def test_changing_ids_after_the_lookup_is_torchs_own_error(make_table):
    emb = make_table()
    ids = torch.tensor([1, 2])
    out = emb(ids)
    ids[0] = 7
    ram_ids = torch.tensor([1, 2])
    ram_out = nn.Embedding(10, 2, sparse=True)(ram_ids)
    ram_ids[0] = 7
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        ram_out.sum().backward()
    try:
        out.sum().backward()
    except RuntimeError as error:
        assert "modified by an inplace operation" in str(error)
        assert not emb.version[:].any()
    else:  # a copy of the ids is as good: the rows that were looked up are trained
        assert emb.version[:].nonzero()[:, 0].tolist() == [1, 2]


# Reading does not write


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_lookups_leave_every_file_as_it_was(make_table, context):
    """Even where the cache is full of rows that were trained since the last commit."""
    emb = make_table(5000, 4, cache_bytes=200 * 13 * 4, chunk_rows=1024)
    for ids in torch.arange(5000).split(100):
        emb(ids).sum().backward()
    before = fingerprint(emb.path)
    emb.eval()
    for _ in range(20):
        with context():
            emb(torch.randint(0, 5000, (100,)))
    assert fingerprint(emb.path) == before
    assert emb.step == 50


def test_lookup_returns_a_copy(make_table):
    emb = make_table(init="zeros")
    with torch.no_grad():
        out = emb(torch.tensor([1, 1, 2]))
        out += 7
    assert not emb.weight[:].any()
    assert not emb(torch.tensor([1, 2])).any()


def test_repeated_ids_see_the_same_row(make_table):
    emb = make_table(10, 3)
    out = emb(torch.tensor([[4, 4], [4, 9]]))
    assert torch.equal(out[0, 0], out[0, 1])
    assert torch.equal(out[0, 0], out[1, 0])
    assert not torch.equal(out[0, 0], out[1, 1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_output_has_the_dtype_of_the_table_also_under_autocast(make_table, dtype):
    emb = make_table(dtype=dtype)
    assert emb(torch.tensor([1])).dtype == dtype
    with torch.autocast("cpu", torch.bfloat16):
        assert emb(torch.tensor([1])).dtype == dtype


def test_batch_larger_than_the_cache_is_looked_up_and_trained_in_pieces(make_table):
    initial = torch.randn(3000, 4)
    emb = make_table(3000, 4, init=initial, cache_bytes=20 * 13 * 4)
    ram = RamTable(initial)
    for _ in range(3):
        ids = torch.randperm(3000)[:2000]
        assert torch.equal(emb(ids), emb.weight[ids])
        train_both(emb, ram, weighted_sum(ids, torch.randn(2000, 4)))
    emb.flush()
    assert_stored_equal(emb.path, ram, imported=True)


# Rows are not behind a small tensor


def test_weight_has_the_shape_of_the_table(make_table):
    emb = make_table(1000, 6, dtype=torch.float64)
    assert emb.weight.shape == (1000, 6)
    assert emb.weight.dtype == torch.float64
    assert len(emb.weight) == 1000


FULL_TENSOR_USES = {
    "init.normal_": lambda emb: nn.init.normal_(emb.weight),
    "init.xavier_uniform_": lambda emb: nn.init.xavier_uniform_(emb.weight),
    "assign Parameter": lambda emb: setattr(emb, "weight", nn.Parameter(torch.ones(10, 2))),
    "assign tensor": lambda emb: setattr(emb, "weight", torch.ones(10, 2)),
    "assign None": lambda emb: setattr(emb, "weight", None),
    "delete": lambda emb: delattr(emb, "weight"),
    "F.linear": lambda emb: nn.functional.linear(torch.ones(3, 2), emb.weight),
    "F.embedding": lambda emb: nn.functional.embedding(torch.tensor([1]), emb.weight),
    "tie to a Linear": lambda emb: setattr(nn.Linear(2, 10), "weight", emb.weight),
    "matmul": lambda emb: torch.ones(3, 2) @ emb.weight,
    "multiply": lambda emb: emb.weight * 2,
    "in place": lambda emb: emb.weight.mul_(2),
    "data": lambda emb: emb.weight.data,
    "sum": lambda emb: torch.sum(emb.weight),
    "norm": lambda emb: emb.weight.norm(),
}


@pytest.mark.parametrize("use", FULL_TENSOR_USES.values(), ids=FULL_TENSOR_USES)
def test_using_the_weight_as_a_tensor_is_an_error_and_changes_nothing(make_table, use):
    emb = make_table()
    before, rows = fingerprint(emb.path), emb.weight[:]
    with pytest.raises((TypeError, AttributeError)):
        use(emb)
    assert fingerprint(emb.path) == before
    assert torch.equal(emb.weight[:], rows)


@pytest.mark.parametrize("name", ["init.normal_", "assign Parameter", "F.linear"])
def test_error_for_the_usual_tensor_uses_says_what_to_do(make_table, name):
    with pytest.raises((TypeError, AttributeError), match=r"\[|rows|init=|blocks|lookup"):
        FULL_TENSOR_USES[name](make_table())
