"""Models of tokens, of transformers and in their style: a shared table on disk, the same losses."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from model_reference import CLOSE, LR, assert_same_losses, optimizers, train
from torch import Tensor, nn

from ooc_embed import DiskEmbedding, SparseAdam, passes, replace_embeddings

PAD, IGNORED = 0, -100
WORDS = 500
CACHE_BYTES = 100_000  # about a third of the rows


@dataclass(frozen=True)
class Config:
    vocab_size: int = WORDS
    d_model: int = 16
    num_heads: int = 2
    max_positions: int = 12


class Stack(nn.Module):
    """An encoder or a decoder, which is given the embedding that it shares."""

    def __init__(self, config: Config, embed_tokens: nn.Module, block: nn.Module) -> None:
        super().__init__()
        self.embed_tokens = embed_tokens
        self.embed_positions = nn.Embedding(config.max_positions, config.d_model)
        self.block = block

    def forward(self, input_ids: Tensor, **others: Any) -> Tensor:
        places = torch.arange(input_ids.shape[1], device=input_ids.device)
        hidden = self.embed_tokens(input_ids) + self.embed_positions(places)
        return self.block(hidden, **others)


class Seq2Seq(nn.Module):
    """Encoder and decoder look up in one table, under three names."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.shared = nn.Embedding(config.vocab_size, config.d_model, PAD, sparse=True)
        shape = (config.d_model, config.num_heads, 2 * config.d_model)
        encoder = nn.TransformerEncoderLayer(*shape, batch_first=True)
        decoder = nn.TransformerDecoderLayer(*shape, batch_first=True)
        self.encoder = Stack(config, self.shared, encoder)
        self.decoder = Stack(config, self.shared, decoder)
        self.lm_head = nn.Linear(config.d_model, config.vocab_size, bias=False)

    def get_input_embeddings(self) -> nn.Module:
        return self.shared

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.shared = self.encoder.embed_tokens = self.decoder.embed_tokens = value

    def forward(self, input_ids: Tensor, decoder_input_ids: Tensor, labels: Tensor) -> Tensor:
        memory = self.encoder(input_ids, src_key_padding_mask=input_ids == PAD)
        hidden = self.decoder(decoder_input_ids, memory=memory)
        logits = self.lm_head(hidden).flatten(0, 1)
        return nn.functional.cross_entropy(logits, labels.flatten(), ignore_index=IGNORED)


def set_on_disk(model: Any, path: Path) -> None:
    """The line to change in any model with these two methods."""
    table = DiskEmbedding.from_embedding(
        model.get_input_embeddings(), SparseAdam(lr=LR), path=path, cache_bytes=CACHE_BYTES
    )
    model.set_input_embeddings(table)


def replace_by_name(model: nn.Module, path: Path) -> None:
    """The other way, which finds the table under all its names."""
    done = replace_embeddings(
        model, path.parent, min_rows=WORDS, optimizer=SparseAdam(lr=LR), cache_bytes=CACHE_BYTES
    )
    names = ("shared", "encoder.embed_tokens", "decoder.embed_tokens")
    assert [(item.names, item.path) for item in done] == [(names, path)]


@dataclass(frozen=True)
class Tokens:
    """`source` (B, S) ends in padding, `target` (B, T); labels leave out what is padding there."""

    source: Tensor
    target: Tensor

    @property
    def labels(self) -> Tensor:
        return self.target.masked_fill(self.target == PAD, IGNORED)


