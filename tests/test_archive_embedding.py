"""ArchiveEmbedding: an archive's rows in the place of nn.Embedding."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import archives
import pytest
import torch
from torch.utils.data import DataLoader

import ooc_embed
from ooc_embed import ArchiveEmbedding, DiskEmbedding

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:This process:DeprecationWarning"),  # a fork beside threads
    pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning"),
]


@pytest.fixture
def weight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
    """The rows of the archive at tmp_path / "out"."""
    archives.use_small_shards(monkeypatch)
    with archives.trained(tmp_path / "store") as emb:
        ooc_embed.export_table(emb, tmp_path / "out")
        return emb.weight[:]


def test_rows_are_those_of_nn_embedding_for_any_shape(weight: torch.Tensor, tmp_path: Path) -> None:
    emb = ArchiveEmbedding(tmp_path / "out")
    in_ram = torch.nn.Embedding.from_pretrained(weight)
    for ids in (
        torch.randint(0, archives.ROWS, (3, 5, 2)),
        torch.tensor(2999),
        torch.tensor([4, 4, 0], dtype=torch.int32),
        torch.empty(0, 2, dtype=torch.int64),
    ):
        rows = emb(ids)
        assert torch.equal(rows, in_ram(ids))
        assert rows.dtype == torch.float64
        assert not rows.requires_grad
    assert torch.equal(torch.cat([rows for _, rows in emb.blocks(700)]), weight)
    assert emb.padding_idx == 7
    assert "3000, 4, padding_idx=7" in repr(emb)


def test_casts_are_of_the_output(weight: torch.Tensor, tmp_path: Path) -> None:
    model = torch.nn.Sequential(ArchiveEmbedding(tmp_path / "out")).half().eval()
    assert torch.equal(model(torch.tensor([1, 2])), weight[1:3].half())
    assert model.state_dict() == {}
    assert list(model.parameters()) == []


def test_wrong_ids_are_refused(weight: torch.Tensor, tmp_path: Path) -> None:
    emb = ArchiveEmbedding(tmp_path / "out")
    for wrong in (-1, 3000):
        with pytest.raises(IndexError, match=f"row {wrong} is out of range for a table of 3000"):
            emb(torch.tensor([0, wrong]))
    with pytest.raises(TypeError, match="must be int32 or int64"):
        emb(torch.tensor([1.0]))


def test_workers_forked_and_spawned_read_the_archive(weight: torch.Tensor, tmp_path: Path) -> None:
    emb = ArchiveEmbedding(tmp_path / "out")
    emb(torch.tensor([0]))  # zarr's threads run
    ids = list(torch.randint(0, archives.ROWS, (6, 4)))
    for context in ("fork", "spawn"):
        loader = DataLoader(ids, batch_size=3, collate_fn=Lookup(emb), num_workers=1)
        loader.multiprocessing_context = context
        assert torch.equal(torch.cat(list(loader)), weight[torch.stack(ids)])


class Lookup:
    """Looks up in the worker."""

    def __init__(self, emb: ArchiveEmbedding) -> None:
        self.emb = emb

    def __call__(self, ids: list[torch.Tensor]) -> torch.Tensor:
        return self.emb(torch.stack(ids))


def test_copies_keep_casts_and_mode(weight: torch.Tensor, tmp_path: Path) -> None:
    emb = ArchiveEmbedding(tmp_path / "out").float().eval()
    for other in (pickle.loads(pickle.dumps(emb)), copy.deepcopy(emb)):
        assert torch.equal(other(torch.tensor([5])), weight[5:6].float())
        assert not other.training


def test_rows_beyond_max_norm_are_scaled_as_torch_does(tmp_path: Path) -> None:
    with DiskEmbedding(20, 3, path=tmp_path / "store", max_norm=1.0, norm_type=1.0) as emb:
        ooc_embed.export_table(emb, tmp_path / "out")
        weight = emb.weight[:]
    ids = torch.arange(20)
    want = torch.nn.functional.embedding(ids, weight.clone(), max_norm=1.0, norm_type=1.0)
    torch.testing.assert_close(ArchiveEmbedding(tmp_path / "out")(ids), want)


def test_what_is_no_whole_archive_of_weights_is_refused(
    weight: torch.Tensor, tmp_path: Path
) -> None:
    with pytest.raises(FileNotFoundError, match="`ooc-embed export` makes an archive"):
        ArchiveEmbedding(tmp_path / "none")
    with pytest.raises(ooc_embed.FormatError, match="is no archive"):
        ArchiveEmbedding(tmp_path / "store")
    ooc_embed.export_table(tmp_path / "store", tmp_path / "moments", fields=["exp_avg"])
    with pytest.raises(ooc_embed.FormatError, match="has exp_avg, and no weight"):
        ArchiveEmbedding(tmp_path / "moments")
    (tmp_path / "out" / "weight" / "c.1.0").unlink()
    with pytest.raises(ooc_embed.CorruptStoreError, match=r"weight/c\.1\.0 is missing"):
        ArchiveEmbedding(tmp_path / "out")


def test_flipped_bits_are_an_error_and_no_rows(weight: torch.Tensor, tmp_path: Path) -> None:
    shard = tmp_path / "out" / "weight" / "c.0.0"
    data = bytearray(shard.read_bytes())
    data[100] ^= 1
    shard.write_bytes(data)
    emb = ArchiveEmbedding(tmp_path / "out")
    with pytest.raises(ooc_embed.CorruptStoreError, match="damaged"):
        emb(torch.tensor([0]))
