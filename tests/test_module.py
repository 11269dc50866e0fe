"""Tests that the table lives in a model as any module does: repr, state_dict, casts, copies, schedulers."""

import copy
import inspect
import io
import pickle
import shutil
import subprocess
import sys
import warnings

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
from torch.optim import lr_scheduler

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
    assert len(file.getvalue()) < 100_000


def test_state_dict_loads_with_weights_only(make_table):
    emb = make_table()
    train(emb, 2)
    file = io.BytesIO()
    torch.save(emb.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    (extra,) = state.values()
    assert extra["step"] == 2
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
    assert emb.state_dict() == first
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


def test_checkpoint_of_nn_embedding_is_refused_without_a_write(make_table):
    emb = make_table()
    before = fingerprint(emb.path)
    with pytest.raises(RuntimeError, match="weight"):
        emb.load_state_dict(nn.Embedding(10, 2).state_dict())
    assert fingerprint(emb.path) == before


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
        model[0].flush()
        results.append((read_rows(model[0].path).weight, model[1].weight.detach(), model[0].step))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])
    assert results[0][2] == results[1][2] == 4


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


# Copies


def test_copying_the_module_is_an_error_that_says_what_to_do(make_table):
    emb = make_table()
    for duplicate in (copy.copy, copy.deepcopy, lambda e: copy.deepcopy(nn.Sequential(e))):
        with pytest.raises((RuntimeError, TypeError), match=r"open|path"):
            duplicate(emb)
    train(emb)
    assert emb.step == 1


def test_replica_for_data_parallel_is_an_error(make_table):
    emb = make_table()
    with pytest.raises((RuntimeError, TypeError), match="DataParallel"):
        emb._replicate_for_data_parallel()


def test_pickle_carries_the_path_and_opens_read_only(make_table, stores):
    emb = make_table()
    train(emb, 2)
    emb.commit()
    carried = pickle.dumps(emb)
    assert len(carried) < 10_000
    reader = pickle.loads(carried)
    stores.tables.append(reader)
    assert (reader.path, reader.mode, reader.step) == (emb.path, "r", 2)
    assert torch.equal(reader.weight[:], emb.weight[:])
    with pytest.raises((ooc_embed.StoreError, RuntimeError), match="mode|does not require grad"):
        reader(IDS).sum().backward()
    train(emb)
    assert emb.step == 3


def test_pickled_model_keeps_the_options_of_its_lookups(make_table, stores):
    emb = make_table(padding_idx=2)
    emb.commit()
    model = pickle.loads(pickle.dumps(nn.Sequential(emb, nn.Linear(2, 1))))
    stores.tables.append(model[0])
    assert model[0].padding_idx == 2
    assert torch.equal(model[0](IDS), emb(IDS))


def test_saved_module_is_read_in_another_process(make_table, tmp_path):
    emb = make_table(init="zeros", optimizer=ooc_embed.SparseAdam(lr=0.1))
    train(emb)
    emb.commit()
    file = tmp_path / "whole.pt"
    torch.save(nn.Sequential(emb), file)
    read = (
        "import sys, torch; model = torch.load(sys.argv[1], weights_only=False);"
        "print(model[0].mode, model[0].step, round(float(model(torch.tensor([1]))[0, 0]), 4))"
    )
    command = [sys.executable, "-W", "error", "-c", read, str(file)]
    result = subprocess.run(command, check=True, capture_output=True, text=True)
    assert result.stdout.split() == ["r", "1", "-0.1"]


FORK = """
import os, sys, torch, ooc_embed
emb = ooc_embed.DiskEmbedding(10, 2, path=sys.argv[1])
emb(torch.tensor([1])).sum().backward()
loss = emb(torch.tensor([2])).sum()
child = os.fork()
if not child:
    def refused(action):
        try:
            action()
        except ooc_embed.StoreError as error:
            return "fork" in str(error)
        return False
    actions = [loss.backward, emb.commit, lambda: emb(torch.tensor([1])),
               lambda: emb.weight.__setitem__([1], torch.zeros(1, 2))]
    os._exit(sum(not refused(action) for action in actions))
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
emb(torch.tensor([1])).sum().backward()
emb.close(flush=True)
"""


