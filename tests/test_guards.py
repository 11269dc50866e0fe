"""Tests that a table stays whole in odd company: handlers, hooks, forks, devices, modes."""

import gc
import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from ram_reference import assert_stored_equal, read_rows, train_both

import ooc_embed
from ooc_embed import CorruptStoreError, StoreError, durable

pytestmark = pytest.mark.usefixtures("one_thread")
ONE_SLOT = 1


def train(emb, *ids):
    emb(torch.tensor(ids)).sum().backward()


def drop(tables):
    tables.clear()
    gc.collect()


def test_call_from_within_an_operation_is_refused_and_costs_nothing(make_table, monkeypatch):
    """As a signal handler does that commits while rows go to the log."""
    emb = make_table(50, 2, cache_bytes=ONE_SLOT)
    train(emb, 1, 2, 3)
    refused = []
    write = durable.AppendFile.write

    def interrupted(*args, **options):
        if not refused:
            for call in (emb.commit, emb.flush, emb.close, lambda: emb.weight[0]):
                with pytest.raises(StoreError, match="in the middle"):
                    call()
                refused.append(call)
        write(*args, **options)

    monkeypatch.setattr(durable.AppendFile, "write", interrupted)
    train(emb, 3, 4, 5)
    assert len(refused) == 4
    emb.commit()
    assert emb.step == 2
    assert emb.version[:6].tolist() == [0, 1, 1, 2, 1, 1]


@pytest.mark.parametrize("cache_bytes", [ONE_SLOT, 1 << 20])
@pytest.mark.parametrize("hook", ["register_step_pre_hook", "register_step_post_hook"])
def test_optimizer_hook_may_commit_and_assign(make_table, open_table, cache_bytes, hook):
    emb = make_table(50, 2, init="zeros", cache_bytes=cache_bytes)

    def commit_and_assign(*_):
        emb.weight[40] = float(emb.step)
        emb.commit()

    getattr(emb.optimizer, hook)(commit_and_assign)
    for _ in range(3):
        train(emb, *range(30))
    emb.close()
    emb = open_table(emb.path)
    assert emb.step == 3
    assert emb.version[:].tolist() == [3] * 30 + [0] * 10 + [3] + [0] * 9
    assert emb.weight[40].tolist() == [3.0, 3.0]


def test_hook_that_raises_finds_all_tables_of_the_pass_stepped(make_table):
    first, second = make_table(), make_table()

    def stop(*_):
        raise KeyboardInterrupt

    for emb in (first, second):
        emb.optimizer.register_step_post_hook(stop)
    with pytest.raises(KeyboardInterrupt):
        (first(torch.tensor([1])).sum() + second(torch.tensor([1])).sum()).backward()
    assert (first.step, second.step) == (1, 1)


def test_numpy_hyperparameters_are_kept_as_numbers(make_table, open_table):
    emb = make_table()
    emb.optimizer.param_groups[0]["lr"] = np.float32(0.25)
    emb.close()
    assert open_table(emb.path).optimizer.param_groups[0]["lr"] == 0.25


@pytest.mark.parametrize("lr", [float("nan"), float("inf"), object()])
def test_hyperparameter_that_cannot_be_kept_does_not_cost_the_rows(tmp_path, lr):
    path = tmp_path / "t.zarr"
    emb = ooc_embed.DiskEmbedding(10, 2, path=path)
    train(emb, 1)
    emb.optimizer.param_groups[0]["lr"] = lr
    with pytest.raises((TypeError, ValueError), match="hyper-parameter"):
        emb.commit()
    dropped = [emb]
    del emb
    with pytest.warns(UserWarning, match="hyper-parameter"):
        drop(dropped)
    with ooc_embed.DiskEmbedding.open(path) as emb:
        assert emb.step == 1
        assert emb.optimizer.param_groups[0]["lr"] == 1e-3


def test_manifest_is_strict_json_with_an_infinite_norm(make_table, open_table):
    emb = make_table(max_norm=1.0, norm_type=float("inf"))
    text = (emb.path / "zarr.json").read_text()
    json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    emb.close()
    assert open_table(emb.path).norm_type == float("inf")


