"""Tests that hundreds of random steps equal torch's in RAM, whatever the cache and commits."""

import pytest
import torch
from ram_reference import RamTable, assert_stored_equal, train_both

import ooc_embed

pytestmark = pytest.mark.usefixtures("each_kernel")

ROWS, DIM, STEPS = 2000, 6, 300


def random_calls(step: int, generator: torch.Generator, dtype: torch.dtype) -> list:
    """Three lookups of one step, `(ids, grad)` each.

    Ids are skewed, so that there are duplicates and rows that idle for long; a tenth of the
    gradients are zero, another tenth tiny.
    """
    calls = []
    for size in (40, 7, int(torch.randint(0, 60, (), generator=generator))):
        skewed = torch.rand(size, generator=generator, dtype=torch.float64) ** 4
        ids = (skewed * ROWS).long()
        if step % 10 == 0:
            ids = torch.randint(0, ROWS, (size,), generator=generator)
        grad = torch.randn(size, DIM, generator=generator, dtype=torch.float64)
        kind = torch.rand(size, 1, generator=generator)
        grad = torch.where(kind < 0.1, 0.0, torch.where(kind < 0.2, grad * 1e-6, grad))
        calls.append((ids, grad.to(dtype)))
    return calls


def loss_of_calls(calls: list):
    return lambda lookup: sum((lookup(ids) * grad).sum() for ids, grad in calls)


def cache_of(share: float, dtype: torch.dtype) -> int:
    """Bytes for this share of all records."""
    return int(share * ROWS) * (3 * DIM + 1) * dtype.itemsize


@pytest.mark.parametrize("padding_idx", [None, 3])
@pytest.mark.parametrize("share", [0.01, 0.1, 2.0])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_random_training_equals_torch(make_table, dtype, share, padding_idx):
    generator = torch.Generator().manual_seed(int(share * 100))
    emb = make_table(
        ROWS,
        DIM,
        padding_idx=padding_idx,
        dtype=dtype,
        cache_bytes=cache_of(share, dtype),
        chunk_rows=1024,
        optimizer=ooc_embed.SparseAdam(lr=0.01),
    )
    ram = RamTable(emb.weight[:], padding_idx=padding_idx, lr=0.01)
    for step in range(STEPS):
        train_both(emb, ram, loss_of_calls(random_calls(step, generator, dtype)))
        chance = float(torch.rand((), generator=generator))
        if chance < 0.05:
            emb.commit()
        elif chance < 0.08:
            emb.flush()
            assert_stored_equal(emb.path, ram)
    emb.flush()
    assert emb.step == ram.step == STEPS
    assert_stored_equal(emb.path, ram)


@pytest.mark.parametrize("share", [0.01, 2.0])
def test_random_training_equals_torch_over_reopenings(make_table, open_table, share):
    generator = torch.Generator().manual_seed(1)
    initial = torch.randn(ROWS, DIM, dtype=torch.float64)
    cache_bytes = cache_of(share, torch.float64)
    emb = make_table(ROWS, DIM, init=initial, dtype=torch.float64, cache_bytes=cache_bytes)
    ram = RamTable(initial)
    for step in range(100):
        train_both(emb, ram, loss_of_calls(random_calls(step, generator, torch.float64)))
        if step % 20 == 7:
            emb.close(flush=step % 40 == 7)
            emb = open_table(emb.path, cache_bytes=cache_bytes)
    emb.flush()
    assert emb.step == ram.step == 100
    assert_stored_equal(emb.path, ram, imported=True)


def test_model_with_dense_layers_trains_as_with_torchs_embedding(make_table):
    """The loss depends on the looked-up values; a dense optimizer steps beside the table."""
    initial = torch.randn(50, 8, dtype=torch.float64)
    emb = make_table(50, 8, init=initial, dtype=torch.float64, cache_bytes=10 * 25 * 8)
    ram = RamTable(initial)
    heads = [torch.nn.Linear(8, 3, dtype=torch.float64) for _ in range(2)]
    heads[1].load_state_dict(heads[0].state_dict())
    dense = [torch.optim.Adam(head.parameters(), lr=0.01) for head in heads]
    for _ in range(100):
        ids, labels = torch.randint(0, 50, (16, 4)), torch.randint(0, 3, (16,))
        losses = []
        for lookup, head in zip((emb, ram), heads, strict=True):
            logits = head(lookup(ids).mean(dim=1).tanh())
            losses.append(torch.nn.functional.cross_entropy(logits, labels))
            losses[-1].backward()
        ram.step_and_zero()
        for optimizer in dense:
            optimizer.step()
            optimizer.zero_grad()
        torch.testing.assert_close(losses[0], losses[1], rtol=1e-12, atol=1e-12)
    emb.flush()
    assert_stored_equal(emb.path, ram, imported=True)


def test_lookups_between_steps_see_what_torch_sees(make_table):
    initial = torch.randn(100, 3, dtype=torch.float64)
    emb = make_table(100, 3, init=initial, dtype=torch.float64, cache_bytes=10 * 10 * 8)
    ram = RamTable(initial, lr=1e-3)
    for _ in range(60):
        ids = torch.randint(0, 100, (30,))
        torch.testing.assert_close(emb(ids), ram(ids), rtol=1e-12, atol=1e-12)
        with torch.no_grad():
            other = torch.randint(0, 100, (30,))
            torch.testing.assert_close(emb(other), ram(other), rtol=1e-12, atol=1e-12)
        train_both(emb, ram, lambda lookup, ids=ids: lookup(ids).pow(3).sum())
    torch.testing.assert_close(emb.weight[:], ram.weight, rtol=1e-12, atol=1e-12)
