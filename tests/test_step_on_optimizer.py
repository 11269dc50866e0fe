"""step_on="optimizer": gradients wait for `step`; accumulate, scale and clip as in torch."""

from __future__ import annotations

import pytest
import torch
from ram_reference import RamTable, assert_same, assert_untrained, fingerprint
from torch import nn

import ooc_embed
from ooc_embed import SparseAdam

IDS = torch.tensor([1, 2, 2, 7])


@pytest.fixture
def waiting(make_table):
    """A table that waits for its optimizer, and torch's own in RAM with the same rows."""
    initial = torch.randn(10, 2, dtype=torch.float64)
    options = {"dtype": torch.float64, "optimizer": SparseAdam(lr=0.1)}
    emb = make_table(init=initial, step_on="optimizer", chunk_rows=1024, **options)
    return emb, RamTable(initial, lr=0.1)


def handle(emb) -> torch.Tensor:
    (parameter,) = emb.optimizer.param_groups[0]["params"]
    return parameter


def test_nothing_moves_before_the_optimizer_steps(waiting):
    emb, _ = waiting
    before = fingerprint(emb.path)
    emb(IDS).sum().backward()
    assert_untrained(emb, before)
    emb.optimizer.step()
    assert emb.step == 1


def test_micro_batches_add_up_to_one_step_of_the_large_batch(waiting):
    emb, ram = waiting
    generator = torch.Generator().manual_seed(0)
    for _ in range(10):
        ids = torch.randint(10, (12,), generator=generator)
        grads = torch.randn(12, 2, dtype=torch.float64, generator=generator)
        for part, grad in zip(ids.split(3), grads.split(3), strict=True):
            (emb(part) * grad).sum().backward()
        emb.optimizer.step()
        emb.optimizer.zero_grad()
        ram.train(lambda lookup, ids=ids, grads=grads: (lookup(ids) * grads).sum())
    assert_same(emb, ram)


def test_one_record_a_distinct_row_waits_and_is_summed(waiting):
    emb, _ = waiting
    emb(IDS).sum().backward()
    emb(torch.tensor([7, 9])).sum().backward()
    assert torch.equal(handle(emb).grad, torch.tensor([[1, 1], [2, 2], [2, 2], [1, 1]]).double())


def test_two_accumulated_gradients_are_the_published_step(make_table):
    emb = make_table(
        2, 1, init=torch.zeros(2, 1), optimizer=SparseAdam(lr=0.1), step_on="optimizer"
    )
    for grad in (1.0, -0.5):
        (emb(torch.tensor([1])) * grad).sum().backward()
    emb.optimizer.step()
    assert emb.step == 1
    torch.testing.assert_close(float(emb.weight[1]), -0.0999999368)


def test_zero_grad_drops_what_waits(waiting):
    emb, _ = waiting
    before = fingerprint(emb.path)
    emb(IDS).sum().backward()
    emb.optimizer.zero_grad()
    emb.optimizer.step()
    assert_untrained(emb, before)


def test_a_step_uses_the_gradients_up(waiting):
    emb, ram = waiting
    for _ in range(3):
        emb(IDS).sum().backward()
        emb.optimizer.step()
        emb.optimizer.step()
        ram.train(lambda lookup: lookup(IDS).sum())
    assert_same(emb, ram)


def test_the_mode_is_kept_by_the_store_and_shown(waiting):
    emb, _ = waiting
    assert "step_on='optimizer'" in repr(emb)
    emb.close()
    with ooc_embed.DiskEmbedding.open(emb.path) as again:
        assert again.step_on == "optimizer"


def test_a_backward_that_fails_stages_nothing(waiting):
    emb, _ = waiting

    def fail(grad):
        raise RuntimeError("a later layer fails")

    start = torch.ones(4, 2, dtype=torch.float64, requires_grad=True)
    start.register_hook(fail)
    with pytest.raises(RuntimeError, match="a later layer"):
        (emb(IDS) * (start * 2)).sum().backward()
    emb.optimizer.step()
    assert emb.step == 0


