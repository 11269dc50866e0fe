"""A store on a network file system, which is pretended: its writer is warned, and trains right."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from ram_reference import assert_same, train_both

from ooc_embed import DiskEmbedding, disk_facts, report

IDS = torch.tensor([1, 2, 2, 7])


@pytest.mark.parametrize(
    "kind", ["nfs", "nfs4", "cifs", "smb3", "ceph", "lustre", "fuse.sshfs", "9p", "virtiofs"]
)
def test_a_writer_on_a_network_file_system_is_warned_and_a_reader_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(disk_facts, "file_system", lambda path: kind)
    path = tmp_path / "t.zarr"
    with pytest.warns(UserWarning, match=rf"t\.zarr is on {kind}, a network") as creating:
        DiskEmbedding(10, 2, path=path).close()
    with pytest.warns(UserWarning, match="local disk") as opening:
        DiskEmbedding.open(path).close()
    assert {warning.filename for caught in (creating, opening) for warning in caught} == {__file__}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        DiskEmbedding.open(path, mode="r").close()


def test_training_goes_on_there_as_anywhere(both, monkeypatch: pytest.MonkeyPatch) -> None:
    emb, ram = both
    emb.close()
    monkeypatch.setattr(disk_facts, "file_system", lambda path: "nfs4")
    with pytest.warns(UserWarning, match="nfs4"):
        again = DiskEmbedding.open(emb.path)
    for _ in range(3):
        train_both(again, ram, lambda lookup: lookup(IDS).pow(2).sum())
    assert_same(again, ram)
    again.close()


def test_a_warning_that_is_an_error_leaves_no_lock_behind(
    make_table, monkeypatch: pytest.MonkeyPatch
) -> None:
    emb = make_table()
    emb.close()
    with monkeypatch.context() as patch, warnings.catch_warnings():
        patch.setattr(disk_facts, "file_system", lambda path: "nfs4")
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="nfs4"):
            DiskEmbedding.open(emb.path)
    with DiskEmbedding.open(emb.path) as again:
        assert again.step == 0
    assert report.verify(emb.path) == []


@pytest.mark.parametrize(("path", "kind"), [("/proc", "proc"), ("/sys", "sysfs")])
def test_file_systems_have_the_names_that_linux_gives_them(path: str, kind: str) -> None:
    if not Path(path, "self" if kind == "proc" else "kernel").exists():
        pytest.skip(f"this system has no {path}")
    assert disk_facts.file_system(Path(path)) == kind
    # Of no file system that the kernel lists, nothing is known; that is no network's either.
    assert disk_facts.file_system(Path("/")) not in disk_facts._NETWORK_FILE_SYSTEMS