def test_forked_child_is_refused_and_its_parent_trains_on(store_path):
    command = [sys.executable, "-c", FORK, str(store_path)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr
    assert read_rows(store_path).version.tolist() == [0, 2] + [0] * 8


# Reading only, closing


def test_read_only_table_looks_up_and_does_not_train(make_table, open_table):
    emb = make_table()
    train(emb, 2)
    emb.close()
    before = fingerprint(emb.path)
    reader = open_table(emb.path, mode="r")
    assert (reader.mode, reader.step) == ("r", 2)
    layer = nn.Linear(2, 1)
    with torch.no_grad():
        assert reader(IDS).shape == (4, 2)
    reader.requires_grad_(False)
    assert not reader(IDS).requires_grad
    layer(reader(IDS)).sum().backward()
    assert layer.weight.grad is not None
    reader.close()
    assert fingerprint(emb.path) == before


def test_closed_table_refuses_and_closing_twice_is_fine(make_table):
    emb = make_table()
    loss = emb(IDS).sum()
    emb.close()
    emb.close()
    assert emb.closed
    for action in (loss.backward, emb.commit, emb.flush, lambda: emb(IDS)):
        with pytest.raises(ooc_embed.StoreError, match="closed"):
            action()


def test_with_closes_and_commits(store_path, open_table):
    with ooc_embed.DiskEmbedding(10, 2, path=store_path) as emb:
        train(emb)
        assert not emb.closed
    assert emb.closed
    assert open_table(store_path).step == 1


def test_with_closes_also_after_an_exception(store_path, open_table):
    with pytest.raises(KeyError), ooc_embed.DiskEmbedding(10, 2, path=store_path) as emb:
        train(emb)
        raise KeyError
    assert emb.closed
    assert open_table(store_path).step == 1


def test_unknown_mode_is_refused(make_table):
    emb = make_table()
    emb.close()
    before = fingerprint(emb.path)
    for mode in ("w", "a", "rw", ""):
        with pytest.raises(ValueError, match="mode"):
            ooc_embed.DiskEmbedding.open(emb.path, mode=mode)
    assert fingerprint(emb.path) == before


# The optimizer's face


def test_optimizer_is_a_torch_optimizer_with_the_hyperparameters(make_table):
    emb = make_table(optimizer=ooc_embed.SparseAdam(lr=0.3, betas=(0.8, 0.9), eps=1e-5))
    assert isinstance(emb.optimizer, torch.optim.Optimizer)
    (group,) = emb.optimizer.param_groups
    for values in (group, emb.optimizer.defaults):
        assert (values["lr"], tuple(values["betas"]), values["eps"]) == (0.3, (0.8, 0.9), 1e-5)


def test_step_of_the_optimizer_without_a_backward_does_nothing(make_table):
    emb = make_table()
    train(emb)
    rows = emb.weight[:]
    emb.optimizer.step()
    emb.optimizer.zero_grad()
    emb.optimizer.step()
    assert emb.step == 1
    assert torch.equal(emb.weight[:], rows)


def test_user_who_also_steps_the_optimizer_trains_once_a_backward(make_table):
    initial = torch.randn(10, 2)
    emb, ram = make_table(init=initial), RamTable(initial)
    for _ in range(4):
        emb.optimizer.zero_grad()
        train_both(emb, ram, lambda lookup: lookup(IDS).pow(2).sum())
        emb.optimizer.step()
    emb.flush()
    assert emb.step == 4
    assert_stored_equal(emb.path, ram, imported=True)


SCHEDULERS = {
    "StepLR": lambda optimizer: lr_scheduler.StepLR(optimizer, 2, gamma=0.5),
    "LambdaLR": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda t: 1 / (1 + t)),
    "ExponentialLR": lambda optimizer: lr_scheduler.ExponentialLR(optimizer, 0.7),
    "CosineAnnealingLR": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 8),
    "OneCycleLR": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.5, total_steps=9),
    "CyclicLR": lambda optimizer: lr_scheduler.CyclicLR(optimizer, 0.01, 0.1, 2),
    "SequentialLR": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.LinearLR(optimizer, 0.1), lr_scheduler.ExponentialLR(optimizer, 0.9)],
        [4],
    ),
}


