"""Tests of the table as what autograd holds of it: frozen, wrapped, checkpointed, dropped."""

import gc
import weakref
from pathlib import Path

import pytest
import torch
from ram_reference import (
    assert_same,
    assert_untrained,
    fingerprint,
    leaf,
    train_both,
)
from torch import nn
from torch.utils.checkpoint import checkpoint

IDS = torch.tensor([1, 2, 2, 7])


# Freezing


def test_frozen_table_gives_outputs_without_grad_and_does_not_train(both):
    emb, ram = both
    before = fingerprint(emb.path)
    emb.requires_grad_(False)
    assert not emb(IDS).requires_grad
    layer = nn.Linear(2, 1, dtype=torch.float64)
    layer(emb(IDS)).sum().backward()
    assert layer.weight.grad.abs().sum() > 0
    assert_untrained(emb, before)
    emb.requires_grad_(True)
    assert emb(IDS).requires_grad
    train_both(emb, ram, lambda lookup: lookup(IDS).pow(2).sum())
    assert_same(emb, ram)


def test_table_frozen_with_its_model_does_not_train(both):
    emb, _ = both
    model = nn.Sequential(emb, nn.Linear(2, 1, dtype=torch.float64)).requires_grad_(False)
    out = model(IDS)
    assert not out.requires_grad
    with pytest.raises(RuntimeError, match="does not require grad"):
        out.sum().backward()
    assert emb.step == 0


def test_one_frozen_table_beside_one_that_trains(make_table):
    frozen, trained = make_table(init="zeros"), make_table(init="zeros")
    frozen.requires_grad_(False)
    (frozen(IDS) + trained(IDS)).sum().backward()
    assert (frozen.step, trained.step) == (0, 1)
    assert not frozen.weight[:].any()


# The parameter that autograd holds


def test_model_of_a_table_alone_gives_optimizers_and_clipping_a_harmless_parameter(both):
    emb, ram = both
    dense = torch.optim.AdamW(emb.parameters(), lr=1.0, weight_decay=1.0)
    for _ in range(2):
        train_both(emb, ram, lambda lookup: lookup(IDS).pow(2).sum())
        nn.utils.clip_grad_norm_(emb.parameters(), 1.0)
        dense.step()
        dense.zero_grad()
    assert_same(emb, ram)


@pytest.mark.parametrize("find_unused_parameters", [False, True])
def test_data_parallel_over_one_process_trains_as_without(both, tmp_path, find_unused_parameters):
    emb, ram = both
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_gloo_available()):
        pytest.skip("this torch has no gloo")
    distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'group'}", rank=0, world_size=1
    )
    try:
        model = nn.Sequential(emb, nn.Linear(2, 1, dtype=torch.float64))
        reference = nn.Linear(2, 1, dtype=torch.float64)
        reference.load_state_dict(model[1].state_dict())
        parallel = nn.parallel.DistributedDataParallel(
            model, find_unused_parameters=find_unused_parameters
        )
        for _ in range(4):
            parallel(IDS).pow(2).sum().backward()
            ram.train(lambda lookup: reference(lookup(IDS)).pow(2).sum())
    finally:
        distributed.destroy_process_group()
    assert emb.step == 4
    assert_same(emb, ram)


# Checkpointing


def region(lookup, ids):
    return lookup(ids).tanh() * lookup(ids + 1)


@pytest.mark.parametrize("regions", [1, 2])
def test_checkpointing_without_reentry_trains_as_without_checkpoints(both, regions):
    emb, ram = both
    for _ in range(3):
        outs = [checkpoint(region, emb, IDS + n, use_reentrant=False) for n in range(regions)]
        sum(out.sum() for out in outs).backward()
        ram.train(lambda lookup: sum(region(lookup, IDS + n).sum() for n in range(regions)))
    assert emb.step == 3
    assert_same(emb, ram)


def test_reentrant_checkpointing_is_refused_and_the_next_backward_trains(both):
    emb, ram = both
    before = fingerprint(emb.path)
    loss = checkpoint(lambda x: region(emb, IDS) * x, leaf(), use_reentrant=True).sum()
    with pytest.raises(RuntimeError, match="use_reentrant=False"):
        loss.backward()
    assert_untrained(emb, before)
    train_both(emb, ram, lambda lookup: region(lookup, IDS).sum())
    assert_same(emb, ram)


# Outputs that are dropped


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_dropped_outputs_leave_no_memory_behind(make_table):
    emb = make_table(1000, 64)
    ids = torch.randint(0, 1000, (512,))
    for _ in range(50):
        emb(ids)
    before = resident_bytes()
    for _ in range(2000):  # 128 KiB each, 250 MiB if they stayed
        emb(ids)
    assert resident_bytes() - before < 40e6


def test_dropped_outputs_free_themselves_and_their_ids(make_table):
    emb = make_table()
    ids = torch.tensor([1, 2])
    out = emb(ids)
    held = weakref.ref(out), weakref.ref(ids)
    del out, ids
    gc.collect()
    assert [reference() for reference in held] == [None, None]


def test_backward_trains_its_own_batch_alone_after_dropped_forwards(both):
    emb, ram = both
    for _ in range(10):
        emb(torch.arange(10))
    train_both(emb, ram, lambda lookup: lookup(IDS).pow(2).sum())
    assert_same(emb, ram)


def test_dropped_table_is_freed_committed_and_unlocked(make_table, open_table, stores):
    emb = make_table()
    path = emb.path
    emb(IDS).sum().backward()
    out = emb(IDS)
    reference = weakref.ref(emb)
    stores.tables.clear()
    del emb, out
    gc.collect()
    assert reference() is None
    assert open_table(path).step == 1
