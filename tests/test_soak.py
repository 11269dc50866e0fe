"""A sample of tests/soak.py, which by itself runs for an hour; and that it finds what is wrong."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import crash_child
import numpy as np
import pytest
import soak
import soak_child
import soak_watch
import store_files

from ooc_embed import DiskEmbedding, memory_limit

SETTINGS = soak.Settings(
    ram=None, lives=2, tracked=2000, verify_every=2, short=2.0, long=2.0, patience=1.0
)
# One record in float32.
WIDTH = 3 * 8 + 1


@pytest.fixture
def run(quick: Path, one_thread: None) -> soak.Soak:
    """A table of which a hundredth fits into its cache, and an operation every fourth round."""
    work = soak_child.Work(
        str(quick / "t.zarr"),
        rows=20_000,
        dim=8,
        batch=256,
        cache_bytes=200 * 4 * WIDTH,
        chunk_rows=1024,
        pause=4,
    )
    return soak.Soak(SETTINGS, work, crash_child.nursery())


@pytest.fixture
def sound(run: soak.Soak) -> soak.Soak:
    """One that was killed once, and was sound until here."""
    run.live()
    run.check()
    return run


def test_a_run_that_is_killed_twice_loses_nothing_and_leaves_no_file(run: soak.Soak) -> None:
    run.run()
    counts = run.counts
    assert counts["SIGKILL"] + counts["SIGTERM"] + counts["SIGINT"] == counts["checks"] == 2
    assert counts["verified"] == 1
    assert 0 < run.step <= counts["steps"]
    assert counts["commits"] > 0
    assert dict(run.summary())["last step"] == f"{run.step:,}"


def test_the_command_runs_under_a_limit_and_removes_its_store(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], one_thread: None
) -> None:
    try:
        with memory_limit.limited_group(1 << 30):
            pass
    except OSError as error:
        pytest.skip(f"no cgroup can be made here: {error}")
    sizes = ["--rows", "20000", "--dim", "8", "--batch", "256", "--ram", "1G"]
    assert soak.main(["--minutes", "0.01", "--folder", str(tmp_path), *sizes]) == 0
    told = dict(line.split("  ", 1) for line in capsys.readouterr().out.splitlines())
    assert told["killed for memory"].strip() == "0"
    assert told["lives"].strip() == told["checks"].strip() == "1"
    assert 0 < int(told["peak of memory and page cache"].replace(",", "")) <= 1 << 30
    assert list(tmp_path.iterdir()) == []


@pytest.mark.filterwarnings("ignore:.*gives up commit")
def test_a_row_that_is_not_what_torch_makes_of_it_is_found(sound: soak.Soak) -> None:
    with DiskEmbedding.open(sound.path) as emb:
        emb.flush()
    row = int(sound.reference.rows[7])
    file = sound.path / "table" / f"c.{row // 1024}.0"
    records = np.memmap(file, "<f4", "r+").reshape(-1, WIDTH)
    records[row % 1024, 3] += 0.01
    records.flush()
    with pytest.raises(AssertionError, match="weight of row"):
        sound.check()


def test_an_older_commit_in_the_place_of_the_last_one_is_found(
    sound: soak.Soak, quick: Path
) -> None:
    older = shutil.copytree(sound.path, quick / "older")
    known = sound.newest
    while sound.newest == known:
        sound.live()
        sound.check()
    shutil.rmtree(sound.path)
    older.rename(sound.path)
    with pytest.raises(AssertionError, match=f"commit {known}, .* is there; commit {sound.newest}"):
        sound.check()


def test_a_file_that_nothing_names_is_found(sound: soak.Soak) -> None:
    (sound.path / "log" / "0" / "records" / "stray").write_bytes(b"x")
    with pytest.raises(AssertionError, match=r"left over are \['log/0/records/stray'\]"):
        sound.live()


def test_more_memory_than_the_cache_and_the_map_is_found(
    sound: soak.Soak, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(soak_watch, "BESIDE", 1 << 20)
    with pytest.raises(AssertionError, match="anon: "):
        sound.live()


def watched(run: soak.Soak, anon: list[int]) -> soak_watch.Watch:
    """A life with these samples."""
    watch = soak_watch.Watch(run.path, run.work, None, os.getpid())
    watch.samples = [{"anon": value, "quiet": 1} for value in anon]
    return watch


def test_memory_that_grows_is_found(sound: soak.Soak) -> None:
    sound.watches = [watched(sound, [10**9]) for _ in range(20)]
    sound.check_flat()
    sound.watches = [watched(sound, [10**9 + 10**7 * life]) for life in range(20)]
    with pytest.raises(
        AssertionError, match=r"1,020,000,000 bytes at first, 1,170,000,000 at last"
    ):
        sound.check_flat()
    watched(sound, [10**9] * 100).check_flat()
    with pytest.raises(AssertionError, match="memory grows"):
        watched(sound, [10**9 + 2 * 10**6 * second for second in range(100)]).check_flat()


def test_files_that_a_store_should_have_are_those_that_it_has(sound: soak.Soak) -> None:
    DiskEmbedding.open(sound.path).close()
    soak_child.check_files(sound.path)
    index = next(iter(store_files.manifest(sound.path)["chunk_crc32"]))
    (sound.path / "table" / f"c.{index}.0").unlink()
    with pytest.raises(AssertionError, match=rf"missing are \['table/c.{index}.0'\]"):
        soak_child.check_files(sound.path)
