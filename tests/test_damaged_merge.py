"""A chunk file that was damaged while a log waits for its merge: it is never certified."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import going_back
import pytest
import store_files
import system_calls
import torch
from test_merging import CHUNKS, ROWS, Gate, Pair, gate, pair, sealed, wait_for_merge

from ooc_embed import CorruptStoreError, DiskEmbedding, report
from ooc_embed.mapped import MappedRows
from ooc_embed.storage import Storage

pytestmark = pytest.mark.usefixtures("one_thread")


__all__ = ["gate", "pair"]


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[50] ^= 1  # of its first row
    _replace(path, bytes(data))


def _shorten(path: Path) -> None:
    _replace(path, path.read_bytes()[:-4096])


def _replace(path: Path, data: bytes) -> None:
    """By a new file: a table maps the old one, and must not lose pages under its feet."""
    path.unlink()
    path.write_bytes(data)


@pytest.mark.parametrize("damage", [_flip, _shorten])
def test_nothing_is_merged_into_a_chunk_that_was_damaged_until_it_is_mended(
    pair: Pair, damage: Callable[[Path], None]
) -> None:
    chunk = pair.path / "table" / "c.4.0"
    kept = chunk.read_bytes()
    damage(chunk)
    damaged = chunk.read_bytes()
    pair.seal()
    for _ in range(2):
        wait_for_merge(pair.emb)
        with pytest.raises(CorruptStoreError, match=r"c\.4\.0 .*\(rows 4,096 to 5,119\)"):
            pair.emb.commit()
        assert chunk.read_bytes() == damaged
        pair.check()
        pair.train()
        pair.emb.commit()
    wait_for_merge(pair.emb)
    _replace(chunk, kept)
    with pytest.raises(CorruptStoreError):
        pair.emb.flush()
    pair.finish()


def test_a_chunk_that_the_disk_cannot_read_is_named_by_its_merge(pair: Pair) -> None:
    pair.train_rows(torch.arange(ROWS))
    chunk = pair.path / "table" / "c.3.0"
    with (
        system_calls.unreadable(chunk),
        pytest.raises(OSError, match=rf"Input/output error: '{chunk}'"),
    ):
        pair.emb.flush()
    pair.emb.flush()
    pair.finish()


def test_a_chunk_that_is_gone_before_the_table_maps_it_is_merged_again(
    pair: Pair, gate: Gate
) -> None:
    pair.seal()
    gate.let(CHUNKS)
    wait_for_merge(pair.emb)
    chunk = pair.path / "table" / "c.2.0"
    kept = chunk.read_bytes()
    chunk.unlink()
    pair.train()  # meets it, and goes on with what the log has
    pair.check()
    with pytest.raises(CorruptStoreError, match=r"c\.2\.0"):
        pair.emb.commit()
    chunk.write_bytes(kept)
    gate.open()
    pair.finish()


def _rollback(pair: Pair) -> None:
    pair.emb.rollback()


def _resize(pair: Pair) -> None:
    pair.emb.resize(ROWS + 1)


def _reopen(pair: Pair) -> None:
    pair.emb.close()
    pair.emb = DiskEmbedding.open(pair.path)


@pytest.mark.parametrize("read_anew", [_rollback, _resize, _reopen])
def test_a_damaged_chunk_stays_refused_though_the_store_is_read_anew(
    pair: Pair, read_anew: Callable[[Pair], None]
) -> None:
    """What is damaged is a row that the sealed log does not have."""
    chunk = pair.path / "table" / "c.4.0"
    kept = chunk.read_bytes()
    pair.train_rows(torch.arange(4 * 1024 + 1, ROWS))
    _flip(chunk)
    damaged = chunk.read_bytes()
    with pytest.raises(CorruptStoreError, match=r"c\.4\.0"):
        pair.emb.flush()
    assert sealed(pair.path)
    read_anew(pair)
    for _ in range(2):
        with pytest.raises(CorruptStoreError, match=r"c\.4\.0"):
            pair.emb.flush()
        assert chunk.read_bytes() == damaged
        assert [problem for problem in report.verify(pair.path) if "c.4.0" in problem]
    _replace(chunk, kept)
    pair.emb.flush()
    assert report.verify(pair.path) == []
    torch.testing.assert_close(pair.emb.weight[:ROWS], pair.ram.weight)


def _stop_by_close(pair: Pair) -> Path:
    pair.emb.close()
    return pair.path


def _stop_by_commit(pair: Pair) -> Path:
    """A kill comes behind a commit that was made while the merge went on."""
    with pytest.raises(OSError, match="on purpose"):
        pair.emb.commit()
    pair.train()
    pair.emb.commit()
    going_back.abandon(pair.emb)
    return pair.path


def _stop_by_snapshot(pair: Pair) -> Path:
    with pytest.raises(OSError, match="on purpose"):
        pair.emb.commit()
    pair.emb.snapshot(pair.path.with_name("s.zarr"))
    pair.emb.close()
    return pair.path.with_name("s.zarr")


def _stop_by_rollback(pair: Pair) -> Path:
    pair.emb.rollback()
    going_back.abandon(pair.emb)
    return pair.path


STOPS = [_stop_by_close, _stop_by_commit, _stop_by_snapshot, _stop_by_rollback]


@pytest.mark.filterwarnings("ignore:.*a merge failed")  # one that goes on behind a snapshot
@pytest.mark.parametrize("stop", STOPS)
def test_a_file_that_a_merge_replaced_has_a_checksum_though_the_merge_was_stopped(
    pair: Pair, stop: Callable[[Pair], Path]
) -> None:
    """What is damaged is a row that the sealed log does not have."""

    def fail_late(name: str, arguments: tuple[Any, ...]) -> None:
        if name == "rename" and "c.5.0" in str(arguments[1]):
            raise OSError(errno.EIO, "failing on purpose")

    before = store_files.manifest(pair.path)["chunk_crc32"]
    ids = torch.arange(ROWS)
    with system_calls.watched(pair.path, fail_late):
        for part in ids[ids % 4 != 0].split(500):
            pair.train_rows(part)
        pair.emb.commit()
        assert sealed(pair.path)
        wait_for_merge(pair.emb)
        path = stop(pair)
    merged = store_files.manifest(path)["merged_crc32"]
    assert sorted(map(int, merged)) == [0, 1, 2, 3, 4]
    assert all(merged[index] != before[index] for index in merged)
    assert report.verify(path) == []
    chunk = path / "table" / "c.1.0"
    kept = chunk.read_bytes()
    _flip(chunk)
    assert [problem for problem in report.verify(path) if "c.1.0" in problem]
    with DiskEmbedding.open(path) as emb:
        for _ in range(2):
            with pytest.raises(
                CorruptStoreError, match=r"c\.1\.0 was changed .* put the file back"
            ):
                emb.flush()
        _replace(chunk, kept)
        emb.flush()
        torch.testing.assert_close(emb.weight[:], pair.ram.weight)
    assert report.verify(path) == []


def test_a_snapshot_in_a_first_merge_is_whole(tmp_path: Path) -> None:
    """Chunks that the merge brought into being are in no manifest's checksums before its end."""
    path, target = tmp_path / "t.zarr", tmp_path / "s.zarr"
    with DiskEmbedding(ROWS, 4, path=path, chunk_rows=1024, cache_bytes=1 << 22) as emb:
        emb(torch.arange(ROWS)).sum().backward()
        emb.commit()
        merge = emb._table._storage._chunks.merge
        assert merge is not None
        next(merge.wait())
        merge.end()
        emb.snapshot(target)
        before = emb.weight[:]
        assert len(store_files.manifest(target)["merged_crc32"]) > 0
    for store in (target, path):
        assert report.verify(store) == []
        with DiskEmbedding.open(store) as again:
            assert torch.equal(again.weight[:], before)
            again.flush()
        assert report.verify(store) == []


