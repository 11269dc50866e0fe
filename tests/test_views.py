"""Tests of the row views `emb.weight`, `emb.state[...]` and `emb.version`; reads files by zarr."""

import numpy as np
import pytest
import torch
from ram_reference import RamTable, assert_stored_equal, read_rows, train_both, weighted_sum

import ooc_embed

IDS = torch.tensor([1, 2, 2, 7])


@pytest.fixture
def initial() -> torch.Tensor:
    return torch.randn(10, 3)


@pytest.fixture
def emb(make_table, initial):
    return make_table(10, 3, init=initial, optimizer=ooc_embed.SparseAdam(lr=0.1))


@pytest.fixture
def trained(emb, initial):
    """The table and torch's after five random steps."""
    ram = RamTable(initial, lr=0.1)
    for _ in range(5):
        train_both(emb, ram, weighted_sum(torch.randint(0, 8, (6,)), torch.randn(6, 3)))
    return emb, ram


def views(emb) -> dict:
    return {"weight": emb.weight, **emb.state, "version": emb.version}


# Reading


def test_views_have_the_shape_and_dtype_of_their_field(make_table):
    emb = make_table(1000, 6, dtype=torch.float64)
    for name, view in views(emb).items():
        assert len(view) == 1000
        assert tuple(view.shape) == ((1000,) if name == "version" else (1000, 6))
        assert view.size() == view.shape
        assert view.size(0) == view.size(-len(view.shape)) == 1000
        assert view.dtype == (torch.int64 if name == "version" else torch.float64)
    assert set(emb.state) == {"exp_avg", "exp_avg_sq"}


def test_views_show_the_fields_that_torch_has(trained):
    emb, ram = trained
    for name in ("weight", "exp_avg", "exp_avg_sq"):
        expected = getattr(ram, name)
        view = views(emb)[name]
        torch.testing.assert_close(view[:], expected)
        torch.testing.assert_close(view[3], expected[3])
        torch.testing.assert_close(view[2:9], expected[2:9])
        torch.testing.assert_close(view[torch.tensor([7, 1, 1])], expected[[7, 1, 1]])


def test_a_mask_of_all_rows_reads_and_writes_those_it_has(trained):
    emb, ram = trained
    mask = torch.arange(10) % 3 == 1
    torch.testing.assert_close(emb.weight[mask], ram.weight[mask])
    torch.testing.assert_close(emb.weight[mask.numpy()], ram.weight[mask])
    assert emb.weight[torch.zeros(10, dtype=torch.bool)].shape == (0, 3)
    assert torch.equal(emb.version[mask], ram.version[mask] + 1)
    emb.weight[mask] = torch.tensor([[1.0], [2.0], [3.0]])
    assert emb.weight[:][:, 0][mask].tolist() == [1, 2, 3]
    torch.testing.assert_close(emb.weight[~mask], ram.weight[~mask])


def test_a_mask_of_other_rows_than_the_tables_raises(emb):
    for mask in (torch.ones(9, dtype=torch.bool), torch.ones(10, 3, dtype=torch.bool), [True]):
        with pytest.raises(TypeError, match="mask of all rows"):
            emb.weight[mask]


@pytest.mark.parametrize(
    "rows",
    [
        [4, 0, 4, 9],
        np.array([4, 0, 4, 9]),
        np.array([4, 0, 4, 9], dtype=np.int32),
        torch.tensor([4, 0, 4, 9]),
        torch.tensor([4, 0, 4, 9], dtype=torch.int32),
    ],
    ids=["list", "ndarray", "int32 ndarray", "tensor", "int32 tensor"],
)
def test_rows_are_chosen_by_list_array_or_tensor_in_any_order(emb, initial, rows):
    assert torch.equal(emb.weight[rows], initial[[4, 0, 4, 9]])
    assert emb.version[rows].tolist() == [1, 1, 1, 1]


@pytest.mark.parametrize("empty", [[], torch.zeros(0, dtype=torch.int64), slice(4, 4)], ids=str)
def test_no_rows_are_an_empty_tensor(emb, empty):
    assert emb.weight[empty].shape == (0, 3)
    assert emb.version[empty].shape == (0,)


