"""Lookups whose ids are on another device than the table; where there is none, by its code path."""

import pytest
import torch

from ooc_embed import passes

CUDA = pytest.param(
    "cuda",
    marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
)


@pytest.fixture(params=[CUDA, "cpu"])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A CUDA device, and the CPU taken for an accelerator."""
    if request.param == "cpu":
        monkeypatch.setattr(passes, "_on_cpu", lambda device: False)
    return str(request.param)


def train(emb, device: str, steps: int = 20) -> None:
    generator = torch.Generator().manual_seed(5)
    for _ in range(steps):
        ids = torch.randint(0, 50, (3, 40), generator=generator)
        grad = torch.randn(3, 40, 6, generator=generator)
        out = emb(ids.to(device))
        assert out.device.type == device
        (out * grad.to(device)).sum().backward()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"padding_idx": 3},
        {"scale_grad_by_freq": True},
        {"max_norm": 0.5},
        {"cache_bytes": 700},
        {"dtype": torch.float64},
    ],
    ids=lambda options: next(iter(options), "plain"),
)
def test_rows_and_gradients_that_travel_give_the_same_table(make_table, device, options):
    emb = make_table(50, 6, **options)
    train(emb, device)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(passes, "_on_cpu", lambda device: device.type == "cpu")
        expected = make_table(50, 6, **options)
        train(expected, "cpu")
    torch.testing.assert_close(emb.weight[:], expected.weight[:])
    torch.testing.assert_close(emb.state["exp_avg_sq"][:], expected.state["exp_avg_sq"][:])
    assert torch.equal(emb.version[:], expected.version[:])


@pytest.mark.parametrize("bad", [50, -1, torch.iinfo(torch.int64).min])
def test_id_outside_the_table_is_an_index_error_and_the_device_goes_on(make_table, device, bad):
    emb = make_table(50, 6)
    with pytest.raises(IndexError, match=rf"{bad}\b.*\b50\b"):
        emb(torch.tensor([1, bad], device=device))
    assert emb.step == 0
    train(emb, device, steps=1)
    assert emb.step == 1


def test_each_row_travels_once_however_often_its_id_comes(make_table, device, monkeypatch):
    sent, back = [], []
    to_device, to_cpu = passes._to_device, passes._to_cpu
    monkeypatch.setattr(
        passes, "_to_device", lambda rows, to: (sent.append(len(rows)), to_device(rows, to))[1]
    )
    monkeypatch.setattr(passes, "_to_cpu", lambda sums: (back.append(len(sums)), to_cpu(sums))[1])
    emb = make_table(50, 6)
    emb(torch.tensor([4, 4, 9, 4], device=device)).sum().backward()
    assert (sent, back) == ([2], [2])


def test_half_precision_output_on_the_device_trains_the_table(make_table, device):
    emb = make_table(50, 6).half()
    train(emb, device, steps=3)
    assert emb.step == 3
    assert emb.weight.dtype == torch.float32


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_gradient_that_is_late_on_a_side_stream_is_waited_for(make_table):
    """Backward runs in a thread of the device, behind work that takes longer than all else."""
    initial = torch.randn(50, 6)
    emb, expected = make_table(50, 6, init=initial), make_table(50, 6, init=initial)
    generator = torch.Generator().manual_seed(5)
    large = torch.eye(4096, device="cuda")
    stream = torch.cuda.Stream()
    for _ in range(200):
        ids = torch.randint(0, 50, (40,), generator=generator)
        grad = torch.randn(40, 6, generator=generator)
        with torch.cuda.stream(stream):
            product = large @ large @ large
            late = grad.to("cuda") * product[0, 0]
            (emb(ids.to("cuda")) * late).sum().backward()
        (expected(ids) * grad).sum().backward()
    assert emb.step == 200
    torch.testing.assert_close(emb.weight[:], expected.weight[:], rtol=1e-5, atol=1e-5)
