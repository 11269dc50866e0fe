"""Tests that the table is a module as any other: arguments, repr, state_dict, casts."""

import copy
import inspect
import io
import json
import shutil

import pytest
import safetensors.torch
import torch
from ram_reference import (
    RamTable,
    assert_stored_equal,
    fingerprint,
    weighted_sum,
)
from torch import nn

import ooc_embed

IDS = torch.tensor([1, 2, 2, 7])


def train(emb, steps: int = 1, grad: float = 1.0) -> None:
    for _ in range(steps):
        (emb(IDS) * grad).sum().backward()


# Construction and repr


def test_arguments_are_named_and_ordered_as_in_nn_embedding():
    ours = inspect.signature(ooc_embed.DiskEmbedding).parameters
    positional = [p for p in ours.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    torchs = list(inspect.signature(nn.Embedding).parameters.values())
    for our, their in zip(positional, torchs, strict=False):
        assert our.name == their.name
        assert our.name == "sparse" or our.default == their.default
    assert len(positional) == 7


@pytest.mark.parametrize("sparse", [True, False])
def test_sparse_is_accepted_and_means_the_same(make_table, sparse):
    emb = make_table(init="zeros", sparse=sparse, optimizer=ooc_embed.SparseAdam(lr=0.1))
    train(emb)
    assert emb.version[:].tolist() == [0, 1, 1, 0, 0, 0, 0, 1, 0, 0]


@pytest.mark.parametrize(
    "arguments",
    [
        {"num_embeddings": 0},
        {"num_embeddings": -3},
        {"num_embeddings": 2.5},
        {"embedding_dim": 0},
        {"embedding_dim": -1},
        {"embedding_dim": "2"},
        {"cache_bytes": -1},
        {"cache_bytes": "much"},
        {"cache_bytes": 1.5},
        {"chunk_rows": 1000},
        {"chunk_rows": 0},
        {"chunk_rows": -1024},
        {"max_norm": "one"},
        {"norm_type": "two"},
        {"padding_idx": 1.5},
        {"seed": "x"},
        {"seed": 0.5},
    ],
    ids=str,
)
def test_senseless_arguments_are_refused_before_anything_is_made(store_path, arguments):
    options = {"num_embeddings": 10, "embedding_dim": 2, "path": store_path, **arguments}
    with pytest.raises((TypeError, ValueError), match=next(iter(arguments))):
        ooc_embed.DiskEmbedding(**options)
    assert not store_path.exists()


def test_path_is_required():
    with pytest.raises(TypeError, match="path"):
        ooc_embed.DiskEmbedding(10, 2)


@pytest.mark.parametrize("as_path", [str, lambda path: path])
def test_path_may_be_a_string(store_path, as_path):
    emb = ooc_embed.DiskEmbedding(10, 2, path=as_path(store_path))
    assert emb.path == store_path
    emb.close()
    assert (store_path / "zarr.json").is_file()


def test_existing_path_is_refused_and_the_error_names_the_ways_on(make_table, stores):
    emb = make_table()
    train(emb)
    emb.close()
    before = fingerprint(emb.path)
    with pytest.raises(FileExistsError, match=r"(?s)open.*overwrite|overwrite.*open"):
        ooc_embed.DiskEmbedding(10, 3, path=emb.path)
    assert fingerprint(emb.path) == before


def test_overwrite_makes_a_new_table(make_table):
    emb = make_table(init="zeros")
    train(emb)
    emb.close()
    new = make_table(20, 3, path=emb.path, overwrite=True)
    assert tuple(new.weight.shape) == (20, 3)
    assert (new.step, int(new.version[:].sum())) == (0, 0)


def test_repr_shows_what_differs_from_the_default(make_table):
    plain = make_table(10, 2)
    assert repr(plain).startswith("DiskEmbedding(10, 2")
    assert str(plain.path) in repr(plain)
    for name in ("padding_idx", "max_norm", "norm_type", "scale_grad_by_freq"):
        assert name not in repr(plain)
    given = make_table(10, 2, padding_idx=3, max_norm=2.0, norm_type=1.0, scale_grad_by_freq=True)
    for text in ("padding_idx=3", "max_norm=2.0", "norm_type=1.0", "scale_grad_by_freq=True"):
        assert text in repr(given)


def test_repr_of_a_model_and_of_a_closed_table_works(make_table):
    emb = make_table()
    model = nn.Sequential(emb, nn.Linear(2, 1))
    assert "DiskEmbedding(10, 2" in repr(model)
    emb.close()
    assert "DiskEmbedding(10, 2" in repr(emb)


def test_attributes_of_nn_embedding_are_there(make_table):
    emb = make_table(10, 2, padding_idx=-1, max_norm=3.0, norm_type=1.0, scale_grad_by_freq=True)
    assert (emb.num_embeddings, emb.embedding_dim, emb.padding_idx) == (10, 2, 9)
    assert (emb.max_norm, emb.norm_type, emb.scale_grad_by_freq) == (3.0, 1.0, True)


# Parameters and state_dict


def test_only_parameter_is_empty_and_not_in_the_state_dict(make_table):
    emb = make_table(1000, 50)
    ((_, anchor),) = emb.named_parameters()
    assert anchor.numel() == 0
    assert not list(emb.buffers())
    assert [key for key in emb.state_dict() if not key.endswith("_extra_state")] == []


def test_gradient_of_the_parameter_stays_none(make_table):
    emb = make_table()
    train(emb, 3)
    assert [p.grad for p in emb.parameters()] == [None]
    emb.zero_grad()


def test_state_dict_of_a_model_is_small(make_table):
    emb = make_table(1_000_000, 64)
    train(emb, 2)
    file = io.BytesIO()
    torch.save(nn.Sequential(emb, nn.Linear(2, 1)).state_dict(), file)
    assert len(file.getvalue()) < 10_000


def test_state_dict_holds_tensors_alone_as_safetensors_wants(make_table, tmp_path):
    model = nn.Sequential(make_table(), nn.Linear(2, 1))
    train(model[0], 2)
    safetensors.torch.save_file(model.state_dict(), tmp_path / "model.safetensors")
    state = safetensors.torch.load_file(tmp_path / "model.safetensors")
    model.load_state_dict(state)
    train(model[0])
    with pytest.raises(RuntimeError, match="step 2 .* step 3"):
        model.load_state_dict(state)


@pytest.mark.parametrize("word", [{}, "a text", torch.ones(3), torch.zeros(5, dtype=torch.uint8)])
def test_checkpoint_without_a_word_of_a_table_is_refused(make_table, word):
    with pytest.raises(RuntimeError, match="would have put its identity"):
        make_table().load_state_dict({"_extra_state": word})


def test_reset_parameters_is_nothing_before_training_and_refused_after(make_table):
    emb = make_table()
    before = emb.weight[:]
    emb.reset_parameters()
    assert torch.equal(emb.weight[:], before)
    train(emb)
    with pytest.raises(ooc_embed.StoreError, match="overwrite=True"):
        emb.reset_parameters()


def test_state_dict_loads_with_weights_only(make_table):
    emb = make_table()
    train(emb, 2)
    file = io.BytesIO()
    torch.save(emb.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    (extra,) = state.values()
    assert json.loads(bytes(extra.tolist()))["step"] == 2
    emb.load_state_dict(state)
    assert emb.step == 2


def test_state_dict_commits(make_table, open_table, tmp_path):
    emb = make_table(init="zeros", optimizer=ooc_embed.SparseAdam(lr=0.1))
    train(emb, 3)
    emb.state_dict()
    copied = tmp_path / "copied.zarr"
    shutil.copytree(emb.path, copied)  # as a kill at this moment would leave it
    again = open_table(copied)
    assert again.step == 3
    assert torch.equal(again.weight[:], emb.weight[:])


def test_state_dict_of_an_unchanged_table_writes_nothing(make_table):
    emb = make_table()
    train(emb)
    first = emb.state_dict()
    before = fingerprint(emb.path)
    assert torch.equal(emb.state_dict()["_extra_state"], first["_extra_state"])
    assert fingerprint(emb.path) == before


def test_strict_loading_of_a_checkpoint_without_the_table_says_so(make_table):
    model = nn.Sequential(make_table(), nn.Linear(2, 1))
    before = fingerprint(model[0].path)
    with pytest.raises(RuntimeError, match="Missing key"):
        model.load_state_dict({})
    assert fingerprint(model[0].path) == before


def test_checkpoint_of_another_step_is_not_loaded_silently(make_table):
    emb = make_table()
    train(emb, 10)
    state = copy.deepcopy(emb.state_dict())
    train(emb, 10)
    with pytest.raises(RuntimeError, match=r"(?s)10.*20|20.*10"):
        emb.load_state_dict(state)
    assert emb.step == 20


def test_checkpoint_of_another_table_is_not_loaded_silently(make_table):
    one, other = make_table(), make_table()
    for emb in (one, other):
        train(emb)
    with pytest.raises(RuntimeError, match="table"):
        one.load_state_dict(other.state_dict())


@pytest.mark.parametrize("shape", [(10, 2), (11, 2), (10, 3)])
def test_checkpoint_of_nn_embedding_is_refused_without_a_write(make_table, shape):
    emb = make_table()
    before, rows = fingerprint(emb.path), emb.weight[:]
    with pytest.raises(RuntimeError, match="weight"):
        emb.load_state_dict(nn.Embedding(*shape).state_dict())
    assert fingerprint(emb.path) == before
    assert torch.equal(emb.weight[:], rows)


def test_checkpoint_whose_dense_part_does_not_fit_leaves_the_table_as_it_was(make_table):
    emb = make_table()
    train(emb, 2)
    saved = nn.Sequential(emb, nn.Linear(2, 1)).state_dict()
    before = fingerprint(emb.path)
    with pytest.raises(RuntimeError, match="size mismatch"):
        nn.Sequential(emb, nn.Linear(2, 3)).load_state_dict(saved)
    assert fingerprint(emb.path) == before
    assert emb.step == 2


def test_dense_part_and_table_resume_together(make_table, open_table, tmp_path):
    """Two steps, a checkpoint, two more; and again with the process ended at the checkpoint."""

    def step(model, dense):
        model(IDS).pow(2).sum().backward()
        dense.step()
        dense.zero_grad()

    results = []
    for interrupted in (False, True):
        torch.manual_seed(3)
        emb = make_table(seed=1)
        model = nn.Sequential(emb, nn.Linear(2, 3))
        dense = torch.optim.Adam(model.parameters(), lr=0.1)
        for _ in range(2):
            step(model, dense)
        if interrupted:
            checkpoint = tmp_path / "model.pt"
            torch.save({"model": model.state_dict(), "dense": dense.state_dict()}, checkpoint)
            emb.close()
            model = nn.Sequential(open_table(emb.path), nn.Linear(2, 3))
            dense = torch.optim.Adam(model.parameters(), lr=0.1)
            saved = torch.load(checkpoint, weights_only=True)
            model.load_state_dict(saved["model"])
            dense.load_state_dict(saved["dense"])
        for _ in range(2):
            step(model, dense)
        model[0].commit()
        results.append((model[0].weight[:], model[1].weight.detach(), model[0].step))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])
    assert results[0][2] == results[1][2] == 4