@pytest.mark.parametrize(
    "part",
    [slice(None), slice(3), slice(3, None), slice(2, 7), slice(6, 20), slice(-3, None)],
    ids=str,
)
def test_slices_are_those_of_a_tensor(emb, initial, part):
    assert torch.equal(emb.weight[part], initial[part])
    assert emb.version[part].shape == initial[part].shape[:1]


def test_one_row_is_a_vector_and_its_version_a_number(emb, initial):
    assert torch.equal(emb.weight[4], initial[4])
    assert int(emb.version[4]) == 1


def test_result_is_a_copy(emb, initial):
    for rows in (3, slice(2, 5), [3, 4], slice(None)):
        emb.weight[rows].fill_(7)
    assert torch.equal(emb.weight[:], initial)
    assert torch.equal(emb(torch.arange(10)), initial)


def test_result_carries_no_graph(emb):
    assert not emb.weight[:].requires_grad
    assert not emb.weight[[1]].requires_grad


def test_reading_writes_nothing(make_table):
    emb = make_table(3000, 2, cache_bytes=20 * 7 * 4)
    emb(torch.arange(0, 3000, 50)).sum().backward()
    versions = emb.version[:]
    for view in views(emb).values():
        _ = view[:], view[5], view[torch.arange(0, 3000, 3)], list(view.blocks())
    emb.flush()
    assert read_rows(emb.path).version.tolist() == versions.tolist()
    assert int(versions.sum()) == 60


@pytest.mark.parametrize("block_rows", [1, 3, 10, 1000])
def test_blocks_run_over_all_rows_in_order(emb, initial, block_rows):
    blocks = list(emb.weight.blocks(block_rows=block_rows))
    starts = [start for start, _ in blocks]
    assert starts == list(range(0, 10, block_rows))
    assert torch.equal(torch.cat([block for _, block in blocks]), initial)
    assert all(len(block) == block_rows for _, block in blocks[:-1])


def test_blocks_of_every_field_by_default_cover_the_table(trained):
    emb, ram = trained
    for name in ("weight", "exp_avg", "exp_avg_sq"):
        rows = torch.cat([block for _, block in views(emb)[name].blocks()])
        torch.testing.assert_close(rows, getattr(ram, name))
    assert torch.equal(torch.cat([b for _, b in emb.version.blocks()]), 1 + ram.version)


@pytest.mark.parametrize("cached", [20, 5000])
def test_rows_are_seen_in_cache_log_and_table_alike(make_table, cached):
    emb = make_table(3000, 2, chunk_rows=1024, cache_bytes=cached * 7 * 4)
    ram = RamTable(emb.weight[:])
    for step in range(12):
        ids = torch.randint(0, 3000, (200,))
        train_both(emb, ram, weighted_sum(ids, torch.randn(200, 2)))
        if step == 3:
            emb.flush()
        if step == 7:
            emb.commit()
        torch.testing.assert_close(emb.weight[:], ram.weight)
        torch.testing.assert_close(emb.state["exp_avg"][:], ram.exp_avg)
        assert torch.equal(emb.version[:], ram.version)


# Versions


def test_version_counts_the_writes_of_a_row(make_table):
    emb = make_table(10, 3)
    assert emb.version[:].tolist() == [0] * 10
    with torch.no_grad():
        emb(torch.arange(10))
    assert emb.version[:].tolist() == [0] * 10
    emb(IDS).sum().backward()
    assert emb.version[:].tolist() == [0, 1, 1, 0, 0, 0, 0, 1, 0, 0]
    emb.weight[[2, 5]] = torch.zeros(2, 3)
    assert emb.version[:].tolist() == [0, 1, 2, 0, 0, 1, 0, 1, 0, 0]
    emb.flush()
    assert read_rows(emb.path).version.tolist() == [0, 1, 2, 0, 0, 1, 0, 1, 0, 0]


def test_version_cannot_be_assigned(emb):
    for rows in (3, [3], slice(None)):
        with pytest.raises((TypeError, AttributeError), match="(?i)version|read-only|read only"):
            emb.version[rows] = 5
    with pytest.raises((TypeError, AttributeError)):
        emb.version = torch.zeros(10)
    assert emb.version[:].tolist() == [1] * 10


# Assigning


