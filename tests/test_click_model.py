"""A click model on data shaped as Criteo's: its bags on disk give the losses of those in RAM."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from model_reference import CLOSE, LR, assert_same_losses, optimizers, train
from torch import Tensor, nn

from ooc_embed import DiskEmbeddingBag, SparseAdam, replace_embeddings

DIM = 8
DENSE_FEATURES = 13
# Rows of the 26 categorical features: most are small, as Criteo's are, and four go to disk.
ROWS = (3000, 40, 7, 2500, 60, 12, 300, 5, 90, 2000, *(20,) * 15, 4000)
LARGE = (0, 3, 9, 25)
MULTI_HOT = {3: 6, 9: 3, 25: 2}  # the most ids in a bag; such bags may be empty
RARE = 9  # most of its batches have no id at all
MODES = ["mean" if feature in (3, 7) else "sum" for feature in range(26)]


@dataclass(frozen=True)
class Batch:
    """`numbers` (B, 13), `clicked` (B,), and for each feature ids and where its bags begin."""

    numbers: Tensor
    bags: list[tuple[Tensor, Tensor]]
    clicked: Tensor


class ClickModel(nn.Module):
    """A DLRM: bottom MLP, bags, products of all pairs of vectors, top MLP."""

    def __init__(self, make_bag: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.bottom = nn.Sequential(
            nn.Linear(DENSE_FEATURES, 16), nn.ReLU(), nn.Linear(16, DIM), nn.ReLU()
        )
        self.bags = nn.ModuleList(make_bag(feature) for feature in range(len(ROWS)))
        pairs = (len(ROWS) + 1) * len(ROWS) // 2
        self.top = nn.Sequential(nn.Linear(pairs + DIM, 16), nn.ReLU(), nn.Linear(16, 1))
        self.register_buffer("pairs", torch.tril_indices(len(ROWS) + 1, len(ROWS) + 1, -1))

    def forward(self, numbers: Tensor, bags: list[tuple[Tensor, Tensor]]) -> Tensor:
        bottom = self.bottom(numbers)
        vectors = [bag(ids, starts) for bag, (ids, starts) in zip(self.bags, bags, strict=True)]
        stacked = torch.stack([bottom, *vectors], dim=1)
        products = (stacked @ stacked.mT)[:, self.pairs[0], self.pairs[1]]
        return self.top(torch.cat([bottom, products], dim=1)).squeeze(1)


def in_ram(feature: int) -> nn.Module:
    bag = nn.EmbeddingBag(ROWS[feature], DIM, mode=MODES[feature], sparse=True)
    nn.init.normal_(bag.weight, std=0.3)
    return bag


def skewed(count: int, rows: int) -> Tensor:
    """Ids of which few make up most, as in logs of clicks."""
    return (torch.rand(count).pow(4) * rows).long()


def make_batch(size: int = 64) -> Batch:
    bags = []
    for feature, rows in enumerate(ROWS):
        lengths = torch.ones(size, dtype=torch.int64)
        if feature in MULTI_HOT:
            lengths = torch.randint(0, MULTI_HOT[feature] + 1, (size,))
        if feature == RARE and torch.rand(()) < 0.6:
            lengths.zero_()
        starts = lengths.cumsum(0) - lengths
        bags.append((skewed(int(lengths.sum()), rows), starts))
    numbers = torch.randn(size, DENSE_FEATURES, dtype=torch.float64)
    return Batch(numbers, bags, (torch.rand(size) < 0.25).double())


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    return nn.BCEWithLogitsLoss()(model(batch.numbers, batch.bags), batch.clicked)


def replaced(ram: ClickModel, folder: Path) -> ClickModel:
    """As a user would: one call for the whole model."""
    model = copy.deepcopy(ram)
    options = {"optimizer": SparseAdam(lr=LR), "cache_bytes": 1 << 17}
    done = replace_embeddings(model, folder, min_rows=2000, **options)
    assert [item.names for item in done] == [(f"bags.{feature}",) for feature in LARGE]
    return model


def by_hand(ram: ClickModel, folder: Path) -> ClickModel:
    """The large bags are tables from the start; rows come from the model in RAM."""

    def make_bag(feature: int) -> nn.Module:
        if feature not in LARGE:
            return copy.deepcopy(ram.bags[feature])
        return DiskEmbeddingBag(
            ROWS[feature],
            DIM,
            mode=MODES[feature],
            path=folder / f"{feature}.zarr",
            optimizer=SparseAdam(lr=LR),
            init=ram.bags[feature].weight.detach(),
            dtype=torch.float64,
            cache_bytes=1 << 17,
        )

    folder.mkdir()
    model = ClickModel(make_bag).double()
    for part in ("bottom", "top"):
        getattr(model, part).load_state_dict(getattr(ram, part).state_dict())
    return model


@pytest.fixture
def batches() -> list[Batch]:
    return [make_batch() for _ in range(30)]


@pytest.fixture
def ram() -> ClickModel:
    return ClickModel(in_ram).double()


@pytest.fixture(params=[replaced, by_hand], ids=lambda how: how.__name__)
def disk(request: pytest.FixtureRequest, ram: ClickModel, stores, tmp_path: Path) -> ClickModel:
    """The model with its large bags on disk, before a step; their stores are checked at the end."""
    model = request.param(ram, tmp_path / "tables")
    stores.tables += [model.bags[feature] for feature in LARGE]
    stores.paths += [model.bags[feature].path for feature in LARGE]
    return model


@pytest.mark.parametrize("dense", [torch.optim.Adam, torch.optim.Adagrad])
def test_a_click_model_with_bags_on_disk_has_the_losses_of_ram(
    ram: ClickModel, disk: ClickModel, batches: list[Batch], dense: type[torch.optim.Optimizer]
) -> None:
    ram_optimizers = optimizers(ram, dense)
    ram_losses = train(ram, batches, loss_of, ram_optimizers)
    disk_losses = train(disk, batches, loss_of, optimizers(disk, dense))
    assert_same_losses(disk_losses, ram_losses)
    assert min(len(batch.bags[RARE][0]) for batch in batches) == 0
    assert sum(disk.bags[feature].stats().evictions for feature in LARGE) > 0
    for feature in LARGE:
        table, weight = disk.bags[feature], ram.bags[feature].weight
        assert table.step == ram_optimizers[0].state[weight]["step"]
        torch.testing.assert_close(table.weight[:], weight.detach(), **CLOSE)


def test_a_click_model_predicts_as_in_ram_and_evaluation_writes_nothing(
    ram: ClickModel, disk: ClickModel, batches: list[Batch]
) -> None:
    for model in (ram, disk):
        train(model, batches[:5], loss_of, optimizers(model))
        model.eval()
    steps = [disk.bags[feature].step for feature in LARGE]
    written = [disk.bags[feature].version[:] for feature in LARGE]
    with torch.no_grad():
        for batch in batches:
            expected = ram(batch.numbers, batch.bags)
            torch.testing.assert_close(disk(batch.numbers, batch.bags), expected, **CLOSE)
    assert [disk.bags[feature].step for feature in LARGE] == steps
    for feature, before in zip(LARGE, written, strict=True):
        assert torch.equal(disk.bags[feature].version[:], before)


def test_a_click_model_that_is_stopped_and_opened_goes_on_with_the_losses_of_ram(
    ram: ClickModel, disk: ClickModel, batches: list[Batch], stores, tmp_path: Path
) -> None:
    expected = train(ram, batches, loss_of, optimizers(ram))
    stepping = optimizers(disk)
    before = train(disk, batches[:12], loss_of, stepping)
    saved = {"model": disk.state_dict(), "optimizers": [each.state_dict() for each in stepping]}
    torch.save(saved, tmp_path / "model.pt")
    for feature in LARGE:
        disk.bags[feature].close()

    def reopen(feature: int) -> nn.Module:
        if feature not in LARGE:
            return in_ram(feature)
        table = DiskEmbeddingBag.open(disk.bags[feature].path)
        stores.tables.append(table)
        return table

    again = ClickModel(reopen).double()
    stepping = optimizers(again)
    saved = torch.load(tmp_path / "model.pt")
    again.load_state_dict(saved["model"])
    for optimizer, state in zip(stepping, saved["optimizers"], strict=True):
        optimizer.load_state_dict(state)
    after = train(again, batches[12:], loss_of, stepping)
    assert_same_losses(torch.cat([before, after]), expected)
