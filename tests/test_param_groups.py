"""What a param group may hold: a commit keeps nothing that opening would refuse."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import store_files
import torch
from torch import nn
from torch.optim import lr_scheduler

from ooc_embed import SGD, DiskEmbedding, SparseAdam

IDS = torch.tensor([1, 2, 2, 7])

BROKEN = [
    {"lr": "0.1"},
    {"lr": None},
    {"lr": -1.0},
    {"lr": True},
    {"lr": torch.tensor([0.1, 0.2])},
    {"eps": 0.0},
    {"betas": 0.9},
    {"betas": (0.9,)},
    {"betas": (1.0, 0.999)},
    {"maximize": 1},
    {"row_weight_decay": -1.0},
    {"bias_correction": "row"},
    {"max_grad_norm": "1"},
    {"nonfinite": "ignore"},
]


@pytest.mark.parametrize("change", BROKEN, ids=str)
def test_a_value_that_no_step_could_use_is_not_committed(make_table, change):
    emb = make_table()
    emb(IDS).sum().backward()
    group = emb.optimizer.param_groups[0]
    kept = dict(group)
    group.update(change)
    for call in (emb.commit, emb.flush, emb.close):
        with pytest.raises(ValueError, match="param_groups"):
            call()
    group.update(kept)
    emb.close()
    with DiskEmbedding.open(emb.path) as again:
        assert again.step == 1


def test_a_table_that_is_dropped_with_such_a_value_keeps_the_last_good_one(store_path):
    tables = [DiskEmbedding(10, 2, path=store_path, optimizer=SGD(lr=0.1))]
    tables[0](IDS).sum().backward()
    tables[0].commit()
    tables[0](IDS).sum().backward()
    # It cycles a momentum, which this table has no field for.
    lr_scheduler.OneCycleLR(tables[0].optimizer, 0.1, total_steps=10)
    with pytest.warns(UserWarning, match="the last ones stay"):
        tables.clear()
    with DiskEmbedding.open(store_path) as again:
        assert again.step == 2
        assert again.optimizer.param_groups[0]["lr"] == 0.1


def test_the_state_of_torchs_optimizer_gives_its_hyperparameters(make_table):
    emb = make_table(optimizer=SparseAdam(lr=0.1, row_weight_decay=0.25))
    weight = nn.Parameter(torch.zeros(10, 2))
    torchs = torch.optim.SparseAdam([weight], lr=0.02, betas=(0.5, 0.75))
    emb.optimizer.load_state_dict(torchs.state_dict())
    emb(IDS).sum().backward()
    emb.close()
    with DiskEmbedding.open(emb.path) as again:
        group = again.optimizer.param_groups[0]
        assert (group["lr"], group["betas"], group["row_weight_decay"]) == (0.02, (0.5, 0.75), 0.25)


def test_state_of_several_groups_or_of_no_sense_is_refused(make_table):
    emb = make_table()
    state = emb.optimizer.state_dict()
    two = {**state, "param_groups": state["param_groups"] * 2}
    with pytest.raises(ValueError, match="one group"):
        emb.optimizer.load_state_dict(two)
    senseless = copy.deepcopy(state)
    senseless["param_groups"][0]["eps"] = -1.0
    with pytest.raises(ValueError, match="eps"):
        emb.optimizer.load_state_dict(senseless)
    emb(IDS).sum().backward()
    assert emb.step == 1


def test_another_group_is_refused(make_table):
    emb = make_table()
    with pytest.raises(ValueError, match="an optimizer of their own"):
        emb.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
    assert len(emb.optimizer.param_groups) == 1


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_the_optimizer_is_not_copied(make_table, copied):
    with pytest.raises(TypeError, match="state_dict"):
        copied(make_table().optimizer)


def test_what_steps_the_table_is_not_changed_on_the_way(make_table):
    with pytest.raises(AttributeError):
        make_table().optimizer.step_on = "optimizer"


def test_a_store_without_the_newer_options_opens_with_their_defaults(make_table):
    emb = make_table()
    emb(IDS).sum().backward()
    emb.close()
    newer = ("row_weight_decay", "bias_correction", "max_grad_norm", "max_grad_value", "nonfinite")

    def make_older(manifest: dict[str, Any]) -> None:
        for values in (manifest["rule"], manifest["commits"][-1]["param_groups"][0]):
            for name in newer:
                values.pop(name, None)
        for name in ("step_on", "bag", "include_last_offset"):
            del manifest["module"][name]
        del manifest["crc32"]

    store_files.edit_manifest(emb.path, make_older)
    with DiskEmbedding.open(emb.path) as again:
        again(IDS).sum().backward()
        assert again.step == 2
        assert again.optimizer.param_groups[0]["nonfinite"] == "raise"


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"lr": "0.1"}, TypeError),
        ({"lr": True}, TypeError),
        ({"betas": 0.9}, ValueError),
        ({"eps": None}, TypeError),
        ({"maximize": None}, TypeError),
        ({"row_weight_decay": "0"}, TypeError),
    ],
)
def test_rules_refuse_values_of_another_kind(options, error):
    with pytest.raises(error, match=next(iter(options))):
        SparseAdam(**options)


@pytest.mark.parametrize("option", ["max_grad_norm", "max_grad_value"])
@pytest.mark.parametrize("value", ["1", True, torch.ones(2)])
def test_clipping_by_no_number_is_refused(store_path, option, value):
    with pytest.raises(TypeError, match=option):
        DiskEmbedding(10, 2, path=store_path, **{option: value})
    assert not store_path.exists()