ASSIGNMENTS = {
    "one row": (4, torch.randn(3)),
    "rows by list": ([4, 0, 9], torch.randn(3, 3)),
    "rows by array": (np.array([4, 0, 9]), torch.randn(3, 3)),
    "rows by tensor": (torch.tensor([4, 0, 9]), torch.randn(3, 3)),
    "slice": (slice(2, 5), torch.randn(3, 3)),
    "all": (slice(None), torch.randn(10, 3)),
    "array of values": ([1, 2], np.ones((2, 3), dtype=np.float32)),
    "no rows": ([], torch.zeros(0, 3)),
}


@pytest.mark.parametrize("field", ["weight", "exp_avg", "exp_avg_sq"])
@pytest.mark.parametrize(("rows", "values"), ASSIGNMENTS.values(), ids=ASSIGNMENTS)
def test_assigned_rows_are_read_by_views_lookups_and_zarr(trained, open_table, field, rows, values):
    emb, ram = trained
    views(emb)[field][rows] = values
    expected = {name: getattr(ram, name).clone() for name in ("weight", "exp_avg", "exp_avg_sq")}
    expected[field][rows] = torch.as_tensor(values)
    torch.testing.assert_close(emb(torch.arange(10)).detach(), expected["weight"])
    emb.close(flush=True)
    stored = read_rows(emb.path)
    again = open_table(emb.path, mode="r")
    for name, value in expected.items():
        torch.testing.assert_close(getattr(stored, name), value)
        torch.testing.assert_close(views(again)[name][:], value)


def test_assigning_weights_leaves_the_moments(trained):
    emb, ram = trained
    emb.weight[IDS.unique()] = torch.zeros(3, 3)
    torch.testing.assert_close(emb.state["exp_avg"][:], ram.exp_avg)
    torch.testing.assert_close(emb.state["exp_avg_sq"][:], ram.exp_avg_sq)
    assert emb.step == 5


def test_training_goes_on_from_assigned_rows(trained):
    emb, ram = trained
    values = torch.randn(2, 3)
    emb.weight[[1, 9]] = values
    with torch.no_grad():
        ram.embedding.weight[[1, 9]] = values
    for _ in range(5):
        train_both(emb, ram, weighted_sum(torch.randint(0, 10, (6,)), torch.randn(6, 3)))
    torch.testing.assert_close(emb.weight[:], ram.weight)
    torch.testing.assert_close(emb.state["exp_avg"][:], ram.exp_avg)


def test_assigning_moments_of_an_untouched_row_keeps_its_initial_weight(make_table):
    emb = make_table(10, 3, seed=4)
    initial = emb.weight[:]
    emb.state["exp_avg"][[6]] = torch.ones(1, 3)
    emb.flush()
    stored = read_rows(emb.path)
    assert torch.equal(stored.weight[6], initial[6])
    assert stored.exp_avg[6].tolist() == [1, 1, 1]
    assert stored.version.tolist() == [0] * 6 + [1] + [0] * 3
    assert torch.equal(emb.weight[:], initial)


def test_last_of_duplicate_rows_wins_in_an_assignment(emb):
    for rows in ([5, 5, 5], torch.tensor([5, 3, 5])):
        values = torch.randn(3, 3)
        emb.weight[rows] = values
        assert torch.equal(emb.weight[5], values[2])


@pytest.mark.parametrize("value", [0.0, 1.5, 2])
def test_number_is_assigned_to_each_entry(emb, initial, value):
    emb.weight[[2, 3]] = value
    assert torch.equal(emb.weight[[2, 3]], torch.full((2, 3), float(value)))
    assert torch.equal(emb.weight[4:], initial[4:])


def test_values_of_another_dtype_are_cast(emb):
    emb.weight[[2]] = torch.tensor([[1.0, 2.0, 3.0]], dtype=torch.float64)
    assert emb.weight[2].tolist() == [1, 2, 3]
    assert emb.weight[2].dtype == torch.float32


def test_values_that_require_grad_are_assigned_without_their_graph(emb):
    emb.weight[[2]] = torch.ones(1, 3, requires_grad=True)
    assert not emb.weight[[2]].requires_grad
    assert emb.weight[2].tolist() == [1, 1, 1]