def test_a_failed_step_can_be_taken_again(waiting, monkeypatch):
    emb, ram = waiting
    emb(IDS).sum().backward()
    prepare = emb._table.prepare

    def fail(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(emb._table, "prepare", fail)
    with pytest.raises(OSError, match="No space"):
        emb.optimizer.step()
    monkeypatch.setattr(emb._table, "prepare", prepare)
    emb.optimizer.step()
    ram.train(lambda lookup: lookup(IDS).sum())
    assert_same(emb, ram)


def test_a_closure_is_called_before_the_step(waiting):
    emb, ram = waiting

    def closure():
        loss = emb(IDS).sum()
        loss.backward()
        return loss

    expected = float(emb.weight[IDS].sum())
    assert float(emb.optimizer.step(closure).detach()) == pytest.approx(expected)
    ram.train(lambda lookup: lookup(IDS).sum())
    assert_same(emb, ram)


def test_state_dict_goes_round(waiting, make_table):
    emb, _ = waiting
    emb.optimizer.param_groups[0]["lr"] = 0.03
    other = make_table(dtype=torch.float64)
    other.optimizer.load_state_dict(emb.optimizer.state_dict())
    assert other.optimizer.param_groups[0]["lr"] == 0.03
    other(IDS).sum().backward()
    assert other.step == 1


# Mixed precision


def scaler(scale: float = 65536.0) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=10**6)


@pytest.mark.parametrize("step_on", ["backward", "optimizer"])
def test_a_scaler_leaves_moments_as_without(make_table, step_on):
    initial = torch.randn(10, 2)
    emb = make_table(init=initial, optimizer=SparseAdam(lr=0.1), step_on=step_on)
    plain = make_table(init=initial, optimizer=SparseAdam(lr=0.1))
    layer = nn.Linear(2, 1)
    dense = torch.optim.SGD(layer.parameters(), lr=0.0)
    scale = scaler()
    if step_on == "backward":
        emb.grad_scaler = scale
    for _ in range(3):
        scale.scale(layer(emb(IDS)).pow(2).sum()).backward()
        if step_on == "optimizer":
            scale.step(emb.optimizer)
            emb.optimizer.zero_grad()
        scale.step(dense)
        scale.update()
        dense.zero_grad()
        layer(plain(IDS)).pow(2).sum().backward()
        dense.zero_grad()
    assert emb.step == 3
    for field in ("exp_avg", "exp_avg_sq"):
        torch.testing.assert_close(emb.state[field][:], plain.state[field][:])
    torch.testing.assert_close(emb.weight[:], plain.weight[:])


@pytest.mark.parametrize("step_on", ["backward", "optimizer"])
def test_an_overflow_changes_no_byte_and_the_scaler_sees_it(make_table, step_on):
    emb = make_table(step_on=step_on)
    scale = scaler()
    if step_on == "backward":
        emb.grad_scaler = scale
    before = fingerprint(emb.path)
    scale.scale((emb(IDS) * torch.inf).sum()).backward()
    if step_on == "optimizer":
        scale.step(emb.optimizer)
        emb.optimizer.zero_grad()
    scale.update()
    assert scale.get_scale() == 32768.0
    assert_untrained(emb, before)
    scale.scale(emb(IDS).sum()).backward()
    if step_on == "optimizer":
        scale.step(emb.optimizer)
    scale.update()
    assert emb.step == 1


def test_a_scaler_that_was_not_attached_is_refused(make_table):
    emb = make_table()
    scale = scaler()
    scale.scale(emb(IDS).sum()).backward()
    with pytest.raises(RuntimeError, match="grad_scaler"):
        scale.step(emb.optimizer)


def test_a_scaler_with_an_idle_table_has_its_check(waiting):
    emb, _ = waiting
    scale = scaler()
    scale.scale(torch.ones(1, requires_grad=True).sum()).backward()
    scale.step(emb.optimizer)
    scale.update()
    assert emb.step == 0


