"""Tables that come from tensors, files and torch's own layers, and go back; exact both ways."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import zarr
from ram_reference import RamTable, assert_same, train_both
from torch import nn

from ooc_embed import Adagrad, DiskEmbedding, DiskEmbeddingBag, SparseAdam

ROWS = torch.randn(30, 3, generator=torch.Generator().manual_seed(0))
IDS = torch.tensor([1, 2, 2, 7])


@pytest.fixture
def owned(stores):
    """Closes and checks a table that a class method made."""

    def own(emb):
        return stores._own(emb)

    return own


# from_pretrained


def as_tensor(folder):
    return ROWS


def as_bfloat16(folder):
    return ROWS.to(torch.bfloat16)


def as_array(folder):
    return ROWS.numpy()


def as_npy(folder):
    np.save(folder / "rows.npy", ROWS.numpy())
    return folder / "rows.npy"


def as_memmap(folder):
    return np.load(as_npy(folder), mmap_mode="r")


def as_zarr(folder):
    array = zarr.create_array(folder / "rows.zarr", shape=ROWS.shape, dtype="f4", chunks=(7, 3))
    array[:] = ROWS.numpy()
    return array


def as_zarr_path(folder):
    as_zarr(folder)
    return str(folder / "rows.zarr")


def as_zarr_group(folder):
    group = zarr.create_group(folder / "group.zarr")
    group.create_array("rows", data=ROWS.numpy())
    return folder / "group.zarr"


def as_safetensors(folder):
    files = pytest.importorskip("safetensors.torch", reason="needs the extra `safetensors`")
    files.save_file({"rows": ROWS}, folder / "rows.safetensors")
    return folder / "rows.safetensors"


SOURCES = [
    as_tensor,
    as_bfloat16,
    as_array,
    as_npy,
    as_memmap,
    as_zarr,
    as_zarr_path,
    as_zarr_group,
    as_safetensors,
]


@pytest.mark.parametrize("source", SOURCES)
def test_rows_come_from_whatever_holds_them(store_path, owned, tmp_path, source):
    emb = owned(DiskEmbedding.from_pretrained(source(tmp_path), path=store_path))
    expected = ROWS.to(torch.bfloat16).float() if source is as_bfloat16 else ROWS
    assert torch.equal(emb.weight[:], expected)
    assert not emb(IDS).requires_grad


def test_pretrained_rows_train_if_they_are_not_frozen(store_path, owned):
    emb = owned(DiskEmbedding.from_pretrained(ROWS, freeze=False, path=store_path))
    ram = RamTable(ROWS)
    train_both(emb, ram, lambda lookup: lookup(IDS).pow(2).sum())
    assert_same(emb, ram)


def test_a_padding_row_keeps_its_value(store_path, owned):
    emb = owned(DiskEmbedding.from_pretrained(torch.ones(3, 2), path=store_path, padding_idx=1))
    assert torch.equal(emb.weight[1], torch.ones(2))


def test_a_bag_comes_from_rows_too(store_path, owned):
    bag = owned(DiskEmbeddingBag.from_pretrained(ROWS, mode="sum", path=store_path))
    torch.testing.assert_close(bag(IDS[None])[0], ROWS[IDS].sum(0))


@pytest.mark.parametrize(
    ("source", "error", "message"),
    [
        (torch.ones(3), ValueError, r"\(3,\)"),
        ("nowhere.npy", FileNotFoundError, "nowhere"),
        ([[1.0]], TypeError, "tensor, an array or a path"),
    ],
)
def test_what_holds_no_rows_is_refused(store_path, source, error, message):
    with pytest.raises(error, match=message):
        DiskEmbedding.from_pretrained(source, path=store_path)
    assert not store_path.exists()


def test_files_of_another_kind_are_refused(store_path, tmp_path):
    (tmp_path / "rows.csv").write_text("1,2")
    (tmp_path / "folder").mkdir()
    for name in ("rows.csv", "folder"):
        with pytest.raises(ValueError, match=name):
            DiskEmbedding.from_pretrained(tmp_path / name, path=store_path)


def test_one_of_several_arrays_is_named(store_path, owned, tmp_path):
    group = zarr.create_group(tmp_path / "group.zarr")
    for name in ("head", "tail"):
        group.create_array(name, data=ROWS.numpy() * (1 if name == "tail" else 2))
    with pytest.raises(ValueError, match="head, tail"):
        DiskEmbedding.from_pretrained(tmp_path / "group.zarr", path=store_path)
    emb = owned(DiskEmbedding.from_pretrained(tmp_path / "group.zarr", key="tail", path=store_path))
    assert torch.equal(emb.weight[:], ROWS)


# from_embedding and to_embedding


def trained_in_ram(**options):
    embedding = nn.Embedding.from_pretrained(ROWS.double(), freeze=False, sparse=True, **options)
    optimizer = torch.optim.SparseAdam([embedding.weight], lr=0.1, betas=(0.8, 0.95), eps=1e-6)
    for _ in range(3):
        step_in_ram(embedding, optimizer)
    return embedding, optimizer


def step_in_ram(embedding, optimizer):
    embedding(IDS).pow(2).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_training_goes_on_on_disk_where_it_was_in_ram_and_back(store_path, owned):
    embedding, optimizer = trained_in_ram()
    emb = owned(DiskEmbedding.from_embedding(embedding, optimizer, path=store_path))
    assert emb.step == 3
    assert "lr=0.1, betas=(0.8, 0.95), eps=1e-06" in repr(emb)
    for _ in range(3):
        emb(IDS).pow(2).sum().backward()
        step_in_ram(embedding, optimizer)
    torch.testing.assert_close(emb.weight[:], embedding.weight.detach())
    back, its_optimizer = emb.to_embedding()
    for _ in range(3):
        step_in_ram(back, its_optimizer)
        step_in_ram(embedding, optimizer)
    torch.testing.assert_close(back.weight, embedding.weight)
    state = optimizer.state[embedding.weight]
    for name, values in its_optimizer.state[back.weight].items():
        torch.testing.assert_close(values, state[name])


def test_some_rows_come_back_in_their_order(make_table):
    emb = make_table(30, 3, init=ROWS, padding_idx=7)
    emb(IDS).sum().backward()
    part, optimizer = emb.to_embedding([7, 1, 29])
    assert torch.equal(part.weight, emb.weight[[7, 1, 29]])
    assert part.padding_idx == 0
    assert torch.equal(optimizer.state[part.weight]["exp_avg"], emb.state["exp_avg"][[7, 1, 29]])
    with pytest.raises(IndexError, match="30"):
        emb.to_embedding([30])


def test_an_untrained_table_gives_an_optimizer_without_state(make_table):
    part, optimizer = make_table().to_embedding()
    assert not optimizer.state
    step_in_ram(part, optimizer)


def test_a_rule_that_torch_does_not_have_gives_the_weights_alone(make_table):
    embedding, optimizer = make_table(optimizer=Adagrad()).to_embedding()
    assert isinstance(embedding, nn.Embedding)
    assert optimizer is None


def test_arguments_of_the_layer_come_along(store_path, owned):
    embedding = nn.Embedding(10, 2, padding_idx=3, max_norm=1.5, norm_type=1.0)
    embedding.weight.requires_grad_(False)
    emb = owned(DiskEmbedding.from_embedding(embedding.eval(), path=store_path))
    assert (emb.padding_idx, emb.max_norm, emb.norm_type) == (3, 1.5, 1.0)
    assert not emb.training
    assert not emb.anchor.requires_grad
    back, _ = emb.to_embedding()
    assert (back.padding_idx, back.max_norm, back.norm_type) == (3, 1.5, 1.0)


def test_a_bag_comes_from_a_bag(store_path, owned):
    torchs = nn.EmbeddingBag(10, 2, mode="max", include_last_offset=True, padding_idx=1)
    bag = owned(DiskEmbeddingBag.from_embedding(torchs, path=store_path))
    ids, offsets = torch.tensor([1, 2, 3]), torch.tensor([0, 2, 3])
    torch.testing.assert_close(bag(ids, offsets), torchs(ids, offsets))


def test_a_rate_that_a_scheduler_brought_to_zero_stays(store_path, owned):
    embedding, optimizer = trained_in_ram()
    optimizer.param_groups[0]["lr"] = 0.0
    emb = owned(DiskEmbedding.from_embedding(embedding, optimizer, path=store_path))
    emb(IDS).sum().backward()
    torch.testing.assert_close(emb.weight[:], embedding.weight.detach())
    assert emb.step == 4


def test_a_rule_begins_anew(store_path, owned):
    embedding, _ = trained_in_ram()
    rule = SparseAdam(lr=0.5)
    emb = owned(DiskEmbedding.from_embedding(embedding, rule, path=store_path))
    assert (emb.step, emb.optimizer.param_groups[0]["lr"]) == (0, 0.5)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda e: torch.optim.Adam(e.parameters()), TypeError, "Adam"),
        (lambda e: torch.optim.SparseAdam([nn.Parameter(ROWS)]), ValueError, "weight"),
        (lambda e: 0.1, TypeError, "0.1"),
    ],
)
def test_an_optimizer_with_other_numbers_is_refused(store_path, make, error, message):
    embedding = nn.Embedding(4, 2)
    with pytest.raises(error, match=message):
        DiskEmbedding.from_embedding(embedding, make(embedding), path=store_path)
    assert not store_path.exists()


def test_a_layer_of_another_kind_is_refused(store_path):
    with pytest.raises(TypeError, match="EmbeddingBag"):
        DiskEmbeddingBag.from_embedding(nn.Embedding(4, 2), path=store_path)
    assert not store_path.exists()


def test_float64_rows_make_a_float64_table(store_path, owned):
    emb = owned(DiskEmbedding.from_pretrained(ROWS.double() * 1e300, path=store_path))
    assert emb.weight.dtype == torch.float64
    assert torch.equal(emb.weight[:], ROWS.double() * 1e300)


@pytest.mark.parametrize("source", [as_tensor, as_npy])
def test_a_key_where_there_is_one_array_is_refused(store_path, tmp_path, source):
    with pytest.raises(ValueError, match="key="):
        DiskEmbedding.from_pretrained(source(tmp_path), key="rows", path=store_path)


def test_a_source_inside_the_store_that_it_would_replace_is_refused(make_table):
    emb = make_table(init="zeros")
    emb(IDS).sum().backward()
    emb.close(flush=True)
    with pytest.raises(ValueError, match="before it is read"):
        DiskEmbedding.from_pretrained(emb.path, key="table", path=emb.path, overwrite=True)
    with DiskEmbedding.open(emb.path) as again:
        assert again.step == 1


def test_the_rate_in_force_and_the_schedules_first_are_committed_at_once(store_path, owned):
    embedding, optimizer = trained_in_ram()
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    step_in_ram(embedding, optimizer)
    scheduler.step()
    emb = owned(DiskEmbedding.from_embedding(embedding, optimizer, path=store_path))
    with DiskEmbedding.open(store_path, mode="r") as reader:
        group = reader.optimizer.param_groups[0]
        assert (group["lr"], group["initial_lr"]) == (0.05, 0.1)
    _, back = emb.to_embedding()
    resumed = torch.optim.lr_scheduler.ExponentialLR(back, 0.5, last_epoch=1)
    assert resumed.base_lrs == [0.1]


def test_a_tensor_rate_that_became_zero_comes_along(store_path, owned):
    embedding = nn.Embedding(10, 2, sparse=True)
    optimizer = torch.optim.SparseAdam(embedding.parameters(), lr=torch.tensor(0.1))
    optimizer.param_groups[0]["lr"].zero_()
    emb = owned(DiskEmbedding.from_embedding(embedding, optimizer, path=store_path))
    assert emb.optimizer.param_groups[0]["lr"] == 0.0


@pytest.mark.parametrize(
    "options",
    [
        {"optimizer": SparseAdam(row_weight_decay=0.1)},
        {"optimizer": SparseAdam(bias_correction="row")},
        {"max_grad_norm": 1.0},
        {"nonfinite": "skip"},
    ],
)
def test_an_option_that_torch_does_not_have_gives_no_optimizer(make_table, options):
    assert make_table(**options).to_embedding()[1] is None


def test_a_frozen_table_in_evaluation_comes_back_as_such(make_table):
    embedding, _ = make_table().eval().requires_grad_(False).to_embedding([])
    assert embedding.weight.shape == (0, 2)
    assert not embedding.training
    assert not embedding.weight.requires_grad