def test_assigning_more_rows_than_the_cache_holds(make_table):
    emb = make_table(3000, 2, cache_bytes=20 * 7 * 4, chunk_rows=1024)
    rows = torch.randperm(3000)[:2500]
    values = torch.randn(2500, 2)
    expected = emb.weight[:]
    expected[rows] = values
    emb.weight[rows] = values
    assert torch.equal(emb.weight[:], expected)
    emb.flush()
    assert torch.equal(read_rows(emb.path).weight[rows], values)


def test_assignment_between_forward_and_backward_is_not_undone(emb, initial):
    """A step reads the record again; it never writes back what forward saw."""
    ram = RamTable(initial, lr=0.1)
    loss = emb(IDS).sum()
    ram_loss = ram(IDS).sum()
    emb.weight[[1]] = torch.full((1, 3), 9.0)
    with torch.no_grad():
        ram.embedding.weight[1] = 9.0
    loss.backward()
    ram_loss.backward()
    ram.step_and_zero()
    torch.testing.assert_close(emb.weight[:], ram.weight)


# Errors


BAD_ROWS = [10, -11, 2**40, [3, 10], [-11], torch.tensor([3, 10]), torch.tensor([2**62])]


@pytest.mark.parametrize("rows", BAD_ROWS, ids=str)
def test_row_outside_the_table_is_an_index_error(emb, initial, rows):
    for view in views(emb).values():
        with pytest.raises(IndexError, match="10"):
            view[rows]
    with pytest.raises(IndexError, match="10"):
        emb.weight[rows] = 0.0
    assert torch.equal(emb.weight[:], initial)


@pytest.mark.parametrize(
    "rows",
    [1.5, "3", None, [1.5], torch.tensor([1.0]), (1, 2), torch.zeros(2, 2, dtype=torch.int64)],
    ids=str,
)
def test_rows_of_another_kind_are_refused(emb, initial, rows):
    with pytest.raises((TypeError, IndexError, ValueError)):
        emb.weight[rows]
    with pytest.raises((TypeError, IndexError, ValueError)):
        emb.weight[rows] = 0.0
    assert torch.equal(emb.weight[:], initial)


@pytest.mark.parametrize(
    ("rows", "shape"), [([1, 2], (3, 3)), ([1, 2], (2, 2)), (slice(0, 4), (3, 3)), (5, (2,))]
)
def test_values_of_a_wrong_shape_are_refused_and_nothing_changes(emb, initial, rows, shape):
    with pytest.raises((ValueError, RuntimeError), match=r"shape|size|expand|broadcast"):
        emb.weight[rows] = torch.ones(shape)
    assert torch.equal(emb.weight[:], initial)
    assert emb.version[:].tolist() == [1] * 10


def test_unknown_field_is_a_key_error(emb):
    with pytest.raises(KeyError, match="momentum"):
        emb.state["momentum"]


def test_assigning_in_a_read_only_table_is_refused(emb, open_table, initial):
    emb.close(flush=True)
    reader = open_table(emb.path, mode="r")
    for view in (reader.weight, reader.state["exp_avg"]):
        with pytest.raises(ooc_embed.StoreError, match="mode"):
            view[[1]] = torch.ones(1, 3)
    assert torch.equal(reader.weight[:], initial)


def test_views_of_a_closed_table_are_refused(emb):
    weight = emb.weight
    emb.close()
    for read in (lambda: weight[1], lambda: weight[:], lambda: list(weight.blocks())):
        with pytest.raises(ooc_embed.StoreError, match="closed"):
            read()
    with pytest.raises(ooc_embed.StoreError, match="closed"):
        weight[[1]] = 0.0


def test_written_rows_reach_disk_with_the_next_commit(emb, open_table, initial):
    emb.weight[[1]] = torch.zeros(1, 3)
    reader = open_table(emb.path, mode="r")
    assert torch.equal(reader.weight[:], initial)
    emb.commit()
    assert open_table(emb.path, mode="r").weight[1].tolist() == [0, 0, 0]
    assert torch.equal(reader.weight[:], initial)


def test_imported_table_equals_torchs_after_training(trained):
    emb, ram = trained
    emb.flush()
    assert_stored_equal(emb.path, ram, imported=True)