def test_a_disabled_scaler_steps_plainly(waiting):
    emb, ram = waiting
    off = torch.amp.GradScaler("cpu", enabled=False)
    off.scale(emb(IDS).sum()).backward()
    off.step(emb.optimizer)
    ram.train(lambda lookup: lookup(IDS).sum())
    assert_same(emb, ram)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_autocast_leaves_the_tables_dtype(make_table, dtype):
    emb = make_table(dtype=dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = emb(IDS)
        (nn.Linear(2, 1, dtype=dtype)(out)).float().sum().backward()
    assert out.dtype == dtype
    assert emb.step == 1


# Clipping


def clipped(grads: torch.Tensor, norm: float | None, value: float | None) -> torch.Tensor:
    """What torch's own functions make of a gradient."""
    parameter = nn.Parameter(torch.zeros_like(grads))
    parameter.grad = grads.clone()
    if value is not None:
        nn.utils.clip_grad_value_([parameter], value)
    if norm is not None:
        nn.utils.clip_grad_norm_([parameter], norm)
    return parameter.grad


@pytest.mark.parametrize(
    ("norm", "value"), [(1.0, None), (None, 0.3), (0.5, 0.3), (1e6, 1e6), (None, None)]
)
def test_clipping_is_torchs_on_the_summed_rows(make_table, norm, value):
    initial = torch.zeros(10, 2, dtype=torch.float64)
    grads = torch.randn(4, 2, dtype=torch.float64)
    options = {"max_grad_norm": norm, "max_grad_value": value}
    emb = make_table(init=initial, dtype=torch.float64, **options)
    (emb(IDS) * grads).sum().backward()
    summed = torch.zeros(10, 2, dtype=torch.float64).index_add_(0, IDS, grads)
    torch.testing.assert_close(emb.state["exp_avg"][:], 0.1 * clipped(summed, norm, value))


def test_clipping_is_live_and_kept(make_table, open_table):
    emb = make_table(max_grad_norm=1.0)
    emb.optimizer.param_groups[0]["max_grad_norm"] = 0.25
    emb(IDS).sum().backward()
    torch.testing.assert_close(emb.state["exp_avg"][:].norm(), torch.tensor(0.025))
    assert "max_grad_norm=0.25" in repr(emb)
    emb.close()
    group = open_table(emb.path).optimizer.param_groups[0]
    assert (group["max_grad_norm"], group["max_grad_value"]) == (0.25, None)


@pytest.mark.parametrize(
    "options", [{"max_grad_norm": 0.0}, {"max_grad_value": -1.0}, {"nonfinite": "ignore"}]
)
def test_senseless_options_are_refused_at_once_and_later(make_table, store_path, options):
    with pytest.raises(ValueError, match=next(iter(options))):
        ooc_embed.DiskEmbedding(10, 2, path=store_path, **options)
    assert not store_path.exists()
    emb = make_table()
    before = fingerprint(emb.path)
    emb.optimizer.param_groups[0].update(options)
    with pytest.raises(ValueError, match=next(iter(options))):
        emb(IDS).sum().backward()
    assert_untrained(emb, before)
    emb.optimizer.param_groups[0].update(max_grad_norm=None, max_grad_value=None, nonfinite="skip")


def test_a_model_is_clipped_with_its_tables_as_one(make_table):
    initial = torch.randn(10, 2)
    emb = make_table(init=initial, step_on="optimizer")
    disk = nn.Sequential(emb, nn.Linear(2, 3))
    ram = nn.Sequential(nn.Embedding.from_pretrained(initial, freeze=False), nn.Linear(2, 3))
    ram[1].load_state_dict(disk[1].state_dict())
    for model in (disk, ram):
        model(IDS).pow(2).sum().backward()
    norm = ooc_embed.clip_grad_norm_(disk, 0.5)
    torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(ram.parameters(), 0.5))
    torch.testing.assert_close(disk[1].weight.grad, ram[1].weight.grad)
    torch.testing.assert_close(handle(emb).grad, ram[0].weight.grad[[1, 2, 7]])


def test_a_table_that_has_stepped_cannot_be_clipped_with_the_others(make_table):
    model = nn.Sequential(make_table(), nn.Linear(2, 1))
    with pytest.raises(ValueError, match="step_on='optimizer'"):
        ooc_embed.clip_grad_norm_(model, 1.0)


# Gradients that are not finite