def test_module_that_was_added_to_a_table_is_saved_and_loaded_with_it(make_table):
    emb = make_table()
    emb.adapter = nn.Linear(2, 2)
    model = nn.Sequential(emb)
    state = copy.deepcopy(model.state_dict())
    with torch.no_grad():
        emb.adapter.weight.zero_()
    model.load_state_dict(state)
    assert torch.equal(emb.adapter.weight, state["0.adapter.weight"])
    with pytest.raises(RuntimeError, match=r"Unexpected key.*0\.adapters"):
        model.load_state_dict({**state, "0.adapters.weight": torch.zeros(2)})


# What is done to all parameters of a model


def init_as_models_do(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.ones_(module.weight)
    elif isinstance(module, nn.Embedding):
        nn.init.zeros_(module.weight)


def test_initializing_a_model_leaves_the_rows(make_table):
    initial = torch.randn(10, 2)
    emb = make_table(init=initial)
    model = nn.Sequential(emb, nn.Linear(2, 1)).apply(init_as_models_do)
    for parameter in emb.parameters():
        nn.init.uniform_(parameter)
    assert model[1].weight.tolist() == [[1.0, 1.0]]
    assert torch.equal(emb(IDS), initial[IDS])
    with pytest.raises(TypeError, match=r"on disk.*init="):
        nn.init.normal_(emb.weight)


@pytest.mark.filterwarnings("ignore:.*gives up commit")  # one that state_dict() handed out
@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.share_memory(),
        lambda model: model.to("meta").to_empty(device="cpu"),
        lambda model: model.to(memory_format=torch.channels_last),
        lambda model: model.load_state_dict(model.state_dict(), assign=True),
        lambda model: model.requires_grad_(False).requires_grad_(True),
    ],
    ids=["share_memory", "meta and back", "memory_format", "assign", "freeze and thaw"],
)
def test_what_moves_a_models_parameters_moves_no_row_and_training_goes_on(make_table, change):
    initial = torch.randn(10, 2)
    emb, ram = make_table(init=initial), RamTable(initial)
    change(nn.Sequential(emb))
    emb(IDS).sum().backward()
    ram.train(lambda lookup: lookup(IDS).sum())
    emb.flush()
    assert_stored_equal(emb.path, ram, imported=True)


