"""Tests of a table that is copied, pickled, forked, opened to read, or closed."""

import copy
import io
import pickle
import subprocess
import sys

import pytest
import torch
from ram_reference import (
    fingerprint,
    read_rows,
)
from torch import nn

import ooc_embed

IDS = torch.tensor([1, 2, 2, 7])


def train(emb, steps: int = 1, grad: float = 1.0) -> None:
    for _ in range(steps):
        (emb(IDS) * grad).sum().backward()


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
    assert (reader.path, reader.read_only, reader.step) == (emb.path, True, 2)
    assert torch.equal(reader.weight[:], emb.weight[:])
    with pytest.raises((ooc_embed.StoreError, RuntimeError), match="mode|does not require grad"):
        reader(IDS).sum().backward()
    train(emb)
    assert emb.step == 3


def test_pickled_reader_of_an_earlier_commit_opens_that_one(make_table, open_table):
    emb = make_table(keep_commits=5)
    for _ in range(3):
        emb(torch.tensor([1, 2])).sum().backward()
        emb.commit()
    for number in (1, None):
        reader = open_table(emb.path, mode="r", commit=number)
        carried = pickle.dumps(reader)
        emb(torch.tensor([1])).sum().backward()
        emb.commit()
        again = pickle.loads(carried)
        assert again.step == (emb.step if number is None else 1)
        if number is not None:
            assert torch.equal(again.weight[:], reader.weight[:])
        again.close()


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
        "print(model[0].read_only, model[0].step, round(float(model(torch.tensor([1]))[0, 0]), 4))"
    )
    command = [sys.executable, "-W", "error", "-c", read, str(file)]
    result = subprocess.run(command, check=True, capture_output=True, text=True)
    assert result.stdout.split() == ["True", "1", "-0.1"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_saved_model_computes_in_the_precision_it_was_cast_to(make_table, stores, dtype):
    model = nn.Sequential(make_table(), nn.Linear(2, 1)).to(dtype).eval()
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    stores.tables.append(loaded[0])
    assert not loaded[0].training
    assert torch.equal(loaded(IDS), model(IDS))
    assert loaded[0].weight.dtype == torch.float32


def test_averaged_model_is_refused_for_it_would_copy_the_table(make_table):
    with pytest.raises(TypeError, match="cannot be copied"):
        torch.optim.swa_utils.AveragedModel(nn.Sequential(make_table(), nn.Linear(2, 1)))


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
    assert (reader.read_only, reader.step) == (True, 2)
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
