"""Tables that come back from archives go on exactly as the original does."""

from __future__ import annotations

import json
from pathlib import Path

import archives
import numpy as np
import pytest
import safetensors
import safetensors.torch
import store_files
import torch

import ooc_embed
from ooc_embed import DiskEmbedding, DiskEmbeddingBag

pytestmark = pytest.mark.usefixtures("one_thread")


def assert_goes_on_alike(original: DiskEmbedding, new: DiskEmbedding) -> None:
    """Further steps, on rows that were never trained too, leave the same bits."""
    assert new.step == original.step
    for seed in range(20, 23):
        for emb in (original, new):
            archives.step(emb, seed)
            emb(torch.arange(2500, 2600)).sum().backward()
    want, found = archives.fields_of(original), archives.fields_of(new)
    assert want.keys() == found.keys()
    for name, rows in want.items():
        assert torch.equal(found[name], rows), name
    assert new.optimizer.param_groups[0]["lr"] == original.optimizer.param_groups[0]["lr"]


@pytest.mark.parametrize("name", ["out", "out.safetensors"])
@pytest.mark.parametrize(
    "rule",
    [
        ooc_embed.SparseAdam(lr=0.1, bias_correction="row"),
        ooc_embed.RowwiseAdagrad(),
        ooc_embed.Adagrad(initial_accumulator_value=0.5),
        ooc_embed.RiemannianAdam(lr=0.01),
    ],
    ids=lambda rule: rule.name,
)
def test_a_table_goes_on_bit_by_bit_where_it_was_exported(
    stores, tmp_path: Path, name: str, rule: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    archives.use_small_shards(monkeypatch)
    options = {"optimizer": rule, "max_grad_norm": 50.0}
    with archives.trained(stores.new_path(), **options) as original:
        ooc_embed.export_table(original, tmp_path / name, fields="all")
        with ooc_embed.import_table(tmp_path / name, stores.new_path()) as new:
            old, own = store_files.manifest(original.path), store_files.manifest(new.path)
            assert own["table_id"] != old["table_id"]
            for key in ("rule", "seed", "init", "padding_idx", "dtype", "fields", "module"):
                assert own[key] == old[key]
            assert own["commits"][-1]["rows_written"] == old["commits"][-1]["rows_written"]
            assert own["commits"][-1]["param_groups"] == old["commits"][-1]["param_groups"]
            assert_goes_on_alike(original, new)
            with pytest.raises(ooc_embed.StoreError, match="belongs to table"):
                new.set_extra_state(original.get_extra_state())


def test_rows_that_never_were_written_take_no_disk_again(stores, tmp_path: Path) -> None:
    with archives.trained(stores.new_path()) as original:
        ooc_embed.export_table(original, tmp_path / "out", fields="all")
    with ooc_embed.import_table(tmp_path / "out", stores.new_path(), chunk_rows=1024) as new:
        assert len(store_files.chunk_files(new.path)) == 2
        records = store_files.read_by_hand(new.path, "table")
        assert not records[new.version[:].numpy() == 0].any()


def test_weights_alone_begin_anew_with_the_layers_arguments(stores, tmp_path: Path) -> None:
    with archives.trained(stores.new_path(), max_norm=2.0) as original:
        ooc_embed.export_table(original, tmp_path / "out")
        weight = original.weight[:]
    for resume in (None, False):
        with ooc_embed.import_table(
            tmp_path / "out", stores.new_path(), resume=resume, optimizer=ooc_embed.SGD(lr=0.5)
        ) as new:
            assert torch.equal(new.weight[:], weight)
            assert new.weight.dtype == torch.float64
            assert (new.version[:] == 1).all()
            assert (new.step, new.padding_idx, new.max_norm) == (0, 7, 2.0)
            assert new.optimizer.param_groups[0]["lr"] == 0.5
    with pytest.raises(ValueError, match="it has no exp_avg, exp_avg_sq, version"):
        ooc_embed.import_table(tmp_path / "out", tmp_path / "no", resume=True)
    with DiskEmbedding.from_pretrained(tmp_path / "out", path=stores.new_path()) as new:
        assert torch.equal(new.weight[:], weight)


def test_a_bag_comes_back_as_a_bag(stores, tmp_path: Path) -> None:
    with DiskEmbeddingBag(50, 2, mode="mean", path=stores.new_path()) as bag:
        bag(torch.tensor([[1, 2], [3, 3]])).sum().backward()
        ooc_embed.export_table(bag, tmp_path / "out", fields="all")
        weight = bag.weight[:]
    for resume in (True, False):
        with ooc_embed.import_table(tmp_path / "out", stores.new_path(), resume=resume) as new:
            assert isinstance(new, DiskEmbeddingBag)
            assert new.mode == "mean"
            assert torch.equal(new.weight[:], weight)
            assert new.step == int(resume)


def test_rounded_moments_resume_with_a_warning_and_float16_ones_do_not(
    stores, tmp_path: Path
) -> None:
    with archives.trained(stores.new_path()) as emb:
        ooc_embed.export_table(emb, tmp_path / "rounded", fields="all", bitround=20)
        ooc_embed.export_table(emb, tmp_path / "half", fields="all", dtype=torch.float16)
        half = emb.weight[:].half()
    with pytest.warns(UserWarning, match="rounded weights and moments"):
        new = ooc_embed.import_table(tmp_path / "rounded", stores.new_path())
    assert new.step == 3
    new.close()
    with pytest.raises(ValueError, match="in float16 small second moments are 0"):
        ooc_embed.import_table(tmp_path / "half", tmp_path / "no", resume=True)
    with ooc_embed.import_table(tmp_path / "half", stores.new_path()) as new:
        assert new.step == 0
        assert torch.equal(new.weight[:], half.float())


def test_other_files_of_weights_are_imported(stores, tmp_path: Path) -> None:
    rows = np.arange(12, dtype=np.float32).reshape(6, 2)
    np.save(tmp_path / "rows.npy", rows)
    with ooc_embed.import_table(tmp_path / "rows.npy", stores.new_path(), padding_idx=1) as new:
        np.testing.assert_array_equal(new.weight[:].numpy(), rows)
        assert new.padding_idx == 1
        new(torch.tensor([0])).sum().backward()
        assert new.step == 1
    with pytest.raises(ValueError, match="is no archive with all fields"):
        ooc_embed.import_table(tmp_path / "rows.npy", tmp_path / "no", resume=True)


def test_an_archive_of_a_frozen_store_gives_weights(stores, tmp_path: Path) -> None:
    with archives.trained(stores.new_path()) as emb:
        ooc_embed.freeze_table(emb, frozen := stores.new_path())
        weight = emb.weight[:]
    ooc_embed.export_table(frozen, tmp_path / "out", fields="all")
    with pytest.raises(ValueError, match="of a frozen store, which has no optimizer"):
        ooc_embed.import_table(tmp_path / "out", tmp_path / "no", resume=True)
    with ooc_embed.import_table(tmp_path / "out", stores.new_path()) as new:
        assert torch.equal(new.weight[:], weight)
        assert new.step == 0


def test_options_that_a_resumed_table_has_itself_are_refused(stores, tmp_path: Path) -> None:
    with archives.trained(stores.new_path()) as emb:
        ooc_embed.export_table(emb, tmp_path / "out", fields="all")
        ooc_embed.export_table(emb, tmp_path / "moments", fields="exp_avg")
    with pytest.raises(ValueError, match="seed cannot be chosen: .* resumes with the table's own"):
        ooc_embed.import_table(tmp_path / "out", tmp_path / "no", seed=3)
    with pytest.raises(ValueError, match="has no weights, only exp_avg"):
        ooc_embed.import_table(tmp_path / "moments", tmp_path / "no")
    with pytest.raises(ValueError, match="lies in"):
        ooc_embed.import_table(tmp_path / "out", tmp_path / "out", overwrite=True)
    with pytest.raises(FileExistsError, match="no ooc_embed store"):
        ooc_embed.import_table(tmp_path / "out", tmp_path / "moments", overwrite=True)
    assert not (tmp_path / "no").exists()


def test_a_changed_description_is_refused(stores, tmp_path: Path) -> None:
    with archives.trained(stores.new_path()) as emb:
        ooc_embed.export_table(emb, tmp_path / "out", fields="all")
    file = tmp_path / "out" / "zarr.json"
    value = json.loads(file.read_text())
    value["attributes"]["ooc_embed_archive"]["table"]["seed"] = 12
    file.write_text(json.dumps(value))
    with pytest.raises(ooc_embed.FormatError, match="its checksum is"):
        ooc_embed.import_table(tmp_path / "out", tmp_path / "no")
    value["attributes"]["ooc_embed_archive"]["format"] = 2
    file.write_text(json.dumps(value))
    with pytest.raises(ooc_embed.FormatError, match="format 2 is not 1"):
        ooc_embed.import_table(tmp_path / "out", tmp_path / "no")


@pytest.mark.parametrize(
    ("file", "key", "value", "message"),
    [
        ("weight/zarr.json", "shape", [9, 4], "shape"),
        ("weight/zarr.json", "data_type", "int64", "data_type 'int64'.*asks for 'float64'"),
        ("weight/zarr.json", "node_type", "group", "weight/zarr.json is damaged"),
        ("weight/zarr.json", "codecs", [{"name": "none"}], "weight/zarr.json is damaged"),
        (
            "weight/zarr.json",
            "chunk_key_encoding",
            {"name": "default", "configuration": {"separator": "/"}},  # no file has such a name
            "chunk_key_encoding",
        ),
        (
            "weight/zarr.json",
            "chunk_grid",
            {"name": "regular", "configuration": {"chunk_shape": [1 << 40, 4]}},
            "chunk_grid",
        ),
        ("zarr.json", "fields", ["../weight"], "the table has no ../weight"),
        ("zarr.json", "fields", ["weight", "weight"], "not all different"),
        ("zarr.json", "dtype", "object", "dtype 'object' is none of"),
        ("zarr.json", "chunk_rows", 1 << 40, "more than the table's 3,000"),
        ("zarr.json", "shard_rows", 1 << 40, "more than the table's 3,000"),
        ("zarr.json", "shard_rows", True, "True is no integer"),
    ],
)
def test_metadata_that_contradict_each_other_are_refused(
    stores, tmp_path: Path, file: str, key: str, value: object, message: str
) -> None:
    with archives.trained(stores.new_path()) as emb:
        ooc_embed.export_table(emb, tmp_path / "out")
    changed = tmp_path / "out" / file
    metadata = json.loads(changed.read_text())
    (metadata["attributes"]["ooc_embed_archive"] if file == "zarr.json" else metadata)[key] = value
    changed.write_text(json.dumps(metadata))
    for read in (
        lambda: ooc_embed.import_table(tmp_path / "out", tmp_path / "no"),
        lambda: DiskEmbedding.from_pretrained(tmp_path / "out", path=tmp_path / "no"),
        lambda: ooc_embed.ArchiveEmbedding(tmp_path / "out"),
    ):
        with pytest.raises(ooc_embed.FormatError, match=message):
            read()
    assert not (tmp_path / "no").exists()


def test_a_safetensors_file_that_is_not_what_it_says_is_refused(stores, tmp_path: Path) -> None:
    with archives.trained(stores.new_path()) as emb:
        ooc_embed.export_table(emb, tmp_path / "out.safetensors", fields="all")
    with safetensors.safe_open(tmp_path / "out.safetensors", framework="pt") as file:
        said = file.metadata()
    tensors = safetensors.torch.load_file(tmp_path / "out.safetensors")
    cases = [
        ({"ooc_embed_archive": "{"}, tensors, "Expecting property name"),
        ({"ooc_embed_archive": "[]"}, tensors, "an object was expected"),
        (said, {**tensors, "exp_avg": tensors["exp_avg"][:9]}, "no exp_avg of the shape"),
        (said, {**tensors, "version": tensors["version"].double()}, "no version of the shape"),
        (said, {"weight": tensors["weight"]}, "no exp_avg of the shape"),
    ]
    for metadata, held, message in cases:
        safetensors.torch.save_file(held, tmp_path / "changed.safetensors", metadata=metadata)
        with pytest.raises(ooc_embed.FormatError, match=rf"changed\.safetensors.*{message}"):
            ooc_embed.import_table(tmp_path / "changed.safetensors", tmp_path / "no")
    negative = {**tensors, "version": -tensors["version"]}
    safetensors.torch.save_file(negative, tmp_path / "changed.safetensors", metadata=said)
    with pytest.raises(ValueError, match=r"versions are counts, got -3"):
        ooc_embed.import_table(tmp_path / "changed.safetensors", tmp_path / "no")
    assert not (tmp_path / "no").exists()


def test_flipped_bits_stop_an_import_and_leave_nothing(stores, tmp_path: Path) -> None:
    with archives.trained(stores.new_path()) as emb:
        ooc_embed.export_table(emb, tmp_path / "out", fields="all")
    shard = tmp_path / "out" / "exp_avg" / "c.0.0"
    data = bytearray(shard.read_bytes())
    data[100] ^= 1
    shard.write_bytes(data)
    with pytest.raises(ooc_embed.CorruptStoreError, match="out/exp_avg is damaged"):
        ooc_embed.import_table(tmp_path / "out", tmp_path / "no")
    (tmp_path / "out" / "weight" / "c.0.0").unlink()
    with pytest.raises(ooc_embed.CorruptStoreError, match=r"weight/c\.0\.0 is missing"):
        DiskEmbedding.from_pretrained(tmp_path / "out", path=tmp_path / "no", key="weight")
    with pytest.raises(ValueError, match="key chooses one array"):
        ooc_embed.import_table(tmp_path / "out", tmp_path / "no", key="weight", resume=True)
    assert not (tmp_path / "no").exists()
