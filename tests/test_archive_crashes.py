"""Exports that are killed, cut off or out of space: recognised, and gone on with."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import archives
import numpy as np
import pytest
import store_files
import system_calls
import torch
from power_cut import Disk

import ooc_embed
from ooc_embed import DiskEmbedding

pytestmark = pytest.mark.usefixtures("one_thread")
OPTIONS: dict[str, Any] = {"fields": ["weight", "version"], "codec": "zstd"}


@pytest.fixture
def store(quick: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    archives.use_small_shards(monkeypatch)
    archives.trained(quick / "store").close()
    return quick / "store"


def files(path: Path) -> dict[str, bytes]:
    return {
        str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()
    }


def assert_goes_on_to(store: Path, out: Path, want: dict[str, bytes], **options: Any) -> None:
    """What is there is no archive, or all of it; the same call makes it one."""
    if (out / "zarr.json").exists():
        assert files(out) == want
    else:
        with pytest.raises((FileNotFoundError, ooc_embed.FormatError)):
            ooc_embed.ArchiveEmbedding(out)
    ooc_embed.export_table(store, out, **OPTIONS, **options)
    assert files(out) == want


def test_a_kill_or_a_power_cut_at_any_call_is_gone_on_from(store: Path, quick: Path) -> None:
    ooc_embed.export_table(store, quick / "want", **OPTIONS)
    want = files(quick / "want")
    assert len(want) == 9
    disk = Disk(quick / "disk")
    disk.folder.mkdir()
    rng = np.random.default_rng(0)
    left: list[Path] = []

    def before(name: str, arguments: tuple[Any, ...]) -> None:
        disk.before(name, arguments)
        for kept in (0.0, 0.5, 1.0):
            left.append(quick / f"left{len(left)}")
            disk.leave(left[-1], rng, kept)

    with system_calls.watched(disk.folder, before, disk.after):
        ooc_embed.export_table(store, disk.folder / "out", **OPTIONS)
    assert len(left) > 100
    for folder in left:
        assert_goes_on_to(store, folder / "out", want)
        shutil.rmtree(folder)


def test_what_a_killed_export_did_not_sync_is_synced_by_the_next(store: Path, quick: Path) -> None:
    """A folder that is there already may have no durable name."""
    ooc_embed.export_table(store, quick / "want", **OPTIONS)
    want = files(quick / "want")
    for stop in range(1, 20):
        disk = Disk(quick / f"disk{stop}")
        disk.folder.mkdir()
        calls = iter(range(1, stop))

        def before(name: str, arguments: tuple[Any, ...], disk: Disk = disk, calls=calls) -> None:
            disk.before(name, arguments)
            if next(calls, None) is None:
                raise KeyboardInterrupt

        with (
            pytest.raises(KeyboardInterrupt),
            system_calls.watched(disk.folder, before, disk.after),
        ):
            ooc_embed.export_table(store, disk.folder / "out", **OPTIONS)

        def cut(name: str, arguments: tuple[Any, ...], disk: Disk = disk, stop: int = stop) -> None:
            disk.before(name, arguments)
            for seed in range(4) if (disk.folder / "out" / "zarr.json").exists() else ():
                left = quick / f"cut{stop}-{seed}"
                disk.leave(left, np.random.default_rng(seed), 0.5)
                if (left / "out" / "zarr.json").exists():
                    # The other name of what was renamed may be back.
                    (left / "out" / "unfinished.json").unlink(missing_ok=True)
                    assert files(left / "out") == want
                shutil.rmtree(left)

        with system_calls.watched(disk.folder, cut, disk.after):
            ooc_embed.export_table(store, disk.folder / "out", **OPTIONS)
        disk.leave(quick / f"left{stop}", np.random.default_rng(stop), 0.0)
        assert files(quick / f"left{stop}" / "out") == want


def test_a_kill_while_an_archive_is_replaced_leaves_one_or_none(store: Path, quick: Path) -> None:
    ooc_embed.export_table(store, quick / "want", **OPTIONS)
    want = files(quick / "want")
    out, left = quick / "out", []
    ooc_embed.export_table(store, out, bitround=3, fields="all")
    first = files(out)

    def before(name: str, arguments: tuple[Any, ...]) -> None:
        left.append(store_files.copied(out, quick / f"left{len(left)}"))

    with system_calls.watched(out, before):
        ooc_embed.export_table(store, out, **OPTIONS, overwrite=True)
    for folder in left:
        if (folder / "zarr.json").exists():
            assert files(folder) in (first, want)
        ooc_embed.export_table(store, folder, **OPTIONS, overwrite=True)
        assert files(folder) == want
        shutil.rmtree(folder)


def test_shards_that_are_there_are_not_written_again(store: Path, quick: Path) -> None:
    out = quick / "out"

    def stop(name: str, arguments: tuple[Any, ...]) -> None:
        if name == "rename" and str(arguments[1]).endswith("weight/c.2.0"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), system_calls.watched(out, stop):
        ooc_embed.export_table(store, out, **OPTIONS)
    shard = out / "weight" / "c.0.0"
    before = shard.stat().st_ino, shard.stat().st_mtime_ns
    with pytest.raises(ooc_embed.FormatError, match=r"unfinished export of commit .*step 3"):
        ooc_embed.ArchiveEmbedding(out)
    with pytest.raises(ooc_embed.FormatError, match="the same `ooc-embed export` again"):
        ooc_embed.import_table(out, quick / "no")
    ooc_embed.export_table(store, out, **OPTIONS)
    assert (shard.stat().st_ino, shard.stat().st_mtime_ns) == before


def test_an_unfinished_export_of_something_else_is_refused(store: Path, quick: Path) -> None:
    out = quick / "out"

    def stop(name: str, arguments: tuple[Any, ...]) -> None:
        if name == "rename" and str(arguments[1]).endswith("zarr.json"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), system_calls.watched(out, stop):
        ooc_embed.export_table(store, out, **OPTIONS)
    with pytest.raises(FileExistsError, match="codec zstd.*this one.*codec none.*--overwrite"):
        ooc_embed.export_table(store, out, **{**OPTIONS, "codec": "none"})
    with DiskEmbedding.open(store) as emb:
        number = max(emb.commits())
        emb.keep_commits = 2
        archives.step(emb, 8)
    with pytest.raises(FileExistsError, match=rf"commit {number} \(step 3\).*\(step 4\).*--commit"):
        ooc_embed.export_table(store, out, **OPTIONS)
    ooc_embed.export_table(store, out, **OPTIONS, commit=number)
    with DiskEmbedding.open(store, "r", commit=number) as emb:
        assert torch.equal(archives.read(out, "weight"), emb.weight[:])


@pytest.mark.parametrize("name", ["out", "out.npy", "out.safetensors"])
def test_a_full_disk_is_an_error_and_the_same_call_goes_on(
    store: Path, quick: Path, name: str
) -> None:
    ooc_embed.export_table(store, quick / f"want{name}")
    count, single = 0, name != "out"

    def fail(call: str, arguments: tuple[Any, ...]) -> None:
        nonlocal count
        if call in ("pwrite", "posix_fallocate"):
            count += 1
            if count != 4 and not (single and count == 2):
                return
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    (quick / "disk").mkdir()
    with (
        pytest.raises(OSError, match=r"needs [\d,]+ bytes, [\d,]+ bytes are free") as caught,
        system_calls.watched(quick / "disk", fail),
    ):
        ooc_embed.export_table(store, quick / "disk" / name)
    assert caught.value.errno == errno.ENOSPC
    ooc_embed.export_table(store, quick / "disk" / name)
    out, want = quick / "disk" / name, quick / f"want{name}"
    assert [path.name for path in (quick / "disk").iterdir()] == [name]
    assert files(out) == files(want) if out.is_dir() else out.read_bytes() == want.read_bytes()


def test_a_file_is_there_whole_or_not_at_all(store: Path, quick: Path) -> None:
    """Of a file that stopped in its second block, nothing is left under its name."""
    folder = quick / "disk"
    folder.mkdir()
    left: list[Path] = []

    def before(name: str, arguments: tuple[Any, ...]) -> None:
        left.append(store_files.copied(folder, quick / f"left{len(left)}"))

    with system_calls.watched(folder, before):
        ooc_embed.export_table(store, folder / "out.npy")
    want = (folder / "out.npy").read_bytes()
    assert len(left) >= 5
    for place in left:
        assert not (place / "out.npy").exists() or (place / "out.npy").read_bytes() == want
        ooc_embed.export_table(store, place / "out.npy", overwrite=True)
        assert files(place) == {"out.npy": want}


@pytest.mark.parametrize("name", ["out.npy", "out.safetensors"])
def test_two_exports_of_a_file_at_once_are_refused(store: Path, quick: Path, name: str) -> None:
    folder = quick / "disk"
    folder.mkdir()
    refused = 0

    def again(call: str, arguments: tuple[Any, ...]) -> None:
        nonlocal refused
        if call == "pwrite":
            with pytest.raises(ooc_embed.LockedError, match=f"{name}.tmp is open for writing"):
                ooc_embed.export_table(store, folder / name, overwrite=True)
            refused += 1

    with system_calls.watched(folder, again):
        ooc_embed.export_table(store, folder / name)
    assert refused >= 2
    assert [path.name for path in folder.iterdir()] == [name]
    ooc_embed.export_table(store, quick / name)
    assert (folder / name).read_bytes() == (quick / name).read_bytes()


def test_two_exports_at_once_are_refused(store: Path, quick: Path) -> None:
    out = quick / "out"

    def again(name: str, arguments: tuple[Any, ...]) -> None:
        if name == "rename" and str(arguments[1]).endswith("weight/c.1.0"):
            with pytest.raises(ooc_embed.LockedError, match="open for writing"):
                ooc_embed.export_table(store, out, **OPTIONS)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), system_calls.watched(out, again):
        ooc_embed.export_table(store, out, **OPTIONS)


KILLED = """
import os, pathlib, signal, sys
import ooc_embed
real, left = os.rename, iter(range(4))
def rename(*arguments):
    if next(left, None) is None:
        os.kill(os.getpid(), signal.SIGKILL)
    real(*arguments)
os.rename = rename
ooc_embed.archive._CHUNK_BYTES, ooc_embed.archive._SHARD_BYTES = {sizes}
ooc_embed.export_table(sys.argv[1], sys.argv[2], fields=["weight", "version"])
"""


def test_a_killed_process_is_gone_on_from(store: Path, quick: Path) -> None:
    sizes = ooc_embed.archive._CHUNK_BYTES, ooc_embed.archive._SHARD_BYTES
    command = [sys.executable, "-c", KILLED.format(sizes=sizes), str(store), str(quick / "out")]
    assert subprocess.run(command).returncode == -signal.SIGKILL
    assert (quick / "out" / "unfinished.json").exists()
    ooc_embed.export_table(store, quick / "want", **OPTIONS)
    assert_goes_on_to(store, quick / "out", files(quick / "want"))