@pytest.mark.parametrize("make", SCHEDULERS.values(), ids=SCHEDULERS)
def test_schedulers_drive_the_table_as_they_drive_torchs_without_a_warning(make_table, make):
    initial = torch.randn(10, 2, dtype=torch.float64)
    rule = ooc_embed.SparseAdam(lr=0.1)
    emb = make_table(init=initial, dtype=torch.float64, optimizer=rule)
    ram = RamTable(initial, lr=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ours, theirs = make(emb.optimizer), make(ram.optimizer)
        for _ in range(8):
            train_both(emb, ram, lambda lookup: lookup(IDS).pow(2).sum())
            ours.step()
            theirs.step()
            assert ours.get_last_lr() == theirs.get_last_lr()
    emb.flush()
    assert_stored_equal(emb.path, ram, imported=True)


def test_reduce_on_plateau_drives_the_table(make_table):
    emb = make_table(init="zeros", optimizer=ooc_embed.SparseAdam(lr=0.1))
    scheduler = lr_scheduler.ReduceLROnPlateau(emb.optimizer, patience=0)
    for _ in range(3):
        train(emb)
        scheduler.step(1.0)
    assert emb.optimizer.param_groups[0]["lr"] == pytest.approx(0.001)


def test_lr_of_one_a_half_and_nothing(make_table):
    """The last step has lr 0: the weight stays, its moments, version and the step go on."""
    rule = ooc_embed.SparseAdam(lr=0.1)
    emb = make_table(10, 1, init="zeros", dtype=torch.float64, optimizer=rule)
    ram = RamTable(torch.zeros(10, 1, dtype=torch.float64), lr=0.1)
    schedulers = [
        lr_scheduler.LambdaLR(optimizer, lambda t: (1.0, 0.5, 0.0, 0.0)[t])
        for optimizer in (emb.optimizer, ram.optimizer)
    ]
    weights = []
    for _ in range(3):
        train_both(emb, ram, lambda lookup: lookup(torch.tensor([1])).sum())
        weights.append(float(emb.weight[1]))
        for scheduler in schedulers:
            scheduler.step()
    assert weights == pytest.approx([-0.1, -0.15, -0.15], abs=1e-7)
    assert weights[1] == weights[2]
    emb.flush()
    assert emb.step == 3
    assert_stored_equal(emb.path, ram)


@pytest.mark.parametrize("shape", [(), (1,)], ids=str)
def test_lr_may_be_a_tensor_of_one_element(make_table, open_table, shape):
    initial = torch.randn(10, 2, dtype=torch.float64)
    lr = torch.full(shape, 0.1, dtype=torch.float64)
    emb = make_table(
        init=initial, dtype=torch.float64, optimizer=ooc_embed.SparseAdam(lr=lr.clone())
    )
    ram = RamTable(initial, lr=0.1)
    train_both(emb, ram, lambda lookup: lookup(IDS).pow(2).sum())
    emb.optimizer.param_groups[0]["lr"] = lr * 2
    ram.optimizer.param_groups[0]["lr"] = 0.2
    train_both(emb, ram, lambda lookup: lookup(IDS).pow(2).sum())
    emb.close(flush=True)
    assert_stored_equal(emb.path, ram, imported=True)
    assert float(open_table(emb.path).optimizer.param_groups[0]["lr"]) == pytest.approx(0.2)


def test_lr_changed_between_forward_and_backward_is_used(make_table):
    emb = make_table(init="zeros", optimizer=ooc_embed.SparseAdam(lr=0.1))
    loss = emb(IDS).sum()
    emb.optimizer.param_groups[0]["lr"] = 0.01
    loss.backward()
    torch.testing.assert_close(emb.weight[1], torch.full((2,), -0.01))


def test_hyperparameters_changed_in_training_step_as_in_torch(make_table):
    initial = torch.randn(10, 2, dtype=torch.float64)
    emb, ram = make_table(init=initial, dtype=torch.float64), RamTable(initial)
    for change in ({}, {"betas": (0.5, 0.9)}, {"eps": 1e-3}, {"lr": 0.5}, {"maximize": True}):
        for optimizer in (emb.optimizer, ram.optimizer):
            optimizer.param_groups[0].update(change)
        train_both(emb, ram, lambda lookup: lookup(IDS).pow(2).sum())
    emb.flush()
    assert_stored_equal(emb.path, ram, imported=True)


def test_scheduled_lr_is_there_after_reopening(make_table, open_table):
    emb = make_table(optimizer=ooc_embed.SparseAdam(lr=0.1))
    scheduler = lr_scheduler.ExponentialLR(emb.optimizer, 0.5)
    for _ in range(2):
        train(emb)
        scheduler.step()
    emb.close()
    again = open_table(emb.path)
    assert again.optimizer.param_groups[0]["lr"] == 0.025
    # Without initial_lr a scheduler that resumes would refuse.
    resumed = lr_scheduler.ExponentialLR(again.optimizer, 0.5, last_epoch=1)
    assert resumed.base_lrs == [0.1]


def test_lr_that_alone_was_changed_is_committed(make_table, open_table):
    emb = make_table(optimizer=ooc_embed.SparseAdam(lr=0.1))
    train(emb)
    emb.commit()
    emb.optimizer.param_groups[0]["lr"] = 0.7
    emb.close()
    assert open_table(emb.path).optimizer.param_groups[0]["lr"] == 0.7


def test_commits_are_numbered_and_an_unneeded_one_is_skipped(make_table):
    emb = make_table()
    first = emb.commit()
    train(emb)
    second = emb.commit()
    assert second > first
    assert emb.commit() == second


def test_table_joins_other_modules_in_a_module_list(make_table):
    tables = nn.ModuleList([make_table(), make_table()])
    loss = sum(table(IDS).sum() for table in tables)
    loss.backward()
    assert [table.step for table in tables] == [1, 1]
    assert len(tables.state_dict()) == 2
