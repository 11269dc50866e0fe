"""Archives: what other readers find in them, and what is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path

import archives
import numcodecs
import numpy as np
import pytest
import safetensors
import safetensors.torch
import store_files
import system_calls
import tensorstore
import torch
import xarray
import zarr

import ooc_embed
from ooc_embed import DiskEmbedding, cli, report

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def emb(store_path: Path, monkeypatch: pytest.MonkeyPatch) -> DiskEmbedding:
    archives.use_small_shards(monkeypatch)
    with archives.trained(store_path) as emb:
        yield emb


@pytest.mark.parametrize("codec", ["zstd", "blosc-lz4", "none"])
def test_every_reader_finds_every_field_of_every_row(
    emb: DiskEmbedding, tmp_path: Path, codec: str
) -> None:
    out = tmp_path / "out"
    ooc_embed.export_table(emb, out, fields="all", codec=codec)
    by_xarray = xarray.open_zarr(out, consolidated=False)
    assert dict(by_xarray.sizes) == {"row": archives.ROWS, "column": archives.DIM}
    for name, rows in archives.fields_of(emb).items():
        assert torch.equal(archives.read(out, name), rows)
        np.testing.assert_array_equal(by_xarray[name].values, rows.numpy())
        by_tensorstore = store_files.open_with_tensorstore(out, name)
        np.testing.assert_array_equal(by_tensorstore.read().result(), rows.numpy())
        assert [path.name for path in sorted((out / name).iterdir())] == [
            *(f"c.{index}" + ".0" * (rows.dim() - 1) for index in range(3)),
            "zarr.json",
        ]
    assert sorted(path.name for path in out.iterdir()) == [*sorted(archives.ALL), "zarr.json"]


def test_the_group_says_what_was_exported(emb: DiskEmbedding, tmp_path: Path) -> None:
    ooc_embed.export_table(emb, tmp_path / "out", bitround=9)
    found = zarr.open_group(tmp_path / "out", mode="r").attrs["ooc_embed_archive"]
    assert found["fields"] == ["weight"]
    assert found["codec"] == "zstd"
    assert found["bitround"] == 9
    table = found["table"]
    assert table["table_id"] == store_files.manifest(emb.path)["table_id"]
    assert table["rule"]["name"] == "SparseAdam"
    assert table["padding_idx"] == 7
    (commit,) = table["commits"]
    assert commit["commit"] == max(emb.commits())
    assert commit["step"] == 3
    assert commit["param_groups"][0]["lr"] == 0.05


def test_bits_are_rounded_as_numcodecs_rounds_them_and_versions_stay(
    emb: DiskEmbedding, tmp_path: Path
) -> None:
    emb.weight[0] = torch.tensor([math.inf, -math.inf, math.nan, 1.0])
    ooc_embed.export_table(emb, tmp_path / "out", fields=["weight", "version"], bitround=5)
    weight = emb.weight[:].numpy()
    want = numcodecs.BitRound(5).encode(weight.copy()).view(np.float64).reshape(weight.shape)
    want[0] = weight[0]
    np.testing.assert_array_equal(archives.read(tmp_path / "out", "weight").numpy(), want)
    assert torch.equal(archives.read(tmp_path / "out", "version"), emb.version[:])


def test_narrower_floats_are_the_nearest(emb: DiskEmbedding, tmp_path: Path) -> None:
    for dtype in (torch.float16, torch.float32):
        ooc_embed.export_table(emb, tmp_path / str(dtype), dtype=dtype)
        found = archives.read(tmp_path / str(dtype), "weight")
        assert found.dtype == dtype
        assert torch.equal(found, emb.weight[:].to(dtype))


@pytest.mark.parametrize("name", ["out", "out.npy", "out.safetensors"])
def test_a_number_beyond_float16_is_an_error_that_leaves_nothing(
    emb: DiskEmbedding, tmp_path: Path, name: str
) -> None:
    emb.weight[2500] = torch.tensor([1.0, 2.0, -70000.0, 4.0])
    before = set(tmp_path.iterdir())
    with pytest.raises(OverflowError, match=r"weight of row 2,500 has -70000.*65504"):
        ooc_embed.export_table(emb, tmp_path / name, dtype=torch.float16)
    assert set(tmp_path.iterdir()) == before


def test_a_safetensors_file_is_what_its_library_reads(emb: DiskEmbedding, tmp_path: Path) -> None:
    out = tmp_path / "out.safetensors"
    ooc_embed.export_table(emb, out, fields="all", dtype=torch.float32)
    found = safetensors.torch.load_file(out)
    want = archives.fields_of(emb)
    assert found.keys() == want.keys()
    for name, rows in want.items():
        assert torch.equal(found[name], rows if name == "version" else rows.float())
    with safetensors.safe_open(out, framework="pt") as file:
        assert json.loads(file.metadata()["ooc_embed_archive"])["dtype"] == "float32"


def test_an_npy_file_is_what_numpy_reads(emb: DiskEmbedding, tmp_path: Path) -> None:
    for field in ("weight", "version"):
        ooc_embed.export_table(emb, tmp_path / f"{field}.npy", fields=field)
        found = np.load(tmp_path / f"{field}.npy", mmap_mode="r")
        np.testing.assert_array_equal(found, archives.fields_of(emb)[field].numpy())


def test_an_npy_file_of_two_fields_is_refused(emb: DiskEmbedding, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds one array, got fields weight, exp_avg: choose"):
        ooc_embed.export_table(emb, tmp_path / "out.npy", fields=["exp_avg", "weight"])
    assert not (tmp_path / "out.npy").exists()


def test_an_earlier_commit_and_a_reader_are_exported_as_they_are(
    emb: DiskEmbedding, tmp_path: Path
) -> None:
    emb.keep_commits = 3
    emb.commit()
    number, before = max(emb.commits()), emb.weight[:]
    with DiskEmbedding.open(emb.path, "r") as reader:
        archives.step(emb, 9)
        emb.commit()
        ooc_embed.export_table(reader, tmp_path / "reader")
    ooc_embed.export_table(emb.path, tmp_path / "earlier", commit=number)
    ooc_embed.export_table(emb.path, tmp_path / "newest")
    assert torch.equal(archives.read(tmp_path / "reader", "weight"), before)
    assert torch.equal(archives.read(tmp_path / "earlier", "weight"), before)
    assert torch.equal(archives.read(tmp_path / "newest", "weight"), emb.weight[:])
    with pytest.raises(ValueError, match="an open layer is at a commit"):
        ooc_embed.export_table(emb, tmp_path / "none", commit=number)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"codec": "gzip"}, "codec must be one of zstd, blosc-lz4, none, got 'gzip'"),
        ({"bitround": 53}, "bitround must be from 1 to 52 for float64, got 53"),
        ({"bitround": 0}, "bitround must be from 1 to 52"),
        ({"bitround": 11, "dtype": torch.float16}, "from 1 to 10 for float16, got 11"),
        ({"dtype": torch.int32}, "dtype must be one of .*got torch.int32"),
        ({"dtype": "float32"}, "dtype must be one of .*got 'float32'"),
        ({"fields": ["weight", "sum"]}, r"some of weight, exp_avg, .*got \['weight', 'sum'\]"),
        ({"fields": []}, "fields must be some of"),
        ({"chunk_rows": 0}, "chunk_rows must be at least 1, got 0"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_is_written(
    emb: DiskEmbedding, tmp_path: Path, options: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        ooc_embed.export_table(emb, tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_what_is_there_is_not_written_over(emb: DiskEmbedding, tmp_path: Path) -> None:
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "notes.txt").write_text("mine")
    (tmp_path / "out.npy").write_bytes(b"mine")
    for out, overwrite in (("foreign", False), ("foreign", True), ("out.npy", False)):
        with pytest.raises(FileExistsError, match="exists"):
            ooc_embed.export_table(emb, tmp_path / out, overwrite=overwrite)
    with pytest.raises(ValueError, match="is the store or inside of it"):
        ooc_embed.export_table(emb, emb.path / "out")
    ooc_embed.export_table(emb, tmp_path / "out.npy", overwrite=True)
    assert np.load(tmp_path / "out.npy").shape == (archives.ROWS, archives.DIM)
    assert (tmp_path / "foreign" / "notes.txt").read_text() == "mine"


def test_an_archive_of_something_else_is_replaced_only_when_asked(
    emb: DiskEmbedding, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    ooc_embed.export_table(emb, out, fields="all")
    ooc_embed.export_table(emb, out, fields="all")  # it is there
    archives.step(emb, 9)
    with pytest.raises(FileExistsError, match=r"an archive of commit .*\(step 3\).*\(step 4\)"):
        ooc_embed.export_table(emb, out, fields="all")
    ooc_embed.export_table(emb, out, overwrite=True)
    assert torch.equal(archives.read(out, "weight"), emb.weight[:])
    assert not (out / "exp_avg").exists()


def test_what_others_put_into_an_archive_stays_when_it_is_replaced(
    emb: DiskEmbedding, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    ooc_embed.export_table(emb, out, fields="all")
    (out / "notes.txt").write_text("mine")
    for folder in ("plots", "weight/old"):
        (out / folder).mkdir()
        (out / folder / "a.txt").write_text("mine")
    inner = out / "copy.zarr"
    emb.snapshot(inner)
    ooc_embed.export_table(inner, out, overwrite=True)
    assert torch.equal(archives.read(out, "weight"), emb.weight[:])
    assert not (out / "exp_avg").exists()
    assert report.verify(inner) == []
    for name in ("notes.txt", "plots/a.txt", "weight/old/a.txt"):
        assert (out / name).read_text() == "mine"


def test_an_export_is_of_one_commit_though_the_table_is_trained_and_merged_meanwhile(
    emb: DiskEmbedding, tmp_path: Path
) -> None:
    (tmp_path / "disk").mkdir()
    want = archives.fields_of(emb)

    def train(name: str, arguments: tuple[object, ...]) -> None:
        if name == "rename" and "/c." in str(arguments[1]):
            archives.step(emb, 9)
            emb.flush()

    with system_calls.watched(tmp_path / "disk", train):
        ooc_embed.export_table(emb.path, tmp_path / "disk" / "out", fields="all")
    assert emb.step == 15
    for name, rows in want.items():
        assert torch.equal(archives.read(tmp_path / "disk" / "out", name), rows)


def test_a_weight_beyond_float32_is_not_frozen(emb: DiskEmbedding, tmp_path: Path) -> None:
    emb.weight[2500] = torch.tensor([1.0, math.inf, -1e39, 4.0], dtype=torch.float64)
    with pytest.raises(OverflowError, match=r"weight of row 2,500 has -1e\+39, 3.40282e\+38"):
        ooc_embed.freeze_table(emb, tmp_path / "frozen", dtype=torch.float32)
    assert not (tmp_path / "frozen").exists()


def test_a_frozen_store_serves_the_weights_and_nothing_else(
    emb: DiskEmbedding, stores, open_table
) -> None:
    path, copy = stores.new_path(), stores.new_path()
    ooc_embed.freeze_table(emb, path)
    served = open_table(path, "r")
    ids = torch.tensor([[0, 7], [2999, 5]])
    assert torch.equal(served(ids), emb(ids))
    assert served.step == emb.step
    assert served.padding_idx == 7
    assert served.state == {}
    assert store_files.manifest(path)["fields"] == [["weight", archives.DIM], ["version", 1]]
    assert report.verify(path) == []
    assert "Frozen" in str(ooc_embed.describe(path))
    with pytest.raises(ooc_embed.StoreError, match="frozen store.*mode='r'"):
        DiskEmbedding.open(path)
    served.snapshot(copy)
    assert torch.equal(open_table(copy, "r").weight[:], emb.weight[:])
    again = stores.new_path()
    trains = DiskEmbedding.from_pretrained(served.weight, freeze=False, path=again)
    trains(ids).sum().backward()
    assert trains.step == 1
    trains.close()


def test_a_bag_is_frozen_as_a_bag_with_narrower_rows(stores, tmp_path: Path) -> None:
    path = stores.new_path()
    with ooc_embed.DiskEmbeddingBag(
        20, 2, mode="mean", path=stores.new_path(), dtype=torch.float64
    ) as bag:
        ooc_embed.freeze_table(bag, path, dtype=torch.float32)
        want = bag(torch.tensor([[1, 2]])).float()
    with ooc_embed.DiskEmbeddingBag.open(path, "r") as served:
        torch.testing.assert_close(served(torch.tensor([[1, 2]])), want)
    with pytest.raises(ValueError, match=r"float16 is refused"):
        ooc_embed.freeze_table(bag.path, stores.new_path(), dtype=torch.float16)


def test_commands_export_and_import(
    emb: DiskEmbedding, stores, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    emb.close()
    out, new, frozen = tmp_path / "out", stores.new_path(), stores.new_path()
    store = str(emb.path)
    assert cli.main(["export", store, str(out), "--fields", "all", "--codec", "blosc-lz4"]) == 0
    assert cli.main(["import", str(out), str(new)]) == 0
    assert "at step 3" in capsys.readouterr().out
    assert cli.main(["export", store, str(frozen), "--frozen"]) == 0
    assert cli.main(["export", store, str(out), "--bitround", "9"]) == 2
    assert "replace it with overwrite=True (--overwrite)" in capsys.readouterr().err
    options = ["--bitround", "9", "--dtype", "float16", "--overwrite", "--chunk-rows", "64"]
    assert cli.main(["export", store, str(out), *options]) == 0
    assert archives.read(out, "weight").dtype == torch.float16
    assert cli.main(["import", str(out), str(new), "--weights-only", "--overwrite"]) == 0
    assert "at step 0" in capsys.readouterr().out
    assert cli.main(["import", str(out), str(new)]) == 2
    assert cli.main(["info", str(out)]) == 2
    assert "is an archive, which `ooc-embed import`" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main(["export", store, str(frozen), "--frozen", "--bitround", "3"])


def test_a_small_chunk_is_read_without_its_shard(emb: DiskEmbedding, tmp_path: Path) -> None:
    """Chunks lie in shards, for readers of few rows."""
    ooc_embed.export_table(emb, tmp_path / "out", chunk_rows=8)
    opened = tensorstore.open(
        {
            "driver": "zarr3",
            "kvstore": {"driver": "file", "path": str(tmp_path / "out" / "weight")},
        }
    ).result()
    assert opened.chunk_layout.read_chunk.shape == (8, archives.DIM)
    assert opened.chunk_layout.write_chunk.shape == (1024, archives.DIM)
