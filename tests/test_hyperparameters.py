"""Tests of the rule's hyper-parameters: defaults, refusals, and that they are kept and shown."""

import pytest
import torch

import ooc_embed


def test_defaults_are_those_of_torch():
    torch_defaults = torch.optim.SparseAdam([torch.zeros(1)]).defaults
    rule = ooc_embed.SparseAdam()
    for name in ("lr", "betas", "eps", "maximize"):
        assert getattr(rule, name) == torch_defaults[name]


def test_default_rule_is_sparse_adam_with_the_defaults(make_table):
    group = make_table().optimizer.param_groups[0]
    assert (group["lr"], tuple(group["betas"]), group["eps"]) == (1e-3, (0.9, 0.999), 1e-8)


def test_hyperparameters_are_shown(make_table):
    emb = make_table(optimizer=ooc_embed.SparseAdam(lr=0.25))
    assert "SparseAdam" in repr(emb)
    assert "lr=0.25" in repr(emb)


def test_hyperparameters_are_restored(make_table, open_table):
    rule = ooc_embed.SparseAdam(lr=0.25, betas=(0.5, 0.75), eps=1e-4, maximize=True)
    emb = make_table(optimizer=rule)
    emb.close()
    group = open_table(emb.path).optimizer.param_groups[0]
    assert (group["lr"], tuple(group["betas"]), group["eps"]) == (0.25, (0.5, 0.75), 1e-4)
    assert group["maximize"] is True


@pytest.mark.parametrize("option", ["weight_decay", "amsgrad", "lr_", "foreach", "step_on"])
def test_option_that_the_rule_lacks_is_a_type_error(option):
    with pytest.raises(TypeError, match=option):
        ooc_embed.SparseAdam(**{option: 1})


def test_misspelt_constructor_option_is_a_type_error(store_path):
    with pytest.raises(TypeError, match="weight_decya"):
        ooc_embed.DiskEmbedding(10, 2, path=store_path, weight_decya=1)
    assert not store_path.exists()


@pytest.mark.parametrize(
    "option",
    [
        {"lr": 0.0},
        {"lr": -1.0},
        {"lr": float("nan")},
        {"lr": torch.tensor([0.1, 0.2])},
        {"eps": 0.0},
        {"eps": -1e-8},
        {"eps": float("nan")},
        {"betas": (1.0, 0.999)},
        {"betas": (-0.1, 0.999)},
        {"betas": (0.9, 1.0)},
        {"betas": (0.9, float("nan"))},
    ],
    ids=str,
)
def test_hyperparameters_that_torch_refuses_are_refused(store_path, option):
    with pytest.raises(ValueError):
        torch.optim.SparseAdam([torch.zeros(1)], **option)
    with pytest.raises(ValueError, match=r"lr|learning rate|eps|epsilon|beta"):
        ooc_embed.DiskEmbedding(10, 2, path=store_path, optimizer=ooc_embed.SparseAdam(**option))
    assert not store_path.exists()


@pytest.mark.parametrize(
    "optimizer",
    [torch.optim.SparseAdam, "adam", 0.1, torch.optim.SparseAdam([torch.ones(1)])],
)
def test_optimizer_that_is_no_rule_is_refused(store_path, optimizer):
    with pytest.raises(TypeError, match="SparseAdam"):
        ooc_embed.DiskEmbedding(10, 2, path=store_path, optimizer=optimizer)
    assert not store_path.exists()


@pytest.mark.parametrize(
    "change", [{"betas": (1.0, 0.999)}, {"betas": (0.9, 2.0)}, {"eps": 0.0}, {"eps": -1.0}], ids=str
)
def test_hyperparameters_that_became_wrong_are_refused_before_any_table_steps(make_table, change):
    good, bad = make_table(), make_table()
    bad.optimizer.param_groups[0].update(change)
    ids = torch.tensor([1, 2])
    loss = good(ids).sum() + bad(ids).sum()
    with pytest.raises(ValueError, match="beta|eps"):
        loss.backward()
    assert (good.step, bad.step) == (0, 0)
    bad.optimizer.param_groups[0].update(betas=(0.9, 0.999), eps=1e-8)
    bad(ids).sum().backward()
    assert bad.step == 1
