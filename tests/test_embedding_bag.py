"""DiskEmbeddingBag against torch.nn.EmbeddingBag: results, gradients, errors; a step is Adam's."""

from __future__ import annotations

import pytest
import torch
from ram_reference import fingerprint
from torch import nn

from ooc_embed import DiskEmbedding, DiskEmbeddingBag, FormatError, SparseAdam

ROWS = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0], [-7.0, -8.0]], dtype=torch.float64)


@pytest.fixture
def make_bag(stores):
    """`make_bag(weights, **options)`: a bag of these rows; float64, so that equal is equal."""

    def make(weights: torch.Tensor = ROWS, **options: object) -> DiskEmbeddingBag:
        options.setdefault("optimizer", SparseAdam(lr=0.1))
        bag = DiskEmbeddingBag(
            *weights.shape, init=weights, dtype=weights.dtype, path=stores.new_path(), **options
        )
        stores.tables.append(bag)
        return bag

    return make


class RamBag:
    """torch's own bag with Adam: dense gradients, masked so that only the batch's rows step."""

    def __init__(self, weights: torch.Tensor, **options: object) -> None:
        self.bag = nn.EmbeddingBag.from_pretrained(weights.clone(), freeze=False, **options)
        self.optimizer = torch.optim.SparseAdam([self.bag.weight], lr=0.1)

    def step(self, ids: torch.Tensor) -> None:
        """Step on the rows of the batch, whose gradient may be zero, but the padding row."""
        rows = ids.reshape(-1).unique()
        rows = rows[rows != self.bag.padding_idx] if self.bag.padding_idx is not None else rows
        dense = self.bag.weight.grad
        self.bag.weight.grad = torch.sparse_coo_tensor(
            rows[None], dense[rows], dense.shape, check_invariants=True
        )
        self.optimizer.step()
        self.bag.weight.grad = None


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_empty_bags_give_zeros(make_bag, mode):
    bag = make_bag(mode=mode)
    ids, offsets = torch.tensor([1, 3]), torch.tensor([0, 0, 1, 1, 2, 2])
    expected = torch.tensor([[0, 0], [3, 4], [0, 0], [-7, -8], [0, 0], [0, 0]])
    assert torch.equal(bag(ids, offsets), expected.double())
    none = torch.empty(0, dtype=torch.int64)
    assert torch.equal(bag(none, torch.tensor([0, 0])), torch.zeros(2, 2).double())


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("sum", [[0, 0], [-7, -8], [-4, -4]]),
        ("mean", [[0, 0], [-7, -8], [-2, -2]]),
        ("max", [[0, 0], [-7, -8], [3, 4]]),
    ],
)
def test_padding_is_left_out_of_its_bags(make_bag, mode, expected):
    bag = make_bag(mode=mode, padding_idx=0)
    out = bag(torch.tensor([[0, 0], [0, 3], [1, 3]]))
    assert torch.equal(out, torch.tensor(expected).double())
    out.sum().backward()
    assert torch.equal(bag.weight[0], ROWS[0])
    assert int(bag.version[0]) == 1


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("padding_idx", [None, 2])
@pytest.mark.parametrize("last", [False, True])
def test_thirty_steps_are_torchs(make_bag, mode, padding_idx, last):
    weights = torch.randn(30, 3, dtype=torch.float64)
    options = {"mode": mode, "padding_idx": padding_idx, "include_last_offset": last}
    bag, ram = make_bag(weights, cache_bytes=6 * 200, **options), RamBag(weights, **options)
    generator = torch.Generator().manual_seed(0)
    for step in range(30):
        count = int(torch.randint(1, 12, (1,), generator=generator))
        ids = torch.randint(30, (count,), generator=generator)
        if step % 3 == 0:
            ids, offsets = ids[: count // 2 * 2].reshape(2, -1), None
        else:
            offsets = torch.randint(0, count + 1, (4,), generator=generator).sort().values
            offsets[0] = 0
            if last:
                offsets[-1] = count
        out, expected = bag(ids, offsets), ram.bag(ids, offsets)
        torch.testing.assert_close(out, expected)
        grad = torch.randn(out.shape, dtype=torch.float64, generator=generator)
        out.backward(grad)
        expected.backward(grad)
        ram.step(ids)
    torch.testing.assert_close(bag.weight[:], ram.bag.weight.detach())
    assert bag.step == 30


def test_two_dimensions_with_include_last_offset_are_a_bag_each(make_bag):
    bag = make_bag(mode="sum", include_last_offset=True)
    out = bag(torch.tensor([[0, 1], [2, 3]]))
    assert torch.equal(out, torch.tensor([[4.0, 6.0], [-2.0, -2.0]]).double())


def test_per_sample_weights_weigh_and_have_the_gradient_of_the_stored_rows(make_bag):
    bag = make_bag(mode="sum", padding_idx=0)
    weights = torch.ones(1, 3, dtype=torch.float64, requires_grad=True)
    out = bag(torch.tensor([[0, 1, 2]]), per_sample_weights=weights)
    assert torch.equal(out, torch.tensor([[8.0, 10.0]]).double())
    out.sum().backward()
    assert torch.equal(weights.grad, torch.tensor([[0.0, 7.0, 11.0]]).double())
    assert bag.version[:].tolist() == [1, 2, 2, 1]
    row_grads = torch.tensor([[0.0, 0.0], [1.0, 1.0], [1.0, 1.0], [0.0, 0.0]]).double()
    torch.testing.assert_close(bag.state["exp_avg"][:], 0.1 * row_grads)


def test_per_sample_weights_have_the_gradient_of_the_rows_that_forward_saw(make_bag):
    bag = make_bag(mode="sum")
    weights = torch.ones(1, 2, dtype=torch.float64, requires_grad=True)
    out = bag(torch.tensor([[1, 2]]), per_sample_weights=weights)
    bag(torch.tensor([[1, 2]])).sum().backward()
    assert not torch.isclose(bag.weight[1:3], ROWS[1:3]).any()
    out.sum().backward()
    assert torch.equal(weights.grad, torch.tensor([[7.0, 11.0]]).double())


@pytest.mark.parametrize("mode", ["mean", "max"])
def test_per_sample_weights_are_only_for_sums(make_bag, mode):
    bag = make_bag(mode=mode)
    with pytest.raises(NotImplementedError):
        bag(torch.tensor([[1]]), per_sample_weights=torch.ones(1, 1, dtype=torch.float64))


def test_scale_grad_by_freq_divides_by_the_count_in_the_batch(make_bag):
    bag = make_bag(mode="sum", scale_grad_by_freq=True, step_on="optimizer", padding_idx=0)
    bag(torch.tensor([0, 1, 1, 0, 3]), torch.tensor([0, 2])).sum().backward()
    (handle,) = bag.optimizer.param_groups[0]["params"]
    assert torch.equal(handle.grad, torch.ones(2, 2).double())


def test_scale_grad_by_freq_gives_the_row_gradients_of_the_reference(make_bag):
    bag = make_bag(mode="sum", scale_grad_by_freq=True)
    bag(torch.tensor([1, 1, 3]), torch.tensor([0])).sum().backward()
    row_grads = torch.tensor([0.0, 1.0, 0.0, 1.0]).double()[:, None].expand(4, 2)
    torch.testing.assert_close(bag.state["exp_avg"][:], 0.1 * row_grads)


@pytest.mark.parametrize("shape", [(0, 3), (3, 0)])
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("last", [False, True])
def test_input_without_ids_gives_a_zero_row_a_bag(make_bag, shape, mode, last):
    bag = make_bag(mode=mode, include_last_offset=last)
    ids = torch.empty(shape, dtype=torch.int64)
    out = bag(ids)
    assert torch.equal(out, torch.zeros(shape[0], 2).double())
    out.sum().backward()
    assert torch.equal(bag.weight[:], ROWS)


def test_weights_of_samples_without_ids_may_be_given(make_bag):
    bag = make_bag(mode="sum")
    ids, weights = torch.empty(3, 0, dtype=torch.int64), torch.empty(3, 0, dtype=torch.float64)
    assert torch.equal(bag(ids, per_sample_weights=weights), torch.zeros(3, 2).double())


def test_int32_ids_go_with_int64_offsets_and_the_other_way_round(make_bag):
    bag = make_bag(mode="sum")
    for ids, offsets in [(torch.int32, torch.int64), (torch.int64, torch.int32)]:
        out = bag(torch.tensor([1, 2, 3], dtype=ids), torch.tensor([0, 2], dtype=offsets))
        assert torch.equal(out, torch.tensor([[8.0, 10.0], [-7.0, -8.0]]).double())


MISTAKES = [
    ([[1, 2]], [0], ValueError),
    ([1, 2], None, ValueError),
    ([1, 2], [[0]], ValueError),
    ([1, 2], [1], (RuntimeError, ValueError)),
    ([1, 2], [0, 5], (RuntimeError, ValueError)),
    ([1, 2], [0, 2, 1], ValueError),
    ([1, 2], [], ValueError),
    ([1, 2], [0.0, 1.0], ValueError),
    ([[[1]]], None, ValueError),
    (1, None, ValueError),
    ([4], [0], IndexError),
    ([-1], [0], IndexError),
    ([-(2**63)], [0], IndexError),
]


@pytest.mark.parametrize(("ids", "offsets", "error"), MISTAKES)
def test_wrong_arguments_are_errors_that_change_nothing(make_bag, ids, offsets, error):
    bag = make_bag(mode="sum", max_norm=5.0)
    before = fingerprint(bag.path)
    offsets = None if offsets is None else torch.tensor(offsets)
    with pytest.raises(error):
        bag(torch.tensor(ids), offsets)
    assert fingerprint(bag.path) == before
    assert torch.equal(bag.weight[:], ROWS)
    assert bag.version[:].tolist() == [1, 1, 1, 1]
    torch.testing.assert_close(bag(torch.tensor([[1]])), ROWS[[1]])


@pytest.mark.parametrize("bad", [4, -1, torch.iinfo(torch.int64).min])
@pytest.mark.parametrize("offsets", [None, [0, 1]])
def test_id_outside_the_table_is_named_with_the_size_of_the_table(make_bag, bad, offsets):
    ids = torch.tensor([1, bad] if offsets else [[1, bad]])
    with pytest.raises(IndexError, match=rf"{bad}\b.*\b4\b"):
        make_bag(mode="sum")(ids, None if offsets is None else torch.tensor(offsets))


@pytest.mark.parametrize("dtype", [torch.float32, torch.int16, torch.bool])
def test_other_id_dtypes_are_refused(make_bag, dtype):
    with pytest.raises(TypeError, match="int32 or int64"):
        make_bag()(torch.ones(1, 1, dtype=dtype))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "average"}, "sum, mean, max"),
        ({"mode": "max", "scale_grad_by_freq": True}, "mode='max'"),
        ({"padding_idx": 4}, "4"),
        ({"step_on": "loss"}, "step_on"),
    ],
)
def test_senseless_arguments_are_refused_before_anything_is_made(tmp_path, options, message):
    path = tmp_path / "bag.zarr"
    with pytest.raises(ValueError, match=message):
        DiskEmbeddingBag(4, 2, path=path, **options)
    assert not path.exists()