def test_default_device_changes_neither_table_nor_numbers(store_path, both):
    emb, ram = both
    with torch.device("meta"):
        other = ooc_embed.DiskEmbedding(10, 2, path=store_path)
        other.close()
    ids = torch.tensor([1, 2, 2, 7])
    with torch.device("meta"):
        train_both(emb, ram, lambda lookup: lookup(ids).sum())
        assert emb.weight[[1]].device.type == "cpu"
        emb.flush()
    assert_stored_equal(emb.path, ram, imported=True)


def test_table_made_in_inference_mode_trains_behind_it(make_table):
    with torch.inference_mode():
        emb = make_table()
    train(emb, 1, 2)
    assert emb.step == 1


def test_view_keeps_its_table_open(make_table):
    emb = make_table(init="zeros")
    emb.close()
    weight = ooc_embed.DiskEmbedding.open(emb.path, "r").weight
    gc.collect()
    assert weight[0].tolist() == [0.0, 0.0]


def test_anchor_that_a_conversion_replaced_still_makes_steps(make_table):
    emb = make_table()
    before = torch.__future__.get_overwrite_module_params_on_conversion()
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        emb.double()
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(before)
    train(emb, 1)
    assert emb.step == 1


def test_forked_child_that_drops_the_table_keeps_its_own_memory(tmp_path):
    script = """
import gc, os, sys
import torch, ooc_embed
emb = ooc_embed.DiskEmbedding(1_000_000, 32, path=sys.argv[1], cache_bytes=1 << 20)
child = os.fork()
if child == 0:
    own = [bytearray(64 << 20) for _ in range(8)]
    del emb
    gc.collect()
    for block in own:
        block[:: 4096] = b"x" * len(block[::4096])
    os._exit(0)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    path = str(tmp_path / "t.zarr")
    assert (
        subprocess.run([sys.executable, "-c", script, path], env=dict(os.environ)).returncode == 0
    )


def test_bad_hyperparameter_of_one_table_leaves_all_of_the_pass_where_they_were(make_table):
    tables = [make_table(), make_table()]
    for bad, other in (tables, tables[::-1]):
        before = bad.optimizer.param_groups[0]["lr"]
        bad.optimizer.param_groups[0]["lr"] = None
        with pytest.raises((TypeError, ValueError)):
            (bad(torch.tensor([1])).sum() + other(torch.tensor([1])).sum()).backward()
        bad.optimizer.param_groups[0]["lr"] = before
    assert [emb.step for emb in tables] == [0, 0]


def test_single_row_is_assigned_by_any_name_of_it(make_table):
    emb = make_table(5, 2)
    emb.weight[-1] = torch.ones(2)
    emb.weight[torch.tensor(3)] = 2.0
    emb.weight[np.int64(2)] = [3.0, 4.0]
    assert emb.weight[2:].tolist() == [[3.0, 4.0], [2.0, 2.0], [1.0, 1.0]]


def test_commit_of_many_dirty_rows_in_parts_equals_one_run(make_table, monkeypatch):
    """More dirty slots than are sorted at once go to the log block by block of rows."""
    emb, other = make_table(5000, 2), make_table(5000, 2)
    ids = torch.randint(0, 5000, (4000,))
    for table in (emb, other):
        table(ids).sum().backward()
    other.flush()
    monkeypatch.setattr("ooc_embed.cache._SORTED_SLOTS", 10)
    monkeypatch.setattr("ooc_embed.cache._BLOCK_ROWS", 700)
    emb.flush()
    assert torch.equal(read_rows(emb.path).weight, read_rows(other.path).weight)


def test_table_whose_log_lost_records_closes_at_its_last_commit(make_table, open_table):
    emb = make_table(50, 2, cache_bytes=ONE_SLOT)
    train(emb, 1, 2, 3)
    emb.commit()
    train(emb, 1, 2, 3)
    log = emb._table._storage._logs.active
    with log.records_path(0).open("r+b") as file:
        file.seek(3 * 28)
        file.write(b"lost" * 7)
    log.suspect = True  # as after a failed fdatasync
    with pytest.raises(CorruptStoreError, match="was written"):
        train(emb, 4, 5)
    with pytest.raises(StoreError, match="open the store again"):
        emb.close()
    assert emb.closed
    assert open_table(emb.path).step == 1