def test_a_chunk_that_the_table_could_not_map_has_a_checksum_all_the_same(pair: Pair) -> None:
    pair.train_rows(torch.arange(1, ROWS))
    going_back.abandon(_sealed_and_killed(pair))
    chunk = pair.path / "table" / "c.0.0"
    with DiskEmbedding.open(pair.path) as emb:
        merge = emb._table._storage._chunks.merge
        assert merge is not None
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(MappedRows, "map_file", _refuse_to_map)
            wait_for_merge(emb)
            with pytest.raises(OSError, match="no maps left, on purpose"):
                emb.commit()
        kept = chunk.read_bytes()
        _flip(chunk)
        with pytest.raises(CorruptStoreError, match=r"c\.0\.0"):
            emb.flush()
        _replace(chunk, kept)
        emb.flush()
        torch.testing.assert_close(emb.weight[:], pair.ram.weight)


def _sealed_and_killed(pair: Pair) -> DiskEmbedding:
    """Killed as its merge begins, which the next opening cannot know."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Storage, "begin_merge", lambda _: None)
        for ids in torch.arange(1, ROWS).split(500):
            pair.train_rows(ids)
        pair.emb.commit()
    assert sealed(pair.path)
    return pair.emb


def _refuse_to_map(*_: Any) -> None:
    raise OSError(errno.ENOMEM, "no maps left, on purpose")


def test_a_close_whose_merge_cannot_be_named_closes_with_a_warning(pair: Pair) -> None:
    pair.seal()
    wait_for_merge(pair.emb)

    def fail(name: str, arguments: tuple[Any, ...]) -> None:
        if name == "rename" and str(arguments[1]).endswith("zarr.json"):
            raise OSError(errno.ENOSPC, "no room, on purpose")

    pair.emb._table._storage._chunks.merge.end()
    with (
        system_calls.watched(pair.path, fail),
        pytest.warns(UserWarning, match="no room, on purpose.*begin anew, and nothing is lost"),
    ):
        pair.emb.close()
    assert pair.emb.closed
    with DiskEmbedding.open(pair.path) as emb:
        emb.flush()
        torch.testing.assert_close(emb.weight[:], pair.ram.weight)


def test_merged_rows_that_were_damaged_before_their_merge_ended_are_found(pair: Pair) -> None:
    """The merge had replaced their file, so that the manifest has no checksum of it yet."""
    pair.train_rows(torch.arange(0, ROWS, 3))

    def fail_late(name: str, arguments: tuple[Any, ...]) -> None:
        if name == "rename" and "c.5.0" in str(arguments[1]):
            raise OSError(errno.EIO, "failing on purpose")

    with (
        system_calls.watched(pair.path, fail_late),
        pytest.raises(OSError, match="on purpose"),
    ):
        pair.emb.flush()
    assert report.verify(pair.path) == []
    pair.emb.close()
    chunk = pair.path / "table" / "c.0.0"
    kept = chunk.read_bytes()
    _flip(chunk)
    with DiskEmbedding.open(pair.path) as emb:
        with pytest.raises(CorruptStoreError, match=r"c\.0\.0"):
            emb.flush()
        assert [problem for problem in report.verify(pair.path) if "c.0.0" in problem]
        _replace(chunk, kept)
        emb.flush()
        torch.testing.assert_close(emb.weight[:], pair.ram.weight)
    assert report.verify(pair.path) == []


def test_a_damaged_record_of_a_log_is_merged_into_no_chunk(pair: Pair) -> None:
    pair.train_rows(torch.arange(0, ROWS, 3))
    pair.emb.commit()
    (log,) = store_files.newest_commit(pair.path)["logs"]
    folder = pair.path / "log" / str(log["generation"] % 2) / "records"
    chunks = {file: file.read_bytes() for file in store_files.chunk_files(pair.path)}
    pair.emb.close()
    file = folder / "c.0.0"
    kept = file.read_bytes()
    _flip(file)
    with DiskEmbedding.open(pair.path) as emb:
        with pytest.raises(CorruptStoreError, match=r"log/./records.*--salvage"):
            emb.flush()
        now = {file: file.read_bytes() for file in store_files.chunk_files(pair.path)}
        assert now == chunks
        assert len(report.verify(pair.path)) == 1
        _replace(file, kept)
        emb.flush()
        torch.testing.assert_close(emb.weight[:], pair.ram.weight)
    assert report.verify(pair.path) == []


def test_the_error_of_a_merge_ahead_of_a_commit_does_not_say_that_it_was_made(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunk = pair.path / "table" / "c.4.0"
    kept = chunk.read_bytes()
    _flip(chunk)
    pair.seal()
    wait_for_merge(pair.emb)
    with pytest.raises(CorruptStoreError):
        pair.emb.commit()
    pair.train()
    before = pair.emb.commits()
    with monkeypatch.context() as patch:
        patch.setattr(Storage, "has_room", lambda *_: False)  # the log must be moved to commit
        with pytest.raises(CorruptStoreError) as caught:
            pair.emb.commit()
    assert caught.value.__notes__[-1:] == [
        "It was a merge in the background that failed; the next commit begins it again."
    ]
    assert pair.emb.commits() == before
    _replace(chunk, kept)
    pair.emb.flush()
    assert pair.emb.commits() != before
    pair.finish()