def test_a_bag_opens_as_it_was_made(make_bag):
    options = {"mode": "max", "include_last_offset": True, "padding_idx": -1, "max_norm": 2.0}
    bag = make_bag(**options, step_on="optimizer")
    text = repr(bag)
    bag.close()
    with DiskEmbeddingBag.open(bag.path) as again:
        assert (again.mode, again.include_last_offset, again.padding_idx) == ("max", True, 3)
        assert (again.max_norm, again.step_on) == (2.0, "optimizer")
        assert repr(again) == text
    with DiskEmbedding.open(bag.path, mode="r") as plain:
        assert torch.equal(plain.weight[1], ROWS[1])


def test_the_table_of_an_embedding_is_no_bag_and_stays_openable(make_table):
    emb = make_table()
    emb.close()
    with pytest.raises(FormatError, match="DiskEmbedding"):
        DiskEmbeddingBag.open(emb.path)
    with DiskEmbedding.open(emb.path) as again:
        assert again.step == 0


def test_max_norm_scales_the_stored_rows_as_torch_does(make_bag):
    bag = make_bag(mode="sum", max_norm=1.0)
    torchs = nn.EmbeddingBag.from_pretrained(ROWS.clone(), mode="sum", max_norm=1.0)
    ids = torch.tensor([[1, 1], [3, 1]])
    torch.testing.assert_close(bag(ids), torchs(ids))
    torch.testing.assert_close(bag.weight[:], torchs.weight)