# Casts and devices


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_casts_change_the_output_alone(make_table, dtype):
    initial = torch.randn(10, 2)
    emb = make_table(init=initial)
    model = nn.Sequential(emb).to(dtype)
    assert emb(IDS).dtype == dtype
    assert torch.equal(emb(IDS), initial[IDS].to(dtype))
    assert emb.weight.dtype == torch.float32
    assert torch.equal(emb.weight[:], initial)
    model.float()
    assert torch.equal(emb(IDS), initial[IDS])


def test_casted_module_trains_the_uncasted_table(make_table):
    initial = torch.randn(10, 2)
    emb, ram = make_table(init=initial), RamTable(initial)
    emb.double()
    grad = torch.randn(4, 2, dtype=torch.float64)
    (emb(IDS) * grad).sum().backward()
    ram.train(weighted_sum(IDS, grad.float()))
    emb.flush()
    assert_stored_equal(emb.path, ram, imported=True)


@pytest.mark.parametrize("given", [False, True], ids=["itself", "after a functional call"])
def test_cast_that_swaps_what_is_under_a_parameter_does_not_end_training(make_table, given):
    emb = make_table()
    if given:
        parameters = {"anchor": nn.Parameter(torch.empty(0))}
        torch.func.functional_call(emb, parameters, (IDS,)).sum().backward()
    step = emb.step
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        emb.double()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)
    assert emb(IDS).dtype == torch.float64
    train(emb, 2)
    assert emb.step == step + 2


def test_reopened_table_gives_its_own_dtype(make_table, open_table):
    emb = make_table().half()
    emb.close()
    assert open_table(emb.path)(IDS).dtype == torch.float32


def test_train_and_eval_change_nothing(make_table):
    emb = make_table(init="zeros", optimizer=ooc_embed.SparseAdam(lr=0.1))
    emb.eval()
    train(emb)
    emb.train()
    train(emb)
    torch.testing.assert_close(emb.weight[1], torch.full((2,), -0.2))
    assert emb.step == 2


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_moving_the_model_to_a_gpu_moves_no_row(make_table):
    initial = torch.randn(200_000, 64)
    emb, ram = make_table(200_000, 64, init=initial), RamTable(initial)
    before = torch.cuda.memory_allocated()
    nn.Sequential(emb).cuda()
    assert torch.cuda.memory_allocated() - before < 1e6
    for device in ("cuda", "cpu"):
        ids = torch.randint(0, 200_000, (1000,))
        out = emb(ids.to(device))
        assert out.device.type == device
        grad = torch.randn(1000, 64)
        (out * grad.to(device)).sum().backward()
        ram.train(weighted_sum(ids, grad))
    emb.flush()
    assert_stored_equal(emb.path, ram, imported=True)