@pytest.fixture
def batches() -> list[Tokens]:
    def tokens(length: int) -> Tensor:
        ids = 1 + (torch.rand(4, length).square() * (WORDS - 1)).long()
        ends = torch.randint(length // 2, length + 1, (4, 1))
        return ids.masked_fill(torch.arange(length) >= ends, PAD)

    return [Tokens(tokens(10), tokens(7)) for _ in range(25)]


CUDA = pytest.param(
    "cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
)


@pytest.fixture(params=["cpu", "cpu taken for an accelerator", CUDA])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    if "taken" in request.param:
        monkeypatch.setattr(passes, "_on_cpu", lambda device: False)
    return torch.device(request.param.split()[0])


@pytest.mark.parametrize("put_on_disk", [set_on_disk, replace_by_name])
def test_an_encoder_and_a_decoder_that_share_a_table_have_the_losses_of_ram(
    stores, tmp_path: Path, batches: list[Tokens], device: torch.device, put_on_disk: Any
) -> None:
    ram = Seq2Seq(Config()).double()
    disk = copy.deepcopy(ram)
    stores.paths.append(tmp_path / "shared.zarr")
    put_on_disk(disk, stores.paths[-1])
    stores.tables.append(disk.shared)
    assert disk.encoder.embed_tokens is disk.decoder.embed_tokens is disk.shared

    def loss_of(model: nn.Module, batch: Tokens) -> Tensor:
        start = batch.target.roll(1, dims=1)
        return model(*(ids.to(device) for ids in (batch.source, start, batch.labels)))

    expected, got = (
        train(model, batches, loss_of, optimizers(model))
        for model in (ram.to(device), disk.to(device))
    )
    assert_same_losses(got, expected)
    assert disk.shared.step == len(batches)
    assert disk.shared.stats().evictions > 0
    torch.testing.assert_close(disk.shared.weight[:], ram.shared.weight.detach().cpu(), **CLOSE)


# transformers


@pytest.fixture
def transformers(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return pytest.importorskip("transformers", reason="needs the extra `models`")


def make_bert(transformers: ModuleType) -> Any:
    config = transformers.BertConfig(
        vocab_size=WORDS,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=16,
        tie_word_embeddings=False,
    )
    return transformers.BertForMaskedLM(config)


def make_t5(transformers: ModuleType) -> Any:
    """Encoder and decoder share their table; the output layer has a weight of its own."""
    config = transformers.T5Config(
        vocab_size=WORDS,
        d_model=16,
        d_kv=8,
        d_ff=32,
        num_layers=2,
        num_heads=2,
        decoder_start_token_id=PAD,
    )
    model = transformers.T5ForConditionalGeneration(config)
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    return model


def loss_of_transformer(model: Any, batch: Tokens) -> Tensor:
    labels = batch.source if model.config.model_type == "bert" else batch.labels
    mask = (batch.source != PAD).long()
    return model(input_ids=batch.source, attention_mask=mask, labels=labels).loss


@pytest.fixture(params=[make_bert, make_t5], ids=["bert", "t5"])
def trained(
    request: pytest.FixtureRequest, transformers: ModuleType, stores, batches: list[Tokens]
) -> tuple[Any, Any, Tensor, Tensor]:
    """The model in RAM, with its table on disk, and the losses of both; dropout is on."""
    ram = request.param(transformers).double().train()
    disk = copy.deepcopy(ram)
    for layer in ram.modules():
        if isinstance(layer, nn.Embedding) and layer.num_embeddings == WORDS:
            layer.sparse = True  # what SparseAdam asks for
    set_on_disk(disk, stores.new_path())
    stores.tables.append(disk.get_input_embeddings())
    # Not Adam: a gradient that is zero but for rounding it divides by its own size, so that two
    # models in RAM whose rows differ by one part in 2^51 have losses 1e-7 apart after 20 steps.
    losses = [
        train(each, batches, loss_of_transformer, optimizers(each, torch.optim.SGD))
        for each in (ram, disk)
    ]
    return ram, disk, *losses


def test_a_transformer_with_its_table_on_disk_has_the_losses_of_ram(trained: Any) -> None:
    ram, disk, expected, got = trained
    assert_same_losses(got, expected)
    table = disk.get_input_embeddings()
    assert table.step == len(expected)
    assert table.stats().evictions > 0
    rows = ram.get_input_embeddings().weight.detach()
    torch.testing.assert_close(table.weight[:], rows, **CLOSE)


def test_a_trained_transformer_with_its_table_on_disk_answers_as_in_ram(
    trained: Any, batches: list[Tokens]
) -> None:
    ram, disk, *_ = trained
    if not ram.can_generate():
        logits = [each.eval()(batches[0].source).logits for each in (ram, disk)]
        torch.testing.assert_close(logits[1], logits[0], **CLOSE)
        return
    tokens = [each.eval().generate(batches[0].source, max_new_tokens=6) for each in (ram, disk)]
    assert torch.equal(tokens[1], tokens[0])


def test_a_transformer_is_saved_by_its_own_method_and_takes_the_table_again(
    trained: Any, batches: list[Tokens], tmp_path: Path
) -> None:
    _, disk, *_ = trained
    disk.eval().save_pretrained(tmp_path)
    again = type(disk).from_pretrained(tmp_path, dtype=torch.float64)
    again.set_input_embeddings(disk.get_input_embeddings())
    losses = [loss_of_transformer(model.eval(), batches[0]) for model in (disk, again)]
    assert torch.equal(*losses)