def test_a_bag_and_an_embedding_step_in_the_same_backward(make_bag, make_table):
    bag, emb = make_bag(mode="sum"), make_table(10, 2, dtype=torch.float64)
    (bag(torch.tensor([[1, 2]])) * emb(torch.tensor([3]))).sum().backward()
    assert (bag.step, emb.step) == (1, 1)


def test_functional_transforms_are_an_error_that_names_the_layer(make_bag):
    bag = make_bag(mode="sum")
    with pytest.raises(RuntimeError, match=r"DiskEmbeddingBag.*torch\.func"):
        torch.func.vmap(bag)(torch.tensor([[[1, 2]], [[3, 3]]]))
    assert bag.step == 0


def test_evaluation_writes_nothing(make_bag):
    bag = make_bag().eval()
    before = fingerprint(bag.path)
    with torch.no_grad():
        bag(torch.tensor([[1, 2]]))
    bag.requires_grad_(False)
    assert not bag(torch.tensor([[1, 2]])).requires_grad
    assert fingerprint(bag.path) == before
    assert torch.equal(bag.weight[:], ROWS)
    assert bag.step == 0


def test_bags_are_in_a_models_state_and_repr(make_bag):
    bag = make_bag(mode="sum")
    model = nn.Sequential(bag)
    assert list(model.state_dict()) == ["0._extra_state"]
    assert "mode='sum'" in repr(model)
