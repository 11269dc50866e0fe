"""`replace_embeddings`: large ones go to disk under their names, the model computes as before."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from ooc_embed import DiskEmbedding, DiskEmbeddingBag, SparseAdam, replace_embeddings

IDS = torch.tensor([[1, 2, 2, 7]])


class Model(nn.Module):
    """Two large embeddings, one of them under two names, a small one, and one that is tied."""

    def __init__(self) -> None:
        super().__init__()
        self.users = nn.Embedding(2000, 4, padding_idx=0)
        self.towers = nn.ModuleDict({"left": nn.Sequential(self.users), "right": self.users})
        self.tags = nn.EmbeddingBag(3000, 4, mode="sum")
        self.small = nn.Embedding(10, 4)
        self.words = nn.Embedding(1500, 4)
        self.out = nn.Linear(4, 1500, bias=False)
        self.out.weight = self.words.weight

    def forward(self, ids):
        both = self.users(ids).sum(1) + self.towers["right"](ids).sum(1) + self.tags(ids)
        return self.out(both + self.small(ids).sum(1) + self.words(ids).sum(1))


@pytest.fixture
def replaced(tmp_path):
    model = Model()
    before = copy.deepcopy(model)
    done = replace_embeddings(model, tmp_path / "tables", min_rows=1000, optimizer=SparseAdam())
    yield before, model, done
    for module in (model.users, model.tags):
        module.close()


def test_large_embeddings_are_tables_under_their_old_names(replaced, tmp_path):
    _, model, _ = replaced
    assert isinstance(model.users, DiskEmbedding)
    assert isinstance(model.tags, DiskEmbeddingBag)
    assert model.towers["right"] is model.users
    assert model.towers["left"][0] is model.users
    assert type(model.small) is type(model.words) is nn.Embedding
    names = {path.name for path in (tmp_path / "tables").iterdir()}
    assert names == {"users.zarr", "tags.zarr"}


def test_the_model_computes_what_it_did(replaced):
    before, model, _ = replaced
    torch.testing.assert_close(model(IDS), before(IDS))
    model(IDS).sum().backward()
    assert (model.users.step, model.tags.step) == (1, 1)


def test_the_report_says_what_was_done_and_saved(replaced):
    _, _, done = replaced
    by_name = {item.names[0]: item for item in done}
    assert by_name.keys() == {"users", "tags", "words"}
    assert by_name["users"].names == ("users", "towers.left.0", "towers.right")
    assert by_name["users"].ram_bytes == 3 * 2000 * 4 * 4
    assert "MB less in RAM" in str(by_name["tags"])
    assert by_name["words"].path is None
    assert "another module" in str(by_name["words"])


def test_the_rest_of_an_old_checkpoint_still_loads(replaced):
    before, model, _ = replaced
    with torch.no_grad():
        before.small.weight.add_(1)
    result = model.load_state_dict(before.state_dict(), strict=False)
    assert torch.equal(model.small.weight, before.small.weight)
    assert {key.rsplit(".", 1)[1] for key in result.unexpected_keys} == {"weight"}
    assert {key.rsplit(".", 1)[1] for key in result.missing_keys} == {"_extra_state"}


def test_moments_come_along(tmp_path):
    model = nn.Sequential(nn.Embedding(2000, 4, sparse=True))
    optimizer = torch.optim.SparseAdam(model.parameters())
    model(IDS).sum().backward()
    optimizer.step()
    moments = optimizer.state[model[0].weight]["exp_avg"].clone()
    replace_embeddings(model, tmp_path, min_rows=1000, optimizer=optimizer)
    assert torch.equal(model[0].state["exp_avg"][:], moments)
    assert model[0].step == 1
    model[0].close()


def test_nothing_is_replaced_where_a_table_is_in_the_way(tmp_path):
    model = Model()
    (tmp_path / "tags.zarr").touch()
    with pytest.raises(FileExistsError, match="tags"):
        replace_embeddings(model, tmp_path, min_rows=1000)
    assert type(model.users) is nn.Embedding
    assert [path.name for path in tmp_path.iterdir()] == ["tags.zarr"]


def test_the_error_for_tables_of_another_day_says_how_to_go_on_with_them(tmp_path):
    model, again = (nn.Sequential(nn.EmbeddingBag(2000, 4)) for _ in range(2))
    rows = model[0].weight.detach().clone()
    replace_embeddings(model, tmp_path, min_rows=1000)
    model[0].close()
    with pytest.raises(FileExistsError) as error:
        replace_embeddings(again, tmp_path, min_rows=1000)
    assert "model.set_submodule('0', DiskEmbeddingBag.open(path)) goes on" in str(error.value)
    again.set_submodule("0", DiskEmbeddingBag.open(tmp_path / "0.zarr"))
    assert torch.equal(again[0].weight[:], rows)
    again[0].close()


def test_a_model_that_is_an_embedding_is_told_the_way(tmp_path):
    with pytest.raises(ValueError, match="from_embedding"):
        replace_embeddings(nn.Embedding(10, 2), tmp_path, min_rows=1)


def test_a_model_without_large_embeddings_stays(tmp_path):
    assert replace_embeddings(Model(), tmp_path) == []


class Scaled(nn.Embedding):
    """What transformers have: it computes something else than its rows."""

    def forward(self, ids):
        return super().forward(ids) * 100


def test_layers_whose_place_a_table_could_not_take_unseen_stay(tmp_path):
    model = nn.ModuleDict(
        {
            "scaled": Scaled(2000, 4),
            "hooked": nn.Embedding(2000, 4),
            "short": nn.Embedding(2000, 4).half(),
            "empty": nn.Embedding(2000, 4, device="meta"),
        }
    )
    model["hooked"].register_forward_hook(lambda module, args, out: out * 2)
    done = replace_embeddings(model, tmp_path, min_rows=1000)
    reasons = {item.names[0]: item.reason for item in done}
    assert "Scaled" in reasons["scaled"]
    assert "hooks" in reasons["hooked"]
    assert "float16" in reasons["short"]
    assert "device meta" in reasons["empty"]
    assert not any(isinstance(module, DiskEmbedding) for module in model.modules())


def test_nothing_is_replaced_where_the_optimizer_lacks_a_weight(tmp_path):
    model = nn.ModuleDict({"a": nn.Embedding(2000, 4), "b": nn.Embedding(2000, 4)})
    optimizer = torch.optim.SparseAdam(model["a"].parameters())
    with pytest.raises(ValueError, match="does not have"):
        replace_embeddings(model, tmp_path, min_rows=1000, optimizer=optimizer)
    assert type(model["a"]) is nn.Embedding
    assert list(tmp_path.iterdir()) == []