@pytest.mark.parametrize("step_on", ["backward", "optimizer"])
@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_skipping_leaves_such_steps_out_and_goes_on(make_table, step_on, bad):
    emb = make_table(nonfinite="skip", step_on=step_on)
    before = fingerprint(emb.path)
    (emb(IDS) * bad).sum().backward()
    emb.optimizer.step()
    assert_untrained(emb, before)
    emb(IDS).sum().backward()
    emb.optimizer.step()
    assert emb.step == 1


def test_a_skipped_table_does_not_hold_up_another(make_table):
    skipping, other = make_table(nonfinite="skip"), make_table()
    (skipping(IDS) * torch.inf).sum().backward()
    ((skipping(IDS) * torch.nan).sum() + other(IDS).sum()).backward()
    assert (skipping.step, other.step) == (0, 1)


# What was found wrong, and then works again


def test_a_refused_scaler_can_be_attached_then(make_table):
    emb = make_table()
    scale = scaler()
    scale.scale(emb(IDS).sum()).backward()
    with pytest.raises(RuntimeError, match="grad_scaler"):
        scale.step(emb.optimizer)
    scale.update()
    emb(IDS).sum().backward()
    emb.grad_scaler = scale
    scale.scale(emb(IDS).sum()).backward()
    scale.update()
    assert emb.step == 3


def test_a_scaler_is_a_scaler(make_table):
    with pytest.raises(TypeError, match="GradScaler"):
        make_table().grad_scaler = "x"


def test_a_second_backward_before_the_update_says_what_to_do_and_leaves_nothing(make_table):
    tables = [make_table(init="zeros"), make_table(init="zeros")]
    scale = scaler()
    for emb in tables:
        emb.grad_scaler = scale

    def backward():
        scale.scale(sum(emb(IDS).sum() for emb in tables)).backward()

    backward()
    with pytest.raises(RuntimeError, match="step_on='optimizer'"):
        backward()
    scale.update()
    backward()
    for emb in tables:
        assert emb.step == 2
        torch.testing.assert_close(emb.state["exp_avg"][1], torch.full((2,), 0.19))


def test_a_table_that_fails_leaves_no_gradient_with_another_of_the_scaler(make_table, monkeypatch):
    tables = [make_table(init="zeros"), make_table(init="zeros")]
    scale = scaler()
    for emb in tables:
        emb.grad_scaler = scale
        monkeypatch.setattr(emb._table, "prepare", lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        scale.scale(sum(emb(IDS).sum() for emb in tables)).backward()
    assert all(emb.optimizer.waiting is None for emb in tables)


@pytest.mark.parametrize("step_on", ["backward", "optimizer"])
def test_a_default_device_does_not_reach_the_table(make_table, step_on):
    with torch.device("meta"):
        emb = make_table(init="zeros", optimizer=SparseAdam(lr=0.1), step_on=step_on)
        emb(IDS).sum().backward()
        emb.optimizer.step()
    torch.testing.assert_close(emb.weight[1], torch.full((2,), -0.1))


def test_zero_grad_of_the_layer_drops_what_waits(waiting):
    emb, _ = waiting
    emb(IDS).sum().backward()
    emb.zero_grad()
    emb.optimizer.step()
    assert emb.step == 0


def test_frozen_and_reading_tables_are_clipped_with_no_one(make_table, open_table):
    frozen = make_table().requires_grad_(False)
    closed = make_table()
    closed.close()
    reader = open_table(closed.path, mode="r")
    training = make_table(step_on="optimizer")
    model = nn.ModuleList([frozen, reader, training])
    (training(IDS) + frozen(IDS) + reader(IDS)).sum().backward()
    norm = ooc_embed.clip_grad_norm_(model, 0.5)
    torch.testing.assert_close(norm, torch.tensor(12.0).sqrt())


def test_an_idle_table_does_not_disturb_clipping(make_table):
    model = nn.Sequential(make_table(step_on="optimizer"), nn.Linear(2, 1))
    model[1](torch.ones(1, 2)).sum().backward()
    norm = ooc_embed.clip_grad_norm_(model, 1.0, norm_type=torch.inf)
    assert float(norm) == 1.0


def test_clipping_wants_the_model(make_table):
    model = nn.Sequential(make_table(step_on="optimizer"))
    with pytest.raises(TypeError, match="model itself"):
        ooc_embed.clip_grad_norm_(model.parameters(), 1.0)
